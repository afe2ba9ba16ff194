// Pinned memory as other libraries use it: one pool, used on streams of several devices.
#include <memory>
#include <string>
#include <vector>

#include "backends/pinned.hpp"
#include "plug/engine_parts.hpp"
#include "plug/pinned.hpp"
#include "plug/plug.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::World;

namespace {

// Two devices with their pools, and a pool of pinned memory in the order of the first one.
struct Plugged {
  Plugged() {
    Plug::set_pool(0, first.pool);
    Plug::set_pool(1, second.pool);
    PinnedPlug::set_pool(pinned);
  }
  ~Plugged() {
    PinnedPlug::set_pool(nullptr);
    Plug::set_pool(0, nullptr);
    Plug::set_pool(1, nullptr);
  }
  VramPinnedStats stats() const {
    VramPinnedStats stats;
    vram_engine_pinned_stats(&stats);
    return stats;
  }
  World first{kGiB, {}, vram::testing::manual()};
  World second{kGiB, {}, vram::testing::manual()};
  std::shared_ptr<PinnedBackend> memory = std::make_shared<PinnedBackend>(first.device);
  std::shared_ptr<Pool> pinned = std::make_shared<Pool>(memory, vram::testing::plain());
};

void* get(std::size_t bytes) {
  const char* why = "";
  return vram_engine_pinned_allocate(0, bytes, &why);
}
void* on(StreamHandle stream) { return reinterpret_cast<void*>(stream); }

}  // namespace

TEST(the_pool_is_made_on_first_use) {
  static Plugged* world = nullptr;
  const char* why = "";
  CHECK(vram_engine_pinned_allocate(0, 100, &why) == nullptr &&
        std::string(why).find("no pool") != std::string::npos);
  int number = 0;
  CHECK(vram_engine_pinned_free(&number) == 0 && vram_engine_pinned_record(&number, 0, nullptr) == 0);
  PinnedPlug::set_make([](int) { world = new Plugged(); });
  void* const address = get(100);
  REQUIRE(address != nullptr);
  CHECK(vram_engine_pinned_free(address) == 1 && vram_engine_pinned_free(address) == 0);
  PinnedPlug::set_make(nullptr);
  delete world;
}

TEST(reuse_waits_for_the_streams_that_use_a_block) {
  Plugged world;
  char* const address = static_cast<char*>(get(4096));
  REQUIRE(address != nullptr);
  CHECK(world.first.device->work(1, 7).ok());
  CHECK(vram_engine_pinned_record(address + 100, 0, on(1)) == 1);
  CHECK(vram_engine_pinned_free(address) == 1);
  CHECK(world.stats().active.current == 1);
  void* const other = get(4096);
  CHECK(other != address);
  CHECK(world.first.device->run_all());
  CHECK(world.stats().active.current == 1);
  CHECK(vram_engine_pinned_free(other) == 1);
}

TEST(reuse_waits_for_streams_of_other_devices) {
  Plugged world;
  char* const address = static_cast<char*>(get(4096));
  CHECK(world.second.device->work(2, 7).ok());
  CHECK(vram_engine_pinned_record(address + 4000, 1, on(2)) == 1);
  CHECK(vram_engine_pinned_record(address, 1, on(2)) == 1);
  CHECK(vram_engine_pinned_free(address) == 1);
  CHECK(world.stats().active.current == 1);
  void* const other = get(4096);
  CHECK(other != address);
  CHECK(world.second.device->run_all());
  CHECK(world.stats().active.current == 1);
  CHECK(world.second.device->counts().events == 0);
  CHECK(vram_engine_pinned_free(other) == 1 && world.stats().active.current == 0);
}

TEST(without_events_the_host_waits_for_other_devices) {
  for (const char* call : {"event_create", "event_record"}) {
    Plugged world;
    void* const address = get(4096);
    CHECK(world.second.device->work(2, 7).ok());
    CHECK(vram_engine_pinned_record(address, 1, on(2)) == 1);
    CHECK(world.second.device->fail(call, 1, {Code::failed, 2, call}));
    CHECK(vram_engine_pinned_free(address) == 1);
    CHECK(world.second.device->counts().queued == 0);  // all work was waited for
    CHECK(world.stats().active.current == 0 && world.second.device->counts().events == 0);
  }
}

TEST(sizes_just_above_powers_of_two_waste_little) {
  Plugged world;
  std::uint64_t requested = 0;
  std::vector<void*> blocks;
  for (std::uint64_t size = 4 * kKiB; size <= 64 * kMiB; size *= 2)
    for (int i = 0; i < (size <= kMiB ? 32 : 4); ++i) {
      blocks.push_back(get(size + 1));
      requested += size + 1;
    }
  const VramPinnedStats stats = world.stats();
  CHECK(stats.active.current == blocks.size());
  CHECK(stats.reserved_bytes.current * 10 <= requested * 11);  // with powers of two it would be twice
  for (void* block : blocks) CHECK(vram_engine_pinned_free(block) == 1);
  vram_engine_pinned_trim();
  CHECK(world.stats().reserved_bytes.current == 0);
  CHECK(world.stats().reserved.current == 0);
  CHECK(world.stats().reserved_bytes.peak == stats.reserved_bytes.current);
  vram_engine_pinned_reset_peaks();
  CHECK(world.stats().reserved_bytes.peak == 0 && world.stats().active_bytes.peak == 0);
}

TEST_MAIN()
