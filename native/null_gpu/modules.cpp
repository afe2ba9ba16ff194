// The driver's modules, libraries and kernels on the null GPU. Code is accepted unread; a kernel is a handle.
#include <atomic>
#include <cstring>

#include "null_gpu/abi.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/profile.hpp"
#include "null_gpu/properties.hpp"
#include "null_gpu/values.hpp"

using namespace vram::null_gpu;

namespace {

// Numbers of CUfunction_attribute.
constexpr int kMaxThreads = 0, kRegisters = 4, kPtxVersion = 5, kBinaryVersion = 6, kMaxDynamicShared = 8;

int function_attribute(int number) {
  const Profile& profile = Profile::get();
  switch (number) {
    case kMaxThreads:
      return 1024;
    case kRegisters:
      return 32;
    case kPtxVersion:
    case kBinaryVersion:
      return profile.major * 10 + profile.minor;
    case kMaxDynamicShared:
      return attribute(97);
    default:
      return 0;
  }
}

Result make(Handle* out) {
  *out = new_handle();
  return kSuccess;
}

// The one kernel that has an effect: vram's gate, on which the host waits. Work is over when it is queued, so
// a stream arrives at once.
std::atomic<Handle> gate_kernel{nullptr};

void arrive_at_gate(void** parameters) {
  std::uint32_t* const arrived = *static_cast<std::uint32_t**>(parameters[0]);
  *arrived = *static_cast<std::uint32_t*>(parameters[1]);
}

}  // namespace

VRAM_NULL_API Result cuModuleLoadData(Handle* out, const void*) { return make(out); }
VRAM_NULL_API Result cuModuleLoad(Handle* out, const char*) { return cuModuleLoadData(out, nullptr); }
VRAM_NULL_API Result cuModuleLoadDataEx(Handle* out, const void* image, unsigned, int*, void**) {
  return cuModuleLoadData(out, image);
}
VRAM_NULL_API Result cuModuleUnload(Handle) { return kSuccess; }
VRAM_NULL_API Result cuModuleGetFunction(Handle* out, Handle, const char* name) {
  const Result result = make(out);
  if (std::strcmp(name, "vram_gate") == 0) gate_kernel = *out;
  return result;
}
VRAM_NULL_API Result cuFuncGetAttribute(int* out, int number, Handle) {
  *out = function_attribute(number);
  return kSuccess;
}
VRAM_NULL_API Result cuFuncSetAttribute(Handle, int, int) { return kSuccess; }
VRAM_NULL_API Result cuFuncSetCacheConfig(Handle, int) { return kSuccess; }
VRAM_NULL_API Result cuFuncGetModule(Handle* out, Handle) { return make(out); }
VRAM_NULL_API Result cuLaunchKernel(Handle function, unsigned, unsigned, unsigned, unsigned, unsigned,
                                    unsigned, unsigned, Handle stream, void** parameters, void**) {
  Order::get().queued(stream);
  if (function == gate_kernel && function != nullptr && Order::get().capture_of(stream) == 0)
    arrive_at_gate(parameters);
  kernel_launched();
  return kSuccess;
}
VRAM_NULL_API Result cuLaunchKernelEx(const void*, Handle, void**, void**) {
  kernel_launched();
  return kSuccess;
}
VRAM_NULL_API Result cuLaunchCooperativeKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned,
                                               unsigned, unsigned, Handle, void**) {
  kernel_launched();
  return kSuccess;
}
VRAM_NULL_API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, Handle, int threads, std::size_t) {
  *out = blocks_of(threads);
  return kSuccess;
}
VRAM_NULL_API Result cuOccupancyMaxActiveClusters(int* out, Handle, const void*) {
  *out = 16;
  return kSuccess;
}
VRAM_NULL_API Result cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, Handle, int threads,
                                                                          std::size_t, unsigned) {
  *out = blocks_of(threads);
  return kSuccess;
}
VRAM_NULL_API Result cuOccupancyMaxPotentialClusterSize(int* out, Handle, const void*) {
  *out = 8;
  return kSuccess;
}
VRAM_NULL_API Result cuOccupancyMaxPotentialBlockSize(int* grid, int* block, Handle, void*, std::size_t,
                                                      int) {
  *block = 1024;
  *grid = Profile::get().multiprocessors * blocks_of(*block);
  return kSuccess;
}
VRAM_NULL_API Result cuOccupancyAvailableDynamicSMemPerBlock(std::size_t* out, Handle, int, int) {
  *out = static_cast<std::size_t>(attribute(97));
  return kSuccess;
}

// ---- libraries and their kernels ------------------------------------------------------------------------

VRAM_NULL_API Result cuLibraryLoadData(Handle* out, const void*, int*, void**, unsigned, int*, void**,
                                       unsigned) {
  return make(out);
}
VRAM_NULL_API Result cuLibraryLoadFromFile(Handle* out, const char*, int*, void**, unsigned, int*, void**,
                                           unsigned) {
  return make(out);
}
VRAM_NULL_API Result cuLibraryUnload(Handle) { return kSuccess; }
VRAM_NULL_API Result cuLibraryGetKernel(Handle* out, Handle, const char*) { return make(out); }
VRAM_NULL_API Result cuLibraryGetModule(Handle* out, Handle) { return make(out); }
VRAM_NULL_API Result cuKernelGetFunction(Handle* out, Handle kernel) {
  *out = kernel;
  return kSuccess;
}
VRAM_NULL_API Result cuKernelGetAttribute(int* out, int number, Handle, int) {
  *out = function_attribute(number);
  return kSuccess;
}
VRAM_NULL_API Result cuKernelSetAttribute(int, int, Handle, int) { return kSuccess; }
VRAM_NULL_API Result cuKernelSetCacheConfig(Handle, int, int) { return kSuccess; }
VRAM_NULL_API Result cuFuncSetSharedMemConfig(Handle, int) { return kSuccess; }
VRAM_NULL_API Result cuFuncLoad(Handle) { return kSuccess; }
VRAM_NULL_API Result cuFuncIsLoaded(int* state, Handle) {
  *state = 1;
  return kSuccess;
}

// ---- linking --------------------------------------------------------------------------------------------

VRAM_NULL_API Result cuLinkCreate_v2(unsigned, int*, void**, Handle* out) { return make(out); }
VRAM_NULL_API Result cuLinkCreate(unsigned count, int* options, void** values, Handle* out) {
  return cuLinkCreate_v2(count, options, values, out);
}
VRAM_NULL_API Result cuLinkAddData_v2(Handle, int, void*, std::size_t, const char*, unsigned, int*, void**) {
  return kSuccess;
}
VRAM_NULL_API Result cuLinkAddData(Handle state, int kind, void* data, std::size_t bytes, const char* name,
                                   unsigned count, int* options, void** values) {
  return cuLinkAddData_v2(state, kind, data, bytes, name, count, options, values);
}
VRAM_NULL_API Result cuLinkComplete(Handle, void** image, std::size_t* bytes) {
  static char nothing[8];
  *image = nothing;
  *bytes = sizeof(nothing);
  return kSuccess;
}
VRAM_NULL_API Result cuLinkDestroy(Handle) { return kSuccess; }

// ---- descriptions of tensors ----------------------------------------------------------------------------

VRAM_NULL_API Result cuTensorMapEncodeTiled(...) { return kSuccess; }
