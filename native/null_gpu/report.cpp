// What the program that runs on the null GPU can ask about it (vram.predict asks, through ctypes).
#include <algorithm>
#include <cstring>
#include <string>

#include "null_gpu/abi.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/unknown.hpp"

using namespace vram::null_gpu;

// Bytes of a device in use, with what the context takes; -1: there is no such device.
VRAM_NULL_API std::int64_t vram_null_gpu_used(int device) {
  Memory* const memory = memory_of(device);
  return memory != nullptr ? static_cast<std::int64_t>(memory->used()) : -1;
}
// The most that were in use.
VRAM_NULL_API std::int64_t vram_null_gpu_peak(int device) {
  Memory* const memory = memory_of(device);
  return memory != nullptr ? static_cast<std::int64_t>(memory->peak()) : -1;
}
// Names of functions that were called and that the null GPU does not have, one a line. post: how many bytes
// that takes, with the end; at most `bytes` are written.
VRAM_NULL_API int vram_null_gpu_unknown(char* out, int bytes) {
  const std::string names = unknown_calls();
  if (out != nullptr && bytes > 0) {
    const std::size_t fit = std::min(names.size(), static_cast<std::size_t>(bytes) - 1);
    std::memcpy(out, names.data(), fit);
    out[fit] = 0;
  }
  return static_cast<int>(names.size()) + 1;
}
