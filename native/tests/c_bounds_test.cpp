// What a long run may hold of everything that can run out: events, streams, mappings, pages, queued work,
// file descriptors, threads, heap. A table of workloads, on every kind of device and through every plug; each
// runs twice as long as it took to settle, and then holds no more than before. VRAM_BOUNDS_OPS: operations of
// each.
#include <dirent.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "arena/arena.hpp"
#include "backends/host.hpp"
#include "backends/model.hpp"
#include "oracle.hpp"
#include "plug/plug.hpp"
#include "plug/pluggable.hpp"
#include "state.hpp"
#include "testing.hpp"
#include "vram.h"

using namespace vram;
using vram::testing::Random;

namespace {

#if defined(VRAM_CHECKS)
constexpr std::uint64_t kDefaultOps = 100'000;  // each slow path verifies everything there
#else
constexpr std::uint64_t kDefaultOps = 1'000'000;
#endif
constexpr std::uint64_t kHeapSlack = 256 * kKiB;  // tables that double, the heap's own caches

std::uint64_t operations() {
  const char* const wanted = std::getenv("VRAM_BOUNDS_OPS");
  return (wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : kDefaultOps) / vram::testing::kSlowdown;
}

std::uint64_t entries_of(const char* directory) {
  DIR* const open = opendir(directory);
  if (open == nullptr) return 0;
  std::uint64_t count = 0;
  while (readdir(open) != nullptr) ++count;
  closedir(open);
  return count;
}

// Bytes that are allocated, not what the process was given: the latter depends on where holes are.
std::uint64_t heap_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

using Counts = std::map<std::string, std::uint64_t>;

// Where a workload runs. The model counts what exists on it; of the host the process does.
struct Place {
  std::string name;
  std::shared_ptr<Backend> backend;
  ModelBackend* model = nullptr;

  void pass_time() const {
    if (model == nullptr) return;
    model->advance(50.0);
    model->clear_executed();  // its own account of what ran
  }
  Counts exists() const {
    if (model == nullptr) return {};
    const ModelCounts now = model->counts();
    return {{"events", now.events}, {"streams", now.streams}, {"mappings", now.mappings},
            {"pages", now.pages},   {"spaces", now.spaces},   {"ranges", now.plain_ranges},
            {"queued", now.queued}};
  }
};

Place on_model(bool pages) {
  ModelOptions options;
  options.pages = pages;
  auto made = std::make_shared<ModelBackend>(16 * kGiB, options);
  return {pages ? "model" : "model without pages", made, made.get()};
}
Place on_host() { return {"host", std::make_shared<HostBackend>(2 * kGiB), nullptr}; }
std::vector<Place> everywhere() { return {on_model(true), on_model(false), on_host()}; }

Counts of_process() {
  return {{"descriptors", entries_of("/proc/self/fd")},
          {"threads", entries_of("/proc/self/task")},
          {"heap", heap_bytes()}};
}

void keep_most(Counts& most, const Counts& now) {
  for (const auto& [name, count] : now) most[name] = std::max(most[name], count);
}

bool within(const Counts& before, const Counts& after,
            const std::function<std::uint64_t(std::uint64_t)>& bound) {
  for (const auto& [name, count] : after)
    if (count > bound(before.at(name)) + (name == "heap" ? kHeapSlack : 0)) return false;
  return true;
}

void say(const std::string& what, const Place& place, const Counts& before, const Counts& after) {
  for (const auto& [name, count] : after)
    if (count != before.at(name))
      std::printf("     %s on %s: %s %llu, then %llu\n", what.c_str(), place.name.c_str(), name.c_str(),
                  static_cast<unsigned long long>(before.at(name)), static_cast<unsigned long long>(count));
}

// `step(i)` costs as much as `cost` small operations. Half of them settle; the other half may hold no more at
// any time than a quarter above that (random sizes peak by chance), and at its end the same (a leak would
// have doubled it). Fences of a stream may reach their bound late.
void expect_bounded(const std::string& what, const Place& place, std::uint64_t cost,
                    const std::function<void(std::uint64_t)>& step, const std::function<void()>& rest) {
  const std::uint64_t steps = std::max<std::uint64_t>(200, operations() / cost / 2);
  const std::uint64_t sampled = std::max<std::uint64_t>(1, steps / 500);
  Counts most[2], resting[2];
  for (int half = 0; half < 2; ++half) {
    for (std::uint64_t i = 0; i < steps; ++i) {
      step(half * steps + i);
      place.pass_time();
      if (i % sampled == 0) keep_most(most[half], place.exists());
    }
    rest();
    keep_most(most[half], place.exists());
    resting[half] = of_process();
  }
  // On a busy machine, threads that have ended leave a little later, with what they hold.
  const auto settled = [&] {
    return within(resting[0], resting[1], [](std::uint64_t count) { return count + 2; });
  };
  for (int wait = 0; wait < 5000 && !settled(); ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    resting[1] = of_process();
  }
  if (const auto events = most[0].find("events"); events != most[0].end())
    events->second = std::max(events->second, Fences::kMostFences * most[0]["streams"]);
  const bool peaks = within(most[0], most[1], [](std::uint64_t count) { return count + count / 4 + 16; });
  const bool ends = settled();
  if (!peaks) say(what + ", at most", place, most[0], most[1]);
  if (!ends) say(what + ", at rest", place, resting[0], resting[1]);
  CHECK(peaks && ends);
}

// ---- pools ------------------------------------------------------------------------------------------------

struct World {
  Place place;
  std::shared_ptr<Pool> pool;
  std::vector<StreamHandle> streams{0};
  Random random{7};
  std::vector<Address> held;

  World(const Place& where, const PoolConfig& config, int more_streams)
      : place(where), pool(std::make_shared<Pool>(where.backend, config)) {
    for (int i = 0; i < more_streams; ++i) {
      StreamHandle stream = 0;
      CHECK(place.backend->stream_create(&stream).ok());
      streams.push_back(stream);
    }
  }
  ~World() {
    std::string why;
    CHECK(pool->check(&why));
    CHECK(pool->close().ok());
    for (const StreamHandle stream : streams)
      if (stream != 0) CHECK(place.backend->stream_destroy(stream).ok());
  }
  Address get(std::uint64_t size, StreamHandle stream, std::uint32_t tag = 0) {
    Address out = 0;
    const Status status = pool->allocate(size, stream, 0, tag, &out);
    CHECK(status.ok() || status.code == Code::out_of_memory);
    return out;
  }
  void give(Address address) {
    if (address != 0) CHECK(pool->free(address).ok());
  }
  void rest() {
    for (const Address address : held) give(address);
    held.clear();
    CHECK(place.backend->synchronize().ok());
    CHECK(pool->trim(0, true).ok());
  }
};

struct Workload {
  const char* name;
  std::uint64_t cost;  // of a step, in small operations
  int more_streams;
  PoolConfig config;
  std::function<void(World&, std::uint64_t)> step;
};

PoolConfig with(const std::function<void(PoolConfig&)>& change) {
  PoolConfig config;
  change(config);
  return config;
}

void run(const Workload& workload) {
  for (const Place& place : everywhere()) {
    World world(place, workload.config, workload.more_streams);
    expect_bounded(
        workload.name, place, workload.cost, [&](std::uint64_t i) { workload.step(world, i); },
        [&] { world.rest(); });
  }
}

// Keeps a few blocks and replaces one at a time.
void churn(World& world, std::uint64_t size, StreamHandle stream, std::size_t most) {
  if (world.held.size() < most) {
    world.held.push_back(world.get(size, stream));
    return;
  }
  Address& place = world.held[world.random.below(world.held.size())];
  world.give(place);
  place = world.get(size, stream);
}

}  // namespace

TEST(small_pairs) {
  run({"small pairs", 2, 0, {}, [](World& world, std::uint64_t) {
         world.give(world.get(1 + world.random.below(100'000), 0));
       }});
}

// A framework's steps: large blocks of ever other sizes on one stream, another alive beside it.
TEST(large_blocks_of_varying_sizes_beside_another_stream) {
  run({"varying sizes", 10, 1, {}, [](World& world, std::uint64_t) {
         world.give(world.get((2 + world.random.below(59)) * kMiB, world.streams[1]));
       }});
}

TEST(many_live_blocks_of_varying_sizes) {
  run({"churn", 10, 2, {}, [](World& world, std::uint64_t) {
         churn(world, 1 + world.random.below(world.random.chance(90) ? 200 * kKiB : 9 * kMiB),
               world.random.of(world.streams), 64);
       }});
}

TEST(uses_on_other_streams) {
  run({"record_stream", 20, 2, {}, [](World& world, std::uint64_t i) {
         const Address block = world.get(4096 + i % 5 * kMiB, world.streams[i % 3]);
         if (block == 0) return;
         CHECK(world.pool->record_stream(block, world.streams[(i + 1) % 3]).ok());
         CHECK(world.place.backend->fill(block, 1, 64, world.streams[(i + 1) % 3]).ok());
         world.give(block);
       }});
}

TEST(memory_that_goes_from_stream_to_stream) {
  for (const CrossStream way : {CrossStream::ready, CrossStream::wait, CrossStream::never})
    run({"cross-stream", 20, 3, with([&](PoolConfig& config) {
           config.cross_stream = way;
           config.limit = 96 * kMiB;
         }),
         [](World& world, std::uint64_t i) {
           world.give(
               world.get((1 + world.random.below(20)) * kMiB, world.streams[i % world.streams.size()]));
         }});
}

TEST(streams_that_come_and_go) {
  run({"streams", 200, 0, {}, [](World& world, std::uint64_t i) {
         StreamHandle stream = 0;
         CHECK(world.place.backend->stream_create(&stream).ok());
         const Address small = world.get(4096, stream), large = world.get(3 * kMiB, stream);
         CHECK(world.pool->record_stream(large, 0).ok());
         if (i % 2 == 0) CHECK(world.place.backend->fill(large, 1, 64, stream).ok());
         world.give(large);
         world.give(small);
         CHECK(world.pool->retire_stream(stream).ok());
         CHECK(world.place.backend->stream_destroy(stream).ok());
       }});
}

TEST(requests_that_fail) {
  run({"out of memory", 20, 1, with([](PoolConfig& config) { config.limit = 32 * kMiB; }),
       [](World& world, std::uint64_t) {
         churn(world, (1 + world.random.below(12)) * kMiB, world.random.of(world.streams), 6);
       }});
}

TEST(trims_and_merges) {
  run({"trim", 100, 1, with([](PoolConfig& config) { config.release_threshold = 16 * kMiB; }),
       [](World& world, std::uint64_t i) {
         for (int n = 0; n < 5; ++n)
           churn(world, 1 + world.random.below(8 * kMiB), world.random.of(world.streams), 20);
         CHECK((i % 3 == 0 ? world.pool->trim(world.random.below(64 * kMiB), i % 2 == 0)
                           : world.pool->coalesce())
                   .ok());
       }});
}

TEST(batches) {
  run({"batches", 20, 1, {}, [](World& world, std::uint64_t i) {
         std::vector<Address> out;
         CHECK(world.pool
                   ->allocate_batch({100, 5000, (1 + i % 7) * 100 * kKiB, kMiB}, world.streams[i % 2], 0, out,
                                    nullptr)
                   .ok());
         for (const Address address : out) world.give(address);
       }});
}

TEST(zeroed_memory) {
  run({"zeroing", 20, 1,
       with([](PoolConfig& config) { config.zero_on_allocate = config.zero_on_free = true; }),
       [](World& world, std::uint64_t i) {
         world.give(world.get(1 + world.random.below(64 * kKiB), world.streams[i % 2]));
       }});
}

TEST(a_journal_and_a_recording) {
  run({"journal", 4, 1, with([](PoolConfig& config) { config.journal = 256; }),
       [](World& world, std::uint64_t i) {
         if (i == 0) world.pool->start_recording(1 << 16);
         world.give(world.get(1 + world.random.below(4 * kMiB), world.streams[i % 2],
                              static_cast<std::uint32_t>(i)));
         if (i % 100 != 0) return;
         std::vector<JournalEntry> entries;
         CHECK(world.pool->take_recorded(entries) == 0);
       }});
}

TEST(looking) {
  run({"looking", 100, 1, {}, [](World& world, std::uint64_t i) {
         churn(world, 1 + world.random.below(2 * kMiB), world.streams[i % 2], 20);
         (void)world.pool->stats();
         (void)world.pool->snapshot();
         BlockInfo info;
         (void)world.pool->find(world.held[0], &info);
       }});
}

TEST(growable_buffers) {
  for (const Place& place : {on_model(true), on_host()}) {
    World world(place, {}, 1);
    expect_bounded(
        "growables", place, 200,
        [&](std::uint64_t i) {
          Address buffer = 0;
          REQUIRE(world.pool->growable_open(64 * kMiB, world.streams[i % 2], &buffer).ok());
          for (const std::uint64_t slots : {1, 7, 3, 12})
            CHECK(world.pool->growable_resize(buffer, (slots + i % 3) * kSlotBytes, 0, 0).ok());
          CHECK(world.pool->growable_close(buffer).ok());
        },
        [&] { world.rest(); });
  }
}

TEST(suspended_memory) {
  for (const Place& place : {on_model(true), on_host()}) {
    World world(place, {}, 1);
    const auto store = std::make_shared<Pool>(std::make_shared<HostBackend>(kGiB),
                                              with([](PoolConfig& config) { config.pages = false; }));
    expect_bounded(
        "suspend", place, 2000,
        [&](std::uint64_t i) {
          for (int n = 0; n < 4; ++n)
            churn(world, (1 + world.random.below(6)) * kMiB, world.random.of(world.streams), 6);
          std::uint64_t bytes = 0;
          const bool keep = place.model == nullptr && i % 2 == 0;
          CHECK(world.pool->suspend({}, keep, keep ? store : nullptr, &bytes, nullptr).ok());
          CHECK(world.pool->resume({}, &bytes, nullptr).ok());
        },
        [&] {
          world.rest();
          CHECK(store->trim(0, true).ok());
        });
  }
}

TEST(arenas) {
  for (const Place& place : everywhere()) {
    World world(place, {}, 2);
    ArenaOptions options;
    options.stream = world.streams[1];
    std::unique_ptr<Arena> kept;
    REQUIRE(Arena::open(world.pool, options, &kept).ok());
    expect_bounded(
        "arenas", place, 50,
        [&](std::uint64_t i) {
          std::unique_ptr<Arena> brief;
          CHECK(Arena::open(world.pool, {}, &brief).ok());
          for (Arena* const arena : {kept.get(), brief.get()}) {
            Address out = 0;
            for (int n = 0; n < 4; ++n) CHECK(arena->allocate(1 + world.random.below(kMiB), 0, &out).ok());
            Arena::Mark mark;
            CHECK(arena->mark(&mark).ok() && arena->allocate(100, 0, &out).ok() && arena->rewind(mark).ok());
            CHECK(arena->record_stream(world.streams[2]).ok() && arena->reset(i % 5 == 0).ok());
          }
          CHECK(brief->close().ok());
        },
        [&] {
          CHECK(kept->trim().ok());
          world.rest();
        });
    CHECK(kept->close().ok());
  }
}

TEST(captured_graphs) {
  const Place place = on_model(true);
  World world(place, {}, 1);
  expect_bounded(
      "graphs", place, 100,
      [&](std::uint64_t) {
        std::uint64_t graph = 0;
        const StreamHandle stream = world.streams[1];
        const Address before = world.get(kMiB, stream);
        CHECK(place.model->capture_begin(stream).ok());
        world.give(before);
        world.give(world.get(3 * kMiB, stream));
        CHECK(place.model->capture_end(stream, &graph).ok());
        CHECK(place.model->graph_launch(graph, stream).ok() && place.model->graph_destroy(graph).ok());
      },
      [&] { world.rest(); });
}

TEST(pools_that_come_and_go) {
  for (const Place& place : everywhere()) {
    StreamHandle side = 0;
    REQUIRE(place.backend->stream_create(&side).ok());
    expect_bounded(
        "pools", place, 500,
        [&](std::uint64_t i) {
          Pool pool(place.backend, {});
          Address one = 0, two = 0;
          CHECK(pool.allocate(4096, 0, 0, 0, &one).ok() && pool.allocate(5 * kMiB, side, 0, 0, &two).ok());
          CHECK(pool.record_stream(one, side).ok() && pool.free(one).ok());
          if (i % 2 == 0) CHECK(pool.close().ok());
        },
        [&] { CHECK(place.backend->synchronize().ok()); });
    CHECK(place.backend->stream_destroy(side).ok());
  }
}

TEST(frees_by_other_threads) {
  for (const Place& place : everywhere()) {
    World world(place, {}, 2);
    expect_bounded(
        "other threads", place, 1000,
        [&](std::uint64_t i) {
          std::vector<Address> blocks;
          for (int n = 0; n < 100; ++n)
            blocks.push_back(world.get(1 + world.random.below(300 * kKiB), world.streams[i % 3]));
          std::thread([&] {
            for (const Address block : blocks) CHECK(world.pool->free(block).ok());
          }).join();
        },
        [&] { world.rest(); });
  }
}

// ---- plugs ------------------------------------------------------------------------------------------------

TEST(the_functions_for_pytorch) {
  for (const Place& place : {on_model(true), on_model(false)}) {
    World world(place, {}, 1);
    Plug::set_pool(0, world.pool);
    void* const side = reinterpret_cast<void*>(world.streams[1]);
    expect_bounded(
        "PyTorch's functions", place, 20,
        [&](std::uint64_t i) {
          void* const large = vram_plug_allocate((2 + world.random.below(59)) * kMiB, 0, nullptr);
          void* const small =
              vram_plug_allocate(1 + world.random.below(100'000), 0, i % 2 == 0 ? side : nullptr);
          if (i % 7 == 0) vram_plug_record_stream(large, side);
          vram_plug_free(small, 0, 0, nullptr);
          vram_plug_free(large, 0, 0, nullptr);
          if (i % 200 == 0) vram_plug_empty_cache();  // often, so that both halves have seen the worst of it
          if (i % 50 != 0) return;
          const HeapId id{i, 1};
          vram_plug_heap_begin(0, id, [side](void* stream) { return stream == side; });
          vram_plug_free(vram_plug_allocate(3 * kMiB, 0, side), 0, 0, side);
          vram_plug_heap_end(0, id);
          vram_plug_heap_release(0, id);
        },
        [&] { world.rest(); });
    Plug::set_pool(0, nullptr);
  }
}

TEST(the_c_interface) {
  for (const Place& place : everywhere()) {
    vram_device* const device = c::adopt(place.backend);
    vram_pool* pool = nullptr;
    REQUIRE(vram_pool_create(device, nullptr, &pool) == VRAM_OK);
    vram_stream side = nullptr;
    REQUIRE(vram_stream_create(device, &side) == VRAM_OK);
    Random random(3);
    expect_bounded(
        "C", place, 200,
        [&](std::uint64_t i) {
          void* blocks[4] = {};
          // Now and then as a framework's steps: large ones of ever other sizes beside another stream.
          const bool large = i % 10 == 0;
          for (void*& block : blocks) {
            const std::uint64_t size = large ? (2 + random.below(59)) * kMiB : 1 + random.below(100'000);
            CHECK(vram_pool_allocate(pool, size, i % 2 == 0 ? side : nullptr, &block) == VRAM_OK);
          }
          CHECK(vram_pool_record_stream(pool, blocks[0], i % 2 == 0 ? nullptr : side) == VRAM_OK);
          for (void* const block : blocks) CHECK(vram_pool_free(pool, block) == VRAM_OK);
          CHECK(vram_pool_free(pool, &random) == VRAM_BAD_POINTER);  // and its words
          vram_stream brief = nullptr;
          CHECK(vram_stream_create(device, &brief) == VRAM_OK &&
                vram_stream_wait(device, brief, side) == VRAM_OK);
          CHECK(vram_launch(device, [](void*) {}, nullptr, brief) == VRAM_OK);
          CHECK(vram_stream_destroy(device, brief) == VRAM_OK);
          vram_arena* arena = nullptr;
          CHECK(vram_arena_create(pool, nullptr, &arena) == VRAM_OK);
          CHECK(vram_arena_allocate(arena, 1000, 0, blocks) == VRAM_OK &&
                vram_arena_reset(arena, 0) == VRAM_OK);
          CHECK(vram_arena_destroy(arena) == VRAM_OK);
          if (i % 20 != 0) return;
          vram_pool* other = nullptr;
          CHECK(vram_pool_create(device, nullptr, &other) == VRAM_OK);
          CHECK(vram_pool_allocate(other, 3 * kMiB, side, blocks) == VRAM_OK);
          CHECK(vram_pool_destroy(other) == VRAM_OK);
        },
        [&] { CHECK(vram_device_synchronize(device) == VRAM_OK && vram_pool_trim(pool, 0, 1) == VRAM_OK); });
    CHECK(vram_stream_destroy(device, side) == VRAM_OK && vram_pool_destroy(pool) == VRAM_OK);
    CHECK(vram_device_close(device) == VRAM_OK);
  }
}

TEST_MAIN()
