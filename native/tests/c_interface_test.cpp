// The C interface: what it promises of results, handles, pointers, structures and threads, and that nothing
// is lost when the device fails under it. Placement and order are tested with the core; how programs are
// built with the installed library is tested in tests/process/test_c.py.
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/model.hpp"
#include "oracle.hpp"
#include "state.hpp"
#include "testing.hpp"
#include "vram.h"

using namespace vram;
using vram::testing::holds_in_child;

namespace {

// Everything that is open, closed in the reverse order at the end of a test.
struct World {
  explicit World(const char* name = "host", const vram_pool_options* options = nullptr) {
    CHECK(vram_device_open(name, &device) == VRAM_OK);
    CHECK(vram_pool_create(device, options, &pool) == VRAM_OK);
  }
  ~World() {
    (void)vram_pool_destroy(pool);
    (void)vram_device_close(device);
  }
  vram_device* device = nullptr;
  vram_pool* pool = nullptr;
};

vram_pool_stats stats_of(vram_pool* pool) {
  vram_pool_stats stats = VRAM_POOL_STATS_INIT;
  CHECK(vram_pool_get_stats(pool, &stats) == VRAM_OK);
  return stats;
}

vram_arena_stats stats_of(vram_arena* arena) {
  vram_arena_stats stats = VRAM_ARENA_STATS_INIT;
  CHECK(vram_arena_get_stats(arena, &stats) == VRAM_OK);
  return stats;
}

bool said(const char* text) { return std::strstr(vram_last_error(), text) != nullptr; }

// ---- pools ------------------------------------------------------------------------------------------------

TEST(memory_of_the_host_is_usable_and_counted) {
  const World world;
  std::vector<unsigned char*> held;
  for (std::size_t size : {0u, 1u, 511u, 512u, 4096u, 3u << 20}) {
    void* memory = nullptr;
    REQUIRE(vram_pool_allocate(world.pool, size, nullptr, &memory) == VRAM_OK);
    CHECK(memory != nullptr && reinterpret_cast<std::uintptr_t>(memory) % 512 == 0);
    std::memset(memory, static_cast<int>(held.size()), size);
    held.push_back(static_cast<unsigned char*>(memory));
  }
  CHECK(std::set<unsigned char*>(held.begin(), held.end()).size() == held.size());
  CHECK(held[3][0] == 3 && held[3][511] == 3 && held[5][(3u << 20) - 1] == 5);
  CHECK(stats_of(world.pool).allocations == held.size());
  CHECK(stats_of(world.pool).requested == 1 + 511 + 512 + 4096 + (3u << 20));
  for (unsigned char* memory : held) CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  const vram_pool_stats after = stats_of(world.pool);
  CHECK(after.allocations == 0 && after.allocated == 0 && after.total_allocations == held.size());
  CHECK(after.reserved > 0 && after.peak_allocated >= (3u << 20));
  CHECK(vram_pool_reset_peak(world.pool) == VRAM_OK);
  CHECK(stats_of(world.pool).peak_allocated == 0);
  CHECK(vram_pool_trim(world.pool, 0, 1) == VRAM_OK);
  CHECK(stats_of(world.pool).reserved == 0);
}

TEST(alignment_is_kept_and_a_bad_one_refused) {
  const World world;
  for (std::size_t align = 1; align <= (1u << 20); align *= 2) {
    void* memory = nullptr;
    REQUIRE(vram_pool_allocate_aligned(world.pool, 100, align, nullptr, &memory) == VRAM_OK);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % align == 0);
    CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  }
  void* memory = nullptr;
  CHECK(vram_pool_allocate_aligned(world.pool, 100, 48, nullptr, &memory) == VRAM_BAD_ARGUMENT);
  CHECK(memory == nullptr && said("power of two"));
}

TEST(what_cannot_be_freed_is_said) {
  const World world;
  const World other;
  void* memory = nullptr;
  REQUIRE(vram_pool_allocate(world.pool, 1 << 20, nullptr, &memory) == VRAM_OK);
  CHECK(vram_pool_free(world.pool, nullptr) == VRAM_OK);
  CHECK(vram_pool_free(world.pool, static_cast<char*>(memory) + 512) == VRAM_BAD_POINTER);
  CHECK(vram_pool_free(other.pool, memory) == VRAM_BAD_POINTER);
  int local = 0;
  CHECK(vram_pool_free(world.pool, &local) == VRAM_BAD_POINTER);
  CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  CHECK(vram_pool_free(world.pool, memory) == VRAM_BAD_POINTER);
  CHECK(said("vram_pool_free") && said("freed before"));
  CHECK(vram_pool_record_stream(world.pool, memory, nullptr) == VRAM_BAD_POINTER);
  CHECK(vram_pool_find(world.pool, memory, nullptr, nullptr) == VRAM_BAD_POINTER);
}

TEST(an_address_inside_finds_its_allocation) {
  const World world;
  void* memory = nullptr;
  void* begin = nullptr;
  std::size_t bytes = 0;
  REQUIRE(vram_pool_allocate(world.pool, 5000, nullptr, &memory) == VRAM_OK);
  CHECK(vram_pool_find(world.pool, static_cast<char*>(memory) + 4999, &begin, &bytes) == VRAM_OK);
  CHECK(begin == memory && bytes >= 5000 && bytes < 5000 + 1024);
  CHECK(vram_pool_find(world.pool, memory, nullptr, nullptr) == VRAM_OK);
}

TEST(null_is_refused_everywhere) {
  const World world;
  vram_arena* arena = nullptr;
  REQUIRE(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
  CHECK(vram_device_open("host", nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pool_create(world.device, nullptr, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pool_allocate(world.pool, 1, nullptr, nullptr) == VRAM_BAD_ARGUMENT && said("out is null"));
  CHECK(vram_pool_allocate_aligned(world.pool, 1, 0, nullptr, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pool_get_stats(world.pool, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_device_get_info(world.device, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_stream_create(world.device, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_copy(world.device, nullptr, &arena, 1, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_copy(world.device, &arena, nullptr, 1, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_fill(world.device, nullptr, 0, 1, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_launch(world.device, nullptr, nullptr, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pin(world.device, nullptr, 1) == VRAM_BAD_ARGUMENT);
  CHECK(vram_unpin(world.device, nullptr) == VRAM_BAD_POINTER);
  CHECK(vram_last_out_of_memory(nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_arena_create(world.pool, nullptr, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_arena_allocate(arena, 1, 0, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_arena_mark(arena, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_arena_on_reset(arena, nullptr, nullptr) == VRAM_BAD_ARGUMENT && said("function is null"));
  CHECK(vram_arena_get_stats(arena, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pool_get_attribute(world.pool, VRAM_ATTR_USED_MEM_HIGH, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_span_begin(world.pool, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_span_end(nullptr, nullptr) == VRAM_BAD_HANDLE);
  CHECK(vram_growable_open(world.pool, 1, nullptr, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_growable_close(world.pool, nullptr) == VRAM_BAD_POINTER);
  CHECK(vram_device_close(nullptr) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_destroy(nullptr) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_free(nullptr, nullptr) == VRAM_BAD_HANDLE);
  CHECK(vram_arena_destroy(nullptr) == VRAM_BAD_HANDLE);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}

// ---- handles ----------------------------------------------------------------------------------------------

TEST(a_handle_is_not_valid_after_its_end_or_as_another_kind) {
  World world;
  void* memory = nullptr;
  vram_arena* arena = nullptr;
  REQUIRE(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
  CHECK(vram_pool_destroy(reinterpret_cast<vram_pool*>(arena)) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_destroy(reinterpret_cast<vram_pool*>(world.device)) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_destroy(reinterpret_cast<vram_pool*>(&world)) == VRAM_BAD_HANDLE);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
  CHECK(vram_arena_destroy(arena) == VRAM_BAD_HANDLE);
  CHECK(vram_arena_allocate(arena, 1, 0, &memory) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_destroy(world.pool) == VRAM_OK);
  CHECK(vram_pool_destroy(world.pool) == VRAM_BAD_HANDLE && said("already destroyed"));
  CHECK(vram_pool_allocate(world.pool, 1, nullptr, &memory) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_allocate_aligned(world.pool, 1, 0, nullptr, &memory) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_free(world.pool, &world) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_trim(world.pool, 0, 0) == VRAM_BAD_HANDLE);
  vram_pool* const stale = world.pool;
  REQUIRE(vram_pool_create(world.device, nullptr, &world.pool) == VRAM_OK);  // in the place of the first
  CHECK(stale != world.pool && vram_pool_allocate(stale, 1, nullptr, &memory) == VRAM_BAD_HANDLE);
  CHECK(memory == nullptr);
}

TEST(what_a_handle_depends_on_stays) {
  World world;
  void* memory = nullptr;
  vram_arena* arena = nullptr;
  REQUIRE(vram_device_close(world.device) == VRAM_OK);
  CHECK(vram_device_synchronize(world.device) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_allocate(world.pool, 1 << 20, nullptr, &memory) == VRAM_OK);
  std::memset(memory, 1, 1 << 20);
  REQUIRE(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 100, 0, &memory) == VRAM_OK);
  CHECK(vram_pool_destroy(world.pool) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 100, 0, &memory) == VRAM_CLOSED);
  CHECK(vram_arena_reset(arena, 0) == VRAM_CLOSED);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}

TEST(many_handles_come_and_go) {
  constexpr std::size_t kMany = 1500;  // more than a chunk of the registry
  std::vector<vram_device*> all;
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < kMany; ++i) {
      vram_device* device = nullptr;
      CHECK(vram_device_open("host", &device) == VRAM_OK);
      all.push_back(device);
    }
    CHECK(std::set<vram_device*>(all.begin(), all.end()).size() == all.size());
    for (std::size_t i = all.size() - kMany; i < all.size(); ++i) CHECK(vram_device_close(all[i]) == VRAM_OK);
  }
  for (vram_device* device : all) CHECK(vram_device_close(device) == VRAM_BAD_HANDLE);
}

// ---- devices ----------------------------------------------------------------------------------------------

TEST(devices_are_opened_by_name) {
  vram_device* device = nullptr;
  for (const char* name : {"", "gpu", "cuda:", "cuda:x", "cuda:99999999999", "host ", "model:", "model:x",
                           "model:1", "model:99999999999TiB", "model:-1GiB"}) {
    CHECK(vram_device_open(name, &device) == VRAM_BAD_ARGUMENT);
    CHECK(device == nullptr && said(name));
  }
  CHECK(vram_device_open("cuda:63", &device) == VRAM_UNSUPPORTED && said("cuda:63"));
  REQUIRE(vram_device_open("model:16GiB", &device) == VRAM_OK);
  vram_device_info info = VRAM_DEVICE_INFO_INIT;
  CHECK(vram_device_get_info(device, &info) == VRAM_OK);
  CHECK(info.total_bytes == 16 * kGiB && info.free_bytes == 16 * kGiB && !info.host_accessible);
  CHECK(vram_device_close(device) == VRAM_OK);
  REQUIRE(vram_device_open(nullptr, &device) == VRAM_OK);
  CHECK(vram_device_get_info(device, &info) == VRAM_OK);
  CHECK(info.total_bytes > 0 && (info.name[0] == 'h' || info.name[0] == 'c'));
  CHECK(vram_device_close(device) == VRAM_OK);
}

TEST(handles_of_the_host_share_its_streams) {
  const World world;
  vram_device* again = nullptr;
  vram_stream stream = nullptr;
  REQUIRE(vram_device_open("host", &again) == VRAM_OK);
  CHECK(again != world.device);
  REQUIRE(vram_stream_create(world.device, &stream) == VRAM_OK);
  CHECK(vram_stream_synchronize(again, stream) == VRAM_OK);
  CHECK(vram_stream_destroy(again, stream) == VRAM_OK);
  CHECK(vram_stream_destroy(world.device, stream) == VRAM_BAD_ARGUMENT);
  CHECK(vram_stream_destroy(world.device, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_stream_synchronize(world.device, stream) == VRAM_BAD_ARGUMENT);
  CHECK(vram_device_close(again) == VRAM_OK);
}

struct Gate {
  std::atomic<bool> open{false};
  static void wait(void* gate) { static_cast<Gate*>(gate)->open.wait(false); }
  void lift() {
    open = true;
    open.notify_all();
  }
};

TEST(work_runs_in_the_order_of_streams) {
  const World world;
  vram_stream first = nullptr, second = nullptr;
  unsigned char* memory = nullptr;
  REQUIRE(vram_stream_create(world.device, &first) == VRAM_OK);
  REQUIRE(vram_stream_create(world.device, &second) == VRAM_OK);
  REQUIRE(vram_pool_allocate(world.pool, 4096, first, reinterpret_cast<void**>(&memory)) == VRAM_OK);
  std::memset(memory, 0, 4096);
  unsigned char copied[4096] = {};
  Gate gate;
  CHECK(vram_launch(world.device, Gate::wait, &gate, first) == VRAM_OK);
  CHECK(vram_fill(world.device, memory, 7, 4096, first) == VRAM_OK);
  CHECK(vram_stream_wait(world.device, second, first) == VRAM_OK);
  CHECK(vram_copy(world.device, copied, memory, 4096, second) == VRAM_OK);
  CHECK(memory[0] == 0);  // the gate is shut
  gate.lift();
  CHECK(vram_stream_synchronize(world.device, second) == VRAM_OK);
  CHECK(copied[0] == 7 && copied[4095] == 7);
  CHECK(vram_stream_destroy(world.device, first) == VRAM_OK);
  CHECK(vram_stream_destroy(world.device, second) == VRAM_OK);
  CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);  // its stream is gone
}

TEST(memory_used_on_another_stream_is_not_reused_before_that_is_done) {
  const World world;
  vram_stream stream = nullptr;
  void *memory = nullptr, *next = nullptr;
  Gate gate;
  REQUIRE(vram_stream_create(world.device, &stream) == VRAM_OK);
  REQUIRE(vram_pool_allocate(world.pool, 1 << 20, nullptr, &memory) == VRAM_OK);
  CHECK(vram_launch(world.device, Gate::wait, &gate, stream) == VRAM_OK);
  CHECK(vram_pool_record_stream(world.pool, memory, stream) == VRAM_OK);
  CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  CHECK(stats_of(world.pool).pending == 1 << 20);
  CHECK(vram_pool_allocate(world.pool, 1 << 20, nullptr, &next) == VRAM_OK);
  CHECK(next != memory);
  gate.lift();
  CHECK(vram_pool_synchronize(world.pool) == VRAM_OK);
  CHECK(vram_pool_trim(world.pool, 0, 1) == VRAM_OK);
  CHECK(stats_of(world.pool).pending == 0);
  CHECK(vram_stream_destroy(world.device, stream) == VRAM_OK);
}

TEST(a_stream_of_another_library_is_let_go_before_it_is_destroyed) {
  const auto model = std::make_shared<ModelBackend>(kGiB);
  vram_device* const device = c::adopt(model);
  vram_pool* pool = nullptr;
  void *memory = nullptr, *next = nullptr;
  StreamHandle foreign = 0;
  REQUIRE(vram_pool_create(device, nullptr, &pool) == VRAM_OK);
  REQUIRE(model->stream_create(&foreign).ok());
  const auto stream = reinterpret_cast<vram_stream>(foreign);
  REQUIRE(vram_pool_allocate(pool, kMiB, stream, &memory) == VRAM_OK);
  CHECK(vram_fill(device, memory, 1, kMiB, stream) == VRAM_OK);
  CHECK(vram_pool_free(pool, memory) == VRAM_OK);
  CHECK(vram_stream_destroy(device, stream) == VRAM_BAD_ARGUMENT);  // not ours to destroy
  CHECK(vram_stream_retire(device, stream) == VRAM_OK);
  REQUIRE(model->stream_destroy(foreign).ok());
  CHECK(vram_device_synchronize(device) == VRAM_OK);
  CHECK(vram_pool_allocate(pool, kMiB, nullptr, &next) == VRAM_OK);
  CHECK(next == memory);  // it went to the default stream
  CHECK(vram_stream_retire(device, nullptr) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pool_destroy(pool) == VRAM_OK);
  CHECK(vram_device_close(device) == VRAM_OK);
}

// ---- host memory ------------------------------------------------------------------------------------------

TEST(pins_keep_books_where_there_is_nobody_to_tell) {
  const World world;
  static char memory[3 * 4096];
  vram_device_info info = VRAM_DEVICE_INFO_INIT;
  CHECK(vram_device_get_info(world.device, &info) == VRAM_OK && info.page_locks == 0);
  CHECK(vram_pin(world.device, memory + 4096, 4096) == VRAM_OK);
  CHECK(vram_pin(world.device, memory + 4096, 4096) == VRAM_BAD_ARGUMENT && said("already pinned"));
  CHECK(vram_pin(world.device, memory, 4097) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pin(world.device, memory + 2 * 4096 - 1, 4096) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pin(world.device, memory, sizeof memory) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pin(world.device, memory, 4096) == VRAM_OK);
  CHECK(vram_pin(world.device, memory, 0) == VRAM_BAD_ARGUMENT);
  CHECK(vram_pin(world.device, memory, ~std::size_t{0}) == VRAM_BAD_ARGUMENT);
  CHECK(vram_unpin(world.device, memory + 1) == VRAM_BAD_POINTER);
  CHECK(vram_unpin(world.device, memory + 4096) == VRAM_OK);
  CHECK(vram_unpin(world.device, memory + 4096) == VRAM_BAD_POINTER);
  CHECK(vram_pin(world.device, memory + 4096, 2 * 4096) == VRAM_OK);  // the rest goes with the device
}

TEST(a_pinned_pool_is_host_memory_in_the_order_of_the_device) {
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  options.pinned = 1;
  const World world("host", &options);
  unsigned char* memory = nullptr;
  REQUIRE(vram_pool_allocate(world.pool, 1 << 20, nullptr, reinterpret_cast<void**>(&memory)) == VRAM_OK);
  std::memset(memory, 1, 1 << 20);
  const vram_pool_stats stats = stats_of(world.pool);
  CHECK(stats.reserved == 64 * kMiB && !stats.pinned && !stats.paged);  // nobody to tell on the host
  Gate gate;
  CHECK(vram_launch(world.device, Gate::wait, &gate, nullptr) == VRAM_OK);
  CHECK(vram_fill(world.device, memory, 2, 1 << 20, nullptr) == VRAM_OK);
  CHECK(vram_pool_record_stream(world.pool, memory, nullptr) == VRAM_OK);
  CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  void* next = nullptr;
  CHECK(vram_pool_allocate(world.pool, 1 << 20, nullptr, &next) == VRAM_OK);
  CHECK(next != memory);  // the host would write there before the fill has run
  gate.lift();
}

// ---- structures -------------------------------------------------------------------------------------------

TEST(structures_of_other_versions_are_understood) {
  const World world;
  struct Newer {
    vram_pool_options options;
    std::uint64_t more;
  } newer = {VRAM_POOL_OPTIONS_INIT, 0};
  vram_pool* pool = nullptr;
  newer.options.struct_size = sizeof newer;
  newer.options.limit = 8 * kMiB;
  REQUIRE(vram_pool_create(world.device, &newer.options, &pool) == VRAM_OK);
  CHECK(vram_pool_destroy(pool) == VRAM_OK);
  newer.more = 1;
  CHECK(vram_pool_create(world.device, &newer.options, &pool) == VRAM_UNSUPPORTED);
  newer.options.struct_size = 0;
  CHECK(vram_pool_create(world.device, &newer.options, &pool) == VRAM_BAD_ARGUMENT && said("struct_size"));

  vram_pool_options older = VRAM_POOL_OPTIONS_INIT;
  older.struct_size = offsetof(vram_pool_options, cross_stream);
  older.cross_stream = 99;  // beyond what it knows
  REQUIRE(vram_pool_create(world.device, &older, &pool) == VRAM_OK);
  CHECK(vram_pool_destroy(pool) == VRAM_OK);
  older.struct_size = sizeof older;
  CHECK(vram_pool_create(world.device, &older, &pool) == VRAM_BAD_ARGUMENT && said("99"));

  vram_pool_stats stats = VRAM_POOL_STATS_INIT;
  stats.struct_size = offsetof(vram_pool_stats, reserved);
  stats.reserved = 42;
  CHECK(vram_pool_get_stats(world.pool, &stats) == VRAM_OK);
  CHECK(stats.reserved == 42 && stats.struct_size == offsetof(vram_pool_stats, reserved));
  stats.struct_size = 0;
  CHECK(vram_pool_get_stats(world.pool, &stats) == VRAM_BAD_ARGUMENT);
}

TEST(options_take_effect) {
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  options.zero_on_allocate = 1;
  options.plain = 1;
  const World world("host", &options);
  for (int round = 0; round < 2; ++round) {
    unsigned char* memory = nullptr;
    REQUIRE(vram_pool_allocate(world.pool, 1000, nullptr, reinterpret_cast<void**>(&memory)) == VRAM_OK);
    CHECK(vram_pool_synchronize(world.pool) == VRAM_OK);
    CHECK(memory[0] == 0 && memory[999] == 0);
    std::memset(memory, 9, 1000);
    CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  }
  CHECK(!stats_of(world.pool).paged);
}

TEST(a_release_threshold_holds_whenever_the_host_has_waited) {
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  options.release_threshold = 8 << 20;
  for (int plain = 0; plain < 2; ++plain) {
    options.plain = plain;
    const World world("host", &options);
    const auto fill = [&] {
      std::vector<void*> all;
      for (std::size_t size : {100u << 10, 50u << 20})
        for (int i = 0; i < 4 + 160 * (size < (1u << 20)); ++i) {
          void* memory = nullptr;
          REQUIRE(vram_pool_allocate(world.pool, size, nullptr, &memory) == VRAM_OK);
          all.push_back(memory);
        }
      for (void* memory : all) CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
    };
    fill();
    CHECK(vram_device_synchronize(world.device) == VRAM_OK);
    CHECK(stats_of(world.pool).reserved <= 8 << 20);
    fill();
    CHECK(vram_stream_synchronize(world.device, nullptr) == VRAM_OK);
    CHECK(stats_of(world.pool).reserved <= 8 << 20);
    std::uint64_t value = 0;
    CHECK(vram_pool_get_attribute(world.pool, VRAM_ATTR_RELEASE_THRESHOLD, &value) == VRAM_OK);
    CHECK(value == 8 << 20);
    CHECK(vram_pool_set_attribute(world.pool, VRAM_ATTR_RELEASE_THRESHOLD, UINT64_MAX) == VRAM_OK);
    fill();
    CHECK(vram_pool_synchronize(world.pool) == VRAM_OK);
    CHECK(stats_of(world.pool).reserved >= 200 << 20);
  }
}

TEST(attributes_are_those_of_cuda) {
  vram_device* device = nullptr;
  REQUIRE(vram_device_open("model:1GiB", &device) == VRAM_OK);
  for (int owner : {VRAM_OWN_POOL, VRAM_DRIVER_POOL, VRAM_DRIVER_DEFAULT_POOL}) {
    vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
    options.owner = owner;
    vram_pool* pool = nullptr;
    REQUIRE(vram_pool_create(device, &options, &pool) == VRAM_OK);
    void *one = nullptr, *two = nullptr;
    REQUIRE(vram_pool_allocate(pool, 10 << 20, nullptr, &one) == VRAM_OK);
    REQUIRE(vram_pool_allocate_aligned(pool, 20 << 20, 1 << 20, nullptr, &two) == VRAM_OK);
    CHECK(reinterpret_cast<std::uintptr_t>(two) % (1 << 20) == 0);
    void* begin = nullptr;
    std::size_t bytes = 0;
    CHECK(vram_pool_find(pool, one, &begin, &bytes) == VRAM_OK && begin == one && bytes == 10 << 20);
    CHECK(vram_pool_free(pool, two) == VRAM_OK);
    CHECK(vram_pool_synchronize(pool) == VRAM_OK);
    const auto attribute = [&](vram_pool_attribute which) {
      std::uint64_t value = 0;
      CHECK(vram_pool_get_attribute(pool, which, &value) == VRAM_OK);
      return value;
    };
    CHECK(attribute(VRAM_ATTR_USED_MEM_CURRENT) == 10 << 20);
    CHECK(attribute(VRAM_ATTR_USED_MEM_HIGH) >= 30 << 20);
    CHECK(attribute(VRAM_ATTR_RESERVED_MEM_HIGH) >= 30 << 20);
    CHECK(attribute(VRAM_ATTR_RESERVED_MEM_CURRENT) >= 10 << 20);
    CHECK(vram_pool_set_attribute(pool, VRAM_ATTR_USED_MEM_HIGH, 0) == VRAM_OK);
    CHECK(attribute(VRAM_ATTR_USED_MEM_HIGH) == 10 << 20);
    CHECK(vram_pool_set_attribute(pool, VRAM_ATTR_USED_MEM_HIGH, 1) == VRAM_BAD_ARGUMENT);
    CHECK(vram_pool_set_attribute(pool, VRAM_ATTR_RESERVED_MEM_CURRENT, 0) == VRAM_BAD_ARGUMENT);
    CHECK(vram_pool_set_attribute(pool, VRAM_ATTR_RELEASE_THRESHOLD, 4 << 20) == VRAM_OK);
    CHECK(attribute(VRAM_ATTR_RELEASE_THRESHOLD) == 4 << 20);
    std::uint64_t value = 0;
    const bool own = owner == VRAM_OWN_POOL;
    const vram_pool_attribute flag = VRAM_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
    CHECK(vram_pool_set_attribute(pool, flag, 0) == (own ? VRAM_UNSUPPORTED : VRAM_OK));
    CHECK(vram_pool_get_attribute(pool, flag, &value) == (own ? VRAM_UNSUPPORTED : VRAM_OK) && value == 0);
    for (int number : {-1, 0, 9, 1 << 30})
      CHECK(vram_pool_get_attribute(pool, number, &value) == VRAM_BAD_ARGUMENT);
    CHECK(vram_pool_free(pool, one) == VRAM_OK);
    CHECK(vram_pool_free(pool, one) == VRAM_BAD_POINTER);
    CHECK(vram_pool_trim(pool, 0, 1) == VRAM_OK);
    CHECK(attribute(VRAM_ATTR_RESERVED_MEM_CURRENT) == 0);
    CHECK(vram_pool_destroy(pool) == VRAM_OK);
  }
  CHECK(vram_device_close(device) == VRAM_OK);
}

TEST(options_of_the_other_kind_of_pool_are_refused) {
  const World model("model:1GiB");
  vram_pool* pool = nullptr;
  const auto refused = [&](vram_device* device, auto change, vram_status expected) {
    vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
    options.owner = VRAM_DRIVER_POOL;
    change(options);
    CHECK(vram_pool_create(device, &options, &pool) == expected);
  };
  refused(model.device, [](auto& options) { options.segment_size = 1 << 20; }, VRAM_BAD_ARGUMENT);
  refused(model.device, [](auto& options) { options.pinned = 1; }, VRAM_BAD_ARGUMENT);
  refused(model.device, [](auto& options) { options.kind = 7; }, VRAM_BAD_ARGUMENT);
  refused(model.device, [](auto& options) { options.owner = 3; }, VRAM_BAD_ARGUMENT);
  refused(
      model.device,
      [](auto& options) {
        options.owner = VRAM_DRIVER_DEFAULT_POOL;
        options.max_size = 1;
      },
      VRAM_BAD_ARGUMENT);
  refused(
      model.device,
      [](auto& options) {
        options.owner = VRAM_OWN_POOL;
        options.max_size = 1;
      },
      VRAM_BAD_ARGUMENT);
  const World host;
  refused(host.device, [](auto&) {}, VRAM_UNSUPPORTED);
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  options.owner = VRAM_DRIVER_POOL;
  REQUIRE(vram_pool_create(model.device, &options, &pool) == VRAM_OK);
  void* memory = nullptr;
  CHECK(vram_growable_open(pool, 1 << 20, nullptr, &memory) == VRAM_UNSUPPORTED && said("growable"));
  vram_arena* arena = nullptr;
  REQUIRE(vram_arena_create(pool, nullptr, &arena) == VRAM_OK);  // an arena takes any pool
  CHECK(vram_arena_allocate(arena, 1000, 0, &memory) == VRAM_OK);
  CHECK(vram_arena_destroy(arena) == VRAM_OK && vram_pool_destroy(pool) == VRAM_OK);
}

TEST(a_buffer_grows_in_place) {
  const World world;
  void* memory = nullptr;
  REQUIRE(vram_growable_open(world.pool, 64 << 20, nullptr, &memory) == VRAM_OK);
  auto* const bytes = static_cast<unsigned char*>(memory);
  REQUIRE(vram_growable_resize(world.pool, memory, 1) == VRAM_OK);
  std::memset(bytes, 7, 2 << 20);
  REQUIRE(vram_growable_prepare(world.pool, memory, 8 << 20) == VRAM_OK);
  vram_growable_info info = VRAM_GROWABLE_INFO_INIT;
  REQUIRE(vram_growable_get_info(world.pool, memory, &info) == VRAM_OK);
  CHECK(info.bytes == 2 << 20 && info.ready >= 8 << 20 && info.max == 64 << 20);
  REQUIRE(vram_growable_resize(world.pool, memory, 10 << 20) == VRAM_OK);
  std::memset(bytes + (2 << 20), 8, 8 << 20);
  CHECK(bytes[0] == 7 && bytes[(2 << 20) - 1] == 7 && bytes[(10 << 20) - 1] == 8);
  CHECK(vram_growable_resize(world.pool, memory, 65 << 20) == VRAM_BAD_ARGUMENT && said("maximum"));
  CHECK(vram_pool_free(world.pool, memory) != VRAM_OK);  // it is closed instead
  CHECK(vram_growable_resize(world.pool, memory, 0) == VRAM_OK);
  CHECK(stats_of(world.pool).allocated == 0);
  CHECK(vram_growable_close(world.pool, memory) == VRAM_OK);
  CHECK(vram_growable_close(world.pool, memory) == VRAM_BAD_POINTER);
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  options.plain = 1;
  const World plain("host", &options);
  CHECK(vram_growable_open(plain.pool, 1 << 20, nullptr, &memory) == VRAM_UNSUPPORTED);
}

TEST(spans_count_their_own) {
  const World world;
  const auto pair = [&](std::size_t size) {
    void* memory = nullptr;
    REQUIRE(vram_pool_allocate(world.pool, size, nullptr, &memory) == VRAM_OK);
    CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  };
  const auto stats = [](vram_span* span) {
    vram_span_stats now = VRAM_SPAN_STATS_INIT;
    CHECK(vram_span_get_stats(span, &now) == VRAM_OK);
    return now;
  };
  void* kept = nullptr;
  REQUIRE(vram_pool_allocate(world.pool, 4 << 20, nullptr, &kept) == VRAM_OK);
  pair(40 << 20);
  vram_span *outer = nullptr, *inner = nullptr;
  REQUIRE(vram_span_begin(world.pool, &outer) == VRAM_OK);
  pair(8 << 20);
  REQUIRE(vram_span_begin(world.pool, &inner) == VRAM_OK);
  for (int i = 0; i < 10; ++i) pair(1000);
  CHECK(stats(inner).allocations == 10 && stats(inner).frees == 10 && stats(inner).cache_hits == 9);
  CHECK(stats(inner).peak == 1024 && stats(inner).peak_allocated == (4 << 20) + 1024);
  CHECK(stats_of(world.pool).peak_allocated == 44 << 20);  // of the pool
  CHECK(vram_pool_reset_peak(world.pool) == VRAM_OK);
  CHECK(stats_of(world.pool).peak_allocated == 4 << 20);
  vram_span_stats ended = VRAM_SPAN_STATS_INIT;
  REQUIRE(vram_span_end(inner, &ended) == VRAM_OK);
  CHECK(ended.allocations == 10 && ended.bytes == 10 * 1024 && ended.peak == 1024);
  CHECK(vram_span_end(inner, nullptr) == VRAM_BAD_HANDLE);
  CHECK(vram_pool_free(world.pool, kept) == VRAM_OK);
  CHECK(stats(outer).allocations == 11 && stats(outer).frees == 12 && stats(outer).peak == 8 << 20);
  CHECK(vram_span_end(outer, nullptr) == VRAM_OK);
}

TEST(a_span_outlives_its_pool) {
  World world;
  vram_span* span = nullptr;
  REQUIRE(vram_span_begin(world.pool, &span) == VRAM_OK);
  REQUIRE(vram_pool_destroy(world.pool) == VRAM_OK);
  vram_span_stats stats = VRAM_SPAN_STATS_INIT;
  CHECK(vram_span_get_stats(span, &stats) == VRAM_OK && stats.allocations == 0);
  CHECK(vram_span_end(span, &stats) == VRAM_OK);
}

// ---- out of memory ----------------------------------------------------------------------------------------

TEST(out_of_memory_says_where_the_memory_is) {
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  options.limit = 8 * kMiB;
  const World world("model:1GiB", &options);
  void *held = nullptr, *more = &held;
  REQUIRE(vram_pool_allocate(world.pool, 6 * kMiB, nullptr, &held) == VRAM_OK);
  CHECK(vram_pool_allocate(world.pool, 4 * kMiB, nullptr, &more) == VRAM_OUT_OF_MEMORY);
  CHECK(more == &held);  // untouched
  CHECK(said("failed to allocate 4.00 MiB") && said("limit of 8.00 MiB") && said("6.00 MiB allocated"));
  CHECK(said("freeing 2.00 MiB") && said("limit of at least 10.00 MiB"));
  vram_oom_report report = VRAM_OOM_REPORT_INIT;
  CHECK(vram_last_out_of_memory(&report) == VRAM_OK);
  CHECK(report.requested == 4 * kMiB && report.limit == 8 * kMiB && report.device_total == kGiB);
  CHECK(report.allocated == 6 * kMiB && report.allocated <= report.reserved);
  CHECK(report.reserved == report.allocated + report.pending + report.cached + report.free_pages +
                               report.free_elsewhere + report.stranded);
  CHECK(vram_pool_set_limit(world.pool, 0) == VRAM_OK);
  CHECK(vram_pool_allocate(world.pool, 4 * kMiB, nullptr, &more) == VRAM_OK);
  for (std::size_t size : {std::size_t{2} << 30, ~std::size_t{0}, ~std::size_t{0} - 511}) {
    CHECK(vram_pool_allocate(world.pool, size, nullptr, &more) == VRAM_OUT_OF_MEMORY);
    CHECK(said("a smaller request"));
  }
  CHECK(stats_of(world.pool).out_of_memory == 4);
}

struct Reserve {
  vram_pool* pool;
  void* memory;
  int calls;
};
int give_reserve_up(void* argument, std::size_t size, vram_stream) {
  auto* const reserve = static_cast<Reserve*>(argument);
  reserve->calls += size == 6 * kMiB;
  void* const memory = std::exchange(reserve->memory, nullptr);
  return memory != nullptr && vram_pool_free(reserve->pool, memory) == VRAM_OK;
}

TEST(a_callback_may_free_when_memory_is_out) {
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  options.limit = 8 * kMiB;
  const World world("model:1GiB", &options);
  Reserve reserve = {world.pool, nullptr, 0};
  void *memory = nullptr, *more = nullptr;
  REQUIRE(vram_pool_allocate(world.pool, 6 * kMiB, nullptr, &reserve.memory) == VRAM_OK);
  CHECK(vram_pool_on_out_of_memory(world.pool, give_reserve_up, &reserve) == VRAM_OK);
  CHECK(vram_pool_allocate(world.pool, 6 * kMiB, nullptr, &memory) == VRAM_OK && reserve.calls == 1);
  CHECK(vram_pool_allocate(world.pool, 6 * kMiB, nullptr, &more) == VRAM_OUT_OF_MEMORY && reserve.calls == 2);
  CHECK(vram_pool_on_out_of_memory(world.pool, nullptr, nullptr) == VRAM_OK);
  CHECK(vram_pool_allocate(world.pool, 6 * kMiB, nullptr, &more) == VRAM_OUT_OF_MEMORY && reserve.calls == 2);
}

TEST(errors_are_each_threads_own) {
  CHECK(vram_pool_destroy(nullptr) == VRAM_BAD_HANDLE);
  std::string other = "?";
  std::thread([&] { other = vram_last_error(); }).join();
  CHECK(other.empty() && said("vram_pool_destroy"));
  CHECK(std::string(vram_status_name(VRAM_BAD_MARK)) == "bad_mark");
  CHECK(std::string(vram_status_name(VRAM_OK)) == "ok");
  CHECK(std::string(vram_status_name(static_cast<vram_status>(15))) == "unknown");
  CHECK(vram_version() == VRAM_VERSION);
}

// ---- arenas -----------------------------------------------------------------------------------------------

TEST(an_arena_grows_once_and_then_stays) {
  const World world;
  vram_arena* arena = nullptr;
  REQUIRE(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
  std::vector<void*> first;
  vram_arena_stats grown = VRAM_ARENA_STATS_INIT;
  for (int iteration = 0; iteration < 5; ++iteration) {
    std::vector<void*> now;
    for (std::size_t size : {100u, 3u << 20, 0u, 5000u, 9u << 20, 1u}) {
      void* memory = nullptr;
      REQUIRE(vram_arena_allocate(arena, size, 0, &memory) == VRAM_OK);
      CHECK(reinterpret_cast<std::uintptr_t>(memory) % 64 == 0);
      std::memset(memory, iteration, size);
      now.push_back(memory);
    }
    CHECK(std::set<void*>(now.begin(), now.end()).size() == now.size());
    if (iteration == 1) first = now, grown = stats_of(arena);
    if (iteration > 1) CHECK(now == first);
    CHECK(vram_arena_reset(arena, 0) == VRAM_OK);
    CHECK(stats_of(arena).used == 0);
  }
  const vram_arena_stats after = stats_of(arena);
  CHECK(after.requests == grown.requests && after.capacity == grown.capacity && after.resets == 5);
  CHECK(after.allocations == 30 && after.high_water >= (12u << 20));
  void* begin = nullptr;
  std::size_t bytes = 0;
  CHECK(vram_arena_find(arena, first[1], &begin, &bytes) == VRAM_OK);
  CHECK(begin <= first[1] && static_cast<char*>(begin) + bytes >= static_cast<char*>(first[1]) + (3u << 20));
  CHECK(vram_arena_find(arena, &world, &begin, &bytes) == VRAM_BAD_POINTER);
  CHECK(vram_arena_trim(arena) == VRAM_OK && stats_of(arena).capacity == 0);
  CHECK(vram_arena_reset_peak(arena) == VRAM_OK && stats_of(arena).high_water == 0);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
  CHECK(stats_of(world.pool).allocations == 0);
}

TEST(marks_nest_and_end_in_order) {
  const World world;
  vram_arena* arena = nullptr;
  void *outer = nullptr, *inner = nullptr, *again = nullptr;
  vram_mark one = {0, 0}, two = {0, 0};
  REQUIRE(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
  CHECK(vram_arena_rewind(arena, one) == VRAM_BAD_MARK);
  CHECK(vram_arena_allocate(arena, 64, 0, &outer) == VRAM_OK);
  CHECK(vram_arena_mark(arena, &one) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 64, 0, &inner) == VRAM_OK);
  CHECK(vram_arena_mark(arena, &two) == VRAM_OK);
  CHECK(stats_of(arena).marks == 2);
  CHECK(vram_arena_reset(arena, 0) == VRAM_BAD_MARK && said("outermost"));
  CHECK(vram_arena_rewind(arena, one) == VRAM_OK);
  CHECK(vram_arena_rewind(arena, two) == VRAM_BAD_MARK);
  CHECK(vram_arena_rewind(arena, one) == VRAM_BAD_MARK);
  CHECK(vram_arena_allocate(arena, 64, 0, &again) == VRAM_OK);
  CHECK(again == inner && again != outer);
  CHECK(vram_arena_reset(arena, 1) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 64, 0, &again) == VRAM_OK);
  CHECK(vram_pool_synchronize(world.pool) == VRAM_OK);
  CHECK(again == outer && static_cast<unsigned char*>(again)[63] == 0);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}

TEST(what_has_ended_can_be_overwritten) {
  const World world;
  vram_arena_options options = VRAM_ARENA_OPTIONS_INIT;
  vram_arena* arena = nullptr;
  unsigned char* memory = nullptr;
  options.poison = 1;
  REQUIRE(vram_arena_create(world.pool, &options, &arena) == VRAM_OK);
  REQUIRE(vram_arena_allocate(arena, 1000, 0, reinterpret_cast<void**>(&memory)) == VRAM_OK);
  std::memset(memory, 1, 1000);
  CHECK(vram_arena_reset(arena, 0) == VRAM_OK);
  CHECK(vram_pool_synchronize(world.pool) == VRAM_OK);
  CHECK(memory[0] == 0xFF && memory[999] == 0xFF);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}

TEST(a_fixed_arena_is_full_at_its_size) {
  const World world;
  vram_arena_options options = VRAM_ARENA_OPTIONS_INIT;
  vram_arena* arena = nullptr;
  void* memory = nullptr;
  options.fixed = 1;
  CHECK(vram_arena_create(world.pool, &options, &arena) == VRAM_BAD_ARGUMENT);
  options.size = 1 << 20;
  options.align = 48;
  CHECK(vram_arena_create(world.pool, &options, &arena) == VRAM_BAD_ARGUMENT);
  options.align = 0;
  REQUIRE(vram_arena_create(world.pool, &options, &arena) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 1 << 19, 3, &memory) == VRAM_BAD_ARGUMENT);
  CHECK(vram_arena_allocate(arena, 1 << 20, 0, &memory) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 1 << 20, 0, &memory) == VRAM_OUT_OF_MEMORY && said("fixed size"));
  CHECK(vram_arena_reset(arena, 0) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 1 << 20, 0, &memory) == VRAM_OK);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}

TEST(an_arena_belongs_to_one_thread) {
  const World world;
  vram_arena* arena = nullptr;
  void* memory = nullptr;
  REQUIRE(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
  std::thread([&] {
    void* stolen = nullptr;
    vram_mark mark = {0, 0};
    CHECK(vram_arena_allocate(arena, 1, 0, &stolen) == VRAM_OTHER_THREAD && said("vram_arena_adopt"));
    CHECK(vram_arena_reset(arena, 0) == VRAM_OTHER_THREAD);
    CHECK(vram_arena_mark(arena, &mark) == VRAM_OTHER_THREAD);
    CHECK(vram_arena_on_reset(arena, std::free, nullptr) == VRAM_OTHER_THREAD);
    CHECK(vram_arena_trim(arena) == VRAM_OTHER_THREAD);
    CHECK(vram_arena_find(arena, arena, nullptr, nullptr) == VRAM_OTHER_THREAD);
    CHECK(vram_arena_reset_peak(arena) == VRAM_OTHER_THREAD);
    CHECK(stolen == nullptr && stats_of(arena).allocations == 0);
    CHECK(vram_arena_adopt(arena) == VRAM_OK);
    CHECK(vram_arena_allocate(arena, 1, 0, &stolen) == VRAM_OK);
  }).join();
  CHECK(vram_arena_allocate(arena, 1, 0, &memory) == VRAM_OTHER_THREAD);
  CHECK(vram_arena_adopt(arena) == VRAM_OK);
  CHECK(vram_arena_allocate(arena, 1, 0, &memory) == VRAM_OK);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}

struct Released {
  vram_arena* arena;
  int calls;
};

void release(void* argument) {
  auto& released = *static_cast<Released*>(argument);
  void* memory = nullptr;
  CHECK(vram_arena_allocate(released.arena, 1, 0, &memory) == VRAM_IN_CALLBACK &&
        said("vram_arena_on_reset"));
  CHECK(vram_arena_reset(released.arena, 0) == VRAM_IN_CALLBACK && memory == nullptr);
  CHECK(vram_arena_destroy(released.arena) == VRAM_IN_CALLBACK);
  CHECK(vram_arena_record_stream(released.arena, nullptr) == VRAM_OK && stats_of(released.arena).used == 100);
  ++released.calls;
}

TEST(a_reset_and_the_end_call_back) {
  const World world;
  Released released = {};
  void* memory = nullptr;
  REQUIRE(vram_arena_create(world.pool, nullptr, &released.arena) == VRAM_OK);
  for (int iteration = 0; iteration < 3; ++iteration) {
    CHECK(vram_arena_allocate(released.arena, 100, 0, &memory) == VRAM_OK);
    CHECK(vram_arena_on_reset(released.arena, release, &released) == VRAM_OK && released.calls == iteration);
    CHECK(vram_arena_reset(released.arena, 0) == VRAM_OK && released.calls == iteration + 1);
  }
  CHECK(vram_arena_reset(released.arena, 0) == VRAM_OK && released.calls == 3);
  int ended = 0;
  CHECK(vram_arena_on_reset(
            released.arena, [](void* count) { ++*static_cast<int*>(count); }, &ended) == VRAM_OK);
  CHECK(vram_arena_destroy(released.arena) == VRAM_OK && ended == 1);
}

TEST(an_arena_outlives_its_stream) {
  const World world;
  vram_arena_options options = VRAM_ARENA_OPTIONS_INIT;
  vram_arena* arena = nullptr;
  vram_stream other = nullptr;
  void* memory = nullptr;
  REQUIRE(vram_stream_create(world.device, &options.stream) == VRAM_OK);
  REQUIRE(vram_stream_create(world.device, &other) == VRAM_OK);
  REQUIRE(vram_arena_create(world.pool, &options, &arena) == VRAM_OK);
  for (int iteration = 0; iteration < 4; ++iteration) {
    CHECK(vram_arena_allocate(arena, 1 << 20, 0, &memory) == VRAM_OK);
    if (iteration == 1) CHECK(vram_arena_record_stream(arena, other) == VRAM_OK);
    if (iteration == 1) CHECK(vram_stream_destroy(world.device, other) == VRAM_OK);
    if (iteration == 2) CHECK(vram_stream_destroy(world.device, options.stream) == VRAM_OK);
    CHECK(vram_arena_reset(arena, 0) == VRAM_OK);
  }
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}

// ---- failures of the device
// ---------------------------------------------------------------------------------

// A fixed program over everything that can be made; goes on after failures, and counts them.
int run_program(vram_device* device) {
  int failures = 0;
  const auto count = [&](vram_status status) {
    failures += status != VRAM_OK;
    return status == VRAM_OK;
  };
  vram_pool* pool = nullptr;
  vram_arena* arena = nullptr;
  vram_stream stream = nullptr;
  void* memory[4] = {};
  if (!count(vram_pool_create(device, nullptr, &pool))) return failures;
  count(vram_stream_create(device, &stream));
  for (int i = 0; i < 4; ++i)
    count(vram_pool_allocate(pool, (1u << 20) << i, i % 2 ? stream : nullptr, &memory[i]));
  if (memory[0] != nullptr) count(vram_pool_record_stream(pool, memory[0], stream));
  if (memory[1] != nullptr) count(vram_fill(device, memory[1], 1, 100, stream));
  count(vram_stream_wait(device, nullptr, stream));
  if (count(vram_arena_create(pool, nullptr, &arena))) {
    for (int iteration = 0; iteration < 2; ++iteration) {
      void* part = nullptr;
      for (int i = 0; i < 3; ++i) count(vram_arena_allocate(arena, 1u << 20, 0, &part));
      count(vram_arena_record_stream(arena, stream));
      count(vram_arena_reset(arena, 1));
    }
  }
  for (void* each : memory)
    if (each != nullptr && !count(vram_pool_free(pool, each))) count(vram_pool_free(pool, each));
  count(vram_device_synchronize(device));
  count(vram_pool_trim(pool, 0, 1));
  if (arena != nullptr) count(vram_arena_destroy(arena));
  if (stream != nullptr && !count(vram_stream_destroy(device, stream)))
    count(vram_stream_destroy(device, stream));
  CHECK(stats_of(pool).allocations == 0);
  count(vram_pool_destroy(pool));
  return failures;
}

// Fails the nth of these calls; true if the program made that many. Then only what a call that gives
// something back was prevented from giving may be left.
bool fails(const char* call, bool gives_back, std::uint64_t nth, Code code) {
  const auto model = std::make_shared<ModelBackend>(kGiB);
  vram_device* const device = c::adopt(model);
  CHECK(model->fail(call, nth, {code, 17, "made to fail"}));
  const int failures = run_program(device);
  const bool reached = model->calls(call) >= nth;
  model->clear_failures();
  (void)vram_device_synchronize(device);
  const ModelCounts left = model->counts();
  const std::uint64_t most = reached && gives_back ? 1 : 0;
  const bool clean = left.pages + left.plain_ranges <= most && left.mappings <= most && left.events <= most &&
                     left.streams <= 1 + most;
  if (!clean) {
    std::printf("%s, call %d, code %d: %d failures; %d pages, %d mappings, %d events, %d streams left\n",
                call, static_cast<int>(nth), static_cast<int>(code), failures, static_cast<int>(left.pages),
                static_cast<int>(left.mappings), static_cast<int>(left.events),
                static_cast<int>(left.streams));
    CHECK(false);
  }
  CHECK(vram_device_close(device) == VRAM_OK);
  return reached;
}

TEST(whatever_call_fails_nothing_is_lost) {
  const struct {
    const char* call;
    bool gives_back;
  } calls[] = {
      {"space_reserve", false}, {"page_create", false},  {"map", false},           {"set_access", false},
      {"stream_create", false}, {"stream_wait", false},  {"event_create", false},  {"event_record", false},
      {"event_query", false},   {"fill", false},         {"unmap", true},          {"page_release", true},
      {"space_release", true},  {"event_destroy", true}, {"stream_destroy", true},
  };
  for (const auto& each : calls)
    for (const Code code : {Code::out_of_memory, Code::failed}) {
      std::uint64_t nth = 1;
      while (nth < 500 && fails(each.call, each.gives_back, nth, code)) ++nth;
      CHECK(nth > 1 || std::strcmp(each.call, "event_query") == 0);
    }
}

TEST(a_failure_of_the_driver_is_reported_with_its_number) {
  const auto model = std::make_shared<ModelBackend>(kGiB);
  vram_device* const device = c::adopt(model);
  vram_stream stream = nullptr;
  CHECK(model->fail("stream_create", 1, {Code::failed, 719, ""}));
  CHECK(vram_stream_create(device, &stream) == VRAM_FAILED && stream == nullptr);
  CHECK(said("vram_stream_create: ") && said("in stream_create, 719"));
  vram_pool* pool = nullptr;
  void* memory = nullptr;
  REQUIRE(vram_pool_create(device, nullptr, &pool) == VRAM_OK);
  CHECK(model->fail("space_reserve", 1, {Code::failed, 22, ""}));
  CHECK(vram_pool_allocate(pool, 1, nullptr, &memory) == VRAM_FAILED && said("option plain"));
  CHECK(vram_pool_destroy(pool) == VRAM_OK);
  CHECK(vram_device_close(device) == VRAM_OK);
}

// ---- threads and processes
// ----------------------------------------------------------------------------------

TEST(threads_share_a_pool_and_have_arenas_of_their_own) {
  const World world;
  constexpr int kThreads = 4;
  const int rounds = 4000 / testing::kSlowdown;
  std::atomic<void*> handed[kThreads] = {};
  std::vector<std::thread> threads;
  for (int me = 0; me < kThreads; ++me)
    threads.emplace_back([&, me] {
      vram_arena* arena = nullptr;
      CHECK(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
      for (int i = 0; i < rounds; ++i) {
        unsigned char *memory = nullptr, *part = nullptr;
        const std::size_t size = 1 + static_cast<std::size_t>(i * 37 % 5000);
        CHECK(vram_pool_allocate(world.pool, size, nullptr, reinterpret_cast<void**>(&memory)) == VRAM_OK);
        memory[0] = memory[size - 1] = static_cast<unsigned char>(me);
        CHECK(vram_arena_allocate(arena, size, 0, reinterpret_cast<void**>(&part)) == VRAM_OK);
        part[0] = part[size - 1] = static_cast<unsigned char>(me);
        CHECK(memory[0] == me && memory[size - 1] == me && part[0] == me);
        // Another thread frees it.
        void* const old = handed[(me + 1) % kThreads].exchange(memory);
        CHECK(vram_pool_free(world.pool, old) == VRAM_OK);
        if (i % 50 == 49) CHECK(vram_arena_reset(arena, 0) == VRAM_OK);
        if (i % 500 == 0) (void)stats_of(world.pool);
        if (i % 700 == 0) CHECK(vram_pool_trim(world.pool, 0, 0) == VRAM_OK);
      }
      CHECK(vram_arena_destroy(arena) == VRAM_OK);
    });
  for (std::thread& thread : threads) thread.join();
  for (auto& left : handed) CHECK(vram_pool_free(world.pool, left.load()) == VRAM_OK);
  CHECK(stats_of(world.pool).allocations == 0);
}

TEST(threads_open_and_close_at_the_same_time) {
  std::vector<std::thread> threads;
  for (int me = 0; me < 4; ++me)
    threads.emplace_back([] {
      for (int i = 0; i < 100 / testing::kSlowdown + 1; ++i) {
        // Pools on a small device: sanitizers have no room for the addresses of many of the host's.
        const World world("model:1GiB");
        vram_device* host = nullptr;  // the same one for all
        vram_stream stream = nullptr;
        void* memory = nullptr;
        CHECK(vram_device_open("host", &host) == VRAM_OK);
        CHECK(vram_stream_create(host, &stream) == VRAM_OK);
        CHECK(vram_pool_allocate(world.pool, 4096, nullptr, &memory) == VRAM_OK);
        CHECK(vram_stream_destroy(host, stream) == VRAM_OK);
        CHECK(vram_device_close(host) == VRAM_OK);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// Pools that come and go, and pointers live, freed, foreign and interior, in any order: every call answers as
// a plain book of what is live says it must, and no two live allocations overlap.
class Program {
 public:
  explicit Program(std::uint64_t seed) : random_(seed) {
    CHECK(vram_device_open("model:1GiB", &device_) == VRAM_OK);
  }
  ~Program() {
    for (auto& [pool, live] : books_) CHECK(vram_pool_destroy(pool) == VRAM_OK);
    CHECK(vram_device_close(device_) == VRAM_OK);
  }
  void step() {
    const std::uint64_t dice = random_.below(100);
    if (books_.empty() || dice < 3) return make();
    auto book = books_.begin();
    std::advance(book, random_.below(books_.size()));
    if (dice < 5) return end(book->first);
    if (dice < 50) return allocate(book->first, book->second);
    if (dice < 80) return free_one(book->first, book->second);
    if (dice < 90) return free_wrong(book->first);
    if (dice < 93) CHECK(vram_pool_trim(book->first, 0, random_.chance(50)) == VRAM_OK);
    CHECK(stats_of(book->first).allocations == book->second.size());
    for (vram_pool* gone : gone_) CHECK(vram_pool_trim(gone, 0, 0) == VRAM_BAD_HANDLE);
  }

 private:
  using Live = std::map<std::uintptr_t, std::size_t>;

  void make() {
    vram_pool* pool = nullptr;
    if (books_.size() == 4) return;
    CHECK(vram_pool_create(device_, nullptr, &pool) == VRAM_OK);
    CHECK(books_.count(pool) == 0 && gone_.count(pool) == 0);
    books_[pool];
  }
  void end(vram_pool* pool) {
    CHECK(vram_pool_destroy(pool) == VRAM_OK);
    books_.erase(pool);
    gone_.insert(pool);
    if (gone_.size() > 8) gone_.erase(gone_.begin());
  }
  void allocate(vram_pool* pool, Live& live) {
    void* memory = nullptr;
    const std::size_t size = random_.chance(80) ? random_.below(9000) : random_.below(3 * kMiB);
    REQUIRE(vram_pool_allocate(pool, size, nullptr, &memory) == VRAM_OK);
    const auto at = reinterpret_cast<std::uintptr_t>(memory);
    const std::size_t bytes = std::max<std::size_t>(size, 1);
    for (const auto& [other, book] : books_)
      for (const auto& [from, length] : book) CHECK(at + bytes <= from || from + length <= at);
    live[at] = bytes;
  }
  void free_one(vram_pool* pool, Live& live) {
    if (live.empty()) return;
    auto each = live.begin();
    std::advance(each, random_.below(live.size()));
    freed_ = each->first;
    CHECK(vram_pool_free(pool, reinterpret_cast<void*>(freed_)) == VRAM_OK);
    live.erase(each);
  }
  // Freed before, of another pool, or inside: refused unless it happens to be live here again.
  void free_wrong(vram_pool* pool) {
    std::uintptr_t wrong = freed_;
    for (const auto& [other, book] : books_)
      if (!book.empty() && random_.chance(50)) wrong = book.begin()->first + (other == pool ? 512 : 0);
    if (wrong == 0 || books_[pool].count(wrong) != 0) return;
    CHECK(vram_pool_free(pool, reinterpret_cast<void*>(wrong)) == VRAM_BAD_POINTER);
  }

  testing::Random random_;
  vram_device* device_ = nullptr;
  std::map<vram_pool*, Live> books_;
  std::set<vram_pool*> gone_;
  std::uintptr_t freed_ = 0;
};

TEST(whatever_a_program_does_every_call_answers_as_it_must) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    Program program(seed);
    for (int i = 0; i < 1000 / testing::kSlowdown; ++i) program.step();
  }
}

struct Maker {
  vram_device* device;
  vram_status status;
  static void run(void* argument) {
    auto* const maker = static_cast<Maker*>(argument);
    vram_pool* pool = nullptr;
    maker->status = vram_pool_create(maker->device, nullptr, &pool);
    (void)vram_pool_destroy(pool);
  }
};

TEST(no_lock_is_held_while_the_host_waits) {
  const World world;
  static char memory[4096];
  Gate gate;
  Maker maker = {world.device, VRAM_FAILED};
  REQUIRE(vram_pin(world.device, memory, sizeof memory) == VRAM_OK);
  CHECK(vram_launch(world.device, Gate::wait, &gate, nullptr) == VRAM_OK);
  CHECK(vram_launch(world.device, Maker::run, &maker, nullptr) == VRAM_OK);
  std::thread waiter([&] { CHECK(vram_unpin(world.device, memory) == VRAM_OK); });
  gate.lift();
  waiter.join();
  CHECK(maker.status == VRAM_OK);
}

TEST(a_stream_is_destroyed_once_whoever_tries) {
  const World world;
  for (int round = 0; round < 20; ++round) {
    vram_stream stream = nullptr;
    REQUIRE(vram_stream_create(world.device, &stream) == VRAM_OK);
    std::atomic<int> done{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] { done += vram_stream_destroy(world.device, stream) == VRAM_OK; });
    for (std::thread& thread : threads) thread.join();
    CHECK(done == 1);
  }
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow forks of programs with threads
TEST(a_child_opens_its_own) {
  World world;
  void* memory = nullptr;
  vram_arena* arena = nullptr;
  REQUIRE(vram_pool_allocate(world.pool, 4096, nullptr, &memory) == VRAM_OK);
  REQUIRE(vram_arena_create(world.pool, nullptr, &arena) == VRAM_OK);
  CHECK(holds_in_child([&] {
    void* mine = nullptr;
    int wrong = 0;
    wrong += vram_pool_allocate(world.pool, 4096, nullptr, &mine) != VRAM_CLOSED;
    wrong += vram_pool_free(world.pool, memory) != VRAM_CLOSED;
    wrong += vram_arena_allocate(arena, 1, 0, &mine) != VRAM_CLOSED;
    wrong += vram_arena_destroy(arena) != VRAM_OK;
    wrong += vram_pool_destroy(world.pool) != VRAM_OK;
    wrong += vram_pool_create(world.device, nullptr, &world.pool) != VRAM_CLOSED;
    vram_device* device = nullptr;
    wrong += vram_device_open("host", &device) != VRAM_OK;
    wrong += vram_pool_create(device, nullptr, &world.pool) != VRAM_OK;
    wrong += vram_pool_allocate(world.pool, 4096, nullptr, &mine) != VRAM_OK;
    return wrong == 0;
  }));
  CHECK(vram_pool_free(world.pool, memory) == VRAM_OK);
  CHECK(vram_arena_destroy(arena) == VRAM_OK);
}
#endif

}  // namespace

TEST_MAIN()
