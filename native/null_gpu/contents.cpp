#include "null_gpu/contents.hpp"

#include <cstring>

namespace vram::null_gpu {

Contents& Contents::get() {
  static auto* const contents = new Contents;  // used until the process has ended
  return *contents;
}

void Contents::renew() {
  const std::uint64_t now = epoch_.load(std::memory_order_relaxed);
  if (known_at_ != now || pieces_.size() > kMostPieces) pieces_.clear();
  known_at_ = now;
}

// What overlaps is forgotten as a whole.
void Contents::forget(DevicePointer at, std::size_t count) {
  const std::lock_guard lock(mutex_);
  renew();
  auto piece = pieces_.lower_bound(at);
  if (piece != pieces_.begin() && std::prev(piece)->first + std::prev(piece)->second.size() > at) --piece;
  while (piece != pieces_.end() && piece->first < at + count) piece = pieces_.erase(piece);
}

void Contents::put(DevicePointer at, const void* bytes, std::size_t count) {
  forget(at, count);
  if (count == 0 || count > kMost) return;
  const auto* const from = static_cast<const char*>(bytes);
  const std::lock_guard lock(mutex_);
  renew();
  pieces_.insert_or_assign(at, std::vector<char>(from, from + count));
}

void Contents::put_same(DevicePointer at, unsigned char value, std::size_t count) {
  if (count > kMost) return forget(at, count);
  const std::vector<unsigned char> bytes(count, value);
  put(at, bytes.data(), count);
}

bool Contents::take(DevicePointer at, void* out, std::size_t count) {
  const std::lock_guard lock(mutex_);
  renew();
  auto piece = pieces_.upper_bound(at);
  if (piece == pieces_.begin()) return false;
  --piece;
  const std::uint64_t offset = at - piece->first;
  if (offset >= piece->second.size() || count > piece->second.size() - offset) return false;
  std::memcpy(out, piece->second.data() + offset, count);
  return true;
}

}  // namespace vram::null_gpu
