// The driver pool over the model's: accounts, order, the retry, and every call to the device failing in turn.
#include "driver_pool/driver_pool.hpp"

#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>

#include "backends/host.hpp"
#include "backends/model.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

constexpr std::uint64_t kGranule = 32 * kMiB;

struct World {
  explicit World(DriverPool::Source source = {}, const PoolConfig& config = {},
                 Schedule schedule = Schedule::manual) {
    ModelOptions options;
    options.schedule = schedule;
    options.lag_us = 100;
    device = std::make_shared<ModelBackend>(kGiB, options);
    opened = DriverPool::open(device, source, config, &pool);
  }
  StreamHandle stream() {
    StreamHandle made = 0;
    CHECK(device->stream_create(&made).ok());
    return made;
  }
  Address take(std::uint64_t size, StreamHandle on = 0, std::uint64_t align = 0) {
    Address address = 0;
    CHECK(pool->allocate_slow(size, on, align, 0, &address, nullptr).ok());
    return address;
  }
  std::uint64_t attribute(DriverPoolAttribute which) {
    std::uint64_t value = 0;
    CHECK(pool->attribute(which, &value).ok());
    return value;
  }
  bool good() {
    std::string why;
    const bool fine = pool->check(&why) && device->check(&why);
    if (!fine) std::printf("%s\n", why.c_str());
    return fine;
  }
  // What is left on the device after close, but for the default stream.
  bool clean() {
    (void)device->run_all();
    const ModelCounts counts = device->counts();
    return counts.plain_ranges == 0 && counts.events == 0 && counts.pools == 0 && counts.streams == 1;
  }
  std::shared_ptr<ModelBackend> device;
  std::shared_ptr<DriverPool> pool;
  Status opened;
};

DriverPool::Source at_most(std::uint64_t max_size) {
  DriverPool::Source source;
  source.properties.max_size = max_size;
  return source;
}

}  // namespace

TEST(books_are_exact) {
  World world;
  REQUIRE(world.opened.ok());
  const Address small = world.take(1000), none = world.take(0), large = world.take(3 * kMiB);
  const Address aligned = world.take(1000, 0, 2 * kMiB);
  CHECK(aligned % (2 * kMiB) == 0);
  CHECK((std::set<Address>{small, none, large, aligned}.size() == 4));
  CHECK(world.pool->live_bytes() == 1024 + 512 + 3 * kMiB + 1024);
  CHECK(world.attribute(DriverPoolAttribute::used_mem_current) >= world.pool->live_bytes() + 2 * kMiB - 512);
  CHECK(world.good());
  for (Address address : {small, none, large, aligned}) CHECK(world.pool->free_slow(address).ok());
  CHECK(world.pool->free_slow(small).code == Code::invalid);
  const PoolStats stats = world.pool->stats();
  CHECK(stats.live == 0 && stats.peak_live == 1024 + 512 + 3 * kMiB + 1024);
  CHECK(world.attribute(DriverPoolAttribute::used_mem_current) == 0);
  CHECK(world.pool->close().ok() && world.clean());
}

TEST(a_device_without_driver_pools_is_told) {
  std::shared_ptr<DriverPool> pool;
  const Status status = DriverPool::open(std::make_shared<HostBackend>(), {}, {}, &pool);
  CHECK(status.code == Code::unsupported && std::string(status.call) == DriverPool::kNoDriverPools &&
        pool == nullptr);
}

TEST(close_waits_and_frees_what_is_live) {
  World world;
  const StreamHandle stream = world.stream();
  const Address address = world.take(kMiB, stream);
  CHECK(world.device->work(stream, 1, address, kMiB).ok());
  CHECK(world.pool->close().ok());
  CHECK((world.device->executed() == std::vector<std::uint64_t>{1}));
  CHECK(world.device->stream_destroy(stream).ok() && world.clean());
  Address out = 0;
  CHECK(world.pool->allocate_slow(1, 0, 0, 0, &out, nullptr).code == Code::closed);
  CHECK(world.pool->stats().live == 0 && world.pool->stats().allocations[0].total == 1);
}

TEST(the_default_pool_stays_and_so_do_others_allocations) {
  DriverPool::Source source;
  source.origin = DriverPool::Origin::shared_default;
  World world(source);
  std::shared_ptr<DriverPool> other;
  REQUIRE(DriverPool::open(world.device, source, {}, &other).ok());
  const Address mine = world.take(kMiB);
  Address theirs = 0;
  CHECK(other->allocate_slow(2 * kMiB, 0, 0, 0, &theirs, nullptr).ok());
  CHECK(other->close().ok());
  CHECK(world.attribute(DriverPoolAttribute::used_mem_current) == kMiB);
  CHECK(world.pool->free_slow(theirs).code == Code::invalid && world.pool->free_slow(mine).ok());
  CHECK(world.pool->close().ok());
}

TEST(a_free_is_behind_every_stream_that_uses_the_memory) {
  World world;
  const StreamHandle one = world.stream(), two = world.stream(), three = world.stream();
  const Address address = world.take(kGranule, one);
  CHECK(world.device->work(two, 2, address, kGranule).ok());
  CHECK(world.device->work(three, 3, address, kGranule).ok());
  CHECK(world.pool->record_stream(address + kMiB, two).ok());
  CHECK(world.pool->record_stream(address, three).ok());
  CHECK(world.pool->record_stream(address + kGranule, three).code == Code::invalid);
  CHECK(world.pool->free_slow(address).ok());
  CHECK(world.take(kGranule, one) != address);
  while (world.device->step(two)) {
  }
  CHECK(world.take(kGranule, one) != address);
  CHECK(world.device->run_all());
  CHECK(world.take(kGranule, two) == address);
  CHECK(world.device->host_waits() == 0 && world.good());
}

TEST(the_driver_is_asked_again_after_the_stream_was_waited_for) {
  World world(at_most(kGranule));
  const StreamHandle one = world.stream(), two = world.stream();
  const Address address = world.take(kGranule, one);
  CHECK(world.device->work(one, 1, address, kGranule).ok());
  CHECK(world.pool->free_slow(address).ok());
  CHECK(world.take(kGranule, two) == address);
  const PoolStats stats = world.pool->stats();
  CHECK(stats.rungs[static_cast<int>(Rung::host_wait)] == 1 && stats.retries == 1);
  Address out = 0;
  OutOfMemoryReport report;
  CHECK(world.pool->allocate_slow(kMiB, two, 0, 0, &out, &report).code == Code::out_of_memory);
  CHECK(report.requested == kMiB && report.limit == kGranule && report.live == kGranule);
}

TEST(a_batch_is_all_or_nothing) {
  World world(at_most(kGranule));
  std::vector<Address> out;
  CHECK(world.pool->allocate_batch({kMiB, 2 * kMiB, kGranule}, 0, 0, out, nullptr).code ==
        Code::out_of_memory);
  CHECK((out == std::vector<Address>{0, 0, 0}) && world.pool->live_bytes() == 0 && world.good());
  CHECK(world.pool->allocate_batch({kMiB, 2 * kMiB}, 0, 0, out, nullptr).ok());
  CHECK(world.pool->live_bytes() == 3 * kMiB && world.good());
}

TEST(zeros_come_in_order) {
  PoolConfig config;
  config.zero_on_allocate = config.zero_on_free = true;
  World world({}, config);
  const StreamHandle one = world.stream(), two = world.stream();
  const Address address = world.take(kMiB, one);
  CHECK(world.device->calls("fill") == 1);
  CHECK(world.device->work(two, 7, address, kMiB).ok());
  CHECK(world.pool->record_stream(address, two).ok());
  CHECK(world.pool->free_slow(address).ok());
  CHECK(world.device->calls("fill") == 2 && world.device->run_all());
  // The last fill is behind the use.
  CHECK(world.device->executed().size() == 3 && world.device->executed()[2] != 7);
  for (const std::uint64_t nth : {1, 2}) world.device->fail("fill", nth, {Code::failed, 0, ""});
  Address out = 0;
  CHECK(world.pool->allocate_slow(kMiB, one, 0, 0, &out, nullptr).code == Code::failed);
  CHECK(world.pool->live_bytes() == 0 && world.good());
}

TEST(what_is_exported_is_found_and_freed_by_the_importer_first) {
  DriverPool::Source source;
  source.properties.shareable = true;
  World world(source);
  const Address address = world.take(kMiB, 0, 64 * kKiB);
  DriverPool::Source import{DriverPool::Origin::imported, {}, -1};
  REQUIRE(world.pool->export_pool(&import.fd).ok());
  std::shared_ptr<DriverPool> other;
  REQUIRE(DriverPool::open(world.device, import, {}, &other).ok());
  ::close(import.fd);
  SharedPointer pointer{};
  std::uint64_t offset = 0;
  Address found = 0, again = 0;
  CHECK(world.pool->export_pointer(address, &pointer, &offset).ok());
  CHECK(world.pool->export_pointer(address + 512, &pointer, &offset).code == Code::invalid);
  CHECK(other->import_pointer(pointer, offset, kMiB, 0, 0, &found).ok() && found == address);
  CHECK(other->import_pointer(pointer, offset, kMiB, 0, 0, &again).code == Code::invalid);
  CHECK(std::string(other->allocate_slow(1, 0, 0, 0, &again, nullptr).call) == DriverPool::kImported);
  CHECK(other->free_slow(found).ok() && world.pool->free_slow(address).code == Code::ok);
  CHECK(other->close().ok());
}

TEST(threads_share_the_books) {
  PoolConfig config;
  config.limit = 64 * kMiB;
  World world({}, config, Schedule::lag);
  std::vector<StreamHandle> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(world.stream());
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::vector<Address> held;
      for (std::uint64_t i = 0; i < 2000 / vram::testing::kSlowdown; ++i) {
        Address address = 0;
        const std::uint64_t size = (i * 7919 % 60 + 1) * 4 * kKiB;
        const auto at = static_cast<std::size_t>(t);
        if (!world.pool->allocate_slow(size, streams[at], 0, 0, &address, nullptr).ok()) ++wrong;
        if (i % 3 == 0) wrong += !world.pool->record_stream(address, streams[(at + 1) % 4]).ok();
        held.push_back(address);
        if (held.size() < 8) continue;
        wrong += !world.pool->free_slow(held[i % 8]).ok();
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i % 8));
        if (i % 100 == 0) (void)world.pool->stats();
      }
      for (Address address : held) wrong += !world.pool->free_slow(address).ok();
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0 && world.pool->live_bytes() == 0 && world.good());
  CHECK(world.pool->close().ok());
}

// A fixed program that meets every rung and every way a block is freed; it carries on after whatever fails.
namespace {

// `fail_at` counts the calls that the program makes; 0: none fails.
void run_program(World& world, std::uint64_t fail_at, Code code, bool* intact) {
  const StreamHandle streams[] = {0, world.stream(), world.stream()};
  if (fail_at != 0) world.device->fail_any(fail_at, {code, 0, ""});
  world.pool->on_out_of_memory([](std::uint64_t, StreamHandle) { return true; });
  (void)world.pool->set_attribute(DriverPoolAttribute::release_threshold, ~std::uint64_t{0});
  std::vector<Address> held;
  const auto release = [&](std::size_t index) {
    const Address address = held[index % held.size()];
    // What the driver does not take back stays live; the second time nothing fails.
    if (world.pool->free_slow(address).ok() || world.pool->free_slow(address).ok())
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(index % held.size()));
  };
  for (std::uint64_t step = 0; step < 60; ++step) {
    Address address = 0;
    const std::uint64_t size = step % 15 == 7  ? 50 * kMiB
                               : step % 5 == 0 ? 20 * kMiB
                                               : (step * 37 % 300) * 10 * kKiB;
    const StreamHandle stream = streams[step % 3];
    if (world.pool->allocate_slow(size, stream, step % 7 == 0 ? 64 * kKiB : 0, 1, &address, nullptr).ok())
      held.push_back(address);
    if (address != 0) (void)world.device->work(stream, step, address, size);
    if (address != 0 && step % 4 == 0 && world.pool->record_stream(address, streams[(step + 1) % 3]).ok())
      (void)world.device->work(streams[(step + 1) % 3], step, address, size);
    if (held.size() > 4) release(step);
    if (step % 20 == 19) (void)world.pool->trim(0, step == 39);
    *intact = *intact && world.good();
  }
  if (world.pool->retire_stream(streams[2]).ok()) (void)world.device->stream_destroy(streams[2]);
  while (!held.empty()) release(0);
  *intact = *intact && world.good() && world.pool->live_bytes() == 0;
  (void)world.device->run_all();
}

}  // namespace

TEST(every_call_to_the_device_may_fail) {
  std::uint64_t calls = 0;
  {
    World world(at_most(3 * kGranule));
    bool intact = true;
    run_program(world, 0, Code::ok, &intact);
    CHECK(intact);
    calls = world.device->total_calls();
    for (const Rung rung : {Rung::driver, Rung::host_wait, Rung::give_back})
      CHECK(world.pool->stats().rungs[static_cast<int>(rung)] > 0);
  }
  for (const Code code : {Code::failed, Code::out_of_memory}) {
    for (std::uint64_t nth = 1; nth <= calls; nth += vram::testing::kSlowdown) {
      World world(at_most(3 * kGranule));
      REQUIRE(world.opened.ok());
      bool intact = true;
      run_program(world, nth, code, &intact);
      if (!intact) std::printf("after call %llu failed\n", static_cast<unsigned long long>(nth));
      CHECK(intact);
      world.device->clear_failures();
      CHECK(world.pool->close().ok());
      CHECK(world.device->counts().plain_ranges == 0 && world.device->counts().pools == 0);
    }
  }
}

TEST(a_pool_that_cannot_be_opened_leaves_nothing) {
  for (const char* call : {"pool_create", "pool_default", "pool_import"}) {
    World world;
    world.device->fail(call, 1, {Code::failed, 0, ""});
    DriverPool::Source source;
    if (call[5] == 'd') source.origin = DriverPool::Origin::shared_default;
    if (call[5] == 'i') source.origin = DriverPool::Origin::imported;
    std::shared_ptr<DriverPool> pool;
    CHECK(DriverPool::open(world.device, source, {}, &pool).code == Code::failed && pool == nullptr);
    CHECK(world.pool->close().ok() && world.clean());
  }
}

TEST_MAIN()
