// The functions that other libraries call, with what they are known to pass: size 0, null, foreign pointers,
// wrong sizes and devices.
#include "plug/plug.hpp"

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plug/engine.h"
#include "plug/pluggable.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::World;

namespace {

// A pool on a model device, plugged in. What was plugged in once is kept forever, so tests with the same
// limit share one, and leave nothing live in it.
struct Plugged {
  explicit Plugged(std::uint64_t limit = 0) : world(world_of(limit)) { Plug::set_pool(0, world.pool); }
  ~Plugged() { Plug::set_pool(0, nullptr); }
  static World& world_of(std::uint64_t limit) {
    static std::map<std::uint64_t, World> worlds;
    PoolConfig config;
    config.limit = limit;
    return worlds.try_emplace(limit, kGiB, config).first->second;
  }
  void* on() const { return reinterpret_cast<void*>(stream); }

  World& world;
  const std::shared_ptr<ModelBackend>& device = world.device;
  const std::shared_ptr<Pool>& pool = world.pool;
  const StreamHandle stream = 1;
};

}  // namespace

TEST(allocations_and_frees_reach_the_pool) {
  Plugged world;
  void* const one = vram_plug_allocate(1000, 0, world.on());
  REQUIRE(one != nullptr && world.pool->live_bytes() == 1024);
  vram_plug_free(one, 77, 0, nullptr);  // neither the size nor the stream need be right
  CHECK(world.pool->live_bytes() == 0);
}

TEST(padding_is_allocated_and_not_requested) {
  Plugged world;
  Address address = 0;
  REQUIRE(Plug::allocate_padded(0, 5000, 8192, world.stream, &address, nullptr).ok());
  BlockInfo block;
  REQUIRE(world.pool->info(address, &block).ok());
  CHECK(block.bytes == 8192 && block.requested == 5000 && world.pool->live_bytes() == 8192);
  CHECK(world.pool->stats().requested[0].current == 5000);
  CHECK(Plug::allocate_padded(0, 5000, 4096, world.stream, &address, nullptr).code == Code::invalid);
  CHECK(Plug::free(block.address).ok() && world.pool->stats().requested[0].current == 0);
}

TEST(nothing_and_strangers_are_taken_in_stride) {
  Plugged world;
  CHECK(vram_plug_allocate(0, 0, nullptr) == nullptr);
  // A size whose count of units wraps is not that of a small block that lies ready.
  vram_plug_free(vram_plug_allocate(512, 0, nullptr), 512, 0, nullptr);
  CHECK(vram_plug_try_allocate(kMaxSpaceBytes + 512, 0, nullptr) == nullptr);
  vram_plug_free(nullptr, 0, 0, nullptr);
  vram_plug_record_stream(nullptr, world.on());
  int stranger = 0;
  vram_plug_free(&stranger, 4, 0, nullptr);
  vram_plug_record_stream(&stranger, world.on());
  std::size_t size = 5;
  CHECK(vram_plug_base(&stranger, &size) == &stranger && size == 5);
  std::string why;
  CHECK(world.pool->check(&why) && world.pool->live_bytes() == 0);
}

// As a training job does: tensors of many sizes on one stream while another stream exists.
TEST(a_long_job_holds_few_events) {
  Plugged world(900 * kMiB);
  void* const side = vram_plug_allocate(kMiB, 0, nullptr);
  const std::uint64_t before = world.device->counts().events;
  std::uint64_t random = 1;
  for (int i = 0; i < 200'000 / testing::kSlowdown; i += 2) {
    void* pair[2];
    for (void*& each : pair) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      each = vram_plug_allocate(2 * kMiB + (random >> 33) % (58 * kMiB), 0, world.on());
    }
    for (void* each : pair) vram_plug_free(each, 0, 0, world.on());
    REQUIRE(world.device->counts().events <= before + 2 * Fences::kMostFences);
  }
  vram_plug_free(side, kMiB, 0, nullptr);
  CHECK(world.pool->live_bytes() == 0);
}

TEST(memory_of_an_earlier_pool_is_freed_there) {
  Plugged earlier;
  void* const old = vram_plug_allocate(4096, 0, nullptr);
  {
    Plugged later(512 * kMiB);
    vram_plug_free(old, 4096, 0, nullptr);
    CHECK(earlier.pool->live_bytes() == 0 && later.pool->live_bytes() == 0);
  }
}

TEST(a_use_recorded_inside_an_allocation_keeps_it) {
  Plugged world;
  char* const block = static_cast<char*>(vram_plug_allocate(2 * kMiB, 0, nullptr));
  std::size_t size = 0;
  CHECK(vram_plug_base(block + 4096, &size) == block && size == 2 * kMiB);
  REQUIRE(world.device->work(world.stream, 1, reinterpret_cast<Address>(block), 2 * kMiB).ok());
  vram_plug_record_stream(block + 4096, world.on());
  const std::uint64_t before = world.pool->stats().pending_blocks;
  vram_plug_free(block, 2 * kMiB, 0, nullptr);
  CHECK(world.pool->stats().pending_blocks == before + 1);
}

TEST(recorded_streams_are_reported_with_the_start_of_their_block) {
  static std::vector<std::pair<Address, StreamHandle>> told;
  told.clear();
  Plugged world;
  char* const block = static_cast<char*>(vram_plug_allocate(2 * kMiB, 0, nullptr));
  Plug::set_recorded([](int, Address start, StreamHandle stream) { told.emplace_back(start, stream); });
  vram_plug_record_stream(block + 4096, world.on());
  int stranger = 0;
  vram_plug_record_stream(&stranger, world.on());
  Plug::set_recorded(nullptr);
  vram_plug_record_stream(block, world.on());
  CHECK(told.size() == 1 && told[0].first == reinterpret_cast<Address>(block) &&
        told[0].second == world.stream);
  vram_plug_free(block, 2 * kMiB, 0, nullptr);
}

TEST(out_of_memory_is_thrown) {
  Plugged world(4 * kMiB);
  bool thrown = false;
  try {
    (void)vram_plug_allocate(64 * kMiB, 0, nullptr);
  } catch (const std::runtime_error& error) {
    thrown = std::string(error.what()).find("out of memory") != std::string::npos;
  }
  CHECK(thrown);
  thrown = false;
  set_throw_out_of_memory([](const char* message) { throw std::length_error(message); });
  try {
    (void)vram_plug_allocate(64 * kMiB, 0, nullptr);
  } catch (const std::length_error&) {
    thrown = true;
  }
  set_throw_out_of_memory(nullptr);
  CHECK(thrown);
  thrown = false;
  try {
    (void)vram_plug_allocate(64, 5, nullptr);
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown);
}

TEST(who_words_its_own_error_gets_null) {
  Plugged world(4 * kMiB);
  CHECK(vram_plug_try_allocate(64 * kMiB, 0, nullptr) == nullptr);
  CHECK(vram_plug_try_allocate(0, 0, nullptr) == nullptr);
  void* const block = vram_plug_try_allocate(kMiB, 0, nullptr);
  CHECK(block != nullptr);
  vram_plug_free(block, kMiB, 0, nullptr);
}

namespace {
Plugged* made = nullptr;
}  // namespace

TEST(a_pool_is_made_on_first_use_and_allocations_are_labelled) {
  Plugged world;
  Plug::set_pool(0, nullptr);
  made = &world;
  Plug::set_make([](int device) {
    if (device == 3) Plug::set_pool(3, made->pool);
  });
  Plug::set_label([](int device) { return std::uint32_t{40} + static_cast<std::uint32_t>(device); });
  void* const block = vram_plug_allocate(4096, 3, nullptr);
  CHECK(block != nullptr && world.pool->live_bytes() == 4096);
  BlockInfo info;
  CHECK(world.pool->info(reinterpret_cast<Address>(block), &info).ok() && info.tag == 43);
  vram_plug_free(block, 4096, 3, nullptr);
  void* const cached = vram_plug_allocate(4096, 3, nullptr);
  CHECK(world.pool->info(reinterpret_cast<Address>(cached), &info).ok() && info.tag == 43);
  vram_plug_free(cached, 4096, 3, nullptr);
  Plug::set_label(nullptr);
  CHECK(world.pool->live_bytes() == 0);
  Plug::set_make(nullptr);
  Plug::set_pool(3, nullptr);
}

TEST(a_fraction_is_a_limit_and_emptying_gives_back) {
  Plugged world;
  vram_plug_memory_fraction(0.25, 0);
  CHECK(world.pool->config().limit == 256 * kMiB);
  vram_plug_empty_cache();
  CHECK(world.pool->stats().reserved.current == 0);
  vram_plug_memory_fraction(0.0, 0);
  CHECK(vram_plug_try_allocate(512, 0, nullptr) == nullptr);
  vram_plug_memory_fraction(0.25, 0);
  vram_plug_free(vram_plug_allocate(32 * kMiB, 0, nullptr), 32 * kMiB, 0, nullptr);
  CHECK(world.pool->stats().reserved.current == 32 * kMiB);
  vram_plug_empty_cache();
  CHECK(world.pool->stats().reserved.current == 0);
}

TEST(a_peer_may_use_what_is_mapped_and_what_will_be) {
  Plugged plugged;
  void* const early = vram_plug_allocate(8 * kMiB, 0, plugged.on());
  const std::uint64_t mapped = plugged.device->calls("map");
  const std::uint64_t before = plugged.device->calls("set_access");
  CHECK(mapped > 0);
  CHECK(vram_engine()->add_peer(0, 1) != 0);
  CHECK(plugged.device->calls("set_access") > before);
  CHECK(vram_engine()->add_peer(63, 1) == 0);
  vram_plug_free(early, 0, 0, plugged.on());
}

TEST(graph_pools_are_heaps) {
  Plugged world;
  void* const stream = world.on();
  const HeapId id{0, 1};
  vram_plug_heap_begin(0, id, [stream](void* each) { return each == stream; });
  void* const inside = vram_plug_allocate(2 * kMiB, 0, stream);
  vram_plug_free(inside, 2 * kMiB, 0, stream);
  vram_plug_heap_end(0, id);
  void* const outside = vram_plug_allocate(2 * kMiB, 0, stream);
  CHECK(outside != inside);
  vram_plug_free(outside, 2 * kMiB, 0, stream);
  vram_plug_heap_release(0, id);
  vram_plug_heap_release(0, id);  // once more does nothing
  std::string why;
  CHECK(world.pool->check(&why));
}

TEST_MAIN()
