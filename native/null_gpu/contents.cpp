#include "null_gpu/contents.hpp"

#include <cstring>
#include <utility>

namespace vram::null_gpu {

Contents& Contents::get() {
  static auto* const contents = new Contents;  // used until the process has ended
  return *contents;
}

void Contents::renew() {
  const std::uint64_t now = epoch_.load(std::memory_order_relaxed);
  if (std::exchange(known_at_, now) == now) return;
  pieces_.clear();
  total_ = 0;
}

// What overlaps is forgotten as a whole.
void Contents::forget_locked(DevicePointer at, std::size_t count) {
  auto piece = pieces_.lower_bound(at);
  if (piece != pieces_.begin() && std::prev(piece)->first + std::prev(piece)->second.size() > at) --piece;
  while (piece != pieces_.end() && piece->first < at + count) {
    total_ -= piece->second.size();
    piece = pieces_.erase(piece);
  }
}

void Contents::put_locked(DevicePointer at, std::vector<char> bytes) {
  forget_locked(at, bytes.size());
  if (bytes.empty() || bytes.size() > kMost - total_) return;
  total_ += bytes.size();
  pieces_.emplace(at, std::move(bytes));
}

const char* Contents::find(DevicePointer at, std::size_t count) const {
  auto piece = pieces_.upper_bound(at);
  if (piece == pieces_.begin()) return nullptr;
  --piece;
  const std::uint64_t offset = at - piece->first;
  const bool whole = offset < piece->second.size() && count <= piece->second.size() - offset;
  return whole ? piece->second.data() + offset : nullptr;
}

void Contents::forget(DevicePointer at, std::size_t count) {
  const std::lock_guard lock(mutex_);
  renew();
  forget_locked(at, count);
}

void Contents::put(DevicePointer at, const void* bytes, std::size_t count) {
  if (count > kMost) return forget(at, count);
  const auto* const from = static_cast<const char*>(bytes);
  std::vector<char> copy(from, from + count);
  const std::lock_guard lock(mutex_);
  renew();
  put_locked(at, std::move(copy));
}

void Contents::put_same(DevicePointer at, unsigned char value, std::size_t count) {
  if (count > kMost) return forget(at, count);
  std::vector<char> bytes(count, static_cast<char>(value));
  const std::lock_guard lock(mutex_);
  renew();
  put_locked(at, std::move(bytes));
}

void Contents::copy(DevicePointer to, DevicePointer from, std::size_t count) {
  const std::lock_guard lock(mutex_);
  renew();
  const char* const known = find(from, count);
  if (known != nullptr)
    put_locked(to, std::vector<char>(known, known + count));
  else
    forget_locked(to, count);
}

bool Contents::take(DevicePointer at, void* out, std::size_t count) {
  const std::lock_guard lock(mutex_);
  renew();
  const char* const known = find(at, count);
  if (known != nullptr) std::memcpy(out, known, count);
  return known != nullptr;
}

}  // namespace vram::null_gpu
