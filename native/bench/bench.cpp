#include "bench/bench.hpp"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <thread>

namespace vram::bench {

namespace {

using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// Both sources store the first failure and continue with address 0, so that the timed loops have no checks.
struct FromPool {
  Pool& pool;
  Status failure{};
  Address get(std::uint64_t size) {
    Address address = 0;
    const Status status = pool.allocate(size, 0, 0, 0, &address);
    if (!status.ok()) [[unlikely]]
      failure = status;
    return address;
  }
  void drop(Address address) {
    if (address != 0) (void)pool.free(address);
  }
};

struct FromDriver {
  const CudaDriver& driver;
  void* pool;
  CuResult failure = kCuSuccess;
  Address get(std::uint64_t size) {
    Address address = 0;
    const CuResult result = driver.pool_allocate(&address, size, pool, nullptr);
    if (result != kCuSuccess) [[unlikely]]
      failure = result;
    return address;
  }
  void drop(Address address) {
    if (address != 0) (void)driver.pool_free(address, nullptr);
  }
};

// ---- the patterns: each returns the number of pairs ------------------------------------------------------

template <class Source>
std::size_t one_live(Source& from, std::uint64_t size) {
  for (std::size_t i = 0; i < kOneLivePairs; ++i) from.drop(from.get(size));
  return kOneLivePairs;
}

template <class Source>
std::size_t thousand(Source& from, std::vector<Address>& live) {
  live.resize(kThousand);
  for (std::size_t round = 0; round < kThousandRounds; ++round) {
    for (Address& address : live) address = from.get(kThousandBytes);
    for (Address address : live) from.drop(address);
  }
  return kThousand * kThousandRounds;
}

template <class Source>
std::size_t transformer(Source& from, std::vector<Address>& live) {
  for (std::size_t step = 0; step < kSteps; ++step) {
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      for (std::uint64_t size : kKept) live.push_back(from.get(size));
      for (std::uint64_t size : kTemporary) live.push_back(from.get(size));
      for (std::size_t i = 0; i < std::size(kTemporary); ++i, live.pop_back()) from.drop(live.back());
    }
    for (; !live.empty(); live.pop_back()) from.drop(live.back());
  }
  return kSteps * kLayers * (std::size(kKept) + std::size(kTemporary));
}

template <class Source>
std::size_t variable(Source& from) {
  Address live[kLive] = {};
  for (const Swap& swap : swaps()) {
    from.drop(live[swap.slot]);
    live[swap.slot] = from.get(swap.bytes);
  }
  for (Address address : live) from.drop(address);
  return kSwaps;
}

template <class Source>
std::size_t run(Source& from, Scenario scenario, std::vector<Address>& live) {
  switch (scenario) {
    case Scenario::bytes_512:
      return one_live(from, 512);
    case Scenario::kib_256:
      return one_live(from, 256 * kKiB);
    case Scenario::mib_64:
      return one_live(from, 64 * kMiB);
    case Scenario::thousand:
      return thousand(from, live);
    case Scenario::transformer:
      return transformer(from, live);
    case Scenario::variable:
      return variable(from);
  }
  return 1;
}

template <class Source>
double timed(Source& from, Scenario scenario) {
  std::vector<Address> live;
  live.reserve(std::max(kThousand, kLayers * std::size(kKept) + std::size(kTemporary)));
  (void)swaps();
  const auto start = Clock::now();
  const std::size_t pairs = run(from, scenario, live);
  return ns_since(start) / static_cast<double>(pairs);
}

}  // namespace

const char* name_of(Scenario scenario) {
  static constexpr const char* kNames[kScenarios] = {
      "512 B", "256 KiB", "64 MiB", "1000 x 64 KiB", "transformer step", "variable, 64 live"};
  return kNames[static_cast<int>(scenario)];
}

const std::vector<Swap>& swaps() {
  static const std::vector<Swap> made = [] {
    std::vector<Swap> list;
    std::uint64_t state = 1;
    const auto random = [&state] {  // Knuth's MMIX generator; only its upper bits are good
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<std::uint32_t>(state >> 33);
    };
    for (std::uint32_t i = 0; i < kSwaps; ++i) {
      const std::uint32_t slot = i < kLive ? i : random() % kLive;
      list.push_back({slot, kUnit * (1 + random() % 4096)});
    }
    return list;
  }();
  return made;
}

Status run_pairs(Pool& pool, Scenario scenario, double* ns) {
  FromPool from{pool};
  *ns = timed(from, scenario);
  return from.failure;
}

Status run_driver_pairs(const CudaBackend& cuda, Scenario scenario, double* ns) {
  constexpr int kReleaseThreshold = 4;  // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
  const CudaDriver& driver = cuda.driver();
  CuPoolProperties properties{};
  properties.type = kCuAllocationPinned;
  properties.location = {kCuLocationDevice, cuda.device()};
  return cuda.in_context("cuMemAllocFromPoolAsync", [&] {
    void* pool = nullptr;
    if (const CuResult made = driver.pool_create(&pool, &properties); made != kCuSuccess) return made;
    std::uint64_t never = ~std::uint64_t{0};
    (void)driver.pool_set(pool, kReleaseThreshold, &never);
    FromDriver from{driver, pool};
    (void)timed(from, scenario);  // the first run allocates the memory from the device
    *ns = timed(from, scenario);
    // Do not wait here: the device's default pool, which peers use, would release its memory.
    (void)driver.pool_destroy(pool);
    return from.failure;
  });
}

// ---- threads ---------------------------------------------------------------------------------------------

namespace {

constexpr std::size_t kBatch = 64;  // blocks that are live at once
constexpr std::size_t kHalf = kBatch / 2;
constexpr std::size_t kSizes = 8;
constexpr std::size_t kRooms = 16;
constexpr std::size_t kWarmBatches = 16;

// Blocks that one thread passes to another to free: a ring with one writer and one reader.
struct Mailbox {
  alignas(64) std::atomic<std::size_t> written{0};
  alignas(64) std::atomic<std::size_t> read{0};
  alignas(64) Address rooms[kRooms][kHalf];
  alignas(64) std::atomic<bool> closed{false};  // the reader has finished

  bool put(const Address* blocks) {
    const std::size_t next = written.load(std::memory_order_relaxed);
    if (next - read.load(std::memory_order_acquire) == kRooms) return false;
    std::copy(blocks, blocks + kHalf, rooms[next % kRooms]);
    written.store(next + 1, std::memory_order_release);
    return true;
  }
  void free_all(Pool& pool) {
    std::size_t next = read.load(std::memory_order_relaxed);
    for (; next != written.load(std::memory_order_acquire); read.store(++next, std::memory_order_release))
      for (Address address : rooms[next % kRooms]) (void)pool.free(address);
  }
};

double thread_cpu_ns() {
  timespec now{};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

struct Worker {
  Pool& pool;
  StreamHandle stream;
  Mailbox* out;  // null: frees all its own blocks
  Mailbox* in;
  double wall_ns = 0;
  double cpu_ns = 0;
  std::size_t handed_over = 0;  // batches of which half was handed over
  Status failure{};

  // Waits for space while the other thread works; that thread needs nothing from us in the meantime.
  bool hand_over(const Address* blocks) {
    while (!out->put(blocks)) {
      if (out->closed.load(std::memory_order_acquire)) return false;
      in->free_all(pool);
      std::this_thread::yield();
    }
    return true;
  }
  void batches(std::size_t count) {
    Address live[kBatch];
    for (std::size_t batch = 0; batch < count; ++batch) {
      for (std::size_t i = 0; i < kBatch; ++i)
        if (Status status = pool.allocate(kUnit << (i % kSizes), stream, 0, 0, &live[i]); !status.ok())
          live[i] = 0, failure = status;
      std::size_t own = 0;
      if (out != nullptr && hand_over(live)) own = kHalf, ++handed_over;
      for (; own < kBatch; ++own) (void)pool.free(live[own]);
      if (in != nullptr) in->free_all(pool);
    }
  }
  void work(std::size_t count, std::latch& start) {
    batches(kWarmBatches);  // fills the caches
    handed_over = 0;
    start.arrive_and_wait();
    const double cpu = thread_cpu_ns();
    const auto wall = Clock::now();
    batches(count);
    wall_ns = ns_since(wall);
    cpu_ns = thread_cpu_ns() - cpu;
    if (in != nullptr) in->closed.store(true, std::memory_order_release);
  }
};

}  // namespace

Status run_threads(const std::vector<Pool*>& pools, const std::vector<StreamHandle>& streams, bool hand_over,
                   std::size_t batches, ThreadsCost* out) {
  const std::size_t count = streams.size();
  std::vector<Mailbox> boxes(count);
  std::vector<Worker> workers;
  for (std::size_t i = 0; i < count; ++i) {
    Mailbox* const to = hand_over ? &boxes[i] : nullptr;
    Mailbox* const from = hand_over ? &boxes[(i + 1) % count] : nullptr;
    workers.push_back({*pools[i % pools.size()], streams[i], to, from});
  }
  std::latch start(static_cast<std::ptrdiff_t>(count));
  std::vector<std::thread> running;
  for (Worker& worker : workers)
    running.emplace_back([&worker, batches, &start] { worker.work(batches, start); });
  for (std::thread& thread : running) thread.join();
  for (Mailbox& box : boxes) box.free_all(*pools[0]);
  const double pairs = static_cast<double>(count * batches * kBatch);
  *out = {};
  for (const Worker& worker : workers) {
    out->wall_ns += worker.wall_ns / pairs;
    out->cpu_ns += worker.cpu_ns / pairs;
    out->handed_over += static_cast<double>(worker.handed_over * kHalf) / pairs;
    if (!worker.failure.ok()) return worker.failure;
  }
  return {};
}

}  // namespace vram::bench
