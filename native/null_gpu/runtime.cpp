// The CUDA runtime (libcudart) of the null GPU: registration of kernels, launches, devices, memory, streams
// and events. Each function does what its namesake does, except for work, which is done at once.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "null_gpu/errors.hpp"
#include "null_gpu/host.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/pools.hpp"
#include "null_gpu/profile.hpp"
#include "null_gpu/properties.hpp"
#include "null_gpu/unknown.hpp"
#include "null_gpu/values.hpp"

using namespace vram::null_gpu;

namespace {

// The configuration that `<<<…>>>` leaves for the stub of a kernel.
struct Launch {
  Dim3 grid{1, 1, 1}, block{1, 1, 1};
  std::size_t shared = 0;
  Handle stream = nullptr;
};
thread_local Launch configured;

}  // namespace

// ---- registration and launches --------------------------------------------------------------------------

VRAM_NULL_API void** __cudaRegisterFatBinary(void*) {
  static void* modules[1];
  return modules;
}
VRAM_NULL_API void __cudaRegisterFatBinaryEnd(void**) {}
VRAM_NULL_API void __cudaUnregisterFatBinary(void**) {}
VRAM_NULL_API char __cudaInitModule(void**) { return 0; }
VRAM_NULL_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                                          void*, void*, void*, int*) {
  kernel_registered(function, name);
}
VRAM_NULL_API void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
VRAM_NULL_API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, std::size_t, int, int) {}
VRAM_NULL_API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, std::size_t shared, Handle stream) {
  configured = {grid, block, shared, stream};
  return 0;
}
VRAM_NULL_API Result __cudaPopCallConfiguration(Dim3* grid, Dim3* block, std::size_t* shared, void* stream) {
  *grid = configured.grid;
  *block = configured.block;
  *shared = configured.shared;
  std::memcpy(stream, &configured.stream, sizeof(Handle));
  return kSuccess;
}
VRAM_NULL_API Result __cudaGetKernel(Handle* kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return kSuccess;
}
VRAM_NULL_API Result cudaGetKernel(Handle* kernel, const void* function) {
  return __cudaGetKernel(kernel, function);
}
VRAM_NULL_API Result cudaLaunchKernel(const void* function, Dim3, Dim3, void** arguments, std::size_t,
                                      Handle stream) {
  Order::get().queued(stream);
  kernel_launched(function, arguments);
  return kSuccess;
}
VRAM_NULL_API Result __cudaLaunchKernel(Handle kernel, Dim3 grid, Dim3 block, void** arguments,
                                        std::size_t shared, Handle stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
VRAM_NULL_API Result cudaLaunchKernelExC(const void*, const void* function, void** arguments) {
  kernel_launched(function, arguments);
  return kSuccess;
}
VRAM_NULL_API Result cudaLaunchCooperativeKernel(const void* function, Dim3, Dim3, void** arguments,
                                                 std::size_t, Handle) {
  kernel_launched(function, arguments);
  return kSuccess;
}
VRAM_NULL_API Result cudaLaunchHostFunc(Handle stream, void (*function)(void*), void* argument) {
  if (Order::get().capture_of(stream) == 0) function(argument);
  return kSuccess;
}
VRAM_NULL_API Result cudaStreamAddCallback(Handle stream, void (*callback)(Handle, Result, void*),
                                           void* argument, unsigned) {
  callback(stream, kSuccess, argument);
  return kSuccess;
}
VRAM_NULL_API Result cudaFuncGetAttributes(FunctionAttributes* out, const void*) {
  const Profile& profile = Profile::get();
  *out = {};
  out->max_threads = 1024;
  out->registers = 32;
  out->ptx_version = out->binary_version = profile.major * 10 + profile.minor;
  out->max_dynamic_shared = attribute(97);
  return kSuccess;
}
VRAM_NULL_API Result cudaFuncSetAttribute(const void*, int, int) { return kSuccess; }
VRAM_NULL_API Result cudaFuncGetName(const char** name, const void*) {
  *name = "kernel";
  return kSuccess;
}
VRAM_NULL_API Result cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int threads,
                                                                   std::size_t) {
  *out = blocks_of(threads);
  return kSuccess;
}
VRAM_NULL_API Result cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*,
                                                                            int threads, std::size_t,
                                                                            unsigned) {
  *out = blocks_of(threads);
  return kSuccess;
}
VRAM_NULL_API Result cudaGetSymbolAddress(void** out, const void*) {
  static DevicePointer symbols = 0;  // all symbols lie in one allocation that counts as the module's
  if (symbols == 0) symbols = Addresses::get().take(kGranule);
  *out = reinterpret_cast<void*>(symbols);
  return kSuccess;
}
VRAM_NULL_API Result cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, int) {
  return kSuccess;
}

// ---- devices and errors ---------------------------------------------------------------------------------

VRAM_NULL_API Result cudaGetDeviceCount(int* count) {
  *count = Profile::get().devices;
  return kSuccess;
}
VRAM_NULL_API Result cudaGetDevice(int* device) {
  *device = chosen_device();
  return kSuccess;
}
VRAM_NULL_API Result cudaSetDevice(int device) {
  if (memory_of(device) == nullptr) return returned(kInvalidDevice);
  chosen_device() = device;
  return kSuccess;
}
VRAM_NULL_API Result cudaDeviceSynchronize() {
  MemoryPool::synchronize_all();
  return kSuccess;
}
VRAM_NULL_API Result cudaDeviceReset() { return kSuccess; }
VRAM_NULL_API Result cudaDriverGetVersion(int* version) {
  *version = Profile::get().driver;
  return kSuccess;
}
VRAM_NULL_API Result cudaRuntimeGetVersion(int* version) {
  const int driver = Profile::get().driver;
  *version = runtime_version() == driver / 1000 ? driver : 1000 * runtime_version();
  return kSuccess;
}
VRAM_NULL_API Result cudaGetDeviceProperties(void* out, int device) {
  if (memory_of(device) == nullptr) return returned(kInvalidDevice);
  fill_properties(out, device, 13);
  return kSuccess;
}
VRAM_NULL_API Result cudaGetDeviceProperties_v2(void* out, int device) {
  if (memory_of(device) == nullptr) return returned(kInvalidDevice);
  fill_properties(out, device, 12);
  return kSuccess;
}
VRAM_NULL_API Result cudaDeviceGetAttribute(int* out, int number, int device) {
  if (memory_of(device) == nullptr) return returned(kInvalidDevice);
  *out = attribute(number);
  return kSuccess;
}
VRAM_NULL_API Result cudaDeviceGetPCIBusId(char* out, int bytes, int device) {
  std::snprintf(out, static_cast<std::size_t>(bytes), "00000000:%02x:00.0", device + 1);
  return kSuccess;
}
VRAM_NULL_API Result cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return kSuccess;
}
VRAM_NULL_API Result cudaGetLastError() { return std::exchange(last_error(), kSuccess); }
VRAM_NULL_API Result cudaPeekAtLastError() { return last_error(); }
VRAM_NULL_API const char* cudaGetErrorString(Result error) { return error_text(error); }
VRAM_NULL_API const char* cudaGetErrorName(Result error) { return runtime_error_name(error); }
VRAM_NULL_API Result cudaProfilerStart() { return kSuccess; }
VRAM_NULL_API Result cudaProfilerStop() { return kSuccess; }

// ---- memory ---------------------------------------------------------------------------------------------

VRAM_NULL_API Result cudaMalloc(void** out, std::size_t bytes) {
  DevicePointer address = 0;
  const Result result = memory_of(chosen_device())->allocate(bytes, &address);
  *out = reinterpret_cast<void*>(address);
  return returned(result);
}
VRAM_NULL_API Result cudaFree(void* address) {
  const auto pointer = reinterpret_cast<DevicePointer>(address);
  if (MemoryPool::free_anywhere(pointer) == kSuccess) return kSuccess;
  return returned(memory_at(pointer).free(pointer));
}
VRAM_NULL_API Result cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  std::uint64_t free = 0, total = 0;
  memory_of(chosen_device())->info(&free, &total);
  *free_bytes = free;
  *total_bytes = total;
  return kSuccess;
}
VRAM_NULL_API Result cudaHostAlloc(void** out, std::size_t bytes, unsigned) {
  return returned(LockedMemory::get().allocate(bytes, out));
}
VRAM_NULL_API Result cudaMallocHost(void** out, std::size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
VRAM_NULL_API Result cudaFreeHost(void* memory) { return returned(LockedMemory::get().free(memory)); }
VRAM_NULL_API Result cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  return returned(LockedMemory::get().lock(memory, bytes));
}
VRAM_NULL_API Result cudaHostUnregister(void* memory) { return returned(LockedMemory::get().unlock(memory)); }
VRAM_NULL_API Result cudaHostGetDevicePointer(void** out, void* memory, unsigned) {
  *out = memory;
  return kSuccess;
}
VRAM_NULL_API Result cudaMemcpy(void* to, const void* from, std::size_t bytes, int) {
  copied(to, from, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, Handle stream) {
  Order::get().queued(stream);
  copied(to, from, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                                       std::size_t from_pitch, std::size_t width, std::size_t height, int,
                                       Handle) {
  for (std::size_t row = 0; row < height; ++row)
    copied(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return kSuccess;
}
VRAM_NULL_API Result cudaMemset(void* to, int value, std::size_t bytes) {
  filled(to, value, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cudaMemsetAsync(void* to, int value, std::size_t bytes, Handle stream) {
  Order::get().queued(stream);
  filled(to, value, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cudaPointerGetAttributes(void* out, const void* pointer) {
  PointerAttributes attributes{};
  const bool device = Addresses::get().holds(pointer);
  const bool locked = !device && LockedMemory::get().holds(pointer);
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  attributes.type = device ? kMemoryDevice : locked ? kMemoryHost : kMemoryUnregistered;
  attributes.device = device ? memory_at(address).device() : locked ? chosen_device() : -2;
  attributes.device_pointer = device || locked ? const_cast<void*>(pointer) : nullptr;
  attributes.host_pointer = device ? nullptr : const_cast<void*>(pointer);
  constexpr std::size_t kBytes12 = offsetof(PointerAttributes, reserved);
  std::memcpy(out, &attributes, runtime_version() == 12 ? kBytes12 : sizeof(attributes));
  return kSuccess;
}

// ---- streams and events ---------------------------------------------------------------------------------

VRAM_NULL_API Result cudaStreamCreateWithPriority(Handle* out, unsigned, int priority) {
  *out = Order::get().stream_create(priority);
  return kSuccess;
}
VRAM_NULL_API Result cudaStreamCreateWithFlags(Handle* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
VRAM_NULL_API Result cudaStreamCreate(Handle* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
VRAM_NULL_API Result cudaStreamDestroy(Handle stream) {
  return returned(Order::get().stream_destroy(stream));
}
VRAM_NULL_API Result cudaStreamQuery(Handle stream) { return returned(Order::get().stream_query(stream)); }
VRAM_NULL_API Result cudaStreamSynchronize(Handle stream) {
  MemoryPool::synchronize_all();
  return returned(Order::get().stream_query(stream));
}
VRAM_NULL_API Result cudaStreamWaitEvent(Handle stream, Handle event, unsigned) {
  return returned(Order::get().stream_wait(stream, event));
}
VRAM_NULL_API Result cudaStreamGetPriority(Handle stream, int* priority) {
  *priority = Order::get().stream_priority(stream);
  return kSuccess;
}
VRAM_NULL_API Result cudaEventCreateWithFlags(Handle* out, unsigned) {
  *out = Order::get().event_create();
  return kSuccess;
}
VRAM_NULL_API Result cudaEventCreate(Handle* out) { return cudaEventCreateWithFlags(out, 0); }
VRAM_NULL_API Result cudaEventDestroy(Handle event) { return returned(Order::get().event_destroy(event)); }
VRAM_NULL_API Result cudaEventRecord(Handle event, Handle stream) {
  return returned(Order::get().event_record(event, stream));
}
VRAM_NULL_API Result cudaEventRecordWithFlags(Handle event, Handle stream, unsigned) {
  return returned(Order::get().event_record(event, stream));
}
VRAM_NULL_API Result cudaEventQuery(Handle event) { return returned(Order::get().event_query(event)); }
VRAM_NULL_API Result cudaEventSynchronize(Handle event) {
  return returned(Order::get().event_synchronize(event));
}
VRAM_NULL_API Result cudaEventElapsedTime(float* milliseconds, Handle, Handle) {
  *milliseconds = 1.0f;
  return kSuccess;
}
VRAM_NULL_API Result cudaEventElapsedTime_v2(float* milliseconds, Handle begin, Handle end) {
  return cudaEventElapsedTime(milliseconds, begin, end);
}

// ---- the driver's functions -----------------------------------------------------------------------------

VRAM_NULL_API Result cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned version,
                                                      unsigned long long, int* status) {
  *out = driver_function(name, static_cast<int>(version));
  if (status != nullptr) *status = *out != nullptr ? 0 : 1;
  return kSuccess;
}
VRAM_NULL_API Result cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long flags,
                                             int* status) {
  int version = 0;
  (void)cudaRuntimeGetVersion(&version);
  return cudaGetDriverEntryPointByVersion(name, out, static_cast<unsigned>(version), flags, status);
}
