// Heaps: memory kept apart for graphs and for pools of the program. Plain segments in a pool with pages,
// other sources of memory, lending before a request fails, and restoring what was live at an earlier moment.
#include <map>
#include <optional>
#include <thread>

#include "oracle.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::both_kinds;
using vram::testing::lagging;
using vram::testing::manual;
using vram::testing::Random;
using vram::testing::World;

namespace {

constexpr HeapId kHeap{0, 7};

bool everyone(StreamHandle) { return true; }

HeapOptions plain_heap(std::shared_ptr<Source> source = nullptr) {
  HeapOptions options;
  options.plain = true;
  options.source = std::move(source);
  return options;
}

// A scope in which a heap serves all streams.
class Within {
 public:
  Within(const World& world, HeapId id) : pool_(*world.pool), id_(id) {
    CHECK(pool_.heap_begin(id_, everyone).ok());
  }
  ~Within() { CHECK(pool_.heap_end(id_).ok() && pool_.heap_release(id_).ok()); }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  Pool& pool_;
  const HeapId id_;
};

// Memory from another device, counted.
class CountedSource final : public Source {
 public:
  explicit CountedSource(std::uint64_t* bytes, int* alive) : bytes_(bytes), alive_(alive) { ++*alive_; }
  ~CountedSource() override { --*alive_; }
  Status reserve(std::uint64_t bytes, Address* out) override {
    if (fails) return {Code::out_of_memory, 0, "source"};
    const Status status = device_.reserve(bytes, out);
    *out += kFar;
    if (status.ok()) *bytes_ += bytes;
    return status;
  }
  Status release(Address address, std::uint64_t bytes) override {
    *bytes_ -= bytes;
    return device_.release(address - kFar, bytes);
  }
  static constexpr Address kFar = Address{1} << 46;
  bool fails = false;

 private:
  ModelBackend device_{kGiB, {}};
  std::uint64_t* bytes_;
  int* alive_;
};

std::vector<SegmentInfo> of_heap(const World& world, HeapId id) {
  std::vector<SegmentInfo> all;
  for (const SegmentInfo& each : world.pool->backed_segments())
    if (each.heap == id) all.push_back(each);
  return all;
}

std::uint64_t backed_bytes(const World& world) {
  std::uint64_t bytes = 0;
  for (const SegmentInfo& each : world.pool->backed_segments()) {
    std::uint64_t blocks = 0;
    for (const BlockInfo& block : each.blocks) {
      CHECK(block.address == each.address + blocks);
      blocks += block.bytes;
    }
    CHECK(blocks == each.bytes);
    bytes += each.bytes;
  }
  return bytes;
}

}  // namespace

// ---- which heap serves
// -------------------------------------------------------------------------------------

TEST(the_latest_heap_that_accepts_a_stream_serves) {
  World world;
  const HeapId inner{0, 8};
  REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok() && world.pool->heap_open(inner, plain_heap()).ok());
  CHECK(world.pool->heap_uses(kHeap) == 1 && world.pool->heap_uses({9, 9}) == 0);
  {
    const Within one(world, kHeap);
    CHECK(world.pool->heap_uses(kHeap) == 2);
    CHECK(world.get(kMiB) != 0);
    {
      const Within two(world, inner);
      CHECK(world.get(kMiB) != 0);
    }
    CHECK(world.get(kMiB) != 0);
  }
  CHECK(world.get(kMiB) != 0);
  CHECK(world.pool->heap_live(kHeap).size() == 2 && world.pool->heap_live(inner).size() == 1);
  CHECK(world.pool->heap_uses(kHeap) == 1 && world.good());
}

TEST(each_thread_ends_its_own) {
  World world;
  REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok());
  const auto mine = [me = std::this_thread::get_id()](StreamHandle) {
    return std::this_thread::get_id() == me;
  };
  REQUIRE(world.pool->heap_begin(kHeap, mine).ok());
  std::thread([&] {
    const auto other = [me = std::this_thread::get_id()](StreamHandle) {
      return std::this_thread::get_id() == me;
    };
    CHECK(world.get(kMiB) != 0 && world.pool->heap_live(kHeap).empty());
    CHECK(world.pool->heap_begin(kHeap, other).ok());
    CHECK(world.get(kMiB) != 0 && world.pool->heap_live(kHeap).size() == 1);
    CHECK(world.pool->heap_end(kHeap).ok() && world.pool->heap_release(kHeap).ok());
  }).join();
  CHECK(world.get(kMiB) != 0 && world.pool->heap_live(kHeap).size() == 2);
  REQUIRE(world.pool->heap_end(kHeap).ok());
  CHECK(world.get(kMiB) != 0 && world.pool->heap_live(kHeap).size() == 2);
  Address cached = world.get(1000);
  REQUIRE(world.pool->free(cached).ok());
  CHECK(world.pool->try_cached(1000, 0, 0, &cached));  // no heap is open, so caches serve again
  CHECK(world.good());
}

// ---- plain segments
// ----------------------------------------------------------------------------------------

TEST(plain_segments_have_the_sizes_that_PyTorch_uses) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok());
    const Address outside = world.get(4 * kMiB);
    const std::uint64_t before = world.reserved();
    const Within heap(world, kHeap);
    const std::vector<std::pair<std::uint64_t, std::uint64_t>> cases = {
        {kMiB, 2 * kMiB},       {kMiB, 2 * kMiB},          {kMiB, 4 * kMiB},          {kMiB + 1, 24 * kMiB},
        {9 * kMiB, 24 * kMiB},  {9 * kMiB + 1, 24 * kMiB}, {9 * kMiB + 1, 44 * kMiB}, {10 * kMiB, 44 * kMiB},
        {10 * kMiB, 54 * kMiB}, {11 * kMiB, 66 * kMiB}};
    for (const auto& [size, reserved] : cases) {
      const Address address = world.get(size);
      CHECK(address != 0 && world.reserved() - before == reserved);
      BlockInfo info;
      CHECK(world.pool->find(address + size / 2, &info).ok() && info.address == address);
    }
    for (const SegmentInfo& each : of_heap(world, kHeap)) CHECK(each.plain);
    CHECK(backed_bytes(world) == world.reserved());
    CHECK(world.pool->free(outside).ok() && world.good());
    CHECK(world.stats().reserved.peak >= before + 66 * kMiB);
  });
}

TEST(without_splitting_a_request_has_a_segment_of_its_own) {
  World world;
  HeapOptions options = plain_heap();
  options.no_split = true;
  REQUIRE(world.pool->heap_open(kHeap, options).ok());
  const Within heap(world, kHeap);
  const Address one = world.get(4 * kMiB), two = world.get(4 * kMiB), large = world.get(300 * kMiB);
  REQUIRE(one != 0 && two != 0 && large != 0);
  for (const SegmentInfo& each : of_heap(world, kHeap)) CHECK(each.blocks.size() == 1);
  CHECK(world.reserved() == 340 * kMiB);
  // Reused where it fits, and a much longer one only before the request fails.
  REQUIRE(world.pool->free(two).ok() && world.pool->free(large).ok());
  CHECK(world.get(6 * kMiB) == two && world.get(40 * kMiB) != large);
  REQUIRE(world.pool->set_limit(world.reserved()).ok());
  CHECK(world.get(40 * kMiB) == large && world.get(40 * kMiB) == 0);
  REQUIRE(world.pool->heap_set(kHeap, -1, 0).ok() && world.pool->free(one).ok());
  CHECK(world.get(2 * kMiB) == one && world.get(2 * kMiB) == one + 2 * kMiB);
  CHECK(world.good());
}

TEST(memory_of_a_source_is_counted_and_goes_back_to_it) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    std::uint64_t bytes = 0;
    int alive = 0;
    REQUIRE(world.pool->heap_open(kHeap, plain_heap(std::make_shared<CountedSource>(&bytes, &alive))).ok());
    Address kept = 0, gone = 0;
    {
      const Within heap(world, kHeap);
      kept = world.get(30 * kMiB, 1);
      gone = world.get(12 * kMiB);
      CHECK(kept > CountedSource::kFar && bytes == 42 * kMiB && world.reserved() == bytes);
      REQUIRE(world.pool->set_limit(50 * kMiB).ok());
      CHECK(world.get(12 * kMiB) == 0);  // the limit includes it
      REQUIRE(world.pool->set_limit(0).ok());
    }
    REQUIRE(world.pool->free(gone).ok());
    REQUIRE(world.pool->trim(0, true).ok() && world.pool->heap_trim(kHeap, true).ok());
    CHECK(bytes == 42 * kMiB);  // it is in use
    REQUIRE(world.pool->heap_release(kHeap).ok());
    REQUIRE(world.pool->heap_trim(kHeap, true).ok());
    CHECK(bytes == 30 * kMiB && world.reserved() == bytes && alive == 1);
    BlockInfo info;
    CHECK(world.pool->info(kept, &info).ok());
    CHECK(world.get(30 * kMiB) < CountedSource::kFar);
    REQUIRE(world.pool->free(kept).ok() && world.pool->trim(0, true).ok());
    CHECK(bytes == 0 && alive == 0 && world.good());
  });
}

TEST(a_source_that_has_no_memory_or_a_crooked_address_is_a_failure) {
  struct Crooked final : Source {
    Status reserve(std::uint64_t, Address* out) override {
      *out = (Address{1} << 46) + 8;
      return {};
    }
    Status release(Address, std::uint64_t) override { return {}; }
  };
  World world;
  std::uint64_t bytes = 0;
  int alive = 0;
  auto source = std::make_shared<CountedSource>(&bytes, &alive);
  source->fails = true;
  REQUIRE(world.pool->heap_open(kHeap, plain_heap(source)).ok());
  REQUIRE(world.pool->heap_open({0, 8}, plain_heap(std::make_shared<Crooked>())).ok());
  for (const HeapId id : {kHeap, HeapId{0, 8}}) {
    const Within heap(world, id);
    CHECK(world.get(kMiB) == 0 && world.reserved() == 0);
  }
  CHECK(world.good());
}

// What is live when a heap ends is used in the stream's order until it is freed, so its memory is not
// released before the stream has come that far.
TEST(blocks_that_outlive_their_heap_wait_for_the_stream) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config, manual());
    REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok());
    Address kept = 0;
    {
      const Within heap(world, kHeap);
      kept = world.get(20 * kMiB, 1);
    }
    REQUIRE(world.pool->heap_release(kHeap).ok());
    world.device->run_all();
    REQUIRE(world.pool->trim(0, false).ok());
    REQUIRE(world.device->work(1, 1, kept, 20 * kMiB).ok());
    REQUIRE(world.pool->free(kept).ok() && world.pool->trim(0, false).ok());
    CHECK(world.reserved() == 20 * kMiB);
    world.device->run_all();
    REQUIRE(world.pool->trim(0, false).ok());
    CHECK(world.reserved() == 0 && world.good());
  });
}

TEST(other_streams_get_nothing_of_a_heap_in_use) {
  both_kinds([](const PoolConfig& config) {
    World world(64 * kMiB, config);
    REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok());
    {
      const Within heap(world, kHeap);
      REQUIRE(world.pool->free(world.get(40 * kMiB, 1)).ok());
    }
    world.device->run_all();
    CHECK(world.get(30 * kMiB, 1) == 0 && world.get(30 * kMiB, 0) == 0 && world.get(20 * kMiB, 2) != 0);
    REQUIRE(world.pool->heap_release(kHeap).ok());
    CHECK(world.get(30 * kMiB, 0) != 0 && world.good());
  });
}

TEST(a_heap_that_allows_it_lends_before_a_request_fails) {
  both_kinds([](const PoolConfig& config) {
    World world(80 * kMiB, config, manual());
    HeapOptions lends = plain_heap();
    lends.use_on_oom = true;
    const HeapId keeps{0, 8};
    REQUIRE(world.pool->heap_open(kHeap, lends).ok() && world.pool->heap_open(keeps, plain_heap()).ok());
    Address a = 0, b = 0;
    {
      const Within heap(world, keeps);
      a = world.get(40 * kMiB);
    }
    {
      const Within heap(world, kHeap);
      b = world.get(40 * kMiB, 1);
    }
    CHECK(a != 0 && b != 0 && world.get(40 * kMiB) == 0);
    REQUIRE(world.device->work(1, 1, b, 40 * kMiB).ok());
    REQUIRE(world.pool->free(a).ok() && world.pool->free(b).ok());
    const Address c = world.get(30 * kMiB);
    CHECK(c == b && world.device->counts().queued == 0);  // after the work of the heap's stream
    CHECK(world.get(30 * kMiB) == 0);
    CHECK(world.pool->heap_live(kHeap).empty());
    REQUIRE(world.pool->free(c).ok());
    {
      const Within heap(world, kHeap);
      CHECK(world.get(20 * kMiB, 1) == b);
    }
    REQUIRE(world.pool->heap_set(kHeap, 0, -1).ok());
    CHECK(world.get(10 * kMiB) == 0 && world.good());
  });
}

TEST(suspending_leaves_plain_segments_alone) {
  World world;
  REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok());
  Address in_heap = 0;
  {
    const Within heap(world, kHeap);
    in_heap = world.get(20 * kMiB, 1);
  }
  const Address other = world.get(20 * kMiB, 1);
  std::uint64_t given = 0, taken = 0;
  REQUIRE(world.pool->suspend(nullptr, false, nullptr, &given, nullptr).ok());
  CHECK(given == 20 * kMiB && world.pool->suspended(other) && !world.pool->suspended(in_heap));
  CHECK(world.reserved() == 20 * kMiB && world.good());
  REQUIRE(world.pool->resume(nullptr, &taken, nullptr).ok());
  CHECK(taken == 20 * kMiB && world.good());
}

// ---- events
// ------------------------------------------------------------------------------------------------

TEST(a_listener_hears_of_memory_and_of_frees_that_waited) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config);
    std::map<Address, std::uint64_t> there;
    int completed = 0;
    bool in_heap = false;
    world.pool->listen([&](const PoolEvent& event) {
      if (event.kind == PoolEvent::Kind::reserved) CHECK(there.emplace(event.address, event.bytes).second);
      if (event.kind == PoolEvent::Kind::released) CHECK(there.erase(event.address) == 1);
      completed += event.kind == PoolEvent::Kind::completed;
      in_heap = in_heap || (event.heap == kHeap && event.plain && event.stream == 1);
    });
    REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok());
    const Address one = world.get(5 * kMiB);
    {
      const Within heap(world, kHeap);
      REQUIRE(world.pool->free(world.get(5 * kMiB, 1)).ok());
    }
    std::uint64_t sum = 0;
    for (const auto& [address, bytes] : there) sum += bytes;
    CHECK(in_heap && sum == world.reserved());
    REQUIRE(world.pool->record_stream(one, 2).ok() && world.pool->free(one).ok());
    REQUIRE(world.pool->heap_release(kHeap).ok());
    world.device->run_all();
    REQUIRE(world.pool->trim(0, true).ok());
    CHECK(completed == 1 && there.empty() && world.reserved() == 0);
    REQUIRE(world.get(5 * kMiB) != 0 && !there.empty());
    REQUIRE(world.pool->close().ok());
    CHECK(there.empty());
  });
}

// ---- restoring
// ---------------------------------------------------------------------------------------------

namespace {

using Live = std::map<Address, std::pair<std::uint64_t, std::uint64_t>>;  // address → bytes, requested

Live live_in(const World& world, HeapId id) {
  Live all;
  for (const BlockInfo& each : world.pool->heap_live(id)) all[each.address] = {each.bytes, each.requested};
  return all;
}

}  // namespace

TEST(what_was_live_in_a_heap_can_be_restored) {
  both_kinds([](const PoolConfig& config) {
    for (const bool plain : {false, true})
      for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        World world(2 * kGiB, config);
        Random random(seed);
        if (plain) REQUIRE(world.pool->heap_open(kHeap, plain_heap()).ok());
        REQUIRE(world.pool->heap_begin(kHeap, [](StreamHandle stream) { return stream != 0; }).ok());
        std::vector<std::vector<BlockInfo>> checkpoints = {{}};
        std::vector<Live> expected = {{}};
        static const std::vector<std::uint64_t> kSizes = {0,        1000,     300 * kKiB, kMiB,
                                                          3 * kMiB, 8 * kMiB, 21 * kMiB,  50 * kMiB};
        for (int step = 0; step < 150; ++step) {
          const std::uint64_t dice = random.below(100);
          const std::vector<BlockInfo> live = world.pool->heap_live(kHeap);
          if (dice < 50) {
            REQUIRE(world.get(random.of(kSizes), 1 + random.below(2)) != 0);
          } else if (dice < 80 && !live.empty()) {
            const BlockInfo& block = live[random.below(live.size())];
            REQUIRE(world.pool->free(block.address).ok());
          } else if (dice < 84) {
            REQUIRE(world.pool->free(world.get(random.of(kSizes))).ok());
          } else if (dice < 87) {
            REQUIRE(world.pool->trim(0, true).ok());
          } else if (dice < 93) {
            checkpoints.push_back(live);
            expected.push_back(live_in(world, kHeap));
          } else {
            const std::size_t i = random.below(checkpoints.size());
            REQUIRE(world.pool->heap_restore(kHeap, checkpoints[i]).ok());
            CHECK(live_in(world, kHeap) == expected[i]);
          }
          CHECK(backed_bytes(world) == world.reserved());
          REQUIRE(world.good());
        }
        REQUIRE(world.pool->heap_restore(kHeap, {}).ok());
        CHECK(world.stats().live == 0);
        REQUIRE(world.pool->heap_end(kHeap).ok());
        while (world.pool->heap_uses(kHeap) != 0) REQUIRE(world.pool->heap_release(kHeap).ok());
        world.device->run_all();
        REQUIRE(world.pool->trim(0, true).ok());
        CHECK(world.reserved() == 0 && world.good());
      }
  });
}

TEST(a_restore_that_is_impossible_changes_nothing) {
  both_kinds([](const PoolConfig& config) {
    World world(kGiB, config, manual());
    Address one = 0, used = 0, outside = world.get(4 * kMiB);
    REQUIRE(world.pool->heap_begin(kHeap, [](StreamHandle stream) { return stream == 1; }).ok());
    one = world.get(4 * kMiB, 1);
    used = world.get(4 * kMiB, 1);
    const std::vector<BlockInfo> both = world.pool->heap_live(kHeap);
    const Live before = live_in(world, kHeap);
    const auto refused = [&](std::vector<BlockInfo> blocks) {
      const Status status = world.pool->heap_restore(kHeap, blocks);
      CHECK(status.code == Code::invalid && live_in(world, kHeap) == before && world.good());
    };
    BlockInfo block = both.front();
    block.address = outside;
    refused({block});  // not in the heap
    block.address = 1;
    refused({block});
    block = both.front();
    refused({block, block});  // twice
    block.requested = block.bytes + 1;
    refused({block});
    block = both.front();
    block.bytes = kGiB * 100;
    refused({block});
    CHECK(world.pool->heap_restore({1, 1}, {}).code == Code::invalid);
    // Used by work outside of the heap: as it is it may stay; otherwise it waits, and is in the way.
    REQUIRE(world.pool->record_stream(used, 2).ok());
    REQUIRE(world.device->work(2, 1, used, 4 * kMiB).ok());
    CHECK(world.pool->heap_restore(kHeap, both).ok() && live_in(world, kHeap) == before);
    for (BlockInfo shorter : both) {
      if (shorter.address != used) continue;
      shorter.bytes = shorter.requested = kMiB;
      refused({shorter});
    }
    REQUIRE(world.pool->heap_restore(kHeap, {}).ok());
    CHECK(live_in(world, kHeap).empty() && world.stats().pending_blocks == 1);
    CHECK(world.pool->heap_restore(kHeap, both).code == Code::invalid);
    world.device->run_all();
    CHECK(world.pool->heap_restore(kHeap, both).ok() && live_in(world, kHeap) == before);
    // What was freed since is allocated again.
    REQUIRE(world.pool->free(one).ok() && world.good());
    CHECK(world.pool->heap_restore(kHeap, both).ok() && live_in(world, kHeap) == before && world.good());
  });
}

// ---- any sequence, and any failure
// ---------------------------------------------------------------------------

namespace {

// A fixed program with plain heaps beside ordinary streams; it carries on after whatever fails.
class Workload {
 public:
  Workload(const PoolConfig& config, std::uint64_t seed)
      : random_(seed), world(kCapacity, config, lagging()) {
    streams_ = {0};
    for (int i = 0; i < 2; ++i) {
      StreamHandle stream = 0;
      if (world.device->stream_create(&stream).ok()) streams_.push_back(stream);
    }
  }
  bool run(int steps, std::string* why) {
    for (int step = 0; step < steps; ++step) {
      act();
      if (world.good(why)) continue;
      *why += " (step " + std::to_string(step) + ")";
      return false;
    }
    return true;
  }
  void release_heaps() {
    for (const HeapId id : kIds) {
      while (world.pool->heap_uses(id) != 0) (void)world.pool->heap_release(id);
    }
    begun_.clear();
  }

 private:
  static constexpr std::uint64_t kCapacity = 120 * kMiB;
  static constexpr HeapId kIds[] = {{0, 1}, {0, 2}, {0, 3}};

  void act() {
    static const std::vector<std::uint64_t> kSizes = {0,        1000,     300 * kKiB, kMiB,     2 * kMiB,
                                                      3 * kMiB, 7 * kMiB, 12 * kMiB,  25 * kMiB};
    const std::uint64_t dice = random_.below(100);
    const HeapId id = kIds[random_.below(3)];
    const StreamHandle stream = random_.of(streams_);
    const std::size_t i = world.held.empty() ? 0 : random_.below(world.held.size());
    if (dice < 38) {
      (void)world.allocate(random_.of(kSizes), stream);
    } else if (dice < 43) {
      HeapOptions options;
      options.plain = id != kIds[2];
      options.no_split = options.plain && random_.chance(30);
      options.use_on_oom = id == kIds[0];
      (void)world.pool->heap_open(id, options);
    } else if (dice < 50) {
      if (begun_.size() < 2 &&
          world.pool->heap_begin(id, [stream](StreamHandle each) { return each == stream; }).ok())
        begun_.push_back(id);
    } else if (dice < 57) {
      if (begun_.empty()) return;
      (void)world.pool->heap_end(begun_.back());
      (void)world.pool->heap_release(begun_.back());
      begun_.pop_back();
    } else if (dice < 61) {
      const bool open = std::find(begun_.begin(), begun_.end(), id) != begun_.end();
      if (!open || world.pool->heap_uses(id) > 2) (void)world.pool->heap_release(id);
    } else if (dice < 63) {
      (void)world.pool->heap_trim(id, random_.chance(50));
    } else if (dice < 66) {
      (void)world.pool->trim(0, random_.chance(40));
    } else if (dice < 70) {
      world.device->advance(static_cast<double>(random_.below(150)));
    } else if (world.held.empty()) {
      return;
    } else if (dice < 78) {
      world.use(i);
    } else if (dice < 84) {
      (void)world.use_on(i, stream);
    } else {
      (void)world.free(i);
    }
  }

  Random random_;
  std::vector<StreamHandle> streams_;
  std::vector<HeapId> begun_;

 public:
  vram::testing::Watched world;
};

std::string left_behind(Workload& workload) {
  vram::testing::Watched& world = workload.world;
  while (!world.held.empty())
    if (!world.free(world.held.size() - 1).ok()) return "a live block cannot be freed";
  workload.release_heaps();
  if (!world.pool->trim(0, true).ok() || !world.pool->trim(0, true).ok()) return "trim fails";
  std::string why;
  if (!world.good(&why)) return why;
  const PoolStats stats = world.pool->stats();
  const ModelCounts counts = world.device->counts();
  if (stats.live + stats.pending_blocks + stats.cached != 0) return "blocks are left";
  if (stats.reserved.current != 0) return "the pool holds memory that it cannot give back";
  if (counts.page_bytes + counts.plain_bytes + counts.mappings != 0) return "the device has memory left";
  return "";
}

std::vector<PoolConfig> configs() {
  std::vector<PoolConfig> all(3);
  all[1].pages = false;
  all[2].cross_stream = CrossStream::wait;
  all[2].zero_on_allocate = all[2].zero_on_free = true;
  return all;
}

}  // namespace

TEST(any_sequence_of_heaps_keeps_the_order_of_uses) {
  for (const PoolConfig& config : configs())
    for (std::uint64_t seed = 1; seed <= 60 / vram::testing::kSlowdown; ++seed) {
      Workload workload(config, seed);
      std::string why;
      if (workload.run(400, &why)) why = left_behind(workload);
      if (!why.empty()) std::printf("seed %d: %s\n", static_cast<int>(seed), why.c_str());
      REQUIRE(why.empty());
    }
}

TEST(any_call_of_a_program_with_heaps_may_fail) {
  for (const PoolConfig& config : configs()) {
    std::string why;
    Workload whole(config, 5);
    REQUIRE(whole.run(200, &why));
    const std::uint64_t calls = whole.world.device->total_calls();
    for (std::uint64_t k = 1; k <= calls; k += vram::testing::sampling())
      for (const Code code : {Code::out_of_memory, Code::failed}) {
        Workload workload(config, 5);
        const std::uint64_t before = workload.world.device->total_calls();
        if (k <= before) continue;
        workload.world.device->fail_any(k - before, {code, 700, ""});
        if (workload.run(200, &why)) {
          workload.world.device->clear_failures();
          why = left_behind(workload);
        }
        if (!why.empty()) std::printf("call %d: %s\n", static_cast<int>(k), why.c_str());
        REQUIRE(why.empty());
      }
  }
}

TEST_MAIN()
