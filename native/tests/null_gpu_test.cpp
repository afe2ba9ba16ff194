// The null GPU without a program on it: memory and its limits, pages, pools, captures, graphs, what copies
// make known, locked host memory, and the sizes of workspaces beside those of an H200.
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "null_gpu/contents.hpp"
#include "null_gpu/graphs.hpp"
#include "null_gpu/host.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/pools.hpp"
#include "null_gpu/profile.hpp"
#include "null_gpu/rules.hpp"
#include "null_gpu/values.hpp"
#include "testing.hpp"

using namespace vram::null_gpu;

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kTotal = 1024 * kMiB, kOverhead = 24 * kMiB;

// Before main: the profile is read once.
const bool kSet = setenv("VRAM_NULL_GPU", "name=Test;memory=1073741824;overhead=25165824;devices=2", 1) == 0;

Memory& memory() { return *memory_of(0); }

TEST(the_profile_says_what_there_is) {
  CHECK(kSet);
  CHECK(Profile::get().name == "Test");
  CHECK(memory_of(1) != nullptr && memory_of(2) == nullptr && memory_of(-1) == nullptr);
  std::uint64_t free = 0, total = 0;
  memory_of(1)->info(&free, &total);
  CHECK(total == kTotal && free == kTotal - kOverhead);
}

TEST(memory_ends_where_the_device_ends) {
  DevicePointer first = 0, second = 0;
  CHECK(memory().allocate(kTotal - kOverhead + 1, &first) == kOutOfMemory && first == 0);
  CHECK(memory().allocate(~std::uint64_t{0}, &first) == kOutOfMemory);
  CHECK(memory().allocate(kTotal - kOverhead, &first) == kSuccess);
  CHECK(memory().allocate(1, &second) == kOutOfMemory);
  CHECK(memory().used() == kTotal && memory().peak() == kTotal);
  CHECK(memory().free(first + 1) == kInvalidValue);
  CHECK(memory().free(first) == kSuccess && memory().free(first) == kInvalidValue);
  CHECK(memory().free(0) == kSuccess);
  CHECK(memory().used() == kOverhead && memory().peak() == kTotal);
}

// Allocations do not overlap, whatever the order of calls, and a freed range of the same size is used again.
TEST(addresses_never_overlap) {
  std::mt19937 dice(7);
  std::vector<std::pair<DevicePointer, std::uint64_t>> held;
  for (int i = 0; i < 3000; ++i) {
    if (held.empty() || dice() % 3 != 0) {
      const std::uint64_t bytes = (1 + dice() % 20) * kMiB;
      DevicePointer made = 0;
      if (memory().allocate(bytes, &made) != kSuccess) continue;
      for (const auto& [address, length] : held) CHECK(made + bytes <= address || made >= address + length);
      held.emplace_back(made, bytes);
    } else {
      const std::size_t which = dice() % held.size();
      CHECK(memory().free(held[which].first) == kSuccess);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  for (const auto& [address, bytes] : held) CHECK(memory().free(address) == kSuccess);
  CHECK(memory().used() == kOverhead);
}

TEST(pages_are_kept_while_held_or_mapped) {
  const DevicePointer range = Addresses::get().take(8 * kMiB);
  std::uint64_t page = 0, again = 0;
  CHECK(memory().page_create(3, &page) == kInvalidValue);
  CHECK(memory().page_create(4 * kMiB, &page) == kSuccess);
  CHECK(memory().map(range + 1, 4 * kMiB, page) == kInvalidValue);
  CHECK(memory().map(range, 4 * kMiB, page) == kSuccess);
  CHECK(memory().map(range + 2 * kMiB, 4 * kMiB, page) == kInvalidValue);  // overlaps
  CHECK(memory().page_retain(range + kMiB, &again) == kSuccess && again == page);
  CHECK(memory().page_release(page) == kSuccess && memory().page_release(page) == kSuccess);
  CHECK(memory().page_release(page) == kInvalidValue);
  CHECK(memory().used() == kOverhead + 4 * kMiB);  // the mapping keeps it
  CHECK(memory().unmap(range, 2 * kMiB) == kInvalidValue);
  CHECK(memory().unmap(range, 4 * kMiB) == kSuccess);
  CHECK(memory().used() == kOverhead);
  Addresses::get().give(range, 8 * kMiB);
}

TEST(pools_keep_what_their_threshold_says) {
  MemoryPool pool(0, 256 * kMiB);
  DevicePointer first = 0, second = 0;
  CHECK(pool.allocate(10 * kMiB, &first) == kSuccess && pool.allocate(40 * kMiB, &second) == kSuccess);
  std::uint64_t reserved = 0, used = 0;
  const auto read = [&] { return pool.get(5, &reserved) == kSuccess && pool.get(7, &used) == kSuccess; };
  CHECK(read() && used == 50 * kMiB && reserved == 64 * kMiB && memory().used() == kOverhead + reserved);
  DevicePointer begin = 0;
  std::uint64_t bytes = 0;
  CHECK(memory().find(second + 5, &begin, &bytes) && begin == second && bytes == 40 * kMiB);
  CHECK(MemoryPool::free_anywhere(second) == kSuccess && MemoryPool::free_anywhere(second) == kNotFound);
  CHECK(read() && used == 10 * kMiB && reserved == 64 * kMiB);
  const std::uint64_t threshold = 40 * kMiB;
  CHECK(pool.set(4, &threshold) == kSuccess);
  pool.synchronize();
  CHECK(read() && reserved == 64 * kMiB);  // whole pieces
  pool.trim(0);
  CHECK(read() && reserved == 32 * kMiB);
  CHECK(pool.allocate(250 * kMiB, &second) == kOutOfMemory);  // its own limit
  CHECK(pool.free(first) == kSuccess && pool.free(first) == kNotFound);
}

TEST(a_capture_spreads_over_events) {
  Order& order = Order::get();
  const Handle one = order.stream_create(0), two = order.stream_create(0), event = order.event_create();
  Handle graph = nullptr;
  CHECK(order.capture_end(one, &graph) == kCaptureUnmatched);
  CHECK(order.capture_begin(one) == kSuccess && order.capture_of(two) == 0);
  CHECK(order.event_record(event, one) == kSuccess && order.stream_wait(two, event) == kSuccess);
  CHECK(order.capture_of(two) == order.capture_of(one));
  CHECK(order.stream_query(two) == kCaptureImplicit);
  CHECK(order.capture_end(two, &graph) == kCaptureUnmatched);
  CHECK(order.capture_end(one, &graph) == kSuccess && graph != nullptr);
  CHECK(order.capture_of(two) == 0 && order.stream_query(two) == kSuccess);
  CHECK(order.stream_wait(two, event) == kSuccess && order.capture_of(two) == 0);  // that capture has ended
  CHECK(order.stream_destroy(one) == kSuccess && order.stream_destroy(one) == kInvalidHandle);
  CHECK(order.event_destroy(event) == kSuccess && order.event_query(event) == kInvalidHandle);
  CHECK(order.stream_destroy(two) == kSuccess);
}

TEST(graphs_keep_objects_until_all_are_gone) {
  static int ended = 0;
  Graphs& graphs = Graphs::get();
  const Handle graph = new_handle();
  const Handle object = graphs.object_create(&ended, [](void* count) { ++*static_cast<int*>(count); }, 1);
  CHECK(graphs.retain(graph, object, 1, 1) == kSuccess);  // the caller's reference moves
  const Handle executable = graphs.instantiate(graph);
  CHECK(graphs.destroy(graph) == kSuccess && ended == 0);
  CHECK(graphs.destroy(executable) == kSuccess && ended == 1);
  CHECK(graphs.object_release(object, 1) == kInvalidValue &&
        graphs.retain(graph, object, 1, 0) == kInvalidValue);
}

TEST(copies_are_known_until_a_kernel_runs) {
  DevicePointer place = 0;
  CHECK(memory().allocate(4 * kMiB, &place) == kSuccess);
  char* const device = reinterpret_cast<char*>(place);
  const std::vector<char> sent = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<char> got(8, 9);
  copied(device, sent.data(), 8);
  copied(device + kMiB, device + 2, 4);
  copied(got.data(), device + kMiB, 4);
  CHECK(std::memcmp(got.data(), sent.data() + 2, 4) == 0);
  filled(device + 4, 0x11, 2);  // overwrites a part: the whole piece is forgotten, never wrong
  copied(got.data(), device, 8);
  CHECK(got == std::vector<char>(8, 0));
  copied(got.data(), device + 4, 2);
  CHECK(got[0] == 0x11 && got[1] == 0x11);
  kernel_launched();
  copied(got.data(), device + kMiB, 4);
  CHECK(got[0] == 0 && got[3] == 0);
  CHECK(memory().free(place) == kSuccess);
}

TEST(locked_memory_says_what_it_is) {
  LockedMemory& locked = LockedMemory::get();
  std::vector<char> mine(100);
  void* made = nullptr;
  CHECK(locked.allocate(10, &made) == kSuccess && locked.holds(static_cast<char*>(made) + 9));
  CHECK(!locked.holds(static_cast<char*>(made) + 10) && locked.unlock(made) == kNotLocked);
  CHECK(locked.lock(mine.data() + 10, 50) == kSuccess && !locked.holds(mine.data()));
  CHECK(locked.lock(mine.data(), 11) == kAlreadyLocked && locked.lock(mine.data() + 59, 5) == kAlreadyLocked);
  CHECK(locked.free(mine.data() + 10) == kInvalidValue && locked.unlock(mine.data() + 10) == kSuccess);
  CHECK(locked.free(made) == kSuccess && !locked.holds(made));
}

bool near(std::uint64_t value, double truth, double share) {
  return static_cast<double>(value) > truth * (1 - share) && static_cast<double>(value) < truth * (1 + share);
}

// Answers of cuDNN 9.19 on an H200: weights, reserve and workspace.
TEST(recurrent_networks_need_what_an_h200_answers) {
  const RnnShape lstm{2, false, 2, 35 * 64, 64, 512, 512, 512, 4},
      both{2, true, 3, 35 * 64, 64, 512, 512, 512, 4};
  CHECK(rnn_weights(lstm) == 16809984 && near(rnn_reserve(lstm), 50462976, 0.01));
  CHECK(near(rnn_workspace(lstm), 63701760, 0.1));
  CHECK(rnn_weights(both) == 67207168 && near(rnn_reserve(both), 155975936, 0.01));
  CHECK(near(rnn_workspace(both), 195691264, 0.1));
  const RnnShape gru{3, false, 1, 10 * 4, 4, 16, 32, 32, 4};
  CHECK(rnn_weights(gru) == 19200 && near(rnn_workspace(gru), 8435488, 0.1));
}

// Answers of cuFFT 12.0 on an H200.
TEST(transforms_need_what_an_h200_answers) {
  const std::int64_t small[] = {1024, 1024}, large[] = {1048576}, prime[] = {999983};
  CHECK(fft_workspace(2, small, 16, 8, false) == 0);
  CHECK(fft_workspace(1, large, 16, 8, false) == 134217728 &&
        near(fft_workspace(1, large, 16, 8, true), 67108992, 0.01));
  CHECK(near(fft_workspace(1, prime, 16, 8, false), 512000000, 0.01));
}

// Answers of cuDNN 9.19 for filter gradients of a U-Net: the first number without a device, the second on an
// H200.
TEST(convolutions_need_what_an_h200_answers) {
  const auto bytes = [](std::int64_t filters, std::int64_t channels, std::int64_t points, Tiling tiling,
                        std::uint64_t answered) {
    Convolution convolution;
    convolution.direction = Convolution::filter;
    convolution.input = {8, channels, points, points};
    convolution.filter_sizes = {filters, channels, 3, 3};
    convolution.output = {8, filters, points, points};
    convolution.steps = convolution.padding = {1, 1};
    convolution.element_bytes = 2;
    convolution.channels_last = true;
    return convolution_workspace(convolution, tiling, true, answered);
  };
  CHECK(bytes(128, 128, 192, {0, 1, 3, true}, 1179843) == 7668375);
  CHECK(bytes(1024, 512, 24, {0, 1, 3, true}, 131) == 7078267);
  CHECK(bytes(512, 1024, 48, {0, 1, 4, true}, 131) == 6291811);
  CHECK(bytes(64, 128, 384, {7, 1, 4, true}, 0) == 3932847);
  CHECK(bytes(512, 512, 48, {0, 1, 1, false}, 131) == 0);
  CHECK(bytes(1024, 1024, 24, {0, 1, 4, true}, 131) == 131);
}

TEST(a_plan_behind_the_first_needs_its_own_workspace) {
  Convolution convolution;
  convolution.input = convolution.output = {32, 256, 16, 16};
  convolution.filter_sizes = {256, 256, 1, 1};
  convolution.steps = {1, 1};
  convolution.padding = {0, 0};
  convolution.element_bytes = 2;
  CHECK(convolution_workspace(convolution, std::nullopt, true, 5000000) == 272);
  CHECK(convolution_workspace(convolution, std::nullopt, false, 5000000) == 5000000);
}

}  // namespace

TEST_MAIN()
