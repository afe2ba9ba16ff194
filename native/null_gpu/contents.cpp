#include "null_gpu/contents.hpp"

#include <algorithm>
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
  by_size_.clear();
  total_ = 0;
}

Contents::Pieces::iterator Contents::erase(Pieces::iterator piece) {
  const std::size_t size = piece->second.bytes.size();
  by_size_.erase({size, piece->second.age, piece->first});
  total_ -= size + kNode;
  return pieces_.erase(piece);
}

// What overlaps is forgotten as a whole.
void Contents::forget_locked(DevicePointer at, std::size_t count) {
  auto piece = pieces_.lower_bound(at);
  if (piece != pieces_.begin() && std::prev(piece)->first + std::prev(piece)->second.bytes.size() > at)
    --piece;
  while (piece != pieces_.end() && piece->first < at + count) piece = erase(piece);
}

void Contents::put_locked(DevicePointer at, std::vector<char> bytes) {
  forget_locked(at, bytes.size());
  if (bytes.empty()) return;
  const std::uint64_t age = next_age_--;
  total_ += bytes.size() + kNode;
  by_size_.emplace(bytes.size(), age, at);
  pieces_.emplace(at, Piece{std::move(bytes), age});
  while (total_ > kMost) erase(pieces_.find(std::get<2>(*by_size_.rbegin())));
}

bool Contents::read(DevicePointer at, std::size_t count, char* out) const {
  for (const DevicePointer end = at + count; at < end;) {
    auto piece = pieces_.upper_bound(at);
    if (piece == pieces_.begin()) return false;
    --piece;
    const std::vector<char>& bytes = piece->second.bytes;
    const std::size_t offset = at - piece->first;
    if (offset >= bytes.size()) return false;
    const std::size_t known = std::min<std::size_t>(bytes.size() - offset, end - at);
    if (out != nullptr) out = std::copy_n(bytes.data() + offset, known, out);
    at += known;
  }
  return true;
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
  if (!read(from, count, nullptr)) return forget_locked(to, count);
  std::vector<char> bytes(count);
  read(from, count, bytes.data());
  put_locked(to, std::move(bytes));
}

bool Contents::take(DevicePointer at, void* out, std::size_t count) {
  const std::lock_guard lock(mutex_);
  renew();
  if (!read(at, count, nullptr)) return false;
  return read(at, count, static_cast<char*>(out));
}

}  // namespace vram::null_gpu
