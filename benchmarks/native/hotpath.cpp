// What an allocate+free pair costs from C++ when the stream's cache serves it: the six scenarios of
// benchmarks/pairs.py, without Python. `--json` prints one object for machines.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "backends/host.hpp"
#include "pool.hpp"

namespace {

using namespace vram;

constexpr int kRepeats = 15;  // the least counts: the others were disturbed

Address get(Pool& pool, std::uint64_t size) {
  Address address = 0;
  if (!pool.allocate(size, 0, 0, 0, &address).ok()) {
    std::fprintf(stderr, "out of memory\n");
    std::exit(1);
  }
  return address;
}

// Each scenario returns how many pairs it made.
std::size_t one_live(Pool& pool, std::uint64_t size) {
  constexpr std::size_t kPairs = 50'000;
  for (std::size_t i = 0; i < kPairs; ++i) (void)pool.free(get(pool, size));
  return kPairs;
}

std::size_t thousand_live(Pool& pool, std::uint64_t size) {
  static std::vector<Address> live(1000);
  for (Address& address : live) address = get(pool, size);
  for (Address address : live) (void)pool.free(address);
  return live.size();
}

// Every layer keeps what it makes until the way back, except two temporaries.
std::size_t transformer_step(Pool& pool) {
  constexpr std::uint64_t kKept[] = {96 * kKiB, 24 * kMiB, 6 * kMiB,    384 * kKiB,
                                     12 * kMiB, 64 * kMiB, 1536 * kKiB, 16 * kKiB};
  constexpr std::uint64_t kTemporary[] = {24 * kMiB, 6 * kMiB};
  constexpr int kLayers = 12;
  static std::vector<Address> live;
  live.clear();
  std::size_t pairs = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (std::uint64_t size : kKept) live.push_back(get(pool, size));
    const Address temporary[] = {get(pool, kTemporary[0]), get(pool, kTemporary[1])};
    for (Address address : temporary) (void)pool.free(address);
    pairs += std::size(kKept) + std::size(kTemporary);
  }
  for (; !live.empty(); live.pop_back()) (void)pool.free(live.back());
  return pairs;
}

std::size_t variable_sizes(Pool& pool) {
  constexpr std::size_t kLive = 64;
  constexpr std::size_t kPairs = 6400;
  std::uint64_t sizes[kLive];
  Address live[kLive];
  for (std::size_t i = 0; i < kLive; ++i) live[i] = get(pool, sizes[i] = kUnit * (1 + (i * 7919) % 4096));
  for (std::size_t i = 0; i < kPairs; ++i) {
    (void)pool.free(live[i % kLive]);
    live[i % kLive] = get(pool, sizes[i % kLive]);
  }
  for (Address address : live) (void)pool.free(address);
  return kPairs + kLive;
}

struct Scenario {
  const char* name;
  std::function<std::size_t(Pool&)> run;
};

double ns_per_pair(const Scenario& scenario, Pool& pool) {
  scenario.run(pool);  // fills the cache
  double least = 1e300;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const std::size_t pairs = scenario.run(pool);
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    least = std::min(least, spent.count() / static_cast<double>(pairs));
  }
  return least;
}

}  // namespace

int main(int count, char** arguments) {
  const bool json = count > 1 && std::strcmp(arguments[1], "--json") == 0;
  const Scenario scenarios[] = {
      {"512 B", [](Pool& pool) { return one_live(pool, 512); }},
      {"256 KiB", [](Pool& pool) { return one_live(pool, 256 * kKiB); }},
      {"64 MiB", [](Pool& pool) { return one_live(pool, 64 * kMiB); }},
      {"1000 x 64 KiB", [](Pool& pool) { return thousand_live(pool, 64 * kKiB); }},
      {"transformer step", transformer_step},
      {"variable, 64 live", variable_sizes},
  };
  std::printf(json ? "{" : "%-20s %10s\n", "scenario", "ns a pair");
  for (const Scenario& scenario : scenarios) {
    Pool pool(std::make_shared<HostBackend>(8 * kGiB), PoolConfig{});
    const double ns = ns_per_pair(scenario, pool);
    if (json) {
      std::printf("%s\"%s\": %.1f", &scenario == scenarios ? "" : ", ", scenario.name, ns);
    } else {
      std::printf("%-20s %10.1f\n", scenario.name, ns);
    }
  }
  if (json) std::printf("}\n");
  return 0;
}
