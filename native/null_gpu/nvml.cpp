// NVML (libnvidia-ml) of the null GPU: what PyTorch asks before it explains an out-of-memory error, and which
// devices there are.
#include <cstdio>
#include <cstring>

#include "null_gpu/abi.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/profile.hpp"
#include "null_gpu/properties.hpp"

using namespace vram::null_gpu;

namespace {

constexpr int kUnsupported = 3;
constexpr int kUnknownDevice = 6;

Handle handle_of(int device) {
  return reinterpret_cast<Handle>(0x9000 + 64 * static_cast<std::uintptr_t>(device));
}
int device_of(Handle handle) {
  return static_cast<int>((reinterpret_cast<std::uintptr_t>(handle) - 0x9000) / 64);
}

struct MemoryInfo {
  unsigned long long total, free, used;
};

}  // namespace

VRAM_NULL_API int nvmlInit_v2() { return 0; }
VRAM_NULL_API int nvmlInitWithFlags(unsigned) { return 0; }
VRAM_NULL_API int nvmlShutdown() { return 0; }
VRAM_NULL_API const char* nvmlErrorString(int error) { return error == 0 ? "Success" : "Not Supported"; }
VRAM_NULL_API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = Profile::get().driver;
  return 0;
}
VRAM_NULL_API int nvmlSystemGetDriverVersion(char* out, unsigned bytes) {
  std::snprintf(out, bytes, "%d", Profile::get().driver);
  return 0;
}
VRAM_NULL_API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(Profile::get().devices);
  return 0;
}
VRAM_NULL_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* out) {
  *out = handle_of(static_cast<int>(index));
  return memory_of(static_cast<int>(index)) != nullptr ? 0 : kUnknownDevice;
}
VRAM_NULL_API int nvmlDeviceGetHandleByPciBusId_v2(const char* text, Handle* out) {
  unsigned domain = 0, bus = 0;
  if (std::sscanf(text, "%x:%x", &domain, &bus) != 2 || bus == 0) return kUnknownDevice;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, out);
}
VRAM_NULL_API int nvmlDeviceGetName(Handle, char* out, unsigned bytes) {
  std::snprintf(out, bytes, "%s", Profile::get().name.c_str());
  return 0;
}
VRAM_NULL_API int nvmlDeviceGetUUID(Handle handle, char* out, unsigned bytes) {
  std::snprintf(out, bytes, "GPU-null-%d", device_of(handle));
  return 0;
}
VRAM_NULL_API int nvmlDeviceGetMemoryInfo(Handle handle, MemoryInfo* out) {
  Memory* const memory = memory_of(device_of(handle));
  if (memory == nullptr) return kUnknownDevice;
  std::uint64_t free = 0, total = 0;
  memory->info(&free, &total);
  *out = {total, free, total - free};
  return 0;
}
VRAM_NULL_API int nvmlDeviceGetComputeRunningProcesses(Handle, unsigned* count, void*) {
  *count = 0;
  return 0;
}
VRAM_NULL_API int nvmlDeviceGetComputeRunningProcesses_v3(Handle, unsigned* count, void*) {
  *count = 0;
  return 0;
}
VRAM_NULL_API int nvmlDeviceGetNvLinkRemoteDeviceType(Handle, unsigned, int*) { return kUnsupported; }
VRAM_NULL_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, void*) { return kUnsupported; }
VRAM_NULL_API int nvmlDeviceGetP2PStatus(Handle, Handle, int, int*) { return kUnsupported; }
VRAM_NULL_API int nvmlDeviceGetGpuFabricInfoV(Handle, void*) { return kUnsupported; }
VRAM_NULL_API int nvmlDeviceGetCudaComputeCapability(Handle, int* major, int* minor) {
  *major = Profile::get().major;
  *minor = Profile::get().minor;
  return 0;
}
