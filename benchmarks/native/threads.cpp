// What threads cost each other: one and two threads, each allocating on a stream of its own, with all frees
// of their own and with half of them on the other thread. `vram bench threads` has more of them and other
// devices. `--json` prints one object for machines.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backends/host.hpp"
#include "bench/bench.hpp"

namespace {

using namespace vram;

constexpr int kRepeats = 7;
constexpr std::size_t kBatches = 4000;

// Pairs a second, in millions, of all threads together.
double throughput(std::size_t threads, bool hand_over) {
  auto backend = std::make_shared<HostBackend>(4 * kGiB);
  Pool pool(backend, PoolConfig{});
  std::vector<StreamHandle> streams(threads);
  for (StreamHandle& stream : streams) (void)backend->stream_create(&stream);
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    bench::ThreadsCost cost;
    if (!bench::run_threads({&pool}, streams, hand_over, kBatches, &cost).ok()) {
      std::fprintf(stderr, "out of memory\n");
      std::exit(1);
    }
    best = std::max(best, static_cast<double>(threads) * 1e3 / cost.wall_ns);
  }
  return best;
}

}  // namespace

int main(int count, char** arguments) {
  const bool json = count > 1 && std::strcmp(arguments[1], "--json") == 0;
  std::printf(json ? "{" : "%-26s %10s %10s %8s\n", "million pairs a second", "1 thread", "2 threads",
              "ratio");
  for (const bool hand_over : {false, true}) {
    const char* const name = hand_over ? "half freed by the other" : "own frees";
    const double one = throughput(1, hand_over);
    const double two = throughput(2, hand_over);
    std::printf(json ? "%s\"%s\": {\"one\": %.1f, \"two\": %.1f, \"ratio\": %.2f}"
                     : "%.0s%-26s %10.1f %10.1f %8.2f\n",
                hand_over ? ", " : "", name, one, two, two / one);
  }
  if (json) std::printf("}\n");
  return 0;
}
