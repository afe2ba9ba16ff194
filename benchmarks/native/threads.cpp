// What threads cost each other: one and two threads, each allocating on a stream of its own, with all frees
// of their own and with half of them on the other thread. `--json` prints one object for machines.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "backends/host.hpp"
#include "pool.hpp"

namespace {

using namespace vram;

constexpr int kRepeats = 7;
constexpr std::size_t kBatches = 4000;
constexpr std::size_t kBatch = 64;  // blocks that are live at once

// Blocks that one thread leaves for the other to free.
struct alignas(64) Mailbox {
  std::atomic<bool> full{false};
  Address blocks[kBatch / 2];
};

void work(Pool& pool, StreamHandle stream, Mailbox* out, Mailbox* in) {
  Address live[kBatch];
  for (std::size_t batch = 0; batch < kBatches; ++batch) {
    for (std::size_t i = 0; i < kBatch; ++i) (void)pool.allocate(kUnit << (i % 8), stream, 0, 0, &live[i]);
    std::size_t own = 0;
    if (out != nullptr && !out->full.load(std::memory_order_acquire)) {
      std::copy(live, live + kBatch / 2, out->blocks);
      out->full.store(true, std::memory_order_release);
      own = kBatch / 2;
    }
    for (; own < kBatch; ++own) (void)pool.free(live[own]);
    if (in == nullptr || !in->full.load(std::memory_order_acquire)) continue;
    for (Address address : in->blocks) (void)pool.free(address);
    in->full.store(false, std::memory_order_release);
  }
}

// Pairs a second, in millions, of all threads together.
double throughput(std::size_t threads, bool handed_over) {
  auto backend = std::make_shared<HostBackend>(4 * kGiB);
  Pool pool(backend, PoolConfig{});
  std::vector<StreamHandle> streams(threads);
  for (StreamHandle& stream : streams) (void)backend->stream_create(&stream);
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::vector<Mailbox> boxes(threads);
    std::vector<std::thread> running;
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < threads; ++i) {
      Mailbox* const out = handed_over ? &boxes[i] : nullptr;
      Mailbox* const in = handed_over ? &boxes[(i + 1) % threads] : nullptr;
      running.emplace_back([&pool, stream = streams[i], out, in] { work(pool, stream, out, in); });
    }
    for (std::thread& thread : running) thread.join();
    const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
    for (Mailbox& box : boxes)
      if (box.full.load())
        for (Address address : box.blocks) (void)pool.free(address);
    best = std::max(best, static_cast<double>(threads * kBatches * kBatch) / spent.count());
  }
  return best;
}

}  // namespace

int main(int count, char** arguments) {
  const bool json = count > 1 && std::strcmp(arguments[1], "--json") == 0;
  std::printf(json ? "{" : "%-26s %10s %10s %8s\n", "million pairs a second", "1 thread", "2 threads",
              "ratio");
  for (const bool handed_over : {false, true}) {
    const char* const name = handed_over ? "half freed by the other" : "own frees";
    const double one = throughput(1, handed_over);
    const double two = throughput(2, handed_over);
    std::printf(json ? "%s\"%s\": {\"one\": %.1f, \"two\": %.1f, \"ratio\": %.2f}"
                     : "%.0s%-26s %10.1f %10.1f %8.2f\n",
                handed_over ? ", " : "", name, one, two, two / one);
  }
  if (json) std::printf("}\n");
  return 0;
}
