// The binary interface of CUDA's libraries, as far as the null GPU answers it. Declared here, so that the
// library builds without CUDA's headers; native/tests/null_gpu_abi_test.cpp compares the layouts with the
// headers where they are installed.
#pragma once

#include <cstddef>
#include <cstdint>

#define VRAM_NULL_API extern "C" __attribute__((visibility("default")))

namespace vram::null_gpu {

// Numbers of errors, the same in the driver and in the runtime.
using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kPeerUnsupported = 217;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = 600;
inline constexpr Result kPeerEnabled = 704;
inline constexpr Result kPeerNotEnabled = 705;
inline constexpr Result kAlreadyLocked = 712;
inline constexpr Result kNotLocked = 713;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kCaptureUnmatched = 903;
inline constexpr Result kCaptureImplicit = 906;
inline constexpr Result kUnknownError = 999;

using Handle = void*;  // of a stream, an event, a graph, a module, …: the address of an object of ours
using DevicePointer = std::uint64_t;

struct Dim3 {
  unsigned x, y, z;
};
struct Uuid {
  unsigned char bytes[16];
};
struct Location {
  int type;
  int id;
};
struct PointerAttributes {  // cudaPointerAttributes
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  long reserved[8];
};
struct FunctionAttributes {  // cudaFuncAttributes
  std::size_t shared_bytes;
  std::size_t constant_bytes;
  std::size_t local_bytes;
  int max_threads;
  int registers;
  int ptx_version;
  int binary_version;
  int cache_mode;
  int max_dynamic_shared;
  int preferred_carveout;
  int rest[22];
};
static_assert(sizeof(FunctionAttributes) == 144);
static_assert(sizeof(PointerAttributes) == 88);

inline constexpr int kMemoryUnregistered = 0;
inline constexpr int kMemoryHost = 1;
inline constexpr int kMemoryDevice = 2;

inline constexpr int kFileDescriptor = 1;  // CUmemAllocationHandleType

inline constexpr int kCaptureNone = 0;
inline constexpr int kCaptureActive = 1;

// A field of cudaDeviceProp: where it lies in CUDA 12 (cudaGetDeviceProperties_v2) and in CUDA 13.
inline constexpr std::size_t kProperties12 = 1032;
inline constexpr std::size_t kProperties13 = 1008;

}  // namespace vram::null_gpu
