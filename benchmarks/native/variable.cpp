// What an allocate+free pair costs if sizes hardly ever repeat: mixes of sizes, each with its number of live
// blocks, of which a random one is replaced each time. On a model device, so that only the pool is measured.
//   bench_variable [--json] [--quick]   the nanoseconds of a pair of each mix
//   bench_variable MIX ROUNDS           only this mix, for so many rounds
// benchmarks/variable.py counts the instructions, too.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "backends/model.hpp"
#include "bench/bench.hpp"

namespace {

using namespace vram;
using Clock = std::chrono::steady_clock;

struct Mix {
  const char* name;
  std::size_t live;
  std::size_t pairs;                              // in a round
  std::uint64_t least, most;                      // bytes, evenly distributed
  std::uint64_t other_least = 0, other_most = 0;  // of every second request, if not 0
};

constexpr Mix kMixes[] = {
    {"512 B to 2 MiB, 64 live", 64, 20'000, 512, 2 * kMiB},
    {"512 B to 64 KiB, 64 live", 64, 20'000, 512, 64 * kKiB},
    {"512 B to 64 KiB, 1000 live", 1000, 20'000, 512, 64 * kKiB},
    {"512 B to 2 MiB, 1000 live", 1000, 20'000, 512, 2 * kMiB},
    {"64 KiB to 8 MiB, 64 live", 64, 20'000, 64 * kKiB, 8 * kMiB},
    {"1 MiB to 64 MiB, 64 live", 64, 1'000, kMiB, 64 * kMiB},
    {"up to 16 KiB or 16 to 32 MiB, 200 live", 200, 20'000, 512, 16 * kKiB, 16 * kMiB, 32 * kMiB},
    {"4 KiB, 64 live (cached)", 64, 20'000, 4 * kKiB, 4 * kKiB},
    {"4 MiB, 64 live (cached)", 64, 20'000, 4 * kMiB, 4 * kMiB},
};
constexpr int kRounds = 10;
constexpr int kQuickRounds = 2;

class Random {
 public:
  std::uint64_t below(std::uint64_t bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % bound;
  }

 private:
  std::uint64_t state_ = 1;
};

struct Swap {
  std::size_t slot;
  std::uint64_t bytes;
};

std::vector<Swap> swaps_of(const Mix& mix) {
  Random random;
  std::vector<Swap> made;
  for (std::size_t i = 0; i < mix.pairs; ++i) {
    const bool other = mix.other_most != 0 && random.below(2) != 0;
    const std::uint64_t least = other ? mix.other_least : mix.least;
    const std::uint64_t most = other ? mix.other_most : mix.most;
    const std::size_t slot = i < mix.live ? i : random.below(mix.live);
    made.push_back({slot, least + random.below((most - least) / kUnit + 1) * kUnit});
  }
  return made;
}

// One round; returns the nanoseconds of a pair.
double round(Pool& pool, const std::vector<Swap>& swaps, std::vector<Address>& live) {
  const auto start = Clock::now();
  for (const Swap& swap : swaps) {
    if (live[swap.slot] != 0) (void)pool.free(live[swap.slot]);
    if (!pool.allocate(swap.bytes, 0, 0, 0, &live[swap.slot]).ok()) std::exit(1);
  }
  for (Address& address : live) (void)pool.free(std::exchange(address, 0));
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() /
         static_cast<double>(swaps.size());
}

double ns_per_pair(const Mix& mix, int rounds) {
  Pool pool(std::make_shared<ModelBackend>(140 * kGiB), PoolConfig{});
  const std::vector<Swap> swaps = swaps_of(mix);
  std::vector<Address> live(mix.live);
  double least = 0;
  for (int i = 0; i <= rounds; ++i) {  // the first gets memory from the device
    const double ns = round(pool, swaps, live);
    least = i < 2 ? ns : std::min(least, ns);
  }
  return least;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 3) {
    const std::size_t mix = std::strtoul(arguments[1], nullptr, 10);
    if (mix >= std::size(kMixes)) return 2;
    std::printf("%.1f\n", ns_per_pair(kMixes[mix], std::atoi(arguments[2])));
    return 0;
  }
  const auto given = [&](const char* option) {
    return std::any_of(arguments + 1, arguments + count,
                       [&](char* each) { return !std::strcmp(each, option); });
  };
  const bool json = given("--json");
  const int rounds = given("--quick") ? kQuickRounds : kRounds;
  const char* before = "[";
  for (const Mix& mix : kMixes) {
    const double ns = ns_per_pair(mix, rounds);
    if (json) {
      std::printf("%s{\"mix\": \"%s\", \"pairs\": %zu, \"ns\": %.1f}", std::exchange(before, ",\n "),
                  mix.name, mix.pairs, ns);
    } else {
      std::printf("%-42s %8.1f ns\n", mix.name, ns);
    }
  }
  if (json) std::printf("]\n");
  return 0;
}
