// Streams of other libraries: they are destroyed without a word, and their handles come back as other
// streams. The model device ends the process when a handle that is gone is used.
#include <deque>
#include <thread>

#include "arena/arena.hpp"
#include "backends/thread_streams.hpp"
#include "driver_pool/driver_pool.hpp"
#include "oracle.hpp"
#include "plug/plug.hpp"
#include "plug/pluggable.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::both_kinds;
using vram::testing::kSlowdown;
using vram::testing::manual;
using vram::testing::Random;
using vram::testing::status_of_child;
using vram::testing::Watched;
using vram::testing::World;

// ---- the model --------------------------------------------------------------------------------------------

TEST(a_handle_comes_back_with_another_id) {
  const World world;
  const StreamHandle stream = world.foreign();
  StreamId first = 0, second = 0;
  REQUIRE(world.device->stream_id(stream, &first).ok() && !world.device->lasting(stream));
  REQUIRE(world.gone(stream) && world.foreign() == stream);
  REQUIRE(world.device->stream_id(stream, &second).ok());
  CHECK(first != second);
}

TEST(using_a_handle_that_is_gone_ends_the_process) {
  const int status = status_of_child([] {
    (void)!freopen("/dev/null", "w", stderr);
    const World world;
    const StreamHandle stream = world.foreign();
    (void)world.gone(stream);
    (void)world.device->stream_query(stream);
    return true;
  });
  CHECK(WIFSIGNALED(status));
}

// ---- order ------------------------------------------------------------------------------------------------

TEST(a_stream_gets_what_it_freed_at_once) {
  both_kinds([](const PoolConfig& config) {
    const World world(kGiB, config, manual());
    const StreamHandle stream = world.foreign();
    for (const std::uint64_t size : {4 * kKiB, 30 * kMiB}) {
      const Address address = world.get(size, stream);
      REQUIRE(world.device->work(stream, 1, address, size).ok());
      REQUIRE(world.pool->free(address).ok());
      CHECK(world.get(size, stream) == address);
    }
    CHECK(world.good());
  });
}

TEST(another_stream_of_the_same_handle_does_not) {
  both_kinds([](const PoolConfig& config) {
    for (const std::uint64_t size : {4 * kKiB, 30 * kMiB}) {
      const World world(kGiB, config, manual());
      const StreamHandle stream = world.foreign();
      const Address address = world.get(size, stream);
      REQUIRE(world.device->work(stream, 1, address, size).ok());
      REQUIRE(world.pool->free(address).ok());
      REQUIRE(world.gone(stream) && world.foreign() == stream);
      CHECK(world.get(size, stream) != address);
      REQUIRE(world.pool->trim(~std::uint64_t{0}, true).ok());  // waits for the device
      CHECK(world.device->executed().size() == 1);
      CHECK(world.get(size, 0) == address || world.pool->stats().paged);
      CHECK(world.good());
    }
  });
}

TEST(a_stream_that_is_gone_leaves_by_its_fences_where_they_cover_it) {
  const World world(kGiB, {}, manual());
  const StreamHandle stream = world.foreign();
  const Address address = world.get(30 * kMiB, stream);
  REQUIRE(world.device->work(stream, 1, address, 30 * kMiB).ok());
  REQUIRE(world.pool->free(address).ok() && world.pool->coalesce().ok());
  REQUIRE(world.get(kKiB, stream) != 0);  // names it: what was freed gets a fence
  REQUIRE(world.gone(stream));
  const std::uint64_t waits = world.device->host_waits();
  world.device->run_all();
  CHECK(world.get(30 * kMiB, 0) != 0);
  CHECK(world.reserved() < 60 * kMiB && world.device->host_waits() == waits);
  CHECK(world.good());
}

TEST(a_use_on_a_stream_that_is_gone_lasts_until_the_device_was_waited_for) {
  both_kinds([](const PoolConfig& config) {
    const World world(kGiB, config, manual());
    const StreamHandle stream = world.foreign();
    const Address address = world.get(kMiB, 0);
    REQUIRE(world.pool->record_stream(address, stream).ok());
    REQUIRE(world.device->work(stream, 1, address, kMiB).ok());
    REQUIRE(world.gone(stream));
    REQUIRE(world.pool->free(address).ok());
    CHECK(world.pool->stats().pending_blocks == 1 && world.get(kMiB, 0) != address);
    REQUIRE(world.pool->trim(~std::uint64_t{0}, true).ok());
    CHECK(world.pool->stats().pending_blocks == 0 && world.device->executed().size() == 1);
    CHECK(world.good());
  });
}

TEST(a_use_on_a_stream_that_is_named_again_ends_without_a_wait) {
  const World world(kGiB, {}, manual());
  const StreamHandle stream = world.foreign();
  const Address address = world.get(kMiB, 0), next = world.get(kMiB, 0);
  REQUIRE(world.pool->record_stream(address, stream).ok());
  REQUIRE(world.device->work(stream, 1, address, kMiB).ok() && world.pool->free(address).ok());
  REQUIRE(world.pool->record_stream(next, stream).ok());
  world.device->run_all();
  REQUIRE(world.pool->coalesce().ok());
  CHECK(world.pool->stats().pending_blocks == 0 && world.device->host_waits() == 0);
}

TEST(memory_runs_out_only_when_streams_that_are_gone_were_waited_for) {
  both_kinds([](const PoolConfig& config) {
    const World world(64 * kMiB, config, manual());
    for (int i = 0; i < 10; ++i) {
      const StreamHandle stream = world.foreign();
      const Address address = world.get(40 * kMiB, stream);
      REQUIRE(address != 0);
      REQUIRE(world.device->work(stream, 1, address, 40 * kMiB).ok());
      REQUIRE(world.gone(stream) && world.pool->free(address).ok());
    }
    CHECK(world.good());
  });
}

TEST(what_is_zeroed_when_it_is_freed_is_zeroed_elsewhere) {
  both_kinds([](const PoolConfig& plain) {
    PoolConfig config = plain;
    config.zero_on_free = true;
    const World world(kGiB, config);
    const StreamHandle stream = world.foreign();
    const Address address = world.get(kMiB, stream), used = world.get(kMiB, 0);
    REQUIRE(world.pool->record_stream(used, stream).ok() && world.gone(stream));
    REQUIRE(world.pool->free(address).ok() && world.pool->free(used).ok());
    REQUIRE(world.pool->trim(0, true).ok());
    CHECK(world.device->calls("fill") >= 2 && world.reserved() == 0 && world.good());
  });
}

// ---- what lasts longer than a call ------------------------------------------------------------------------

TEST(a_pool_closes_over_memory_of_streams_that_are_gone) {
  both_kinds([](const PoolConfig& config) {
    const World world(kGiB, config, manual());
    const StreamHandle stream = world.foreign();
    const Address address = world.get(3 * kMiB, stream);
    REQUIRE(world.device->work(stream, 1, address, 3 * kMiB).ok() && world.gone(stream));
    CHECK(world.pool->close().ok());
    CHECK(world.device->counts().page_bytes + world.device->counts().plain_bytes == 0);
    CHECK(world.device->counts().events == 0);
  });
}

// The block is live and belongs to another stream, so the pool keeps nothing of the use but its record.
TEST(a_pool_closes_behind_the_uses_of_live_memory_on_streams_of_other_libraries) {
  both_kinds([](const PoolConfig& config) {
    const World world(kGiB, config, manual());
    const StreamHandle stream = world.foreign();
    const Address address = world.get(kMiB);
    for (std::uint64_t use = 1; use <= 2; ++use) {
      REQUIRE(world.pool->record_stream(address, stream).ok());
      REQUIRE(world.device->work(stream, use, address, kMiB).ok());
    }
    CHECK(world.pool->close().ok() && world.device->executed().size() == 2);
  });
}

TEST(memory_of_streams_that_are_gone_is_suspended_and_comes_back) {
  const World world(kGiB, {}, manual());
  const StreamHandle stream = world.foreign();
  const Address address = world.get(32 * kMiB, stream);
  REQUIRE(world.device->work(stream, 1, address, 32 * kMiB).ok() && world.gone(stream));
  std::uint64_t bytes = 0;
  REQUIRE(world.pool->suspend({}, false, nullptr, &bytes, nullptr).ok());
  CHECK(bytes >= 32 * kMiB && world.device->executed().size() == 1);
  REQUIRE(world.pool->resume({}, &bytes, nullptr).ok() && world.pool->free(address).ok());
  CHECK(world.good());
}

TEST(a_growable_buffer_wants_a_stream_that_lasts) {
  const World world;
  const StreamHandle stream = world.foreign();
  Address address = 0;
  CHECK(world.pool->growable_open(kGiB, stream, &address).code == Code::absent);
  REQUIRE(world.device->stream_adopt(stream).ok());
  REQUIRE(world.pool->growable_open(kGiB, stream, &address).ok());
  REQUIRE(world.pool->growable_close(address).ok() && world.pool->retire_stream(stream).ok());
  REQUIRE(world.device->stream_disown(stream).ok() && world.gone(stream));
  CHECK(world.pool->trim(0, true).ok() && world.good());
}

TEST(an_arena_used_on_a_stream_that_is_gone_is_reset_behind_its_work) {
  const World world(kGiB, {}, manual());
  std::unique_ptr<Arena> arena;
  REQUIRE(Arena::open(world.pool, {}, &arena).ok());
  Address address = 0;
  REQUIRE(arena->allocate(kMiB, 0, &address).ok());
  const StreamHandle stream = world.foreign();
  REQUIRE(arena->record_stream(stream).ok());
  REQUIRE(world.device->work(stream, 1, address, kMiB).ok() && world.gone(stream));
  CHECK(arena->reset(false).ok() && world.device->executed().size() == 1);
}

TEST(an_arena_closes_after_its_stream_is_gone) {
  const World world(kGiB, {}, manual());
  ArenaOptions options;
  options.stream = world.foreign();
  std::unique_ptr<Arena> arena;
  Address address = 0;
  REQUIRE(Arena::open(world.pool, options, &arena).ok() && arena->allocate(kMiB, 0, &address).ok());
  REQUIRE(arena->record_stream(0).ok() && world.device->work(0, 1, address, kMiB).ok());
  REQUIRE(world.gone(options.stream));
  CHECK(arena->close().ok() && world.device->executed().size() == 1 && world.good());
}

TEST(a_driver_pool_takes_memory_of_streams_that_are_gone_back) {
  const auto device = std::make_shared<ModelBackend>(kGiB, manual());
  std::shared_ptr<DriverPool> pool;
  REQUIRE(DriverPool::open(device, {}, {}, &pool).ok());
  StreamHandle stream = 0;
  Address own = 0, used = 0, live = 0;
  REQUIRE(device->foreign_create(&stream).ok());
  REQUIRE(pool->allocate_slow(kMiB, stream, 0, 0, &own, nullptr).ok());
  REQUIRE(pool->allocate_slow(kMiB, stream, 0, 0, &live, nullptr).ok());
  REQUIRE(pool->allocate_slow(kMiB, 0, 0, 0, &used, nullptr).ok());
  REQUIRE(pool->record_stream(used, stream).ok() && device->work(stream, 1).ok());
  REQUIRE(device->foreign_destroy(stream).ok());
  CHECK(pool->free_slow(own).ok() && pool->free_slow(used).ok() && device->executed().size() == 1);
  CHECK(pool->trim(0, true).ok() && pool->close().ok());
}

TEST(a_graph_captured_on_a_stream_that_is_gone_gives_its_memory_back) {
  const World world(kGiB, {}, manual());
  const StreamHandle stream = world.foreign();
  REQUIRE(world.device->capture_begin(stream).ok());
  const Address address = world.get(4 * kMiB, stream);
  REQUIRE(address != 0 && world.device->work(stream, 1, address, kMiB).ok());
  std::uint64_t graph = 0;
  REQUIRE(world.pool->free(address).ok() && world.device->capture_end(stream, &graph).ok());
  REQUIRE(world.device->graph_launch(graph, stream).ok() && world.gone(stream));
  REQUIRE(world.device->graph_destroy(graph).ok());
  world.device->run_all();  // now the graph is gone, too
  REQUIRE(world.pool->trim(0, true).ok());
  CHECK(world.reserved() == 0 && world.device->refused_in_capture() == 0 && world.good());
}

TEST(an_adopted_stream_is_served_as_one_of_ours_until_it_goes) {
  const World world(kGiB, {}, manual());
  const StreamHandle stream = world.foreign();
  REQUIRE(world.device->stream_adopt(stream).ok() && world.device->lasting(stream));
  const Address address = world.get(30 * kMiB, stream);
  REQUIRE(world.device->work(stream, 1, address, 30 * kMiB).ok() && world.pool->free(address).ok());
  REQUIRE(world.pool->retire_stream(stream).ok() && world.device->stream_disown(stream).ok());
  REQUIRE(world.gone(stream));
  world.device->run_all();
  CHECK(world.get(30 * kMiB, 0) != 0 && world.device->host_waits() == 0);
  CHECK(world.reserved() < 60 * kMiB && world.good());
}

// ---- thousands --------------------------------------------------------------------------------------------

TEST(streams_are_made_and_destroyed_by_the_thousand) {
  both_kinds([](const PoolConfig& config) {
    const World world(kGiB, config);
    std::deque<Address> live;
    std::vector<StreamHandle> open;
    Random random(7);
    for (int i = 0; i < 1500 / kSlowdown; ++i) {
      const StreamHandle stream = world.foreign();
      open.push_back(stream);
      for (const std::uint64_t size : {4 * kKiB, 3 * kMiB}) {
        const Address address = world.get(size, stream);
        REQUIRE(address != 0 && world.device->work(stream, 1, address, size).ok());
        REQUIRE(world.pool->record_stream(address, random.of(open)).ok());
        live.push_back(address);
      }
      // Destroyed out of turn, so that handles come back in another order, and some only later.
      while (open.size() > 20) {
        const std::size_t which = random.below(open.size());
        REQUIRE(world.gone(open[which]));
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
      }
      while (live.size() > 10) {
        REQUIRE(world.pool->free(live.front()).ok());
        live.pop_front();
      }
      world.device->advance(100);
    }
    CHECK(world.pool->stats().streams.size() <= 400);
    CHECK(world.device->counts().events <= 2000);
    CHECK(world.good());
  });
}

TEST(every_use_is_ordered_whatever_is_destroyed) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    PoolConfig config;
    config.pages = seed % 2 == 0;
    config.cross_stream = seed % 3 == 0 ? CrossStream::wait : CrossStream::ready;
    config.zero_on_free = seed % 5 == 0;
    ModelOptions options;
    options.lag_us = 300;
    Watched world(256 * kMiB, config, options);
    Random random(seed);
    std::vector<StreamHandle> streams = {0};
    StreamHandle own = 0;
    REQUIRE(world.device->stream_create(&own).ok());
    streams.push_back(own);
    const auto is_foreign = [&](StreamHandle stream) { return !world.device->lasting(stream); };
    constexpr StreamHandle kDead = ~StreamHandle{0};
    std::string why;
    for (int i = 0; i < 3000 / kSlowdown; ++i) {
      const std::uint64_t what = random.below(100);
      if (what < 8 && streams.size() < 12) {
        StreamHandle made = 0;
        REQUIRE(world.device->foreign_create(&made).ok());
        streams.push_back(made);
      } else if (what < 14) {
        const StreamHandle goes = random.of(streams);
        if (!is_foreign(goes)) continue;
        REQUIRE(world.device->foreign_destroy(goes).ok());
        std::erase(streams, goes);
        for (Watched::Held& held : world.held)
          if (held.stream == goes) held.stream = kDead;
      } else if (what < 50) {
        const std::uint64_t size = random.chance(50) ? 1 + random.below(64 * kKiB) : random.below(9 * kMiB);
        const Status status = world.allocate(size, random.of(streams));
        REQUIRE(status.ok() || status.code == Code::out_of_memory);
      } else if (world.held.empty()) {
        continue;
      } else {
        const std::size_t which = random.below(world.held.size());
        const bool dead = world.held[which].stream == kDead;
        if (what < 60 && !dead) {
          world.use(which);
        } else if (what < 70 && !dead) {
          REQUIRE(world.use_on(which, random.of(streams)).ok());
        } else if (what < 97) {
          REQUIRE(world.free(which).ok());
        } else {
          REQUIRE(world.pool->trim(0, random.chance(50)).ok());
        }
      }
      if (random.chance(30)) world.device->advance(static_cast<double>(random.below(200)));
      if (i % 20 == 0 && !world.good(&why))
        std::printf("seed %d, step %d: %s\n", static_cast<int>(seed), i, why.c_str());
      REQUIRE(why.empty());
    }
  }
}

TEST(threads_name_the_same_stream_while_others_are_destroyed) {
  const World world(kGiB);
  const StreamHandle shared = world.foreign();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&world, shared, t] {
      for (int i = 0; i < 500 / kSlowdown; ++i) {
        const StreamHandle stream = t % 2 == 0 ? shared : world.foreign();
        const Address address = world.get(1 + static_cast<std::uint64_t>(i % 9) * 300 * kKiB, stream);
        (void)world.pool->record_stream(address, shared);
        if (stream != shared) (void)world.gone(stream);
        if (address == 0 || !world.pool->free(address).ok()) std::abort();
        world.device->advance(100);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(world.pool->stats().live == 0 && world.good());
}

// ---- the plug ---------------------------------------------------------------------------------------------

TEST(other_libraries_use_their_own_streams_through_the_plug) {
  static World* const world = new World();  // what was plugged in is kept to the end
  static StreamHandle pooled = 0;
  pooled = world->foreign();
  Plug::set_pool(0, world->pool);
  Plug::set_adopt([](int) { (void)world->device->stream_adopt(pooled); });
  const auto named = [](StreamHandle stream) { return reinterpret_cast<void*>(stream); };
  void* const first = vram_plug_allocate(kMiB, 0, named(pooled));
  REQUIRE(first != nullptr && world->device->lasting(pooled));
  for (int i = 0; i < 1000 / kSlowdown; ++i) {
    const StreamHandle stream = world->foreign();
    void* const one = vram_plug_allocate(3 * kMiB, 0, named(stream));
    void* const two = vram_plug_try_allocate(5000, 0, named(pooled));
    REQUIRE(one != nullptr && two != nullptr);
    vram_plug_record_stream(two, named(stream));
    vram_plug_record_stream(one, named(pooled));
    if (i % 3 != 0) REQUIRE(world->gone(stream));
    vram_plug_free(one, 0, 0, named(stream));
    vram_plug_free(two, 0, 0, named(pooled));
    if (i % 3 == 0) REQUIRE(world->gone(stream));
    if (i % 500 == 0) vram_plug_empty_cache();
    world->device->advance(100);
  }
  vram_plug_free(first, 0, 0, nullptr);
  CHECK(world->pool->live_bytes() == 0 && world->pool->stats().streams.size() <= 400);
  CHECK(world->reserved() < kGiB && world->good());
  Plug::set_adopt(nullptr);
  Plug::set_pool(0, nullptr);
}

// ---- the default streams of threads -----------------------------------------------------------------------

namespace {

// As a CUDA device: one handle means another stream on each thread, and the default stream marks its work.
class Threaded : public ModelBackend {
 public:
  static constexpr StreamHandle kPerThread = 2;
  using ModelBackend::ModelBackend;
  StreamHandle canonical(StreamHandle stream) const override {
    return stream == kPerThread ? ThreadStreams::mine() : stream;
  }
  bool lasting(StreamHandle) const override { return true; }
  bool ended(StreamHandle stream) const override { return ThreadStreams::ended(stream); }
  Status capture_of(StreamHandle stream, CaptureId* out) override {
    return ModelBackend::capture_of(marked(stream), out);
  }
  bool capturing(StreamHandle stream) override { return ModelBackend::capturing(marked(stream)); }
  Status event_record(EventHandle event, StreamHandle stream) override {
    return ModelBackend::event_record(event, marked(stream));
  }
  Status stream_query(StreamHandle stream) override { return ModelBackend::stream_query(marked(stream)); }
  Status stream_wait(StreamHandle stream, EventHandle event) override {
    return ModelBackend::stream_wait(marked(stream), event);
  }

 private:
  static StreamHandle marked(StreamHandle stream) { return ThreadStreams::is_one(stream) ? 0 : stream; }
};

}  // namespace

TEST(the_streams_of_threads_leave_with_their_threads) {
  const auto device = std::make_shared<Threaded>(kGiB);
  Pool pool(device, {});
  for (int i = 0; i < 500; ++i) {
    std::thread([&pool] {
      Address address = 0;
      if (pool.allocate(3 * kMiB, Threaded::kPerThread, 0, 0, &address).ok()) (void)pool.free(address);
    }).join();
    device->advance(1e4);
  }
  std::string why;
  CHECK(pool.check(&why) && pool.stats().streams.size() <= 4);
  CHECK(pool.stats().reserved.current <= 32 * kMiB);
}

TEST_MAIN()
