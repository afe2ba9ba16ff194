#include "null_gpu/values.hpp"

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
thread_local std::int64_t announced = -1;  // what the next selection finds, where the caller knows

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
  } else if (announced >= 0) {
    expected = {static_cast<std::uint64_t>(announced), sizeof(std::uint64_t)};
    announced = -1;
  } else if (arguments != nullptr) {
    expected.bytes = sizeof(std::uint64_t);
    std::memcpy(&expected.value, arguments[kItemsArgument], sizeof(std::uint64_t));
  }
}

// Device memory that is read is what was copied there, else what is expected after the last kernel, else
// zeros.
static void read_back(void* to, DevicePointer from, std::size_t bytes) {
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

// How many elements the next selection (nonzero, masked_select) of this thread finds.
VRAM_NULL_API void vram_null_gpu_announce_count(std::int64_t count) { vram::null_gpu::announced = count; }
