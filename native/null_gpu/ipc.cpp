// Memory and events shared between processes on null GPUs. A handle says what it stands for; memory that was
// opened has addresses of its own and counts for the process that allocated it.
#include <unistd.h>

#include <cstring>

#include "null_gpu/abi.hpp"
#include "null_gpu/errors.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/order.hpp"

using namespace vram::null_gpu;

namespace {

constexpr std::size_t kHandleBytes = 64;

struct Shared {  // what the bytes of a handle hold
  std::uint64_t process = 0;
  DevicePointer address = 0;
  std::uint64_t bytes = 0;
};
struct IpcHandle {
  char bytes[kHandleBytes];
};

}  // namespace

VRAM_NULL_API Result cuIpcGetMemHandle(IpcHandle* out, DevicePointer address) {
  Shared shared{static_cast<std::uint64_t>(getpid()), 0, 0};
  // Pages and memory pools are shared by file descriptors alone.
  if (!memory_at(address).find_allocated(address, &shared.address, &shared.bytes)) return kInvalidValue;
  *out = {};
  std::memcpy(out->bytes, &shared, sizeof(shared));
  return kSuccess;
}
VRAM_NULL_API Result cuIpcOpenMemHandle_v2(DevicePointer* out, IpcHandle handle, unsigned) {
  Shared shared;
  std::memcpy(&shared, handle.bytes, sizeof(shared));
  if (shared.bytes == 0) return kInvalidValue;
  *out = Addresses::get().take(shared.bytes);
  if (*out == 0) return kOutOfMemory;
  memory_of(chosen_device())->add_range(*out, shared.bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuIpcCloseMemHandle(DevicePointer address) {
  DevicePointer begin = 0;
  std::uint64_t bytes = 0;
  Memory& memory = memory_at(address);
  if (!memory.find(address, &begin, &bytes)) return kInvalidValue;
  memory.remove_range(begin);
  Addresses::get().give(begin, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuIpcGetEventHandle(IpcHandle* out, Handle event) {
  *out = {};
  std::memcpy(out->bytes, &event, sizeof(event));
  return Order::get().event_query(event);
}
VRAM_NULL_API Result cuIpcOpenEventHandle(Handle* out, IpcHandle) {
  *out = Order::get().event_create();
  return kSuccess;
}

VRAM_NULL_API Result cudaIpcGetMemHandle(IpcHandle* out, void* pointer) {
  return returned(cuIpcGetMemHandle(out, reinterpret_cast<DevicePointer>(pointer)));
}
VRAM_NULL_API Result cudaIpcOpenMemHandle(void** out, IpcHandle handle, unsigned flags) {
  DevicePointer address = 0;
  const Result result = cuIpcOpenMemHandle_v2(&address, handle, flags);
  *out = reinterpret_cast<void*>(address);
  return returned(result);
}
VRAM_NULL_API Result cudaIpcCloseMemHandle(void* pointer) {
  return returned(cuIpcCloseMemHandle(reinterpret_cast<DevicePointer>(pointer)));
}
VRAM_NULL_API Result cudaIpcGetEventHandle(IpcHandle* out, Handle event) {
  return returned(cuIpcGetEventHandle(out, event));
}
VRAM_NULL_API Result cudaIpcOpenEventHandle(Handle* out, IpcHandle handle) {
  return returned(cuIpcOpenEventHandle(out, handle));
}
