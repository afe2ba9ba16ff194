// Arenas: nothing live overlaps or moves, an iteration like the last asks for nothing, other streams are
// waited for by order, the host's memory rests while it is used, and whatever fails, nothing is lost.
#include "arena/arena.hpp"

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "backends/host.hpp"
#include "backends/pinned.hpp"
#include "driver_pool/driver_pool.hpp"
#include "oracle.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::holds_in_child;
using vram::testing::lagging;
using vram::testing::manual;
using vram::testing::Random;
using vram::testing::Watched;

namespace {

struct World : Watched {
  explicit World(bool pages = true, std::uint64_t capacity = kGiB, const PoolConfig& config = {},
                 const ModelOptions& options = {})
      : Watched(capacity, config, on(pages, options)) {}
  std::unique_ptr<Arena> arena(ArenaOptions options = {}) {
    std::unique_ptr<Arena> out;
    CHECK(Arena::open(pool, options, &out).ok());
    return out;
  }
  StreamHandle stream() {
    StreamHandle out = 0;
    CHECK(device->stream_create(&out).ok());
    return out;
  }

 private:
  static ModelOptions on(bool pages, ModelOptions options) {
    options.pages = pages;
    return options;
  }
};

Address take(Arena& arena, std::uint64_t size, std::uint64_t align = 0) {
  Address out = 0;
  CHECK(arena.allocate(size, align, &out).ok());
  return out;
}
bool sound(const Arena& arena) {
  std::string why;
  if (arena.check(&why)) return true;
  std::printf("check: %s\n", why.c_str());
  return false;
}
bool is(const Status& status, Code code, const char* call) {
  return status.code == code && std::strcmp(status.call, call) == 0;
}
unsigned char* bytes_at(Address address) { return reinterpret_cast<unsigned char*>(address); }

}  // namespace

// ---- the cursor -------------------------------------------------------------------------------------------

TEST(allocations_follow_each_other_aligned_and_apart) {
  World world;
  const auto arena = world.arena({.size = kMiB});
  const Address first = take(*arena, 100);
  CHECK(first % Arena::kChunkAlign == 0);
  CHECK(take(*arena, 1) == first + 256);
  CHECK(take(*arena, 1, 1) == first + 257);
  CHECK(take(*arena, 8, 4096) == first + 4096);
  const Address empty = take(*arena, 0);
  CHECK(empty == first + 4096 + 256 && take(*arena, 0) != empty);
  CHECK(arena->stats().used == 4096 + 512 + 1 && arena->stats().allocated == 110);
  CHECK(arena->stats().allocations == 6 && arena->stats().requests == 1);
  Address none = 7;
  for (const std::uint64_t bad : {std::uint64_t{3}, std::uint64_t{48}, 2 * Arena::kMaxAlign})
    CHECK(is(arena->allocate(1, bad, &none), Code::invalid, Arena::kBadAlign));
  CHECK(none == 7 && sound(*arena));
}

TEST(sizes_beyond_all_memory_are_refused_and_change_nothing) {
  World world;
  const auto arena = world.arena({.size = kMiB});
  const Address first = take(*arena, 100);
  for (const std::uint64_t size : {2 * kGiB, kMaxRequest, kMaxRequest + 1, ~std::uint64_t{0}}) {
    Address out = 7;
    OutOfMemoryReport report;
    CHECK(arena->allocate(size, 0, &out, &report).code == Code::out_of_memory);
    CHECK(out == 7 && report.requested >= std::min(size, kMaxRequest) && sound(*arena));
  }
  CHECK(take(*arena, 1) == first + 256 && arena->stats().high_water == 257);
}

TEST(an_iteration_like_the_last_asks_for_nothing_and_lands_in_the_same_places) {
  for (const bool pages : {true, false}) {
    World world(pages);
    const auto arena = world.arena();
    std::vector<Address> before;
    for (int iteration = 0; iteration < 5; ++iteration) {
      Random random(3);
      const std::uint64_t calls = world.device->total_calls();
      std::vector<Address> now;
      for (int i = 0; i < 300; ++i) now.push_back(take(*arena, random.below(kMiB)));
      if (iteration > 0) CHECK(now == before && world.device->total_calls() == calls);
      before = now;
      CHECK(sound(*arena) && arena->reset().ok());
    }
    const ArenaStats stats = arena->stats();
    CHECK(stats.used == 0 && stats.resets == 5 && stats.high_water > 128 * kMiB);
    CHECK(stats.capacity < stats.high_water * 5 / 4 && stats.requests == stats.chunks);
    CHECK(world.pool->live_bytes() == stats.capacity);
  }
}

TEST(sizes_that_vary_settle) {
  World world;
  const auto arena = world.arena();
  Random random(11);
  std::uint64_t most = 0;
  for (int iteration = 0; iteration < 400; ++iteration) {
    for (int i = 0; i < 30; ++i) (void)take(*arena, random.below(random.chance(10) ? 4 * kMiB : 200 * kKiB));
    if (iteration == 200) most = arena->stats().requests;
    CHECK(arena->reset().ok());
  }
  CHECK(sound(*arena) && arena->stats().requests <= most + 2);
  CHECK(arena->stats().capacity < 3 * arena->stats().high_water);
}

TEST(a_fixed_arena_of_the_high_water_holds_the_same_and_of_a_byte_less_does_not) {
  Random random(5);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> asked;
  for (int i = 0; i < 200; ++i)
    asked.emplace_back(random.below(300 * kKiB), std::uint64_t{1} << random.below(13));
  World world;
  const auto grown = world.arena();
  for (const auto& [size, align] : asked) (void)take(*grown, size, align);
  const std::uint64_t high = grown->stats().high_water;
  for (const std::uint64_t less : {0, 1}) {
    const auto fixed = world.arena({.size = high - less, .growable = false});
    Status last;
    Address out = 0;
    OutOfMemoryReport report;
    for (const auto& [size, align] : asked)
      if (last = fixed->allocate(size, align, &out, &report); !last.ok()) break;
    CHECK(less == 0 ? last.ok() : is(last, Code::out_of_memory, Arena::kFull));
    CHECK(less == 0 ||
          (report.limit == high - 1 && report.requested == std::max<std::uint64_t>(1, asked.back().first)));
    CHECK(fixed->stats().requests == 1 && fixed->stats().capacity == high - less && sound(*fixed));
    CHECK(fixed->trim().ok() && fixed->stats().capacity == high - less);
  }
  std::unique_ptr<Arena> none;
  CHECK(is(Arena::open(world.pool, {.growable = false}, &none), Code::invalid, Arena::kFull));
  CHECK(is(Arena::open(world.pool, {.align = 24}, &none), Code::invalid, Arena::kBadAlign));
  CHECK(Arena::open(world.pool, {.size = 2 * kGiB}, &none).code == Code::out_of_memory && !none);
}

TEST(trim_after_a_reset_makes_many_chunks_one) {
  World world;
  const auto arena = world.arena();
  const auto iterate = [&] {
    for (int i = 0; i < 100; ++i) (void)take(*arena, 300 * kKiB);
  };
  iterate();
  CHECK(arena->stats().chunks > 5);
  CHECK(arena->reset().ok() && arena->trim().ok());
  CHECK(arena->stats().capacity == 0 && arena->stats().chunks == 0 && world.pool->live_bytes() == 0);
  iterate();
  CHECK(arena->stats().chunks == 1 && sound(*arena));
  CHECK(arena->stats().capacity == round_up(arena->stats().high_water, Arena::kChunkAlign));
  CHECK(arena->trim().ok() && arena->stats().chunks == 1);  // what is live stays
}

TEST(where_the_device_has_less_a_chunk_is_as_large_as_needed) {
  World world(true, 20 * kMiB);
  const auto arena = world.arena();
  for (int i = 0; i < 19; ++i) (void)take(*arena, kMiB);
  Address out = 0;
  CHECK(arena->allocate(2 * kMiB, 0, &out).code == Code::out_of_memory);
  (void)take(*arena, 100);  // and goes on
  CHECK(sound(*arena) && arena->stats().capacity <= 20 * kMiB);
}

TEST(spare_chunks_that_are_too_small_make_room_for_one_that_is_not) {
  for (const bool pages : {true, false}) {
    World world(pages, 20 * kMiB);
    const auto arena = world.arena();
    (void)take(*arena, kMiB);
    Arena::Mark mark;
    CHECK(arena->mark(&mark).ok());
    for (int i = 0; i < 17; ++i) (void)take(*arena, kMiB);
    CHECK(arena->rewind(mark).ok() && arena->stats().chunks > 5);
    (void)take(*arena, 16 * kMiB);
    CHECK(sound(*arena) && arena->stats().chunks == 2);
  }
}

// ---- lifetimes --------------------------------------------------------------------------------------------

TEST(marks_nest_and_rewind) {
  World world;
  const auto arena = world.arena();
  (void)take(*arena, 100);
  Arena::Mark outer, inner, again;
  const Arena::Over all = arena->over();
  CHECK(arena->mark(&outer).ok());
  const Arena::Over outside = arena->over();
  const Address first = take(*arena, 3 * kMiB);
  CHECK(arena->mark(&inner).ok() && arena->stats().depth == 2);
  const Arena::Over inside = arena->over();
  const Address second = take(*arena, 5 * kMiB);
  CHECK(is(arena->reset(), Code::invalid, Arena::kOpenMarks));
  CHECK(arena->rewind(inner).ok() && inside->load() && !outside->load() && sound(*arena));
  CHECK(is(arena->rewind(inner), Code::invalid, Arena::kMarkOver));
  CHECK(arena->mark(&again).ok() && again.id != inner.id && again.depth == inner.depth);
  CHECK(is(arena->rewind(inner), Code::invalid, Arena::kMarkOver));
  CHECK(take(*arena, 5 * kMiB) == second);
  CHECK(arena->rewind(outer).ok());  // and with it what began inside
  CHECK(is(arena->rewind(again), Code::invalid, Arena::kMarkOver) && outside->load() && !all->load());
  CHECK(take(*arena, 3 * kMiB) == first && sound(*arena));
  CHECK(arena->reset().ok() && all->load() && !arena->over()->load());
  CHECK(is(arena->rewind({}), Code::invalid, Arena::kMarkOver));
  const Arena::Over last = arena->over();
  CHECK(arena->close().ok() && last->load() && arena->over()->load());
}

TEST(an_arena_belongs_to_one_thread_at_a_time) {
  World world;
  const auto arena = world.arena({.size = kMiB});
  std::thread([&] {
    Address out = 0;
    Arena::Mark mark;
    CHECK(is(arena->allocate(1, 0, &out), Code::invalid, Arena::kOtherThread));
    CHECK(is(arena->reset(), Code::invalid, Arena::kOtherThread));
    CHECK(is(arena->mark(&mark), Code::invalid, Arena::kOtherThread));
    CHECK(is(arena->rewind(mark), Code::invalid, Arena::kOtherThread));
    CHECK(is(arena->trim(), Code::invalid, Arena::kOtherThread));
    CHECK(arena->stats().capacity == kMiB && arena->record_stream(0).ok());
    arena->adopt();
    CHECK(arena->allocate(1, 0, &out).ok());
  }).join();
  Address out = 0;
  CHECK(is(arena->allocate(1, 0, &out), Code::invalid, Arena::kOtherThread));
  arena->adopt();
  CHECK(arena->allocate(1, 0, &out).ok() && arena->stats().allocations == 2);
}

TEST(a_closed_arena_or_pool_and_the_child_of_a_fork_are_refused) {
  World world;
  const auto arena = world.arena({.size = kMiB});
  (void)take(*arena, 1);
  CHECK(holds_in_child([&] {
    Address out = 0;
    const bool refused = arena->allocate(1, 0, &out).code == Code::closed &&
                         arena->reset().code == Code::closed && arena->close().ok();
    return refused;
  }));
  Address out = 0;
  CHECK(arena->close().ok() && arena->close().ok() && world.pool->live_bytes() == 0);
  CHECK(arena->allocate(1, 0, &out).code == Code::closed && arena->stats().capacity == 0);
  CHECK(arena->record_stream(0).code == Code::closed && arena->retire_stream(0).ok());
  const auto other = world.arena({.size = kMiB});
  world.oracle->closing = true;
  CHECK(world.pool->close().ok());
  CHECK(other->allocate(1, 0, &out).code == Code::closed && other->close().ok());
}

// ---- callbacks --------------------------------------------------------------------------------------------

struct Called {
  Arena* arena;
  std::string* order;
  char name;
};
void note(void* argument) {
  const auto& called = *static_cast<Called*>(argument);
  called.order->push_back(called.name);
}

TEST(callbacks_run_once_and_backwards_when_their_lifetime_ends) {
  World world;
  const auto arena = world.arena();
  std::string order;
  Called a{arena.get(), &order, 'a'}, b{arena.get(), &order, 'b'}, c{arena.get(), &order, 'c'};
  Arena::Mark outer, inner;
  CHECK(arena->on_reset(note, &a).ok() && arena->mark(&outer).ok());
  CHECK(arena->on_reset(note, &b).ok() && arena->mark(&inner).ok());
  CHECK(arena->on_reset(note, &c).ok() && sound(*arena));
  CHECK(is(arena->reset(), Code::invalid, Arena::kOpenMarks) && order.empty());
  CHECK(arena->rewind(inner).ok() && order == "c");
  CHECK(arena->rewind(outer).ok() && order == "cb" && sound(*arena));
  CHECK(arena->on_reset(note, &c).ok() && arena->reset().ok() && order == "cbca");
  CHECK(arena->reset().ok() && order == "cbca");
  CHECK(arena->on_reset(note, &a).ok() && arena->mark(&outer).ok() && arena->on_reset(note, &b).ok());
  CHECK(holds_in_child([&] { return arena->close().ok() && (arena->end(), order == "cbca"); }));
  CHECK(arena->close().ok() && order == "cbcaba");
  CHECK(arena->on_reset(note, &a).code == Code::closed);
}

TEST(callbacks_run_before_the_memory_is_reused_and_cannot_change_the_arena) {
  World world;
  const auto arena = world.arena({.size = kMiB});
  (void)take(*arena, 1000);
  const auto probe = [](void* argument) {
    Arena& it = *static_cast<Arena*>(argument);
    Address out = 0;
    Arena::Mark mark;
    CHECK(it.stats().used == 1000 && !it.over()->load() && sound(it) && it.record_stream(0).ok());
    CHECK(!it.try_allocate(0, 1, &out) && is(it.allocate(1, 0, &out), Code::invalid, Arena::kInCallback));
    for (const Status& status :
         {it.reset(), it.mark(&mark), it.rewind(mark), it.trim(), it.close(), it.on_reset(note, nullptr)})
      CHECK(is(status, Code::invalid, Arena::kInCallback));
    it.end();
    CHECK(!it.closed());
  };
  CHECK(arena->on_reset(probe, arena.get()).ok() && arena->reset().ok());
  CHECK(arena->stats().used == 0 && arena->stats().resets == 1 && sound(*arena));
  (void)take(*arena, 1000);
  CHECK(arena->on_reset(probe, arena.get()).ok() && arena->close().ok() && world.pool->live_bytes() == 0);
}

TEST(a_callback_may_close_the_pool) {
  World world;
  const auto arena = world.arena({.size = kMiB});
  world.oracle->closing = true;
  CHECK(arena->on_reset([](void* pool) { CHECK(static_cast<Pool*>(pool)->close().ok()); }, world.pool.get())
            .ok());
  CHECK(arena->reset().code == Code::closed && arena->close().ok());
}

TEST(a_reset_that_fails_does_not_call_again) {
  World world;
  const StreamHandle other = world.stream();
  const auto arena = world.arena();
  std::string order;
  Called a{arena.get(), &order, 'a'};
  (void)take(*arena, 1000);
  CHECK(arena->record_stream(other).ok() && arena->on_reset(note, &a).ok());
  CHECK(world.device->fail("event_record", 1, {Code::failed, 1, "event_record"}));
  CHECK(arena->reset().code == Code::failed && order == "a" && arena->stats().used == 1000);
  CHECK(arena->reset().ok() && order == "a" && arena->stats().used == 0);
}

TEST(the_drivers_pool_serves_arenas_too) {
  const auto device = std::make_shared<ModelBackend>(kGiB);
  std::shared_ptr<DriverPool> pool;
  REQUIRE(DriverPool::open(device, {}, {}, &pool).ok());
  std::unique_ptr<Arena> arena;
  REQUIRE(Arena::open(pool, {}, &arena).ok());
  for (int iteration = 0; iteration < 3; ++iteration) {
    for (int i = 0; i < 50; ++i) (void)take(*arena, 400 * kKiB);
    CHECK(sound(*arena) && arena->reset().ok());
  }
  CHECK(arena->stats().requests == arena->stats().chunks);
  CHECK(arena->close().ok() && pool->live_bytes() == 0);
}

// ---- order ------------------------------------------------------------------------------------------------

TEST(a_reset_makes_the_stream_wait_for_the_others_and_not_the_host) {
  World world(true, kGiB, {}, manual());
  const StreamHandle own = world.stream(), other = world.stream(), gone = world.stream();
  const auto arena = world.arena({.stream = own});
  for (int iteration = 0; iteration < 3; ++iteration) {
    const Address address = take(*arena, kMiB);
    world.oracle->allocated(address, kMiB, own);
    for (const StreamHandle user : {other, gone, own}) {
      if (user == gone && iteration > 0) continue;
      world.oracle->used(address, kMiB, user);
      CHECK(arena->record_stream(user).ok());
    }
    if (iteration == 0) {
      CHECK(arena->retire_stream(gone).ok() && world.pool->retire_stream(gone).ok());
      CHECK(world.oracle->stream_destroy(gone).ok());
    }
    world.oracle->freed(address);
    CHECK(arena->reset().ok());
  }
  CHECK(world.oracle->faults.empty());
  CHECK(world.device->executed().empty());  // nobody has waited
  CHECK(world.device->calls("event_create") <= 3 && world.device->calls("stream_wait") == 4);
  CHECK(world.device->run_all() && arena->close().ok());
}

TEST(the_arenas_own_stream_gives_way_to_the_default) {
  World world;
  const StreamHandle own = world.stream();
  const auto arena = world.arena({.stream = own});
  const Address address = take(*arena, kMiB);
  world.oracle->allocated(address, kMiB, own);
  world.oracle->used(address, kMiB, own);
  CHECK(arena->retire_stream(own).ok() && world.pool->retire_stream(own).ok());
  CHECK(world.oracle->stream_destroy(own).ok() && arena->stream() == 0);
  world.oracle->freed(address);
  CHECK(arena->reset().ok());
  const Address again = take(*arena, kMiB);
  world.oracle->allocated(again, kMiB, 0);
  CHECK(again == address && world.oracle->faults.empty());
}

TEST(what_is_zeroed_is_zeroed_in_stream_order_and_only_where_it_was_used) {
  World world;
  const auto arena = world.arena({.size = 8 * kMiB});
  (void)take(*arena, kMiB);
  CHECK(arena->reset(true).ok() && world.device->calls("fill") == 0);
  (void)take(*arena, 10);
  CHECK(world.device->calls("fill") == 1);  // new memory: all of it
  (void)take(*arena, 16 * kMiB);
  CHECK(world.device->calls("fill") == 2);  // what it grows by, too
  CHECK(arena->reset().ok());
  (void)take(*arena, 10);
  CHECK(world.device->calls("fill") == 2);
}

TEST(the_hosts_memory_reads_as_zero_after_a_zeroing_reset) {
  const auto host = std::make_shared<HostBackend>();
  const auto pool = std::make_shared<Pool>(host, PoolConfig{});
  std::unique_ptr<Arena> arena;
  REQUIRE(Arena::open(pool, {.size = kMiB}, &arena).ok());
  for (int iteration = 0; iteration < 4; ++iteration) {
    const bool zeroed = iteration > 0;
    for (const std::uint64_t size : {1000, 70000, 3000000, 10}) {
      const Address at = take(*arena, size);
      bool clean = true;
      for (std::uint64_t i = 0; i < size; ++i) clean = clean && bytes_at(at)[i] == 0;
      if (zeroed) CHECK(clean);
      std::memset(bytes_at(at), 0xAB, size);
    }
    CHECK(arena->reset(true).ok() && sound(*arena));
  }
}

TEST(what_is_given_back_is_overwritten_where_wanted) {
  const auto pool = std::make_shared<Pool>(std::make_shared<HostBackend>(), PoolConfig{});
  std::unique_ptr<Arena> arena;
  REQUIRE(Arena::open(pool, {.size = kMiB, .poison = true}, &arena).ok());
  const Address kept = take(*arena, 100);
  std::memset(bytes_at(kept), 1, 100);
  Arena::Mark mark;
  CHECK(arena->mark(&mark).ok());
  const Address gone = take(*arena, 100), far = take(*arena, 3 * kMiB);
  std::memset(bytes_at(gone), 2, 100);
  bytes_at(far)[3 * kMiB - 1] = 3;
  CHECK(arena->rewind(mark).ok());
  CHECK(bytes_at(kept)[99] == 1 && bytes_at(gone)[0] == Arena::kPoison);
  CHECK(bytes_at(gone)[99] == Arena::kPoison && bytes_at(far)[3 * kMiB - 1] == Arena::kPoison);
  CHECK(arena->reset(true).ok() && bytes_at(kept)[99] == Arena::kPoison);
  CHECK(bytes_at(take(*arena, 100))[99] == 0);
}

TEST(an_arena_that_has_ended_keeps_its_memory_until_it_closes) {
  World world;
  const StreamHandle other = world.stream();
  const auto arena = world.arena({.size = kMiB});
  (void)take(*arena, 1);
  const Arena::Over over = arena->over();
  CHECK(arena->record_stream(other).ok());
  arena->end();
  Address out = 0;
  CHECK(over->load() && arena->closed() && world.pool->live_bytes() == kMiB && sound(*arena));
  CHECK(arena->allocate(1, 0, &out).code == Code::closed && arena->reset().code == Code::closed);
  CHECK(arena->retire_stream(other).ok() && world.device->stream_destroy(other).ok());
  CHECK(arena->close().ok() && world.pool->live_bytes() == 0 && sound(*arena));
}

TEST(callbacks_of_the_pool_may_use_the_arena_that_grows) {
  World world(true, 20 * kMiB);
  const auto arena = world.arena();
  Arena::Mark mark;
  CHECK(arena->mark(&mark).ok());
  for (int i = 0; i < 12; ++i) (void)take(*arena, kMiB);
  bool rewound = false;
  world.pool->on_out_of_memory([&](std::uint64_t, StreamHandle) {
    if (!rewound) rewound = arena->rewind(mark).ok() && arena->trim().ok();
    return rewound;
  });
  (void)take(*arena, 18 * kMiB);
  CHECK(rewound && sound(*arena) && arena->stats().used == 18 * kMiB);
  world.pool->on_out_of_memory([&](std::uint64_t, StreamHandle) { return arena->close().ok(); });
  CHECK(arena->reset().ok());
  Address out = 0;
  CHECK(arena->allocate(19 * kMiB, 0, &out).code == Code::closed && world.pool->live_bytes() == 0);
}

TEST(memory_that_the_host_writes_rests_while_it_is_used) {
  const auto model = std::make_shared<ModelBackend>(kGiB, manual());
  const auto pinned = std::make_shared<PinnedBackend>(model);
  PoolConfig config;
  config.pages = false;
  const auto pool = std::make_shared<Pool>(pinned, config);
  std::unique_ptr<Arena> arena;
  REQUIRE(Arena::open(pool, {.size = 2 * kMiB}, &arena).ok());
  const Address first = take(*arena, kMiB);
  REQUIRE(model->work(0, 1).ok());
  CHECK(arena->record_stream(0).ok());
  Arena::Mark mark;
  CHECK(arena->mark(&mark).ok());
  const Address inner = take(*arena, 100);
  CHECK(arena->rewind(mark).ok());
  CHECK(take(*arena, 100) > inner);  // not allocated again before the reset
  CHECK(arena->reset().ok() && arena->stats().resting == 2 * kMiB && sound(*arena));
  const Address second = take(*arena, kMiB);
  CHECK(second != first && arena->stats().capacity == 4 * kMiB);
  CHECK(model->executed().empty());
  CHECK(model->run_all());
  CHECK(arena->reset().ok());  // nothing is used: the chunk serves again
  CHECK(take(*arena, kMiB) == second);
  CHECK(take(*arena, 2 * kMiB) == first && arena->stats().resting == 0);
  CHECK(arena->stats().requests == 2 && arena->stats().host_waits == 0 && sound(*arena));
  // With no other memory the host waits.
  std::unique_ptr<Arena> fixed;
  REQUIRE(Arena::open(pool, {.size = 2 * kMiB, .growable = false}, &fixed).ok());
  const Address only = take(*fixed, kMiB);
  REQUIRE(model->work(0, 2).ok());
  CHECK(fixed->record_stream(0).ok() && fixed->reset().ok());
  CHECK(take(*fixed, kMiB) == only && fixed->stats().host_waits == 1 && model->executed().size() == 2);
  // And it does before the memory goes.
  REQUIRE(model->work(0, 3).ok());
  CHECK(fixed->record_stream(0).ok() && fixed->close().ok() && model->executed().size() == 3);
  CHECK(arena->close().ok() && pool->live_bytes() == 0 && model->counts().events == 0);
}

// ---- properties -------------------------------------------------------------------------------------------

namespace {

// A random program over one arena, watched: every piece is told to the oracle, which knows when bytes are
// allocated twice or before their last use. It carries on after whatever fails.
class Program {
 public:
  Program(std::uint64_t seed, bool pages, std::uint64_t capacity, double lag)
      : random_(seed), world(pages, capacity, {}, lagging(lag)) {
    for (int i = 0; i < 3; ++i) streams_.push_back(world.stream());
  }
  void open() {
    ArenaOptions options;
    options.stream = streams_[0];
    options.poison = random_.chance(30);
    if (random_.chance(30)) options.size = (1 + random_.below(4)) * kMiB;
    (void)Arena::open(world.pool, options, &arena);
  }
  bool run(int steps, std::string* why) {
    for (int step = 0; step < steps && arena; ++step) {
      act();
      if (!world.oracle->faults.empty()) {
        *why = world.oracle->faults.front();
        return false;
      }
      if (!arena->check(why) || !world.pool->check(why)) return false;
    }
    return true;
  }
  void act() {
    const std::uint64_t dice = random_.below(100);
    if (dice < 55) {
      allocate();
    } else if (dice < 62) {
      Arena::Mark mark;
      if (arena->mark(&mark).ok()) marks_.push_back({mark, pieces_.size()});
    } else if (dice < 70) {
      if (!marks_.empty()) rewind(marks_.size() - 1 - random_.below(std::min<std::size_t>(2, marks_.size())));
    } else if (dice < 74) {
      if (!marks_.empty()) rewind(0);
      if (marks_.empty()) end(0, [&] { return arena->reset(random_.chance(20)); });
    } else if (dice < 76) {
      (void)arena->trim();
    } else if (dice < 80) {
      world.device->advance(static_cast<double>(random_.below(300)));
    } else if (dice < 81 && streams_.size() > 2) {
      const StreamHandle stream = streams_.back();
      if (arena->retire_stream(stream).ok() && world.pool->retire_stream(stream).ok()) {
        streams_.pop_back();
        (void)world.oracle->stream_destroy(stream);
      }
    } else if (!pieces_.empty()) {
      use(random_.of(pieces_));
    }
  }
  // Empty: nothing is left behind.
  std::string left_behind() {
    if (arena) {
      end(0, [&] { return arena->close(); });
      if (!arena->closed()) return "close fails without a failure";
      arena.reset();
    }
    if (world.pool->live_bytes() != 0) return "bytes are live that nobody has";
    if (!world.oracle->faults.empty()) return world.oracle->faults.front();
    if (const Status status = world.pool->close(); !status.ok())
      return std::string("the pool's close fails without a failure: ") + status.call;
    const ModelCounts counts = world.device->counts();
    if (counts.page_bytes + counts.plain_bytes + counts.mappings + counts.spaces != 0)
      return "memory is left";
    return counts.events != 0 ? "events are left" : "";
  }

 private:
  struct Piece {
    Address address;
    std::uint64_t bytes;
  };
  void allocate() {
    const std::uint64_t size = random_.below(random_.chance(15)   ? 6 * kMiB
                                             : random_.chance(50) ? 200
                                                                  : 300 * kKiB);
    const std::uint64_t align = random_.chance(70) ? 0 : std::uint64_t{1} << random_.below(22);
    Address at = 0;
    if (!arena->allocate(size, align, &at).ok()) return;
    if (at % (align == 0 ? Arena::kDeviceAlign : align) != 0) world.oracle->faults.push_back("alignment");
    pieces_.push_back({at, size + (size == 0)});
    world.oracle->allocated(at, pieces_.back().bytes, arena->stream());
  }
  // As the rules are: another stream waits for the arena's before it uses what is there.
  void use(const Piece& piece) {
    const StreamHandle stream = random_.of(streams_);
    if (!arena->record_stream(stream).ok()) return;
    EventHandle event = 0;
    if (!world.device->event_create(&event).ok()) return;
    const bool ordered = world.oracle->event_record(event, arena->stream()).ok() &&
                         world.oracle->stream_wait(stream, event).ok();
    while (!world.oracle->event_destroy(event).ok()) {
    }
    if (ordered) world.oracle->used(piece.address, piece.bytes, stream);
  }
  template <class Call>
  bool end(std::size_t keep, Call call) {
    for (std::size_t i = keep; i < pieces_.size(); ++i) world.oracle->freed(pieces_[i].address);
    const bool ended = call().ok();
    for (std::size_t i = keep; i < pieces_.size() && !ended; ++i)
      world.oracle->kept(pieces_[i].address, pieces_[i].bytes);
    if (ended) pieces_.resize(keep);
    return ended;
  }
  void rewind(std::size_t i) {
    if (end(marks_[i].second, [&] { return arena->rewind(marks_[i].first); })) marks_.resize(i);
  }

  Random random_;
  std::vector<StreamHandle> streams_;
  std::vector<std::pair<Arena::Mark, std::size_t>> marks_;
  std::vector<Piece> pieces_;

 public:
  World world;
  std::unique_ptr<Arena> arena;
};

}  // namespace

TEST(random_programs_overlap_nothing_and_reuse_nothing_too_soon) {
  for (std::uint64_t seed = 0; seed < 240 / vram::testing::kSlowdown; ++seed) {
    Program program(seed, seed % 2 == 0, seed % 3 == 0 ? 24 * kMiB : kGiB, seed % 5 == 0 ? 1 : 200);
    program.open();
    std::string why;
    const bool good = program.run(300, &why);
    if (good) why = program.left_behind();
    if (!why.empty()) std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), why.c_str());
    REQUIRE(why.empty());
  }
}

TEST(any_call_to_the_device_may_fail_and_nothing_is_lost) {
  for (const bool pages : {true, false}) {
    for (const std::uint64_t seed : {2, 3}) {
      const auto run = [&](std::uint64_t k, Code code, std::string* why) {
        Program program(seed, pages, 24 * kMiB, 200);
        const std::uint64_t before = program.world.device->total_calls();
        if (k > 0) program.world.device->fail_any(k, {code, 700, ""});
        program.open();
        if (!program.run(150, why)) return std::uint64_t{0};
        const std::uint64_t calls = program.world.device->total_calls() - before;
        program.world.device->clear_failures();
        *why = program.left_behind();
        return calls;
      };
      std::string why;
      const std::uint64_t calls = run(0, Code::ok, &why);
      REQUIRE(why.empty() && calls > 100);
      for (std::uint64_t k = 1; k <= calls; k += vram::testing::sampling())
        for (const Code code : {Code::out_of_memory, Code::failed}) {
          (void)run(k, code, &why);
          if (!why.empty()) std::printf("call %llu: %s\n", static_cast<unsigned long long>(k), why.c_str());
          REQUIRE(why.empty());
        }
    }
  }
}

TEST_MAIN()
