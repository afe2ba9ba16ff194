#include "null_gpu/values.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "null_gpu/memory.hpp"

namespace vram::null_gpu {

namespace {

enum class Reads : std::uint8_t {
  one,    // the next byte that is read is 1: a reduction by "and", of which nothing is known
  count,  // the next number that is read is how many elements a selection has found: all of them
};

// Kernels whose result decides what the program does next. All parts of `name` must occur in it.
constexpr struct {
  std::string_view name[2];
  Reads reads;
} kRules[] = {
    {{"and_kernel_cuda", ""}, Reads::one},
    {{"NonZeroOp", "DeviceReduce"}, Reads::count},
};
constexpr int kItemsArgument = 2;  // of the reduction that counts: how many elements it is given

struct Expected {
  std::uint64_t value = 0;
  std::size_t bytes = 0;  // at most so many are read at once
};

std::mutex mutex;
std::unordered_map<const void*, Reads>& rules() {
  static auto* const made = new std::unordered_map<const void*, Reads>;
  return *made;
}
std::atomic<bool> any_rule = false;
thread_local Expected expected;

// The numbers that this thread reads next, where the caller knows them.
struct Announced {
  static constexpr int kMost = 8;
  std::int64_t values[kMost];
  int next = 0;
  int end = 0;
};
thread_local Announced announced;

}  // namespace

void kernel_registered(const void* function, const char* name) {
  const std::string_view text(name);
  for (const auto& rule : kRules)
    if (text.find(rule.name[0]) != text.npos && text.find(rule.name[1]) != text.npos) {
      const std::lock_guard lock(mutex);
      rules().insert_or_assign(function, rule.reads);
      any_rule = true;
    }
}

void kernel_launched(const void* function, void** arguments) {
  if (!any_rule) return;
  const std::lock_guard lock(mutex);
  const auto rule = rules().find(function);
  if (rule == rules().end()) return;
  if (rule->second == Reads::one) {
    expected = {1, 1};
  } else if (arguments != nullptr) {
    expected.bytes = sizeof(std::uint64_t);
    std::memcpy(&expected.value, arguments[kItemsArgument], sizeof(std::uint64_t));
  }
}

void copied(void* to, const void* from, std::size_t bytes) {
  const Addresses& addresses = Addresses::get();
  if (bytes == 0 || addresses.holds(to)) return;
  if (!addresses.holds(from)) {
    std::memmove(to, from, bytes);
    return;
  }
  std::memset(to, 0, bytes);
  if (bytes <= sizeof(std::int64_t) && announced.next < announced.end) {
    std::memcpy(to, &announced.values[announced.next++], bytes);
    expected = {};
    return;
  }
  if (bytes <= expected.bytes) std::memcpy(to, &expected.value, bytes);
  if (bytes <= sizeof(std::uint64_t)) expected = {};
}

void filled(void* to, int value, std::size_t bytes) {
  if (!Addresses::get().holds(to)) std::memset(to, value, bytes);
}

}  // namespace vram::null_gpu

// The numbers that this thread reads from the device next, in this order: copies of at most 8 bytes each. Replaces
// what was announced before; none ends it.
VRAM_NULL_API void vram_null_gpu_announce(const std::int64_t* values, int count) {
  auto& announced = vram::null_gpu::announced;
  announced.next = 0;
  announced.end = std::clamp(count, 0, announced.kMost);
  std::copy_n(values, announced.end, announced.values);
}
