// What happens when the host has no memory left in the middle of a pool's call: the call throws
// std::bad_alloc, no lock stays held, and the pool is as it was or has done its work. Growable buffers and
// suspend do not promise this yet.
#include <new>
#include <random>

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

// A program of random calls on three streams.
struct Program : World {
  Program(const PoolConfig& config, unsigned seed) : World(256 * kMiB, config, lagging()), dice(seed) {
    live.reserve(4096);  // its own tables never fail
    batch.reserve(8);
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
    if (pool->allocate(size, on(), 0, 0, &address).ok()) live.push_back(address);
  }
  void give() {
    if (live.empty()) return;
    std::swap(live[any(live.size())], live.back());
    const Address address = live.back();
    live.pop_back();
    (void)pool->free(address);
  }
  void take_batch() {
    const std::vector<std::uint64_t> sizes(1 + any(5), 1 + any(kMiB));
    OutOfMemoryReport report;
    if (!pool->allocate_batch(sizes, on(), 0, batch, &report).ok()) return;
    live.insert(live.end(), batch.begin(), batch.end());
  }

  // Of the pool; the model of a device makes no such promise.
  bool sound() const {
    std::string why;
    const bool holds = pool->check(&why);
    if (!holds) std::printf("     check: %s\n", why.c_str());
    return holds;
  }

  std::mt19937 dice;
  StreamHandle streams[3] = {};
  std::vector<Address> live, batch;
};

// Runs the program with the nth allocation of the host failing, counted after a beginning that succeeds.
// False: there were not so many.
bool run(const PoolConfig& config, unsigned seed, long nth) {
  Program program(config, seed);
  for (int i = 0; i < 60; ++i) program.step();
  until_failure = nth;
  bool failed = false;
  for (int i = 0; i < 200 && !failed; ++i) {
    try {
      program.step();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  }
  until_failure = -1;
  CHECK(program.sound());
  for (int i = 0; i < 60; ++i) program.step();
  CHECK(program.sound());
  (void)program.pool->close();  // fails where the model has thrown in the middle of a release
  return failed;
}

TEST(a_pool_survives_a_host_without_memory) {
  for (const bool pages : {true, false})
    for (unsigned seed = 0; seed < 4; ++seed) {
      PoolConfig config;
      config.pages = pages;
      long tried = 0;
      for (long nth = static_cast<long>(seed); run(config, seed, nth); nth += static_cast<long>(sampling()))
        ++tried;
      CHECK(tried > 0);
    }
}

}  // namespace

TEST_MAIN()
