// What happens when the host has no memory left in the middle of a pool's call: the call throws
// std::bad_alloc, no lock stays held, and the pool is as it was or has done its work. When everything is
// freed, nothing stays reserved.
#include <new>
#include <random>

#include "backends/host.hpp"
#include "testing.hpp"
#include "world.hpp"

namespace {

thread_local long until_failure = -1;  // allocations of this thread until one fails; below 0: none does

}  // namespace

void* operator new(std::size_t bytes) {
  if (until_failure >= 0 && until_failure-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (until_failure >= 0 && until_failure-- == 0) return nullptr;
  return std::malloc(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using namespace vram;
using namespace vram::testing;

// Allocates the host memory in which suspend keeps contents.
std::shared_ptr<Pool> make_store() {
  return std::make_shared<Pool>(std::make_shared<HostBackend>(kGiB), plain());
}

// A program of random calls on three streams.
struct Program : World {
  Program(const PoolConfig& config, unsigned seed) : World(256 * kMiB, config, lagging()), dice(seed) {
    live.reserve(4096);  // its own tables never fail
    batch.reserve(8);
    growables.reserve(256);
    for (StreamHandle& each : streams) each = stream();
  }
  std::uint64_t any(std::uint64_t below) { return dice() % below; }
  StreamHandle on() { return streams[any(3)]; }

  void step() {
    switch (any(14)) {
      case 0:
        device->advance(50);
        return;
      case 1:
        (void)pool->trim(any(2) * 64 * kMiB, any(2) == 0);
        return;
      case 2:
        if (!live.empty()) (void)pool->record_stream(live[any(live.size())], on());
        return;
      case 3:
        return take_batch();
      case 4:
      case 5:
      case 6:
      case 7:
      case 8:
        return give();
      default:
        return take();
    }
  }
  void take() {
    Address address = 0;
    const std::uint64_t size = any(2) == 0 ? 1 + any(64 * 1024) : 1 + any(8 * kMiB);
    const std::uint32_t tag = any(2);
    if (pool->allocate(size, on(), 0, tag, &address).ok()) live.push_back(address);
  }
  void give() {
    if (live.empty()) return;
    std::swap(live[any(live.size())], live.back());
    // Where zeros could not be queued, the block is as it was, and is freed later.
    if (pool->free(live.back()).code != Code::failed) live.pop_back();
  }
  void take_batch() {
    const std::vector<std::uint64_t> sizes(1 + any(5), 1 + any(kMiB));
    OutOfMemoryReport report;
    if (!pool->allocate_batch(sizes, on(), 0, batch, &report).ok()) return;
    live.insert(live.end(), batch.begin(), batch.end());
  }

  // ---- growable buffers -------------------------------------------------------------------------
  void grow_or_shrink() {
    switch (any(6)) {
      case 0:
        return open();
      case 1:
        return close();
      default:
        if (growables.empty()) return open();
        OutOfMemoryReport report;
        (void)pool->growable_resize(growables[any(growables.size())], any(8) * kSlotBytes, 0, 0, &report);
    }
  }
  void open() {
    Address address = 0;
    if (pool->growable_open(16 * kMiB, on(), &address).ok()) growables.push_back(address);
  }
  void close() {
    if (growables.empty()) return;
    std::swap(growables[any(growables.size())], growables.back());
    (void)pool->growable_close(growables.back());
    growables.pop_back();
  }

  // ---- suspending -------------------------------------------------------------------------------
  void suspend_or_resume() {
    std::uint64_t bytes = 0;
    OutOfMemoryReport report;
    const Pool::Wanted half = [](std::uint32_t tag) { return tag == 1; };
    const Pool::Wanted& wanted = any(2) == 0 ? half : Pool::Wanted();
    if (any(2) == 0) {
      (void)pool->suspend(wanted, any(3) != 0, store, &bytes, &report);
    } else {
      (void)pool->resume(wanted, &bytes, &report);
    }
  }

  // Frees everything; what stays reserved, or "".
  std::string left_behind() {
    std::uint64_t bytes = 0;
    while (!growables.empty()) close();
    if (const Status status = pool->resume(nullptr, &bytes, nullptr); !status.ok()) return "a resume fails";
    while (!live.empty()) give();
    device->advance(1e6);
    if (!pool->trim(0, true).ok()) return "a trim fails";
    const PoolStats stats = pool->stats();
    if (stats.live != 0) return "bytes are live that nobody has";
    if (stats.pending.current != 0 || stats.pending_blocks != 0) return "blocks stay pending";
    if (stats.cached != 0 || stats.suspended != 0 || stats.kept != 0)
      return "blocks stay cached or suspended";
    if (stats.reserved.current != 0) return "the pool holds memory that it cannot release";
    if (device->counts().page_bytes + device->counts().plain_bytes != 0) return "memory is forgotten";
    if (store->live_bytes() != 0) return "the store keeps contents";
    return "";
  }

  // Of the pool; the model of a device makes no such promise.
  bool sound() const {
    std::string why;
    const bool holds = pool->check(&why) && store->check(&why);
    if (!holds) std::printf("     check: %s\n", why.c_str());
    return holds;
  }

  std::mt19937 dice;
  StreamHandle streams[3] = {};
  std::vector<Address> live, batch, growables;
  std::shared_ptr<Pool> store = make_store();
};

// One step of a program.
using Step = void (*)(Program&);
void allocate_and_free(Program& program) { program.step(); }
void resize_growables(Program& program) { program.any(2) == 0 ? program.step() : program.grow_or_shrink(); }
void suspend_and_resume(Program& program) {
  program.any(6) != 0 ? program.step() : program.suspend_or_resume();
}

// Runs the program with the nth allocation of the host failing, counted after a beginning that succeeds.
// False: there were not so many.
bool run(const PoolConfig& config, Step step, unsigned seed, long nth) {
  Program program(config, seed);
  for (int i = 0; i < 60; ++i) step(program);
  until_failure = nth;
  for (int i = 0; i < 200 && until_failure >= 0; ++i) {
    try {
      step(program);
    } catch (const std::bad_alloc&) {
    }
  }
  const bool failed = until_failure < 0;
  until_failure = -1;
  CHECK(program.sound());
  for (int i = 0; i < 60; ++i) step(program);
  CHECK(program.sound());
  const std::string left = program.left_behind();
  if (!left.empty()) std::printf("     seed %u, allocation %ld: %s\n", seed, nth, left.c_str());
  CHECK(left.empty() && program.sound());
  (void)program.pool->close();  // fails where the model has thrown in the middle of a release
  return failed;
}

// Fails each allocation of the host in turn, or one in `stride`.
void fail_each(const PoolConfig& config, Step step, long stride = 1) {
  stride *= static_cast<long>(sampling());
  for (unsigned seed = 0; seed < 4; ++seed) {
    long tried = 0;
    for (long nth = static_cast<long>(seed); run(config, step, seed, nth); nth += stride) ++tried;
    CHECK(tried > 0);
  }
}

TEST(a_pool_survives_a_host_without_memory) {
  both_kinds([](const PoolConfig& config) { fail_each(config, allocate_and_free); });
}

TEST(growable_buffers_survive_a_host_without_memory) { fail_each({}, resize_growables, 11); }

TEST(suspend_and_resume_survive_a_host_without_memory) {
  PoolConfig zeroing;
  zeroing.zero_on_free = true;
  for (const PoolConfig& config : {PoolConfig{}, zeroing}) fail_each(config, suspend_and_resume, 101);
}

}  // namespace

TEST_MAIN()
