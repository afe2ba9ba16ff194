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
  static constexpr std::size_t kMost = 64 * 1024;  // bytes of one piece
  static Contents& get();

  void put(DevicePointer at, const void* bytes, std::size_t count);  // forgets it where it is too large
  void put_same(DevicePointer at, unsigned char value, std::size_t count);
  void forget(DevicePointer at, std::size_t count);
  // Whether all bytes are known; then they are written to `out`.
  bool take(DevicePointer at, void* out, std::size_t count);
  void forget_all() { epoch_.fetch_add(1, std::memory_order_relaxed); }  // a kernel starts

 private:
  static constexpr std::size_t kMostPieces = 256;
  void renew();  // under the lock

  std::mutex mutex_;
  std::atomic<std::uint64_t> epoch_{0};
  std::uint64_t known_at_ = 0;                         // the epoch that `pieces_` belongs to
  std::map<DevicePointer, std::vector<char>> pieces_;  // not overlapping
};

}  // namespace vram::null_gpu
