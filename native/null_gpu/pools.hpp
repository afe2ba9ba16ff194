// `MemoryPool`: stream-ordered memory of the null GPU (cudaMallocAsync). A pool reserves memory in pieces and
// gives out any of it, since the driver backs any address with any free page of the pool.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "null_gpu/abi.hpp"
#include "null_gpu/memory.hpp"

namespace vram::null_gpu {

class MemoryPool {
 public:
  enum class Kind { own, shareable, imported };
  explicit MemoryPool(int device, std::uint64_t limit = 0, Kind kind = Kind::own);
  ~MemoryPool();

  Result allocate(std::uint64_t bytes, DevicePointer* out);
  Result free(DevicePointer address);
  bool holds(DevicePointer address);

  // A file descriptor by which another process imports the pool; the caller closes it. An imported pool gives
  // access to allocations of the pool that it stands for, and allocates nothing.
  Result share(int* descriptor);
  static Result import(int descriptor, MemoryPool** out);
  // What another process needs to import an allocation.
  struct Pointer {
    char kind[8];
    std::uint64_t bytes;
    std::int64_t device;
    char rest[40];
  };
  static_assert(sizeof(Pointer) == 64);  // CUmemPoolPtrExportData
  static Result share(DevicePointer address, Pointer* out);
  Result import(const Pointer& pointer, DevicePointer* out);
  // Gives memory back to the device until at most `keep` bytes, or what is used, are reserved.
  void trim(std::uint64_t keep);
  void synchronize();  // trims to the release threshold
  Result get(int attribute, void* out);
  Result set(int attribute, const void* value);

  // The pool that a device allocates from, and the one that was created with it.
  static MemoryPool*& current(int device);
  static MemoryPool* own(int device);
  // Frees what some pool has given out. kNotFound: none has.
  static Result free_anywhere(DevicePointer address);
  static void synchronize_all();

 private:
  void trim_locked(std::uint64_t keep);

  const int device_;
  const std::uint64_t limit_;  // bytes it may give out; 0: no limit
  const Kind kind_;
  std::mutex mutex_;
  std::uint64_t used_ = 0, used_peak_ = 0, reserved_ = 0, reserved_peak_ = 0, threshold_ = 0;
  int reuse_[3] = {1, 1, 1};
  std::unordered_map<DevicePointer, std::uint64_t> blocks_;
};

}  // namespace vram::null_gpu
