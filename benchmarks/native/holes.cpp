// What an allocation costs while many free holes lie in the pool. The caches are off, so every pair goes
// through the free index: searched, cut, merged again. The cost must hardly grow with the number of holes.
// `--json` prints one object for machines.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "backends/model.hpp"
#include "pool/pool.hpp"

namespace {

using namespace vram;

constexpr int kRepeats = 9;
constexpr std::size_t kPairs = 20'000;
constexpr std::size_t kLive = 256;       // so that holes are used in turn
constexpr std::uint64_t kMaxUnits = 64;  // blocks of 512 B to 32 KiB

Address get(Pool& pool, std::uint64_t size) {
  Address address = 0;
  if (!pool.allocate(size, 0, 0, 0, &address).ok()) {
    std::fprintf(stderr, "out of memory\n");
    std::exit(1);
  }
  return address;
}

double ns_per_pair(std::size_t holes) {
  PoolConfig config;
  config.stream_cache = 0;
  Pool pool(std::make_shared<ModelBackend>(256 * kGiB), config);
  std::mt19937_64 random(holes);
  std::vector<Address> blocks(2 * holes);
  for (Address& block : blocks) block = get(pool, kUnit * (1 + random() % kMaxUnits));
  // Every other one goes: its neighbours stay, so no two holes merge.
  for (std::size_t i = 0; i < blocks.size(); i += 2) (void)pool.free(blocks[i]);
  double least = 1e300;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::vector<std::uint64_t> sizes(kPairs);
    for (std::uint64_t& size : sizes) size = kUnit * (1 + random() % kMaxUnits);
    Address live[kLive] = {};
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < kPairs; ++i) {
      Address& oldest = live[i % kLive];
      if (oldest != 0) (void)pool.free(oldest);
      oldest = get(pool, sizes[i]);
    }
    for (Address address : live) (void)pool.free(address);
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    least = std::min(least, spent.count() / kPairs);
  }
  return least;
}

}  // namespace

int main(int count, char** arguments) {
  const bool json = count > 1 && std::strcmp(arguments[1], "--json") == 0;
  double first = 0;
  double last = 0;
  std::printf(json ? "{" : "%10s %10s\n", "holes", "ns a pair");
  for (std::size_t holes : {1'000, 10'000, 100'000, 1'000'000}) {
    last = ns_per_pair(holes);
    if (first == 0) first = last;
    std::printf(json ? "\"%zu\": %.1f, " : "%10zu %10.1f\n", holes, last);
  }
  std::printf(json ? "\"ratio\": %.2f}\n" : "ratio of the last to the first: %.2f\n", last / first);
  return 0;
}
