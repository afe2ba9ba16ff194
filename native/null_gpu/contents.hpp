// `Contents`: bytes of device memory that are known. What the host has copied to the device, and what copies
// and collectives have made of it, is known until the next kernel starts, which might write anywhere.
//
// Programs decide by the few bytes that they read: sizes, flags, pickled objects. When too much is known, the
// largest piece is forgotten first, so weights that are copied to the device never displace these.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

class Contents {
 public:
  static constexpr std::size_t kMost = std::size_t{64} << 20;  // bytes of all pieces, with `kNode` for each
  static Contents& get();

  void put(DevicePointer at, const void* bytes, std::size_t count);  // forgets it where it is too large
  void put_same(DevicePointer at, unsigned char value, std::size_t count);
  void forget(DevicePointer at, std::size_t count);
  // Whether all bytes are known; then they are written to `out`.
  bool take(DevicePointer at, void* out, std::size_t count);
  // Moves what is known from one place to another, or forgets what was there.
  void copy(DevicePointer to, DevicePointer from, std::size_t count);
  void forget_all() { epoch_.fetch_add(1, std::memory_order_relaxed); }  // a kernel starts

 private:
  static constexpr std::size_t kNode = 192;  // bytes that keeping a piece takes
  struct Piece {
    std::vector<char> bytes;
    std::uint64_t age;
  };
  using Pieces = std::map<DevicePointer, Piece>;

  // All with the lock held.
  void renew();
  Pieces::iterator erase(Pieces::iterator piece);
  void forget_locked(DevicePointer at, std::size_t count);
  void put_locked(DevicePointer at, std::vector<char> bytes);
  // Whether all bytes are known; then they are written to `out`, unless it is null.
  bool read(DevicePointer at, std::size_t count, char* out) const;

  std::mutex mutex_;
  std::atomic<std::uint64_t> epoch_{0};
  std::uint64_t known_at_ = 0;  // the epoch that `pieces_` belongs to
  Pieces pieces_;               // not overlapping
  // Size, age and address of every piece: the last is the oldest of the largest.
  std::set<std::tuple<std::size_t, std::uint64_t, DevicePointer>> by_size_;
  std::uint64_t next_age_ = ~std::uint64_t{0};  // falls, so that older pieces have more
  std::size_t total_ = 0;                       // bytes of all of them, with `kNode` for each
};

}  // namespace vram::null_gpu
