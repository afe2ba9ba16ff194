// The contract of the pool, promise by promise, on the model device (with and without pages) and the host.
#include "pool/pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/host.hpp"
#include "backends/model.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::both_kinds;
using vram::testing::FarHost;
using vram::testing::holds_in_child;
using vram::testing::manual;
using vram::testing::plain;
using vram::testing::World;

namespace {

Code code(const Status& status) { return status.code; }
std::uint64_t block_bytes(std::uint64_t size) { return std::uint64_t{units_of(size)} * kUnit; }

PoolConfig across(CrossStream cross, bool pages = true) {
  PoolConfig config;
  config.cross_stream = cross;
  config.pages = pages;
  return config;
}

}  // namespace

// ---- sizes and addresses --------------------------------------------------------------------------------

TEST(size_zero_is_distinct_and_can_be_freed) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    std::set<Address> all;
    for (int i = 0; i < 100; ++i) all.insert(world.get(0));
    CHECK(all.size() == 100 && all.count(0) == 0);
    BlockInfo info;
    CHECK(world.pool->info(*all.begin(), &info).ok());
    CHECK(info.requested == 0 && info.bytes == kUnit);
    for (Address address : all) CHECK(world.pool->free(address).ok());
    CHECK(world.pool->live_bytes() == 0 && world.good());
  });
}

TEST(every_alignment_is_kept_and_costs_only_padding) {
  both_kinds([](const PoolConfig& config) {
    World world(2 * kGiB, config);
    std::vector<Address> all;
    for (std::uint64_t align = 1; align <= 64 * kMiB; align *= 2)
      for (std::uint64_t size : {std::uint64_t{1}, 3 * kKiB, 2 * kMiB + 512}) {
        const Address address = world.get(size, 0, align);
        REQUIRE(address != 0);
        CHECK(address % std::max(align, kUnit) == 0);
        all.push_back(address);
      }
    CHECK(world.good());
    for (Address address : all) CHECK(world.pool->free(address).ok());
    CHECK(world.pool->trim(0, true).ok());
    CHECK(world.stats().reserved.current == 0 && world.good());
  });
}

TEST(alignment_must_be_a_power_of_two_whether_or_not_the_cache_could_serve) {
  World world;
  Address address = 0;
  CHECK(code(world.pool->allocate(512, 0, 3, 0, &address)) == Code::invalid);
  REQUIRE(world.pool->free(world.get(512)).ok());
  CHECK(code(world.pool->allocate(512, 0, 3, 0, &address)) == Code::invalid);
  CHECK(code(world.pool->allocate(512, 0, std::uint64_t{1} << 63, 0, &address)) == Code::invalid);
  CHECK(world.pool->live_bytes() == 0 && world.good());
}

TEST(huge_alignment_is_served_or_refused_but_ends) {
  // ThreadSanitizer leaves too few addresses for the tables of a large device.
  World world(vram::testing::kSlowdown > 1 ? 4 * kGiB : 141 * kGiB);
  for (std::uint64_t align = kGiB; align <= kMaxRequest; align *= 2) {
    const Address address = world.get(kMiB, 0, align);
    CHECK(address % align == 0);
    if (address != 0) CHECK(world.pool->free(address).ok());
  }
  CHECK(world.good());
}

TEST(sizes_that_would_wrap_are_out_of_memory_with_a_report) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    for (std::uint64_t size : {kMaxRequest - 1, kMaxRequest, kMaxRequest + 1, std::uint64_t{1} << 63,
                               ~std::uint64_t{0} - kUnit, ~std::uint64_t{0}}) {
      Address address = 0;
      OutOfMemoryReport report;
      CHECK(code(world.pool->allocate(size, 0, 0, 0, &address, &report)) == Code::out_of_memory);
      CHECK(report.requested == size && report.device_total == kGiB);
      CHECK(address == 0);
    }
    CHECK(world.stats().out_of_memory == 6);
    CHECK(world.stats().peak_live == 0 && world.good());
    CHECK(world.get(kGiB / 2) != 0);
  });
}

// ---- split, merge, fit
// ---------------------------------------------------------------------------------------

TEST(a_freed_neighbourhood_merges_into_one_block) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    std::vector<Address> all;
    for (int i = 0; i < 5; ++i) all.push_back(world.get(3 * kMiB));
    const std::uint64_t reserved = world.stats().reserved.current;
    for (int i : {1, 3, 0, 4, 2}) CHECK(world.pool->free(all[static_cast<std::size_t>(i)]).ok());
    CHECK(world.pool->coalesce().ok());
    CHECK(world.stats().free_blocks == 1);
    CHECK(world.get(15 * kMiB) != 0);
    CHECK(world.stats().reserved.current == reserved && world.good());
  });
}

TEST(the_tightest_hole_serves) {
  World world(kGiB, plain());
  // Holes of 4, 2 and 3 MiB between live blocks, in one segment.
  const Address whole = world.get(19 * kMiB);
  REQUIRE(world.pool->free(whole).ok() && world.pool->coalesce().ok());
  const Address four = world.get(4 * kMiB);
  REQUIRE(world.get(kMiB + 512) != 0);
  const Address two = world.get(2 * kMiB);
  REQUIRE(world.get(kMiB + 512) != 0);
  const Address three = world.get(3 * kMiB);
  REQUIRE(world.get(kMiB + 512) != 0);
  for (Address address : {four, two, three}) REQUIRE(world.pool->free(address).ok());
  REQUIRE(world.pool->coalesce().ok());
  CHECK(world.get(3 * kMiB - 512) == three);
  CHECK(world.get(2 * kMiB - 512) == two);
  CHECK(world.get(4 * kMiB - 512) == four);
  CHECK(world.good());
}

TEST(a_step_repeated_needs_the_driver_no_more) {
  World world;
  const auto step = [&] {
    std::vector<Address> all;
    for (std::uint64_t size : {40 * kMiB, 3 * kMiB, 700 * kKiB, 9 * kMiB, 100 * kMiB})
      all.push_back(world.get(size));
    std::swap(all[0], all[3]);
    for (Address address : all) (void)world.pool->free(address);
  };
  step();
  step();
  const std::uint64_t calls = world.device->memory_calls();
  for (int i = 0; i < 20; ++i) step();
  CHECK(world.device->memory_calls() == calls);
}

// ---- misuse
// ------------------------------------------------------------------------------------------------------

TEST(misuse_is_invalid_and_leaves_the_pool_intact) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    Pool other(world.device, config);
    const Address kept = world.get(3 * kMiB);
    const Address freed = world.get(4 * kMiB);
    const Address small = world.get(100);
    Address foreign = 0;
    REQUIRE(other.allocate(kMiB, 0, 0, 0, &foreign).ok());
    REQUIRE(world.pool->free(freed).ok() && world.pool->free(small).ok());
    for (int round = 0; round < 2; ++round) {  // cached, then merged
      for (Address wrong : {freed, small, kept + kUnit, kept + 1, kept + 2 * kMiB, foreign, Address{0},
                            Address{512}, ~Address{0}, ~Address{0} - kUnit + 1, kept + 8 * kGiB}) {
        CHECK(code(world.pool->free(wrong)) == Code::invalid);
        BlockInfo info;
        CHECK(code(world.pool->info(wrong, &info)) == Code::invalid);
      }
      CHECK(code(world.pool->record_stream(foreign, 1)) == Code::invalid);
      CHECK(code(world.pool->record_stream(freed, 1)) == Code::invalid);
      CHECK(world.good());
      REQUIRE(world.pool->coalesce().ok());
    }
    CHECK(world.pool->live_bytes() == 3 * kMiB);
    CHECK(world.pool->free(kept).ok());
    CHECK(code(world.pool->free(kept)) == Code::invalid);
    CHECK(other.free(foreign).ok());
  });
}

TEST(a_block_that_is_pending_cannot_be_freed_again) {
  World world;
  const Address address = world.get(kMiB);
  REQUIRE(world.pool->record_stream(address, 1).ok() && world.pool->free(address).ok());
  CHECK(code(world.pool->free(address)) == Code::invalid);
  CHECK(code(world.pool->record_stream(address, 1)) == Code::invalid);
  CHECK(world.stats().pending_blocks == 1 && world.good());
}

TEST(of_two_threads_that_free_one_block_exactly_one_succeeds) {
  World world;
  for (int round = 0; round < 2000; ++round) {
    const Address address = world.get(round % 2 == 0 ? kMiB : 4 * kMiB);
    std::atomic<int> ready{0}, succeeded{0};
    const auto release = [&] {
      ++ready;
      while (ready.load() < 2) {
      }
      succeeded += world.pool->free(address).ok() ? 1 : 0;
    };
    if (round % 20 != 0) {  // a thread for each round would take too long
      (void)world.pool->free(address);
      continue;
    }
    std::thread one(release), two(release);
    one.join();
    two.join();
    CHECK(succeeded == 1);
  }
  CHECK(world.pool->live_bytes() == 0 && world.good());
}

// ---- the cache
// -----------------------------------------------------------------------------------------------------

TEST(the_cache_serves_last_in_first_out_and_never_another_stream) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    const Address first = world.get(10 * kKiB), second = world.get(10 * kKiB);
    REQUIRE(world.pool->free(first).ok() && world.pool->free(second).ok());
    CHECK(world.stats().cached == 2 * block_bytes(10 * kKiB) && world.stats().cached_blocks == 2);
    Address address = 0;
    CHECK(!world.pool->try_cached(10 * kKiB, 1, 0, &address));
    CHECK(!world.pool->try_cached(11 * kKiB, 0, 0, &address));
    CHECK(world.get(10 * kKiB) == second && world.get(10 * kKiB) == first);
    CHECK(world.stats().hits == 2 && world.served(Rung::stream_cache) == 2);
  });
}

TEST(the_cache_keeps_no_more_blocks_than_allowed) {
  PoolConfig config;
  config.stream_cache = 3;
  World world(kGiB, config);
  std::vector<Address> all;
  for (int i = 0; i < 10; ++i) all.push_back(world.get(4 * kKiB));
  for (Address address : all) REQUIRE(world.pool->free(address).ok());
  CHECK(world.stats().cached_blocks == 3 && world.good());
}

// ---- batches
// --------------------------------------------------------------------------------------------------------

TEST(a_batch_lies_side_by_side) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    const std::vector<std::uint64_t> sizes = {3 * kMiB, 5 * kMiB, 3 * kMiB, 5 * kMiB};
    std::vector<Address> out;
    REQUIRE(world.pool->allocate_batch(sizes, 0, 0, out, nullptr).ok());
    std::vector<std::pair<Address, std::uint64_t>> ranges;
    for (std::size_t i = 0; i < sizes.size(); ++i) ranges.push_back({out[i], sizes[i]});
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 1; i < ranges.size(); ++i)
      CHECK(ranges[i].first == ranges[i - 1].first + ranges[i - 1].second);
    CHECK(world.good());
    for (Address address : out) CHECK(world.pool->free(address).ok());
  });
}

TEST(a_batch_is_all_or_nothing) {
  both_kinds([](const PoolConfig& config) {
    World world(32 * kMiB, config);
    for (const std::vector<std::uint64_t>& sizes : {std::vector<std::uint64_t>{kMiB, 20 * kMiB, 20 * kMiB},
                                                    {1, 2, ~std::uint64_t{0}},
                                                    {0, 33 * kMiB}}) {
      std::vector<Address> out;
      OutOfMemoryReport report;
      CHECK(code(world.pool->allocate_batch(sizes, 0, 0, out, &report)) == Code::out_of_memory);
      CHECK(std::count(out.begin(), out.end(), Address{0}) == static_cast<std::ptrdiff_t>(sizes.size()));
      CHECK(world.pool->live_bytes() == 0 && world.good());
    }
    std::vector<Address> out;
    CHECK(world.pool->allocate_batch({}, 0, 0, out, nullptr).ok() && out.empty());
    CHECK(world.pool->allocate_batch({0, 0, 28 * kMiB}, 0, 0, out, nullptr).ok());
    CHECK(out[0] != out[1] && world.good());
  });
}

// ---- limits, trimming
// ------------------------------------------------------------------------------------------------

TEST(the_limit_is_exact) {
  both_kinds([](const PoolConfig& base) {
    PoolConfig config = base;
    config.limit = 10 * kMiB;
    World world(kGiB, config);
    CHECK(world.get(10 * kMiB + 1) == 0);
    const Address whole = world.get(10 * kMiB);
    CHECK(whole != 0);
    CHECK(world.get(1) == 0);
    CHECK(world.stats().reserved.peak == 10 * kMiB);
    REQUIRE(world.pool->set_limit(12 * kMiB).ok());
    CHECK(world.get(1) != 0 && world.get(2 * kMiB) == 0);
    REQUIRE(world.pool->set_limit(4 * kMiB).ok());  // below what is held: nothing new, nothing taken away
    CHECK(world.get(3 * kMiB) == 0 && world.stats().reserved.current == 12 * kMiB);
    REQUIRE(world.pool->free(whole).ok() && world.pool->trim(0, true).ok());
    CHECK(world.get(4 * kMiB) == 0 && world.get(2 * kMiB) != 0);
    CHECK(world.stats().reserved.current == 4 * kMiB && world.good());
  });
}

// Closes the pool where a call has looked whether it is open and does not hold its lock yet.
class ClosingBackend : public ModelBackend {
 public:
  using ModelBackend::ModelBackend;
  StreamHandle canonical(StreamHandle stream) const override {
    if (Pool* const closing = std::exchange(closes, nullptr)) (void)closing->close();
    return stream;
  }
  mutable Pool* closes = nullptr;
};

// Acts while the host waits for a stream, with no lock held.
template <class Host>
class Waiting : public Host {
 public:
  using Host::Host;
  Status event_record(EventHandle event, StreamHandle on) override {
    recorded_[event] = on;
    return Host::event_record(event, on);
  }
  Status event_synchronize(EventHandle event) override {
    if (recorded_[event] == stream && act) std::exchange(act, nullptr)();
    return Host::event_synchronize(event);
  }
  StreamHandle stream = 0;
  std::function<void()> act;

 private:
  std::map<EventHandle, StreamHandle> recorded_;
};

// Device memory is zeroed in stream order, so a free could queue zeros on a stream for which close() has
// waited already.
TEST(a_free_while_the_pool_closes_queues_no_zeros_on_what_is_released) {
  both_kinds([](PoolConfig config) {
    config.zero_on_free = true;
    CHECK(holds_in_child([&config] {
      const auto device = std::make_shared<Waiting<FarHost>>(256 * kMiB);
      Pool pool(device, config);
      StreamHandle busy = 0;
      Address address = 0, other = 0;
      bool good = device->stream_create(&busy).ok() && device->stream_create(&device->stream).ok();
      good = good && pool.allocate(4 * kMiB, busy, 0, 0, &address).ok();
      good = good && pool.allocate(4 * kMiB, device->stream, 0, 0, &other).ok();
      std::promise<void> released;
      device->act = [&] {
        good = good && device->launch(busy, [&] { released.get_future().wait(); }).ok();
        good = good && pool.free(address).ok();
      };
      good = good && pool.close().ok() && !device->act;
      released.set_value();
      return good && device->stream_synchronize(busy).ok();
    }));
  });
}

// The host zeroes its own memory at once. So zeroing begins only when the work that uses what was freed
// before has completed, also where other threads call the pool during that wait.
TEST(zeroing_that_is_turned_on_spares_what_queued_work_still_reads) {
  both_kinds([](const PoolConfig& base) {
    for (const bool on_free : {false, true}) {
      const auto device = std::make_shared<Waiting<HostBackend>>(256 * kMiB);
      Pool pool(device, base);
      StreamHandle other = 0;
      Address address = 0, again = 0;
      REQUIRE(device->stream_create(&device->stream).ok() && device->stream_create(&other).ok());
      REQUIRE(pool.allocate(kMiB, device->stream, 0, 0, &address).ok());
      REQUIRE(device->fill(address, 7, kMiB, device->stream).ok());
      std::promise<void> go;
      bool intact = false;
      const auto read = [&] {
        go.get_future().wait();
        const auto* const bytes = reinterpret_cast<const char*>(address);
        intact = std::all_of(bytes, bytes + kMiB, [](char byte) { return byte == 7; });
      };
      REQUIRE(device->launch(device->stream, read).ok());
      if (on_free) REQUIRE(pool.record_stream(address, other).ok());
      REQUIRE(pool.free(address).ok());
      device->act = [&] {
        CHECK(pool.coalesce().ok());
        CHECK(on_free || pool.allocate(kMiB, device->stream, 0, 0, &again).ok());
        CHECK(on_free || again == address);
        CHECK(pool.configure(base).ok());  // does not end what the change in progress prepares
        go.set_value();
      };
      PoolConfig config = base;
      (on_free ? config.zero_on_free : config.zero_on_allocate) = true;
      CHECK(pool.configure(config).ok() && !device->act && device->synchronize().ok() && intact);
      if (!on_free) CHECK(pool.free(again).ok());
      REQUIRE(pool.allocate(kMiB, device->stream, 0, 0, &again).ok());
      if (on_free) CHECK(pool.free(again).ok());  // from here on it is zero
      if (on_free) REQUIRE(pool.allocate(kMiB, device->stream, 0, 0, &again).ok());
      CHECK(again == address && *reinterpret_cast<const char*>(again) == 0 && pool.check(nullptr));
    }
  });
}

// If close() cannot wait, the pool stays open, and what was freed meanwhile is zeroed after all.
TEST(what_is_freed_during_a_close_that_fails_is_zeroed_later) {
  both_kinds([](PoolConfig config) {
    config.zero_on_free = true;
    const auto device = std::make_shared<Waiting<FarHost>>(256 * kMiB);
    Pool pool(device, config);
    StreamHandle own = 0;
    Address address = 0, other = 0, again = 0;
    REQUIRE(device->stream_create(&own).ok() && device->stream_create(&device->stream).ok());
    REQUIRE(pool.allocate(4 * kMiB, own, 0, 0, &address).ok());
    REQUIRE(pool.allocate(4 * kMiB, device->stream, 0, 0, &other).ok());
    REQUIRE(device->fill(address, 7, 4 * kMiB, own).ok());
    device->act = [&] { CHECK(pool.free(address).ok()); };
    Status closed;
    REQUIRE(device->launch(device->stream, [&] { closed = pool.close(); }).ok());
    REQUIRE(device->stream_synchronize(device->stream).ok());
    CHECK(closed.code == Code::deadlock && !pool.closed() && !device->act);
    CHECK(pool.coalesce().ok() && device->stream_synchronize(own).ok() && pool.coalesce().ok());
    REQUIRE(pool.allocate(4 * kMiB, own, 0, 0, &again).ok() && device->stream_synchronize(own).ok());
    CHECK(again == address && *reinterpret_cast<const char*>(again) == 0 && pool.check(nullptr));
    CHECK(pool.free(again).ok() && pool.free(other).ok() && pool.trim(0, true).ok());
    CHECK(pool.stats().reserved.current == 0 && pool.close().ok());
  });
}

TEST(a_pool_that_closes_while_a_call_waits_for_it_is_closed_to_it) {
  for (std::uint64_t size : {4 * kKiB, 3 * kMiB, 64 * kMiB}) {
    const auto device = std::make_shared<ClosingBackend>(kGiB);
    Pool pool(device, {});
    Address held = 0;
    Address out = 0;
    REQUIRE(pool.allocate(kMiB, 0, 0, 0, &held).ok());
    device->closes = &pool;
    CHECK(pool.allocate(size, 0, 0, 0, &out).code == Code::closed && out == 0);
  }
  const auto device = std::make_shared<ClosingBackend>(kGiB);
  Pool pool(device, {});
  StreamHandle stream = 0;
  REQUIRE(device->stream_create(&stream).ok());
  Address held = 0;
  REQUIRE(pool.allocate(kMiB, stream, 0, 0, &held).ok());
  device->closes = &pool;
  CHECK(pool.retire_stream(stream).code == Code::closed);
}

TEST(a_pool_that_closes_under_a_fast_path_serves_nothing) {
  const auto device = std::make_shared<ClosingBackend>(kGiB);
  Pool pool(device, {});
  StreamHandle stream = 0;
  REQUIRE(device->stream_create(&stream).ok() && stream == 1);
  Address held = 0;
  REQUIRE(pool.allocate(4 * kKiB, stream, 0, 0, &held).ok() && pool.free(held).ok());
  device->closes = &pool;  // after it was found open, before the stream's lock is taken
  CHECK(!pool.try_cached(4 * kKiB, stream, 0, &held));
  const PoolStats stats = pool.stats();
  CHECK(stats.live == 0 && stats.cached == 0 && stats.cached_blocks == 0);
}

// Whatever the threads are doing when the pool closes, they end with success or `closed`, write no memory
// that is gone, and leave accounts of nothing.
TEST(any_call_may_meet_close) {
  constexpr int kThreads = 3;
  for (int round = 0; round < 60; ++round) {
    const auto host = std::make_shared<HostBackend>(256 * kMiB);
    PoolConfig config;
    config.zero_on_allocate = round % 3 == 0;
    config.pages = round % 2 == 0;
    config.journal = round % 5 == 0 ? 64 : 0;
    Pool pool(host, config);
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        StreamHandle stream = 0;
        if (t != 0) CHECK(host->stream_create(&stream).ok());
        Address kept = 0;
        CHECK(pool.allocate(64 * kKiB, stream, 0, 0, &kept).ok());
        ++ready;
        const auto fine = [](const Status& status) { return status.ok() || status.code == Code::closed; };
        for (int i = 0; !pool.closed(); ++i) {
          Address address = 0;
          BlockInfo info;
          CHECK(fine(pool.allocate(512 << (i % 12), stream, 0, 0, &address)));
          CHECK(fine(pool.info(kept, &info)));
          {
            const Allocator::Access access(pool);
            if (!access.refused()) CHECK(host->fill(kept, 1, kUnit, stream).ok());
          }
          if (address != 0) CHECK(fine(pool.free(address)));
          if (i % 64 == 63) CHECK(fine(pool.record_stream(kept, 0)) && fine(pool.trim(0, false)));
        }
      });
    while (ready != kThreads) std::this_thread::yield();
    CHECK(pool.close().ok());
    for (std::thread& each : threads) each.join();
    const PoolStats stats = pool.stats();
    REQUIRE(stats.live == 0 && stats.cached == 0 && stats.cached_blocks == 0 && stats.pending.current == 0);
    std::uint64_t free_bytes = 0, total_bytes = 0;
    CHECK(host->memory_info(&free_bytes, &total_bytes).ok() && free_bytes == total_bytes);
  }
}

TEST(what_is_cached_of_other_sizes_is_merged_before_the_pool_grows) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    // Each size is asked for once, freed into the cache and never asked for again.
    for (std::uint64_t size = 4 * kKiB; size < 12 * kMiB; size += size < kMiB ? 4 * kKiB : 64 * kKiB)
      REQUIRE(world.pool->free(world.get(size)).ok());
    CHECK(world.stats().reserved.peak <= 40 * kMiB && world.good());
  });
}

TEST(rather_than_fail_a_request_goes_among_blocks_of_other_sizes) {
  // A page is 2 MiB: of each pair one is in use and has room, and there is no other.
  struct Case {
    std::uint64_t first, second;
  };
  for (const Case& each :
       {Case{3 * kMiB, 100}, Case{100, 3 * kMiB}, Case{9 * kMiB, 512 * kKiB}, Case{kMiB, 8 * kMiB}}) {
    PoolConfig config;
    config.limit = round_up(each.first + each.second, 2 * kMiB);
    World world(kGiB, config);
    const Address first = world.get(each.first);
    const Address second = world.get(each.second);
    CHECK(first != 0 && second != 0);
    CHECK(world.stats().reserved.peak <= config.limit && world.good());
    REQUIRE(world.pool->free(first).ok() && world.pool->free(second).ok() && world.pool->trim(0, true).ok());
    CHECK(world.stats().reserved.current == 0 && world.good());
  }
}

TEST(a_refusal_gives_no_page_back_that_could_have_served_as_it_was) {
  PoolConfig config;
  config.limit = 64 * kMiB;
  World world(kGiB, config);
  std::vector<Address> all;
  for (int i = 0; i < 16; ++i) all.push_back(world.get(4 * kMiB));
  for (int i = 0; i < 16; i += 2) REQUIRE(world.pool->free(all[i]).ok());
  CHECK(world.get(40 * kMiB) == 0);
  CHECK(world.device->calls("page_release") == 0 && world.stats().reserved.current == 64 * kMiB);
  CHECK(world.get(32 * kMiB) != 0);  // in the eight holes
  CHECK(world.good());
}

TEST(trim_keeps_what_is_asked_and_what_is_used) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    const Address live = world.get(24 * kMiB);
    std::vector<Address> rest;
    for (int i = 0; i < 5; ++i) rest.push_back(world.get(24 * kMiB));
    for (Address address : rest) REQUIRE(world.pool->free(address).ok());
    world.device->run_all();
    REQUIRE(world.pool->trim(72 * kMiB, true).ok());
    CHECK(world.stats().reserved.current == 72 * kMiB);
    REQUIRE(world.pool->trim(0, true).ok());
    CHECK(world.stats().reserved.current == 24 * kMiB);
    CHECK(world.device->counts().page_bytes + world.device->counts().plain_bytes == 24 * kMiB);
    CHECK(world.pool->free(live).ok() && world.good());
  });
}

TEST(trim_waits_for_queued_work_only_when_told) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config, manual());
    const Address address = world.get(24 * kMiB, 1);
    REQUIRE(world.device->work(1, 1, address, 24 * kMiB).ok());
    REQUIRE(world.pool->free(address).ok());
    CHECK(world.pool->trim(0, false).ok());
    CHECK(world.stats().reserved.current == 24 * kMiB && world.device->executed().empty());
    CHECK(world.pool->trim(0, true).ok());
    CHECK(world.stats().reserved.current == 0 && world.device->executed().size() == 1);
    CHECK(world.good());
  });
}

TEST(coalesce_empties_the_caches) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    std::vector<Address> all;
    for (std::uint64_t size : {kKiB, 2 * kKiB, 600 * kKiB, 3 * kMiB}) all.push_back(world.get(size));
    for (Address address : all) REQUIRE(world.pool->free(address).ok());
    CHECK(world.stats().cached_blocks == 4);
    CHECK(world.pool->coalesce().ok());
    CHECK(world.stats().cached_blocks == 0 && world.stats().cached == 0 && world.good());
  });
}

TEST(free_pages_beyond_the_release_threshold_go_back) {
  PoolConfig config;
  config.release_threshold = 8 * kMiB;
  config.stream_cache = 0;
  World world(kGiB, config);
  const Address one = world.get(30 * kMiB), two = world.get(6 * kMiB);
  REQUIRE(world.pool->free(two).ok());
  CHECK(world.stats().reserved.current == 36 * kMiB);
  world.device->advance(1e6);
  REQUIRE(world.pool->free(one).ok());
  world.device->advance(1e6);
  REQUIRE(world.pool->free(world.get(512)).ok());
  CHECK(world.stats().free_page_bytes <= 8 * kMiB && world.good());
}

TEST(a_release_threshold_counts_cached_blocks_and_plain_segments) {
  both_kinds([](PoolConfig config) {
    config.release_threshold = 8 * kMiB;
    World world(kGiB, config);
    std::vector<Address> all;
    for (int i = 0; i < 200; ++i) all.push_back(world.get(200 * kKiB));
    for (int i = 0; i < 20; ++i) all.push_back(world.get(6 * kMiB));
    const Address kept = world.get(300 * kKiB);
    for (Address address : all) REQUIRE(world.pool->free(address).ok());
    CHECK(world.stats().cached_blocks == 200 && world.good());  // larger ones are not cached
    world.device->advance(1e6);
    REQUIRE(world.pool->release_unused(true).ok());
    const PoolStats stats = world.stats();
    CHECK(stats.cached_blocks == 0 && stats.reserved.current <= 8 * kMiB + 20 * kMiB && world.good());
    REQUIRE(world.pool->free(kept).ok());
    world.device->advance(1e6);
    REQUIRE(world.pool->release_unused(true).ok());
    CHECK(world.stats().reserved.current <= 8 * kMiB && world.good());
    // Without a threshold, large blocks are cached again.
    config.release_threshold = ~std::uint64_t{0};
    REQUIRE(world.pool->configure(config).ok());
    REQUIRE(world.pool->free(world.get(6 * kMiB)).ok());
    REQUIRE(world.pool->release_unused(true).ok());
    CHECK(world.stats().cached_blocks == 1 && world.good());
  });
}

TEST(what_is_still_in_use_is_not_released) {
  both_kinds([](PoolConfig config) {
    config.release_threshold = 0;
    World world(kGiB, config, manual());
    const Address address = world.get(40 * kMiB, 1);
    REQUIRE(world.device->work(1, 1, address, 40 * kMiB).ok());
    REQUIRE(world.pool->free(address).ok());
    REQUIRE(world.pool->release_unused(false).ok());
    CHECK(world.stats().reserved.current >= 40 * kMiB && world.good());
    REQUIRE(world.pool->release_unused(true).ok());
    CHECK(world.stats().reserved.current == 0 && world.good());
  });
}

TEST(a_trim_counts_plain_segments_and_pages_together) {
  PoolConfig config;
  World world(kGiB, config);
  REQUIRE(world.pool->free(world.get(40 * kMiB)).ok());
  HeapOptions options;
  options.plain = true;
  REQUIRE(world.pool->heap_open({1, 1}, options).ok());
  REQUIRE(world.pool->heap_begin({1, 1}, [](StreamHandle) { return true; }).ok());
  const Address kept = world.get(30 * kMiB);
  REQUIRE(world.pool->heap_end({1, 1}).ok());
  const std::uint64_t plain = world.stats().reserved.current - 40 * kMiB;
  REQUIRE(plain >= 30 * kMiB);
  REQUIRE(world.pool->trim(plain, true).ok());
  CHECK(world.stats().reserved.current == plain && world.good());
  REQUIRE(world.pool->free(kept).ok());
}

// ---- other streams
// ------------------------------------------------------------------------------------------------------

TEST(a_block_used_elsewhere_is_pending_until_every_stream_has_passed) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config, manual());
    const Address address = world.get(4 * kMiB, 0);
    for (StreamHandle stream : {1, 2}) {
      REQUIRE(world.pool->record_stream(address + 3 * kMiB + 17, stream).ok());  // any address inside will do
      REQUIRE(world.device->work(stream, stream, address, 4 * kMiB).ok());
    }
    REQUIRE(world.pool->free(address).ok());
    CHECK(world.stats().pending.current == 4 * kMiB && world.stats().pending_blocks == 1);
    for (StreamHandle stream : {1, 2}) {
      REQUIRE(world.pool->coalesce().ok());
      CHECK(world.stats().pending_blocks == 1);
      while (world.device->step(stream)) {
      }
    }
    REQUIRE(world.pool->coalesce().ok());
    CHECK(world.stats().pending_blocks == 0 && world.stats().pending.current == 0 && world.good());
    CHECK(world.get(4 * kMiB, 0) == address);
  });
}

TEST(out_of_memory_waits_for_pending_blocks_first) {
  both_kinds([](const PoolConfig& config) {
    World world(32 * kMiB, config, manual());
    const Address address = world.get(30 * kMiB, 0);
    REQUIRE(world.pool->record_stream(address, 1).ok());
    REQUIRE(world.device->work(1, 1, address, 30 * kMiB).ok());
    REQUIRE(world.device->work(2, 2).ok());  // nobody waits for this one
    REQUIRE(world.pool->free(address).ok());
    CHECK(world.get(30 * kMiB, 0) == address);
    CHECK(world.served(Rung::host_wait) == 1 && world.good());
  });
}

TEST(record_stream_on_its_own_stream_costs_nothing) {
  World world;
  const Address address = world.get(kMiB, 1);
  REQUIRE(world.pool->record_stream(address, 1).ok() && world.pool->free(address).ok());
  CHECK(world.stats().pending_blocks == 0 && world.get(kMiB, 1) == address);
}

TEST(ready_takes_what_has_finished_and_grows_before_it_waits) {
  both_kinds([](const PoolConfig& base) {
    PoolConfig config = base;
    config.cross_stream = CrossStream::ready;
    World world(64 * kMiB, config, manual());
    const Address address = world.get(24 * kMiB, 1);
    REQUIRE(world.device->work(1, 1, address, 24 * kMiB).ok());
    REQUIRE(world.pool->free(address).ok() && world.pool->coalesce().ok());
    REQUIRE(world.get(24 * kMiB, 2) != 0);  // unfinished on stream 1: the driver gives more
    CHECK(world.stats().reserved.current == 48 * kMiB && world.device->calls("stream_wait") == 0);
    world.device->run_all();
    REQUIRE(world.get(24 * kMiB, 2) != 0);  // finished there: taken over
    CHECK(world.stats().reserved.current == 48 * kMiB && world.device->calls("stream_wait") == 0);
    CHECK(world.device->host_waits() == 0 && world.good());
  });
}

TEST(ready_orders_by_a_stream_wait_when_the_driver_has_no_more) {
  both_kinds([](const PoolConfig& base) {
    PoolConfig config = base;
    config.cross_stream = CrossStream::ready;
    World world(32 * kMiB, config, manual());
    const Address address = world.get(24 * kMiB, 1);
    REQUIRE(world.device->work(1, 7, address, 24 * kMiB).ok());
    REQUIRE(world.pool->free(address).ok() && world.pool->coalesce().ok());
    const Address again = world.get(24 * kMiB, 2);
    REQUIRE(again != 0);
    REQUIRE(world.device->work(2, 8, again, 24 * kMiB).ok());
    CHECK(world.served(Rung::stream_wait) == 1 && world.device->host_waits() == 0);
    CHECK(!world.device->step(2));
    world.device->run_all();
    CHECK(world.device->executed() == (std::vector<std::uint64_t>{7, 8}) && world.good());
  });
}

TEST(wait_orders_before_it_grows) {
  both_kinds([](const PoolConfig& base) {
    PoolConfig config = base;
    config.cross_stream = CrossStream::wait;
    World world(kGiB, config, manual());
    const Address address = world.get(24 * kMiB, 1);
    REQUIRE(world.device->work(1, 7, address, 24 * kMiB).ok());
    REQUIRE(world.pool->free(address).ok() && world.pool->coalesce().ok());
    REQUIRE(world.get(24 * kMiB, 2) != 0);
    CHECK(world.stats().reserved.current == 24 * kMiB && world.device->calls("stream_wait") == 1);
    CHECK(world.good());
  });
}

TEST(never_takes_nothing_of_another_stream) {
  both_kinds([](const PoolConfig& base) {
    PoolConfig config = base;
    config.cross_stream = CrossStream::never;
    World world(kGiB, config, manual());
    for (std::uint64_t size : {100 * kKiB, 24 * kMiB}) {
      const Address address = world.get(size, 1);
      REQUIRE(world.pool->free(address).ok() && world.pool->coalesce().ok());
      world.device->run_all();
      const std::uint64_t reserved = world.stats().reserved.current;
      REQUIRE(world.get(size, 2) != 0);
      CHECK(world.stats().reserved.current > reserved);
    }
    CHECK(world.device->calls("stream_wait") == 0 && world.good());
  });
}

TEST(a_small_block_is_lent_and_goes_home) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config, manual());
    const Address address = world.get(100 * kKiB, 1);
    REQUIRE(world.pool->free(address).ok() && world.pool->coalesce().ok());
    const std::uint64_t reserved = world.stats().reserved.current;
    REQUIRE(world.pool->trim(0, false).ok());  // asks whether it has finished, so there is a fence
    world.device->run_all();
    const Address lent = world.get(100 * kKiB, 2);
    CHECK(world.stats().reserved.current == reserved && world.served(Rung::finished_elsewhere) == 1);
    BlockInfo info;
    REQUIRE(world.pool->info(lent, &info).ok());
    CHECK(info.stream == 2);
    REQUIRE(world.device->work(2, 5, lent, 100 * kKiB).ok());
    REQUIRE(world.pool->free(lent).ok() && world.pool->coalesce().ok());
    CHECK(world.stats().pending_blocks == 1);  // its home has it when the borrower's work has finished
    world.device->run_all();
    REQUIRE(world.pool->coalesce().ok());
    CHECK(world.stats().pending_blocks == 0 && world.stats().free_blocks == 1);
    CHECK(world.get(100 * kKiB, 1) == address && world.stats().reserved.current == reserved);
    CHECK(world.good());
  });
}

TEST(a_stream_that_leaves_gives_its_memory_to_the_others) {
  both_kinds([](const PoolConfig& config) {
    World world(64 * kMiB, config, manual());
    const StreamHandle stream = world.stream();
    const Address live = world.get(20 * kMiB, stream), freed = world.get(20 * kMiB, stream);
    REQUIRE(world.device->work(stream, 1, freed, 20 * kMiB).ok());
    REQUIRE(world.pool->free(freed).ok());
    REQUIRE(world.pool->retire_stream(stream).ok());
    REQUIRE(world.device->stream_destroy(stream).ok());
    world.device->run_all();
    CHECK(world.get(20 * kMiB, 0) != 0);
    CHECK(world.stats().reserved.current == 40 * kMiB);
    CHECK(world.pool->free(live).ok());  // what is live outlives its stream
    CHECK(world.get(20 * kMiB, 1) != 0);
    CHECK(world.stats().reserved.current <= 60 * kMiB && world.good());
    CHECK(code(world.pool->retire_stream(0)) == Code::invalid);
    CHECK(world.pool->retire_stream(12345).ok());  // never seen: nothing to do
  });
}

TEST(streams_may_come_and_go_without_end) {
  World world(64 * kMiB);
  Address kept = 0;
  for (int i = 0; i < 100000 / vram::testing::kSlowdown; ++i) {
    const StreamHandle handle = world.stream();
    const Address address = world.get(4 * kKiB, handle);
    REQUIRE(address != 0);
    if (kept != 0) REQUIRE(world.pool->free(kept).ok());  // the stream it came from is gone
    kept = address;
    REQUIRE(world.pool->retire_stream(handle).ok() && world.device->stream_destroy(handle).ok());
    if (i % 64 == 0) world.device->advance(1e4);
  }
  CHECK(world.stats().streams.size() < 200 && world.good());
  CHECK(world.stats().reserved.current <= 16 * kMiB);
}

// ---- out of memory
// -----------------------------------------------------------------------------------------------------------

TEST(callbacks_may_free_and_allocate) {
  both_kinds([](const PoolConfig& config) {
    World world(32 * kMiB, config);
    std::vector<Address> hoard = {world.get(20 * kMiB)};
    int calls = 0;
    world.pool->on_out_of_memory([&](std::uint64_t size, StreamHandle stream) {
      ++calls;
      CHECK(size == 24 * kMiB && stream == 1);
      if (hoard.empty()) return false;
      CHECK(world.pool->free(hoard.back()).ok());
      hoard.pop_back();
      CHECK(world.get(100) != 0);
      return true;
    });
    CHECK(world.get(24 * kMiB, 1) != 0);
    CHECK(calls == 1 && (!config.pages || world.served(Rung::callbacks) == 1));
    CHECK(world.get(24 * kMiB, 1) == 0 && calls == 2);
    CHECK(world.good());
  });
}

TEST(a_callback_whose_own_allocation_fails_is_not_called_again) {
  both_kinds([](const PoolConfig& config) {
    World world(32 * kMiB, config);
    int calls = 0;
    world.pool->on_out_of_memory([&](std::uint64_t, StreamHandle) {
      ++calls;
      CHECK(world.get(64 * kMiB) == 0);
      return true;
    });
    CHECK(world.get(48 * kMiB) == 0 && calls == 1);
    CHECK(world.get(48 * kMiB) == 0 && calls == 2);
    CHECK(world.good());
  });
}

TEST(the_report_adds_up) {
  both_kinds([](const PoolConfig& base) {
    PoolConfig config = base;
    config.limit = 62 * kMiB;
    World world(128 * kMiB, config, manual());
    const Address large = world.get(10 * kMiB, 0), pending = world.get(6 * kMiB, 0),
                  other = world.get(12 * kMiB, 1);
    const Address small = world.get(100 * kKiB, 0);
    REQUIRE(large != 0 && pending != 0 && other != 0 && small != 0);
    REQUIRE(world.device->work(1, 1, other, 12 * kMiB).ok());
    REQUIRE(world.pool->record_stream(pending, 1).ok() && world.pool->free(pending).ok());
    REQUIRE(world.pool->free(other).ok());
    Address address = 0;
    OutOfMemoryReport report;
    REQUIRE(code(world.pool->allocate(63 * kMiB, 0, 0, 0, &address, &report)) == Code::out_of_memory);
    CHECK(report.live + report.pending + report.cached + report.free_pages + report.free_elsewhere +
              report.stranded ==
          report.reserved);
    CHECK(report.requested == 63 * kMiB && report.limit == 62 * kMiB && report.device_total == 128 * kMiB);
    CHECK(report.live == 10 * kMiB + block_bytes(100 * kKiB));
    CHECK(report.device_free + report.reserved == 128 * kMiB);
    CHECK(world.stats().out_of_memory == 1 && world.good());
  });
}

// ---- accounts
// -------------------------------------------------------------------------------------------------------------------

TEST(the_peak_is_exact_over_several_streams) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    std::vector<std::pair<Address, std::uint64_t>> held;
    std::uint64_t live = 0, peak = 0, dice = 1;
    for (int i = 0; i < 4000; ++i) {
      dice = dice * 6364136223846793005u + 1442695040888963407u;
      if ((dice >> 33) % 2 == 0 || held.empty()) {
        const std::uint64_t size = (dice >> 40) % (i % 3 == 0 ? 3 * kMiB : 2 * kKiB);
        held.push_back({world.get(size, (dice >> 35) % 3), block_bytes(size)});
        live += held.back().second;
        peak = std::max(peak, live);
      } else {
        std::swap(held[(dice >> 40) % held.size()], held.back());
        REQUIRE(world.pool->free(held.back().first).ok());
        live -= held.back().second;
        held.pop_back();
      }
      if (i == 2000) {
        world.pool->reset_peak();
        peak = live;
      }
      CHECK(world.pool->live_bytes() == live);
      REQUIRE(world.stats().peak_live == peak);
    }
    CHECK(world.good());
  });
}

TEST(a_request_that_fails_leaves_the_peak_alone) {
  World world(32 * kMiB);
  REQUIRE(world.get(kMiB) != 0);
  CHECK(world.get(100 * kMiB) == 0);
  std::vector<Address> out;
  CHECK(!world.pool->allocate_batch({30 * kMiB, 30 * kMiB}, 0, 0, out, nullptr).ok());
  CHECK(world.stats().peak_live <= 31 * kMiB);
}

TEST(statistics_add_up) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    const Address small = world.get(1000), large = world.get(5 * kMiB, 1);
    PoolStats stats = world.stats();
    CHECK(stats.live == block_bytes(1000) + 5 * kMiB);
    CHECK(stats.allocations[0].current == 1 && stats.allocations[1].current == 1);
    CHECK(stats.requested[0].current == 1000 && stats.bytes[0].current == 1024);
    CHECK(stats.live + stats.cached + stats.pending.current + stats.free_bytes == stats.reserved.current);
    REQUIRE(world.pool->free(small).ok() && world.pool->free(large).ok());
    stats = world.stats();
    CHECK(stats.live == 0 && stats.requested[0].current == 0 && stats.requested[0].total == 1000);
    CHECK(stats.allocations[0].peak == 1 && stats.allocations[0].total == 1);
    world.pool->reset_peak();
    CHECK(world.stats().allocations[0].peak == 0 && world.stats().peak_live == 0);
    CHECK(world.stats().reserved.peak == world.stats().reserved.current);
  });
}

TEST(a_snapshot_tiles_every_segment) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    std::vector<Address> all;
    for (int i = 0; i < 60; ++i)
      all.push_back(world.get((static_cast<std::uint64_t>(i) * 7919 % 300) * 30 * kKiB, i % 3));
    for (int i = 0; i < 60; i += 3) REQUIRE(world.pool->free(all[static_cast<std::size_t>(i)]).ok());
    std::uint64_t live = 0, cached = 0;
    for (const SegmentInfo& segment : world.pool->snapshot()) {
      Address at = segment.address;
      for (const BlockInfo& block : segment.blocks) {
        CHECK(block.address == at && block.bytes > 0);
        at += block.bytes;
        live += block.state == BlockState::live ? block.bytes : 0;
        cached += block.state == BlockState::cached ? block.bytes : 0;
        CHECK(block.state != BlockState::live || block_bytes(block.requested) == block.bytes);
      }
      CHECK(at == segment.address + segment.bytes);
      CHECK(segment.plain == !config.pages);
    }
    CHECK(live == world.stats().live && cached == world.stats().cached);
  });
}

// ---- the journal
// ------------------------------------------------------------------------------------------------------------------

TEST(the_journal_is_in_order_over_streams_and_counts_what_it_drops) {
  PoolConfig config;
  config.journal = 8;
  World world(kGiB, config, manual());
  std::vector<JournalEntry> entries;
  std::uint64_t dropped = 99;
  const Address one = world.get(1000, 0), two = world.get(2000, 1);
  REQUIRE(world.pool->record_stream(one, 1).ok() && world.pool->free(one).ok());
  REQUIRE(world.pool->free(two).ok());
  world.device->run_all();
  REQUIRE(world.pool->coalesce().ok());
  world.pool->journal(entries, &dropped);
  REQUIRE(entries.size() == 6 && dropped == 0);
  const Action expected[] = {Action::grow,         Action::allocate, Action::allocate,
                             Action::free_pending, Action::free,     Action::free_complete};
  for (std::size_t i = 0; i < 6; ++i) CHECK(entries[i].action == expected[i]);
  CHECK(entries[1].bytes == 1000 && entries[1].address == one && entries[3].address == one);
  CHECK(entries[1].serial == entries[3].serial && entries[5].serial == entries[1].serial);
  for (int i = 0; i < 100; ++i) REQUIRE(world.pool->free(world.get(512, 0)).ok());
  entries.clear();
  world.pool->journal(entries, &dropped);
  CHECK(entries.size() == 8 + 2 && dropped == 200 + 4 - 8);
  CHECK(std::is_sorted(entries.begin(), entries.end(),
                       [](const JournalEntry& a, const JournalEntry& b) { return a.sequence < b.sequence; }));
  CHECK(world.pool->start_journal(0).ok());
  entries.clear();
  world.pool->journal(entries, &dropped);
  CHECK(entries.empty() && dropped == 0);
}

// ---- the host: contents
// --------------------------------------------------------------------------------------------------------------

namespace {

bool all_bytes(Address address, std::uint64_t bytes, std::uint8_t value) {
  const auto* at = reinterpret_cast<const std::uint8_t*>(address);
  return std::all_of(at, at + bytes, [value](std::uint8_t byte) { return byte == value; });
}

}  // namespace

TEST(zeroing_on_allocate_and_on_free_on_the_host) {
  both_kinds([](const PoolConfig& base) {
    for (const bool on_free : {false, true}) {
      PoolConfig config = base;
      config.zero_on_allocate = !on_free;
      config.zero_on_free = on_free;
      auto host = std::make_shared<HostBackend>(256 * kMiB);
      Pool pool(host, config);
      for (std::uint64_t size : {std::uint64_t{5000}, 3 * kMiB})
        for (int round = 0; round < 3; ++round) {
          Address address = 0;
          REQUIRE(pool.allocate(size, 0, 0, 0, &address).ok());
          REQUIRE(host->stream_synchronize(0).ok());
          CHECK(all_bytes(address, size, 0));
          std::memset(reinterpret_cast<void*>(address), 0xAB, size);
          REQUIRE(pool.free(address).ok());
        }
    }
  });
}

TEST(zeroing_on_free_waits_for_other_streams) {
  PoolConfig config;
  config.zero_on_free = true;
  auto host = std::make_shared<HostBackend>(256 * kMiB);
  Pool pool(host, config);
  StreamHandle reader = 0;
  REQUIRE(host->stream_create(&reader).ok());
  Address address = 0;
  REQUIRE(pool.allocate(kMiB, 0, 0, 0, &address).ok());
  std::memset(reinterpret_cast<void*>(address), 0xAB, kMiB);
  std::atomic<bool> go{false}, intact{false};
  REQUIRE(pool.record_stream(address, reader).ok());
  REQUIRE(host->launch(reader,
                       [&] {
                         while (!go) std::this_thread::yield();
                         intact = all_bytes(address, kMiB, 0xAB);
                       })
              .ok());
  REQUIRE(pool.free(address).ok());
  REQUIRE(host->stream_synchronize(0).ok());
  go = true;
  REQUIRE(pool.trim(~std::uint64_t{0}, true).ok());
  CHECK(intact);
  REQUIRE(pool.allocate(kMiB, 0, 0, 0, &address).ok());
  REQUIRE(host->stream_synchronize(0).ok());
  CHECK(all_bytes(address, kMiB, 0));
}

TEST(zeroing_on_free_outlives_the_stream) {
  both_kinds([](const PoolConfig& base) {
    PoolConfig config = base;
    config.zero_on_free = true;
    World world(kGiB, config);
    const StreamHandle stream = world.stream();
    const Address first = world.get(kMiB, stream), second = world.get(3 * kMiB, stream);
    REQUIRE(world.pool->retire_stream(stream).ok() && world.device->stream_destroy(stream).ok());
    CHECK(world.pool->free(first).ok());
    world.device->advance(1e6);
    CHECK(world.pool->free(second).ok());
    CHECK(world.pool->trim(0, true).ok());
    CHECK(world.stats().reserved.current == 0 && world.good());
  });
}

// ---- events -----------------------------------------------------------------------------------------------

namespace {

// Pairs of blocks of 2 to 60 MiB on one stream while another exists, with work on each: frees record fences,
// and own blocks serve, so nobody asks about them. The most events that existed at once.
std::uint64_t most_events(World& world, StreamHandle on, int allocations) {
  std::uint64_t random = 1;
  std::uint64_t most = 0;
  for (int i = 0; i < allocations; i += 2) {
    Address pair[2];
    for (Address& address : pair) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      address = world.get(2 * kMiB + (random >> 33) % (58 * kMiB), on);
      CHECK(address != 0);
      CHECK(world.device->work(on, 1, address, kUnit).ok());
    }
    for (Address address : pair) CHECK(world.pool->free(address).ok());
    most = std::max(most, world.device->counts().events);
  }
  return most;
}

}  // namespace

TEST(events_are_bounded_whatever_is_freed) {
  both_kinds([](const PoolConfig& config) {
    World world(8 * kGiB, config);
    REQUIRE(world.get(kMiB, 2) != 0);
    CHECK(most_events(world, 1, 40'000 / testing::kSlowdown) <= 2 * Fences::kMostFences);
    CHECK(world.good());
  });
}

TEST(events_are_bounded_where_a_stream_never_finishes) {
  both_kinds([](const PoolConfig& config) {
    World world(8 * kGiB, config, manual());
    REQUIRE(world.get(kMiB, 2) != 0);
    CHECK(most_events(world, 1, 20'000 / testing::kSlowdown) <= 2 * Fences::kMostFences);
    // The fences that are left still tell what has finished, and no sooner.
    const Address used = world.get(4 * kMiB, 2);
    REQUIRE(world.pool->record_stream(used, 1).ok() && world.pool->free(used).ok());
    CHECK(world.pool->coalesce().ok() && world.stats().pending_blocks == 1);
    CHECK(world.device->run_all() && world.pool->coalesce().ok());
    CHECK(world.stats().pending_blocks == 0 && world.good());
  });
}

TEST(events_are_bounded_where_frees_wait_for_a_stream_that_never_finishes) {
  World world(8 * kGiB, {}, manual());
  REQUIRE(world.device->work(2, 1).ok());
  for (int i = 0; i < 4000; ++i) {
    const Address used = world.get(kMiB, 1);
    REQUIRE(used != 0 && world.pool->record_stream(used, 2).ok() && world.pool->free(used).ok());
    CHECK(world.device->counts().events <= 2 * Fences::kMostFences);
  }
  CHECK(world.stats().pending_blocks == 4000);
  CHECK(world.device->run_all() && world.pool->coalesce().ok() && world.stats().pending_blocks == 0);
}

namespace {

// Says whether an event was recorded again or destroyed while somebody waited for it; the first wait closes
// the pool, or has another call of the pool look at its fences.
class WaitingBackend final : public ModelBackend {
 public:
  using ModelBackend::ModelBackend;
  Status event_synchronize(EventHandle event) override {
    awaited.insert(event);
    if (auto act = std::exchange(meanwhile, nullptr)) act();
    const Status status = ModelBackend::event_synchronize(event);
    awaited.erase(awaited.find(event));
    return status;
  }
  Status event_record(EventHandle event, StreamHandle stream) override {
    disturbed = disturbed || awaited.count(event) != 0;
    return ModelBackend::event_record(event, stream);
  }
  Status event_destroy(EventHandle event) override {
    disturbed = disturbed || awaited.count(event) != 0;
    return ModelBackend::event_destroy(event);
  }
  std::function<void()> meanwhile;
  std::multiset<EventHandle> awaited;
  bool disturbed = false;
};

}  // namespace

TEST(an_event_that_is_waited_for_is_left_alone) {
  for (const bool closing : {true, false}) {
    const auto device = std::make_shared<WaitingBackend>(kGiB, manual());
    auto pool = std::make_unique<Pool>(device, PoolConfig{});
    StreamHandle stream = 0;
    REQUIRE(device->stream_create(&stream).ok());
    Address used = 0;
    REQUIRE(pool->allocate(4 * kMiB, 0, 0, 0, &used).ok() && device->work(stream, 1, used, kUnit).ok());
    REQUIRE(pool->record_stream(used, stream).ok() && pool->free(used).ok());
    device->meanwhile = [&] {
      if (closing) {
        CHECK(pool->close().ok());
        return;
      }
      CHECK(device->run_all() && pool->coalesce().ok());
      for (int i = 0; i < 4; ++i) {
        Address other = 0;
        REQUIRE(pool->allocate(4 * kMiB, 0, 0, 0, &other).ok());
        REQUIRE(pool->record_stream(other, stream).ok() && pool->free(other).ok());
      }
    };
    CHECK(pool->trim(0, true).code == (closing ? Code::closed : Code::ok));
    CHECK(!device->disturbed && device->meanwhile == nullptr);
    pool.reset();
    CHECK(device->counts().events == 0);
  }
}

namespace {

// Does something in the midst of a wait for a stream.
class SynchronizingBackend final : public ModelBackend {
 public:
  using ModelBackend::ModelBackend;
  Status stream_synchronize(StreamHandle stream) override {
    if (auto act = std::exchange(meanwhile, nullptr)) act();
    return ModelBackend::stream_synchronize(stream);
  }
  std::function<void()> meanwhile;
};

}  // namespace

TEST(a_stream_that_two_threads_retire_leaves_once) {
  const auto device = std::make_shared<SynchronizingBackend>(kGiB);
  Pool pool(device, {});
  StreamHandle streams[3];
  for (StreamHandle& stream : streams) REQUIRE(device->stream_create(&stream).ok());
  Address address = 0;
  REQUIRE(pool.allocate(4 * kMiB, streams[0], 0, 0, &address).ok() && pool.free(address).ok());
  // Without a fence the first call has to wait, and the second one comes meanwhile.
  device->fail("event_record", 1, {Code::failed, 0, "event_record"});
  device->meanwhile = [&] { CHECK(pool.retire_stream(streams[0]).ok()); };
  CHECK(pool.retire_stream(streams[0]).ok() && device->meanwhile == nullptr);
  REQUIRE(device->run_all() && pool.coalesce().ok());
  // Those that come next have a state each, whatever they take over.
  for (int i : {1, 2}) REQUIRE(pool.allocate(4 * kMiB, streams[i], 0, 0, &address).ok());
  std::multiset<StreamHandle> known;
  for (const StreamStats& each : pool.stats().streams)
    if (each.live != 0) known.insert(each.handle);
  CHECK(known == (std::multiset<StreamHandle>{streams[1], streams[2]}));
}

// ---- forks
// -------------------------------------------------------------------------------------------------------

namespace {

// Stays in a call that the pool makes with its mutex held.
class StayingBackend final : public ModelBackend {
 public:
  using ModelBackend::ModelBackend;
  Status page_create(std::uint64_t bytes, PageHandle* out) override {
    if (stay.exchange(false)) {
      inside = true;
      while (!leave) std::this_thread::yield();
    }
    return ModelBackend::page_create(bytes, out);
  }
  std::atomic<bool> stay{false}, inside{false}, leave{false};
};

}  // namespace

#ifndef __SANITIZE_THREAD__  // which has no child of a process with threads
TEST(in_the_child_of_a_fork_nothing_takes_a_lock_of_the_parent) {
  const auto device = std::make_shared<StayingBackend>(kGiB);
  Pool pool(device, {});
  Address held = 0;
  REQUIRE(pool.allocate(kMiB, 0, 0, 0, &held).ok());
  device->stay = true;
  std::thread busy([&] {
    Address address = 0;
    CHECK(pool.allocate(64 * kMiB, 0, 0, 0, &address).ok());
  });
  while (!device->inside) std::this_thread::yield();
  CHECK(holds_in_child([&] {
    alarm(20);  // ends a child that waits for the lock
    bool all_refused = true;
    const auto refused = [&](const Status& status) { all_refused &= status.code == Code::closed; };
    Address address = 0;
    std::vector<Address> addresses;
    std::vector<JournalEntry> entries;
    BlockInfo info;
    GrowableInfo growable;
    std::uint64_t bytes = 0;
    refused(pool.allocate(1, 0, 0, 0, &address));
    refused(pool.allocate_batch({1, 2}, 0, 0, addresses, nullptr));
    refused(pool.free(held));
    refused(pool.drop(held));
    refused(pool.record_stream(held, 0));
    refused(pool.growable_open(kGiB, 0, &address));
    refused(pool.growable_resize(held, kSlotBytes, 0, 0));
    refused(pool.growable_prepare(held, kSlotBytes));
    refused(pool.growable_close(held));
    refused(pool.growable_info(held, &growable));
    refused(pool.coalesce());
    refused(pool.trim(0, true));
    refused(pool.set_limit(1));
    refused(pool.configure({}));
    refused(pool.retire_stream(1));
    refused(pool.suspend({}, false, nullptr, &bytes, nullptr));
    refused(pool.resume({}, &bytes, nullptr));
    refused(pool.heap_begin({1, 1}, [](StreamHandle) { return true; }));
    refused(pool.heap_end({1, 1}));
    refused(pool.heap_release({1, 1}));
    refused(pool.info(held, &info));
    refused(pool.find(held, &info));
    refused(pool.start_journal(1));
    pool.on_out_of_memory(nullptr);
    (void)pool.config();
    (void)pool.stats();
    pool.reset_peak();
    (void)pool.snapshot();
    (void)pool.live_bytes();
    (void)pool.suspended(held);
    pool.journal(entries, &bytes);
    pool.start_recording(100);
    pool.mark(1);
    (void)pool.take_recorded(entries);
    (void)pool.check(nullptr);
    const bool open = !Allocator::Access(pool).refused();
    (void)pool.close();
    return all_refused && !open && pool.closed();
  }));
  device->leave = true;
  busy.join();
  std::string why;
  CHECK(pool.check(&why) && pool.live_bytes() == 65 * kMiB);
}
#endif

TEST(a_snapshot_is_of_one_moment) {
  World world;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  constexpr std::uint32_t kThreads = 3;
  for (std::uint32_t tag = 1; tag <= kThreads; ++tag)
    threads.emplace_back([&, tag] {
      // Freed before the next is allocated: never two at once.
      for (std::uint64_t i = 0; !stop; ++i) {
        Address address = 0;
        CHECK(world.pool->allocate(512 << (i % 14), tag % 2, 0, tag, &address).ok());
        CHECK(world.pool->free(address).ok());
      }
    });
  for (int round = 0; round < 300; ++round) {
    std::uint64_t live[kThreads + 1] = {};
    for (const SegmentInfo& segment : world.pool->snapshot())
      for (const BlockInfo& block : segment.blocks)
        if (block.state == BlockState::live) ++live[block.tag];
    for (std::uint64_t count : live) REQUIRE(count <= 1);
    if (round % 10 == 0) CHECK(world.good());
  }
  stop = true;
  for (std::thread& each : threads) each.join();
  CHECK(world.good() && world.stats().live == 0);
}

TEST(a_journal_has_bounds) {
  World world;
  CHECK(code(world.pool->start_journal(kMostJournaled + 1)) == Code::invalid);
  CHECK(world.pool->start_journal(kMostJournaled).ok());
  const Address one = world.get(1000);
  std::vector<JournalEntry> entries;
  std::uint64_t dropped = 0;
  world.pool->journal(entries, &dropped);
  CHECK(one != 0 && dropped == 0 && !entries.empty() && entries.back().address == one);
}

// ---- the end
// -----------------------------------------------------------------------------------------------------------------------------

TEST(close_returns_everything_and_later_calls_say_so) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config, manual());
    const Address live = world.get(30 * kMiB), pending = world.get(5 * kMiB, 1), cached = world.get(1000, 2);
    REQUIRE(world.device->work(1, 1, pending, 5 * kMiB).ok());
    REQUIRE(world.pool->record_stream(pending, 2).ok());
    REQUIRE(world.pool->free(pending).ok() && world.pool->free(cached).ok());
    CHECK(world.pool->close().ok());
    const ModelCounts left = world.device->counts();
    CHECK(left.plain_ranges + left.spaces + left.pages + left.mappings + left.events + left.queued == 0);
    Address address = 0;
    std::vector<Address> out;
    BlockInfo info;
    CHECK(world.pool->closed() && world.pool->close().ok());
    CHECK(code(world.pool->allocate(1, 0, 0, 0, &address)) == Code::closed);
    CHECK(code(world.pool->allocate(1000, 2, 0, 0, &address)) == Code::closed);
    CHECK(code(world.pool->allocate_batch({1, 2}, 0, 0, out, nullptr)) == Code::closed);
    CHECK(code(world.pool->free(live)) == Code::closed);
    CHECK(code(world.pool->record_stream(live, 1)) == Code::closed);
    CHECK(code(world.pool->info(live, &info)) == Code::closed);
    for (const Status& status : {world.pool->coalesce(), world.pool->trim(0, true), world.pool->set_limit(1),
                                 world.pool->configure({}), world.pool->retire_stream(1)})
      CHECK(code(status) == Code::closed);
    CHECK(world.device->counts().queued == 0 && world.good());
  });
}

TEST(a_pool_may_go_while_its_streams_are_busy) {
  both_kinds([](const PoolConfig& config) {
    auto host = std::make_shared<HostBackend>(256 * kMiB);
    std::atomic<int> done{0};
    {
      Pool pool(host, config);
      for (int i = 0; i < 3; ++i) {
        StreamHandle stream = 0;
        REQUIRE(host->stream_create(&stream).ok());
        Address address = 0;
        REQUIRE(pool.allocate(4 * kMiB, stream, 0, 0, &address).ok());
        REQUIRE(host->launch(stream,
                             [&done, address] {
                               std::this_thread::sleep_for(std::chrono::milliseconds(20));
                               std::memset(reinterpret_cast<void*>(address), 0x5A, 4 * kMiB);
                               ++done;
                             })
                    .ok());
        if (i == 1) REQUIRE(pool.free(address).ok());
        if (i == 2) REQUIRE(pool.retire_stream(stream).ok() && host->stream_destroy(stream).ok());
      }
    }
    CHECK(done == 3);
    std::uint64_t free_bytes = 0, total_bytes = 0;
    CHECK(host->memory_info(&free_bytes, &total_bytes).ok());
    CHECK(free_bytes == total_bytes);
  });
}

TEST_MAIN()

// ---- capture --------------------------------------------------------------------------------------------

TEST(a_heap_keeps_its_memory_until_it_is_released) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    const HeapId id{3, 7};
    const auto serves_one = [](StreamHandle stream) { return stream == 1; };
    const Address warm = world.get(2 * kMiB, 1);
    REQUIRE(world.pool->free(warm).ok());
    REQUIRE(world.pool->heap_begin(id, serves_one).ok());
    Address first = 0;
    CHECK(!world.pool->try_cached(2 * kMiB, 1, 0, &first));
    first = world.get(2 * kMiB, 1);
    CHECK(first != 0 && first != warm);
    REQUIRE(world.pool->free(first).ok());
    CHECK(world.get(2 * kMiB, 2) != first && world.get(2 * kMiB, 0) != first);
    REQUIRE(world.pool->heap_end(id).ok());
    CHECK(world.get(2 * kMiB, 1) == warm);
    // Begun again, it has what it had.
    REQUIRE(world.pool->heap_begin(id, serves_one).ok());
    CHECK(world.get(2 * kMiB, 1) == first);
    REQUIRE(world.pool->free(first).ok() && world.pool->heap_end(id).ok());
    REQUIRE(world.pool->heap_release(id).ok());
    world.device->run_all();
    REQUIRE(world.pool->trim(0, true).ok());
    const std::uint64_t held = world.stats().reserved.current;
    REQUIRE(world.pool->heap_release(id).ok());
    world.device->run_all();
    REQUIRE(world.pool->trim(0, true).ok());
    CHECK(world.stats().reserved.current < held);
    CHECK(code(world.pool->heap_release(id)) == Code::invalid && world.good());
  });
}

TEST(a_captured_stream_gets_no_free_block_from_outside_its_graph) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    const Address warm = world.get(2 * kMiB, 1);
    REQUIRE(world.pool->free(warm).ok() && world.pool->coalesce().ok());
    REQUIRE(world.device->capture_begin(1).ok());
    const Address captured = world.get(2 * kMiB, 1);
    CHECK(captured != 0 && captured != warm);
    std::uint64_t graph = 0;
    REQUIRE(world.device->capture_end(1, &graph).ok());
    CHECK(world.get(2 * kMiB, 1) == warm);
    CHECK(world.device->refused_in_capture() == 0 && world.good());
    REQUIRE(world.device->graph_destroy(graph).ok());
  });
}

TEST(the_journal_shows_growth_and_shrinking) {
  PoolConfig config;
  config.journal = 100;
  World world(kGiB, config);
  REQUIRE(world.pool->free(world.get(40 * kMiB)).ok());
  REQUIRE(world.pool->trim(0, true).ok());
  std::vector<JournalEntry> entries;
  std::uint64_t dropped = 0;
  world.pool->journal(entries, &dropped);
  std::uint64_t grown = 0;
  std::uint64_t shrunk = 0;
  for (const JournalEntry& entry : entries) {
    if (entry.action == Action::grow) grown += entry.bytes;
    if (entry.action == Action::shrink) shrunk += entry.bytes;
  }
  CHECK(grown == 40 * kMiB && shrunk == 40 * kMiB);
}
