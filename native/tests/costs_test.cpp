// What calls cost beside many others: streams idle, busy or leaving, live, pending and long blocks, free
// pages. The core is compiled so that every basic block it runs is counted (-fsanitize-coverage=trace-pc); so
// nothing that grows escapes, and nothing depends on a clock. What is not in the table below looks at
// everything there is, and its documentation says so: trim, coalesce, suspend, resume, close, stats,
// snapshot, journals, recordings, check, and requests that are about to be out of memory.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/model.hpp"
#include "pool/pool.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

thread_local std::uint64_t counted = 0;

}  // namespace

extern "C" [[gnu::visibility("default")]] void __sanitizer_cov_trace_pc() { ++counted; }

namespace {

constexpr std::uint64_t kFew = 300;  // more than the pool asks in vain (kMostAsked)
constexpr std::uint64_t kManyStreams = 30'000;
constexpr int kRepeats = 10;
// What kMostAsked questions in vain may cost. Anything that is done for each of many costs many times as
// much.
constexpr std::uint64_t kSlack = 10'000;

struct World {
  std::shared_ptr<ModelBackend> device;
  std::unique_ptr<Pool> pool;
  StreamHandle side = 0;  // of the calls that are measured
  Address block = 0;      // live, the default stream's
  Address growable = 0;
  bool paged = false;

  World(const PoolConfig& config, Schedule schedule) : paged(config.pages) {
    ModelOptions options;
    options.schedule = schedule;
    device = std::make_shared<ModelBackend>(1024 * kGiB, options);
    pool = std::make_unique<Pool>(device, config);
    CHECK(device->stream_create(&side).ok());
    block = get(100 * kKiB, 0);
    (void)get(5 * kMiB, side);
    if (paged) CHECK(pool->growable_open(64 * kMiB, side, &growable).ok());
  }
  // Everything at once, rather than when each stream is waited for.
  ~World() { CHECK(device->run_all() && device->set_schedule(Schedule::lag).ok()); }
  StreamHandle stream() const {
    StreamHandle made = 0;
    CHECK(device->stream_create(&made).ok());
    return made;
  }
  Address get(std::uint64_t size, StreamHandle on) const {
    Address address = 0;
    CHECK(pool->allocate(size, on, 0, 0, &address).ok());
    return address;
  }
  void give(Address address) const { CHECK(pool->free(address).ok()); }
};

// ---- beside what ------------------------------------------------------------------------------------------

struct Surroundings {
  const char* name;
  std::uint64_t many;
  Schedule schedule;
  PoolConfig config;
  std::function<void(World&, std::uint64_t)> make;
};

PoolConfig with(const std::function<void(PoolConfig&)>& change) {
  PoolConfig config;
  change(config);
  return config;
}

void idle_streams(World& world, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const StreamHandle stream = world.stream();
    world.give(world.get(4 * kKiB, stream));
    world.give(world.get(3 * kMiB, stream));
    if (i % 2 == 0) (void)world.get(100 * kKiB, stream);
    world.device->advance(1e4);
  }
}

// Each has memory of its own and a block of the default stream's to finish with. All is allocated before any
// is freed, since then no request meets the others.
void busy_streams(World& world, std::uint64_t count) {
  struct Busy {
    StreamHandle stream;
    Address lent, own;
  };
  std::vector<Busy> all;
  for (std::uint64_t i = 0; i < count; ++i) {
    const StreamHandle stream = world.stream();
    all.push_back({stream, world.get(4 * kKiB, 0), world.get(3 * kMiB, stream)});
  }
  for (const Busy& each : all) {
    CHECK(world.device->fill(each.lent, 0, 64, each.stream).ok());
    CHECK(world.device->fill(each.own, 0, 64, each.stream).ok());
    CHECK(world.pool->record_stream(each.lent, each.stream).ok());
    world.give(each.lent);
    world.give(each.own);
  }
}

void leaving_streams(World& world, std::uint64_t count) {
  std::vector<std::pair<StreamHandle, Address>> all;
  for (std::uint64_t i = 0; i < count; ++i) {
    const StreamHandle stream = world.stream();
    all.emplace_back(stream, world.get(100 * kKiB, stream));
  }
  for (const auto& [stream, own] : all) {
    CHECK(world.device->fill(own, 0, 64, stream).ok());
    world.give(own);
    CHECK(world.pool->retire_stream(stream).ok() && world.device->stream_destroy(stream).ok());
  }
}

void live_streams(World& world, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const StreamHandle stream = world.stream();
    (void)world.get(4 * kKiB, stream);
    world.give(world.get(4 * kKiB, stream));
  }
}

void live_blocks(World& world, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) (void)world.get(512, i % 2 == 0 ? 0 : world.side);
}

void pending_blocks(World& world, std::uint64_t count) {
  const StreamHandle stream = world.stream();
  std::vector<Address> blocks;
  for (std::uint64_t i = 0; i < count; ++i) blocks.push_back(world.get(4 * kKiB, 0));
  CHECK(world.device->fill(blocks[0], 0, 64, stream).ok());
  for (const Address block : blocks) {
    CHECK(world.pool->record_stream(block, stream).ok());
    world.give(block);
  }
}

void free_pages(World& world, std::uint64_t count) {
  std::vector<Address> blocks;
  for (std::uint64_t i = 0; i < count; ++i) blocks.push_back(world.get(8 * kMiB, world.side));
  for (const Address block : blocks) {
    CHECK(world.device->fill(block, 0, 64, world.side).ok());
    world.give(block);
  }
}

void long_block(World& world, std::uint64_t kib) {
  world.give(std::exchange(world.block, world.get(kib * kKiB, 0)));
}

const std::uint64_t kMillion = 1'000'000 / vram::testing::kSlowdown;

std::vector<Surroundings> surroundings(bool pages) {
  const auto plainly = with([&](PoolConfig& config) { config.pages = pages; });
  const auto frugal = with([&](PoolConfig& config) {
    config.pages = pages;
    config.release_threshold = 64 * kMiB;
  });
  // Without pages the same code runs, but for placement: fewer do.
  const std::uint64_t streams = kManyStreams / vram::testing::kSlowdown / (pages ? 1 : 3);
  return {{"idle streams", streams, Schedule::lag, plainly, idle_streams},
          {"busy streams", streams, Schedule::manual, plainly, busy_streams},
          {"busy streams, under an idle limit", streams, Schedule::manual, frugal, busy_streams},
          {"leaving streams", streams, Schedule::manual, plainly, leaving_streams},
          {"streams with live blocks", streams, Schedule::lag, plainly, live_streams},
          {"live blocks", kMillion, Schedule::lag, plainly, live_blocks},
          {"pending blocks", 200'000u / vram::testing::kSlowdown, Schedule::manual, plainly, pending_blocks},
          {"free pages that are in use", 10'000u / vram::testing::kSlowdown, Schedule::manual, frugal,
           free_pages},
          {"a block of 100 GiB", 100 * kGiB / kKiB, Schedule::lag, plainly, long_block}};
}

// ---- which calls ------------------------------------------------------------------------------------------

struct Call {
  const char* name;
  bool pages_only;
  std::function<void(World&, int)> make;
};

void elsewhere(const std::function<void()>& work) { std::thread(work).join(); }

const std::vector<Call> kCalls = {
    {"allocate and free small", false,
     [](World& world, int i) {
       world.give(world.get(static_cast<std::uint64_t>(i + 1) * 1500, world.side));
     }},
    {"allocate middling", false, [](World& world, int) { (void)world.get(100 * kKiB, world.side); }},
    {"allocate large", false,
     [](World& world, int i) { (void)world.get((2 + static_cast<std::uint64_t>(i % 7)) * 3 * kMiB, 0); }},
    {"free large", false,
     [](World& world, int i) {
       const Address large = world.get((2 + static_cast<std::uint64_t>(i % 7)) * 3 * kMiB, world.side);
       counted = 0;
       world.give(large);
     }},
    {"allocate by threads in turn", false,
     [](World& world, int i) {
       elsewhere([&] { (void)world.get(300 * kKiB, 0); });
       counted = 0;
       (void)world.get((1 + static_cast<std::uint64_t>(i)) * 300 * kKiB, world.side);
     }},
    {"allocate on a new stream", false,
     [](World& world, int) {
       const StreamHandle made = world.stream();
       (void)world.get(1000, made);
       (void)world.get(4 * kMiB, made);
     }},
    {"allocate_batch", false,
     [](World& world, int) {
       std::vector<Address> out;
       CHECK(world.pool->allocate_batch({1000, 5000, 200 * kKiB, kMiB}, world.side, 0, out, nullptr).ok());
       for (const Address each : out) world.give(each);
     }},
    {"record_stream and free", false,
     [](World& world, int) {
       const Address used = world.get(20 * kKiB, 0);
       CHECK(world.pool->record_stream(used + 100, world.side).ok());
       world.give(used);
     }},
    {"record_stream inside", false,
     [](World& world, int) {
       BlockInfo info;
       CHECK(world.pool->info(world.block, &info).ok());
       CHECK(world.pool->record_stream(world.block + info.bytes / 2, world.side).ok());
     }},
    {"info, find and suspended", false,
     [](World& world, int) {
       BlockInfo info;
       CHECK(world.pool->info(world.block, &info).ok());
       CHECK(world.pool->find(world.block + info.bytes - 1, &info).ok());
       CHECK(!world.pool->suspended(world.block));
     }},
    {"retire_stream", false,
     [](World& world, int) {
       const StreamHandle made = world.stream();
       world.give(world.get(1000, made));
       counted = 0;
       CHECK(world.pool->retire_stream(made).ok() && world.device->stream_destroy(made).ok());
     }},
    {"set_limit, config and configure", false,
     [](World& world, int) {
       const PoolConfig config = world.pool->config();
       CHECK(world.pool->set_limit(0).ok() && world.pool->configure(config).ok());
     }},
    {"growable_resize", true,
     [](World& world, int i) {
       for (const std::uint64_t slots : {3, 9, 2, 7})
         CHECK(world.pool->growable_resize(world.growable, (slots + i % 3) * kSlotBytes, 0, 0).ok());
     }},
    {"growable_open and growable_close", true,
     [](World& world, int) {
       Address made = 0;
       GrowableInfo info;
       CHECK(world.pool->growable_open(16 * kMiB, world.side, &made).ok());
       CHECK(world.pool->growable_resize(made, 4 * kMiB, 0, 0).ok());
       CHECK(world.pool->growable_info(made, &info).ok() && world.pool->growable_close(made).ok());
     }},
    {"heaps", false,
     [](World& world, int i) {
       const HeapId id{static_cast<std::uint64_t>(i), 1};
       CHECK(world.pool->heap_begin(id, [&](StreamHandle each) { return each == world.side; }).ok());
       world.give(world.get(3 * kMiB, world.side));
       CHECK(world.pool->heap_end(id).ok() && world.pool->heap_release(id).ok());
     }},
};

// The median of a few, so that what is done once in a while, for all that has become idle meanwhile, is not
// counted against one call.
std::uint64_t cost_of(const Call& call, World& world) {
  std::vector<std::uint64_t> costs;
  for (int i = 0; i < 2 * kRepeats; ++i) {
    counted = 0;
    call.make(world, i % kRepeats);
    costs.push_back(counted);
    world.device->clear_executed();
  }
  std::sort(costs.begin() + kRepeats, costs.end());
  return costs[kRepeats + kRepeats / 2];
}

std::vector<std::uint64_t> costs_beside(const Surroundings& place, std::uint64_t count) {
  World world(place.config, place.schedule);
  place.make(world, count);
  (void)world.get(64 * kMiB, 0);  // takes from the others what they have cached
  std::vector<std::uint64_t> costs;
  for (const Call& call : kCalls) costs.push_back(call.pages_only && !world.paged ? 0 : cost_of(call, world));
  return costs;
}

}  // namespace

TEST(the_core_counts_what_it_runs) {
  counted = 0;
  Pool pool(std::make_shared<ModelBackend>(kGiB), {});
  CHECK(counted > 100);
}

TEST(no_call_costs_more_among_many) {
  for (const bool pages : {true, false})
    for (const Surroundings& place : surroundings(pages)) {
      const std::vector<std::uint64_t> few = costs_beside(place, kFew);
      const std::vector<std::uint64_t> many = costs_beside(place, place.many);
      for (std::size_t i = 0; i < kCalls.size(); ++i) {
        const bool good = many[i] <= 3 * few[i] + kSlack;
        if (!good || std::getenv("VRAM_COSTS") != nullptr)
          std::printf("     %s, %s %s: %llu basic blocks beside %llu, %llu beside %llu\n", kCalls[i].name,
                      pages ? "pages," : "no pages,", place.name, static_cast<unsigned long long>(few[i]),
                      static_cast<unsigned long long>(kFew), static_cast<unsigned long long>(many[i]),
                      static_cast<unsigned long long>(place.many));
        CHECK(good);
      }
      std::fflush(stdout);
    }
}

// Of two sizes in turn neither is cached when it is asked for. What one has freed, the other takes again.
TEST(two_sizes_in_turn_cost_the_same_however_long_they_are) {
  const auto cost = [](std::uint64_t size) {
    World world({}, Schedule::lag);
    const auto turn = [&] {
      for (const std::uint64_t each : {3 * size, size}) world.give(world.get(each, 0));
    };
    for (int i = 0; i < kRepeats; ++i) turn();
    counted = 0;
    for (int i = 0; i < kRepeats; ++i) turn();
    return counted;
  };
  const std::uint64_t shorter = cost(16 * kMiB), longer = cost(16 * kGiB);
  std::printf("     %llu basic blocks at 16 MiB, %llu at 16 GiB\n", static_cast<unsigned long long>(shorter),
              static_cast<unsigned long long>(longer));
  CHECK(longer <= 2 * shorter);
}

TEST_MAIN()
