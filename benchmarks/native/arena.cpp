// What an allocation from an arena costs from C++, beside an allocate+free pair of a pool: 1000 live at a
// time, then all given back. `--json` prints one object for machines.
#include "arena/arena.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backends/host.hpp"
#include "pool/pool.hpp"

namespace {

using namespace vram;

constexpr int kRepeats = 2000;  // the least counts: the others were disturbed
constexpr std::size_t kLive = 1000;

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s failed\n", status.call);
  std::exit(1);
}

template <class Step>
double least_ns(Step step) {
  step();
  double least = 1e300;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    least = std::min(least, spent.count() / kLive);
  }
  return least;
}

}  // namespace

int main(int argc, char** argv) {
  const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  for (const std::uint64_t size : {std::uint64_t{512}, 64 * kKiB}) {
    const auto pool = std::make_shared<Pool>(std::make_shared<HostBackend>(8 * kGiB), PoolConfig{});
    std::unique_ptr<Arena> arena;
    require(Arena::open(pool, {}, &arena));
    std::vector<Address> live(kLive);
    const double bump = least_ns([&] {
      for (Address& each : live) require(arena->allocate(size, 0, &each));
      require(arena->reset());
    });
    const double pair = least_ns([&] {
      for (Address& each : live) require(pool->allocate(size, 0, 0, 0, &each));
      for (const Address each : live) require(pool->free(each));
    });
    if (json)
      std::printf("{\"size\": %llu, \"arena_ns\": %.2f, \"pool_pair_ns\": %.2f}\n",
                  static_cast<unsigned long long>(size), bump, pair);
    else
      std::printf("%8llu bytes: arena %6.2f ns, pool %6.2f ns a pair, ratio %.2f\n",
                  static_cast<unsigned long long>(size), bump, pair, bump / pair);
  }
}
