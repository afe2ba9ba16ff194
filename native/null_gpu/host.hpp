// `LockedMemory`: host memory that the program has page-locked, or asked for as such. It is ordinary memory
// here; what counts is that pointers to it say what they are.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

class LockedMemory {
 public:
  static LockedMemory& get();

  Result allocate(std::uint64_t bytes, void** out);
  Result free(void* memory);
  Result lock(void* memory, std::uint64_t bytes);  // kAlreadyLocked: some of it is locked
  Result unlock(void* memory);
  bool holds(const void* pointer);

 private:
  struct Range {
    std::uint64_t bytes;
    bool ours;  // allocated here
  };
  std::mutex mutex_;
  std::map<std::uint64_t, Range> ranges_;
};

}  // namespace vram::null_gpu
