#include "null_gpu/values.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "null_gpu/contents.hpp"
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
// Of the reduction that counts: an iterator, which begins with the address of the elements, and how many
// there are.
constexpr int kMaskArgument = 0;
constexpr int kItemsArgument = 2;

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

// How many elements the masks at these addresses select.
std::unordered_map<const void*, std::int64_t>& masks() {
  static auto* const made = new std::unordered_map<const void*, std::int64_t>;
  return *made;
}

// What a reduction over a mask counts; `arguments` are those of the kernel: where the mask is, ..., how long
// it is.
std::uint64_t selected(void** arguments) {
  const void* mask = nullptr;
  std::memcpy(&mask, arguments[kMaskArgument], sizeof mask);
  if (const auto known = masks().find(mask); known != masks().end())
    return static_cast<std::uint64_t>(known->second);
  std::uint64_t items = 0;
  std::memcpy(&items, arguments[kItemsArgument], sizeof items);
  return items;
}

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
  Contents::get().forget_all();
  if (!any_rule) return;
  const std::lock_guard lock(mutex);
  const auto rule = rules().find(function);
  if (rule == rules().end()) return;
  if (rule->second == Reads::one) {
    expected = {1, 1};
  } else if (arguments != nullptr) {
    expected = {selected(arguments), sizeof(std::uint64_t)};
  }
}

// Device memory that is read is what was announced, else what was copied there, else what is expected after
// the last kernel, else zeros.
static void read_back(void* to, DevicePointer from, std::size_t bytes) {
  if (bytes <= sizeof(std::int64_t) && announced.next < announced.end) {
    std::memcpy(to, &announced.values[announced.next++], bytes);
    expected = {};
    return;
  }
  if (Contents::get().take(from, to, bytes)) return;
  std::memset(to, 0, bytes);
  if (bytes <= expected.bytes) std::memcpy(to, &expected.value, bytes);
  if (bytes <= sizeof(std::uint64_t)) expected = {};
}

void copied(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const Addresses& addresses = Addresses::get();
  const auto target = reinterpret_cast<DevicePointer>(to), source = reinterpret_cast<DevicePointer>(from);
  const bool to_device = addresses.holds(to), from_device = addresses.holds(from);
  if (to_device && from_device) {
    Contents::get().copy(target, source, bytes);
  } else if (to_device) {
    Contents::get().put(target, from, bytes);
  } else if (from_device) {
    read_back(to, source, bytes);
  } else {
    std::memmove(to, from, bytes);
  }
}

void filled(void* to, int value, std::size_t bytes) {
  if (Addresses::get().holds(to))
    Contents::get().put_same(reinterpret_cast<DevicePointer>(to), static_cast<unsigned char>(value), bytes);
  else
    std::memset(to, value, bytes);
}

}  // namespace vram::null_gpu

// The numbers that this thread reads from the device next, in this order: copies of at most 8 bytes each.
// Replaces what was announced before; none ends it.
VRAM_NULL_API void vram_null_gpu_announce(const std::int64_t* values, int count) {
  auto& announced = vram::null_gpu::announced;
  announced.next = 0;
  announced.end = std::clamp(count, 0, announced.kMost);
  std::copy_n(values, announced.end, announced.values);
}

// How many elements the mask at this address selects, as long as it is there; also for functions that nobody
// announces, such as those of a backward pass. A negative count ends it.
VRAM_NULL_API void vram_null_gpu_mask(const void* address, std::int64_t count) {
  const std::lock_guard lock(vram::null_gpu::mutex);
  if (count < 0) {
    vram::null_gpu::masks().erase(address);
  } else {
    vram::null_gpu::masks().insert_or_assign(address, count);
  }
}
