// What the program that runs on the null GPU can ask about it (vram.predict asks, through ctypes), and what
// is left of it.
#include "null_gpu/report.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "null_gpu/abi.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/profile.hpp"
#include "null_gpu/unknown.hpp"

using namespace vram::null_gpu;

namespace {

// The mapped file of this process; null: nobody asked for it, or it cannot be made.
Use* map_uses() {
  const char* const folder = std::getenv("VRAM_PREDICT_FOLDER");
  if (folder == nullptr) return nullptr;
  const std::string path = std::string(folder) + "/" + std::to_string(getpid()) + ".use";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  const std::size_t bytes = static_cast<std::size_t>(Profile::get().devices) * sizeof(Use);
  void* const mapped = ftruncate(file, static_cast<off_t>(bytes)) == 0
                           ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                           : MAP_FAILED;
  close(file);
  return mapped != MAP_FAILED ? static_cast<Use*>(mapped) : nullptr;
}

}  // namespace

void vram::null_gpu::leave_use(int device, const Use& use) {
  static std::mutex mutex;
  static int process = 0;  // whose file it is: the child of a fork has its own
  static Use* uses = nullptr;
  const std::lock_guard lock(mutex);
  if (process != getpid()) {
    process = getpid();
    uses = map_uses();
  }
  if (uses != nullptr) uses[device] = use;
}

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
// Bytes of the last request that was refused; 0: none was.
VRAM_NULL_API std::int64_t vram_null_gpu_refused(int device) {
  Memory* const memory = memory_of(device);
  return memory != nullptr ? static_cast<std::int64_t>(memory->refused()) : -1;
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
