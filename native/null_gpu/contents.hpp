// `Contents`: bytes of device memory that are known. What the host has copied to the device, and what copies
// and collectives have made of it, is known until the next kernel starts, which might write anywhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

class Contents {
 public:
  static constexpr std::size_t kMost = std::size_t{64} << 20;  // bytes of all pieces
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
  // All with the lock held.
  void renew();
  void forget_locked(DevicePointer at, std::size_t count);
  void put_locked(DevicePointer at, std::vector<char> bytes);
  const char* find(DevicePointer at, std::size_t count) const;  // null: not all is known

  std::mutex mutex_;
  std::atomic<std::uint64_t> epoch_{0};
  std::uint64_t known_at_ = 0;                         // the epoch that `pieces_` belongs to
  std::map<DevicePointer, std::vector<char>> pieces_;  // not overlapping
  std::size_t total_ = 0;                              // bytes of all of them
};

}  // namespace vram::null_gpu
