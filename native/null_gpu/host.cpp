#include "null_gpu/host.hpp"

#include <cstdlib>

namespace vram::null_gpu {

namespace {

constexpr std::uint64_t kPage = 4096;
std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

}  // namespace

LockedMemory& LockedMemory::get() {
  static auto* const memory = new LockedMemory;  // used until the process has ended
  return *memory;
}

Result LockedMemory::allocate(std::uint64_t bytes, void** out) {
  *out = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (*out == nullptr) return kOutOfMemory;
  const std::lock_guard lock(mutex_);
  ranges_.insert_or_assign(number(*out), Range{bytes, true});
  return kSuccess;
}

Result LockedMemory::free(void* memory) {
  if (memory == nullptr) return kSuccess;
  {
    const std::lock_guard lock(mutex_);
    const auto range = ranges_.find(number(memory));
    if (range == ranges_.end() || !range->second.ours) return kInvalidValue;
    ranges_.erase(range);
  }
  std::free(memory);
  return kSuccess;
}

Result LockedMemory::lock(void* memory, std::uint64_t bytes) {
  if (memory == nullptr || bytes == 0) return kInvalidValue;
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.lower_bound(number(memory));
  if (next != ranges_.end() && next->first < number(memory) + bytes) return kAlreadyLocked;
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes > number(memory)) return kAlreadyLocked;
  }
  ranges_.emplace(number(memory), Range{bytes, false});
  return kSuccess;
}

Result LockedMemory::unlock(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(number(memory));
  if (range == ranges_.end() || range->second.ours) return kNotLocked;
  ranges_.erase(range);
  return kSuccess;
}

bool LockedMemory::holds(const void* pointer) {
  const std::lock_guard lock(mutex_);
  auto range = ranges_.upper_bound(number(pointer));
  if (range == ranges_.begin()) return false;
  --range;
  return number(pointer) - range->first < range->second.bytes;
}

}  // namespace vram::null_gpu
