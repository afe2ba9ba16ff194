// The CUDA driver (libcuda) of the null GPU: contexts, memory, virtual memory, streams and events.
// PyTorch, Triton and vram's own backend call it.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

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

// One context a device; its handle says which.
Handle context_of(int device) {
  return reinterpret_cast<Handle>(0x7000 + 64 * static_cast<std::uintptr_t>(device));
}
void* pointer(DevicePointer address) { return reinterpret_cast<void*>(address); }

}  // namespace

int vram::null_gpu::device_of_context(Handle context) {
  return static_cast<int>((reinterpret_cast<std::uintptr_t>(context) - 0x7000) / 64);
}

// ---- devices and contexts -------------------------------------------------------------------------------

VRAM_NULL_API Result cuInit(unsigned) { return kSuccess; }
VRAM_NULL_API Result cuDriverGetVersion(int* version) {
  *version = Profile::get().driver;
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceGetCount(int* count) {
  *count = Profile::get().devices;
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceGet(int* device, int number) {
  *device = number;
  return memory_of(number) != nullptr ? kSuccess : kInvalidDevice;
}
VRAM_NULL_API Result cuDeviceGetAttribute(int* out, int number, int device) {
  *out = attribute(number);
  return memory_of(device) != nullptr ? kSuccess : kInvalidDevice;
}
VRAM_NULL_API Result cuDeviceGetName(char* out, int bytes, int) {
  std::snprintf(out, static_cast<std::size_t>(bytes), "%s", Profile::get().name.c_str());
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceGetUuid_v2(Uuid* out, int device) {
  *out = uuid_of(device);
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceGetPCIBusId(char* out, int bytes, int device) {
  std::snprintf(out, static_cast<std::size_t>(bytes), "00000000:%02x:00.0", device + 1);
  return kSuccess;
}
VRAM_NULL_API Result cuDeviceTotalMem_v2(std::size_t* out, int) {
  *out = Profile::get().memory;
  return kSuccess;
}
VRAM_NULL_API Result cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
VRAM_NULL_API Result cuDevicePrimaryCtxRetain(Handle* context, int device) {
  *context = context_of(device);
  return memory_of(device) != nullptr ? kSuccess : kInvalidDevice;
}
VRAM_NULL_API Result cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
VRAM_NULL_API Result cuCtxGetCurrent(Handle* context) {
  *context = context_of(chosen_device());
  return kSuccess;
}
VRAM_NULL_API Result cuCtxSetCurrent(Handle context) {
  if (context != nullptr) chosen_device() = device_of_context(context);
  return kSuccess;
}
VRAM_NULL_API Result cuCtxGetDevice(int* device) {
  *device = chosen_device();
  return kSuccess;
}
VRAM_NULL_API Result cuCtxGetDevice_v2(int* device, Handle context) {
  *device = context != nullptr ? device_of_context(context) : chosen_device();
  return kSuccess;
}
// Contexts that threads have pushed; a thread's device is the one on top.
static thread_local int pushed[64];
static thread_local int depth = 0;
VRAM_NULL_API Result cuCtxPushCurrent_v2(Handle context) {
  if (depth == 64) return kInvalidValue;
  pushed[depth++] = chosen_device();
  chosen_device() = device_of_context(context);
  return kSuccess;
}
VRAM_NULL_API Result cuCtxPushCurrent(Handle context) { return cuCtxPushCurrent_v2(context); }
VRAM_NULL_API Result cuCtxPopCurrent_v2(Handle* context) {
  if (depth == 0) return kInvalidValue;
  if (context != nullptr) *context = context_of(chosen_device());
  chosen_device() = pushed[--depth];
  return kSuccess;
}
VRAM_NULL_API Result cuCtxPopCurrent(Handle* context) { return cuCtxPopCurrent_v2(context); }
VRAM_NULL_API Result cuCtxSynchronize() {
  MemoryPool::synchronize_all();
  return kSuccess;
}
VRAM_NULL_API Result cuCtxSynchronize_v2(Handle) { return cuCtxSynchronize(); }
VRAM_NULL_API Result cuCtxGetLimit(std::size_t* out, int) {
  *out = 1024;
  return kSuccess;
}
VRAM_NULL_API Result cuCtxSetLimit(int, std::size_t) { return kSuccess; }
VRAM_NULL_API Result cuGetErrorString(Result error, const char** out) {
  *out = error_text(error);
  return kSuccess;
}
VRAM_NULL_API Result cuGetErrorName(Result error, const char** out) {
  *out = driver_error_name(error);
  return kSuccess;
}

// Nothing is ever logged, so nobody is called.
VRAM_NULL_API Result cuLogsRegisterCallback(Handle, void*, Handle* out) {
  static int registered;
  *out = &registered;
  return kSuccess;
}
VRAM_NULL_API Result cuLogsUnregisterCallback(Handle) { return kSuccess; }

// ---- memory ---------------------------------------------------------------------------------------------

VRAM_NULL_API Result cuMemAlloc_v2(DevicePointer* out, std::size_t bytes) {
  return memory_of(chosen_device())->allocate(bytes, out);
}
VRAM_NULL_API Result cuMemFree_v2(DevicePointer address) {
  if (MemoryPool::free_anywhere(address) == kSuccess) return kSuccess;
  return memory_at(address).free(address);
}
VRAM_NULL_API Result cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  std::uint64_t free = 0, total = 0;
  memory_of(chosen_device())->info(&free, &total);
  *free_bytes = free;
  *total_bytes = total;
  return kSuccess;
}
VRAM_NULL_API Result cuMemGetAddressRange_v2(DevicePointer* begin, std::size_t* bytes,
                                             DevicePointer address) {
  DevicePointer found = 0;
  std::uint64_t length = 0;
  if (!memory_at(address).find(address, &found, &length)) return kNotFound;
  if (begin != nullptr) *begin = found;
  if (bytes != nullptr) *bytes = length;
  return kSuccess;
}
VRAM_NULL_API Result cuMemHostAlloc(void** out, std::size_t bytes, unsigned) {
  return LockedMemory::get().allocate(bytes, out);
}
VRAM_NULL_API Result cuMemFreeHost(void* memory) { return LockedMemory::get().free(memory); }
VRAM_NULL_API Result cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
  return LockedMemory::get().lock(memory, bytes);
}
VRAM_NULL_API Result cuMemHostUnregister(void* memory) { return LockedMemory::get().unlock(memory); }
VRAM_NULL_API Result cuMemHostGetDevicePointer_v2(DevicePointer* out, void* memory, unsigned) {
  *out = reinterpret_cast<DevicePointer>(memory);
  return LockedMemory::get().holds(memory) ? kSuccess : kInvalidValue;
}
VRAM_NULL_API Result cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t bytes, Handle stream) {
  Order::get().queued(stream);
  copied(pointer(to), pointer(from), bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t bytes, Handle) {
  copied(pointer(to), from, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t bytes, Handle) {
  copied(to, pointer(from), bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, std::size_t bytes) {
  copied(pointer(to), from, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuMemcpyDtoH_v2(void* to, DevicePointer from, std::size_t bytes) {
  copied(to, pointer(from), bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuMemsetD8Async(DevicePointer to, unsigned char value, std::size_t bytes,
                                     Handle stream) {
  Order::get().queued(stream);
  filled(pointer(to), value, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuMemsetD8_v2(DevicePointer to, unsigned char value, std::size_t bytes) {
  filled(pointer(to), value, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cuMemsetD32Async(DevicePointer to, unsigned value, std::size_t count, Handle) {
  const std::vector<unsigned> values(count, value);
  copied(pointer(to), values.data(), count * sizeof(unsigned));
  return kSuccess;
}
VRAM_NULL_API Result cuMemsetD32_v2(DevicePointer to, unsigned value, std::size_t count) {
  return cuMemsetD32Async(to, value, count, nullptr);
}
VRAM_NULL_API Result cuPointerGetAttribute(void* out, int number, DevicePointer address) {
  constexpr int kContext = 1, kKind = 2, kAsDevice = 3, kAsHost = 4, kDevice = 9, kBegin = 11;
  const bool device = Addresses::get().holds(pointer(address));
  if (!device && !LockedMemory::get().holds(pointer(address))) return kInvalidValue;
  const auto answer = [out](const auto& value) {
    std::memcpy(out, &value, sizeof(value));
    return kSuccess;
  };
  switch (number) {
    case kContext:
      return answer(context_of(memory_at(address).device()));
    case kKind:
      return answer(static_cast<unsigned>(device ? kMemoryDevice : kMemoryHost));
    case kAsHost:
      return device ? kInvalidValue : answer(address);
    case kAsDevice:
      return answer(address);
    case kDevice:
      return answer(memory_at(address).device());
    case kBegin: {
      DevicePointer begin = address;
      std::uint64_t bytes = 0;
      (void)memory_at(address).find(address, &begin, &bytes);
      return answer(begin);
    }
    default:
      return answer(0);
  }
}

// ---- virtual memory -------------------------------------------------------------------------------------

VRAM_NULL_API Result cuMemAddressReserve(DevicePointer* out, std::size_t bytes, std::size_t, DevicePointer,
                                         unsigned long long) {
  *out = Addresses::get().take(bytes);
  return *out != 0 ? kSuccess : kOutOfMemory;
}
VRAM_NULL_API Result cuMemAddressFree(DevicePointer address, std::size_t bytes) {
  Addresses::get().give(address, bytes);
  return kSuccess;
}
struct PageProperties {  // CUmemAllocationProp
  int type;
  int handle_types;
  Location location;
  void* security;
  unsigned char flags[8];
};
static_assert(sizeof(PageProperties) == 32);
constexpr int kFabric = 8;
VRAM_NULL_API Result cuMemCreate(std::uint64_t* out, std::size_t bytes, const PageProperties* properties,
                                 unsigned long long) {
  constexpr int kHostNuma = 3;
  if (properties->location.type == kHostNuma) return memory_of(chosen_device())->host_page_create(bytes, out);
  Memory* const memory = memory_of(properties->location.id);
  if (memory == nullptr) return kInvalidDevice;
  const int shared_by = properties->handle_types;
  if ((shared_by & ~(kFileDescriptor | kFabric)) != 0) return kInvalidValue;
  if ((shared_by & kFabric) != 0) return kNotPermitted;  // as where no service manages the fabric
  return memory->page_create(bytes, out, shared_by == kFileDescriptor);
}
VRAM_NULL_API Result cuMemGetAllocationPropertiesFromHandle(PageProperties* out, std::uint64_t page) {
  constexpr int kPinned = 1, kOnDevice = 1;
  Memory* const memory = memory_of(static_cast<int>(page & 0xff));
  bool shareable = false;
  if (memory == nullptr || !memory->page_known(page, &shareable)) return kInvalidValue;
  *out = {kPinned, shareable ? kFileDescriptor : 0, {kOnDevice, memory->device()}, nullptr, {}};
  return kSuccess;
}
VRAM_NULL_API Result cuMemExportToShareableHandle(void* out, std::uint64_t page, int kind,
                                                  unsigned long long) {
  Memory* const memory = memory_of(static_cast<int>(page & 0xff));
  int descriptor = -1;
  if (memory == nullptr || kind != kFileDescriptor) return kInvalidValue;
  const Result result = memory->page_export(page, &descriptor);
  if (result == kSuccess) std::memcpy(out, &descriptor, sizeof(descriptor));
  return result;
}
VRAM_NULL_API Result cuMemImportFromShareableHandle(std::uint64_t* out, void* descriptor, int kind) {
  if (kind != kFileDescriptor) return kInvalidValue;
  return Memory::page_import(static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor)), out);
}
VRAM_NULL_API Result cuMemRelease(std::uint64_t page) {
  Memory* const memory = memory_of(static_cast<int>(page & 0xff));
  return memory != nullptr ? memory->page_release(page) : kInvalidValue;
}
VRAM_NULL_API Result cuMemMap(DevicePointer address, std::size_t bytes, std::size_t offset,
                              std::uint64_t page, unsigned long long) {
  Memory* const memory = memory_of(static_cast<int>(page & 0xff));
  if (memory == nullptr || offset != 0) return kInvalidValue;
  return memory->map(address, bytes, page);
}
VRAM_NULL_API Result cuMemUnmap(DevicePointer address, std::size_t bytes) {
  return memory_at(address).unmap(address, bytes);
}
VRAM_NULL_API Result cuMemSetAccess(DevicePointer, std::size_t, const void*, std::size_t) { return kSuccess; }
VRAM_NULL_API Result cuMemGetAllocationGranularity(std::size_t* out, const PageProperties*, int) {
  *out = kGranule;
  return kSuccess;
}
VRAM_NULL_API Result cuMemRetainAllocationHandle(std::uint64_t* out, void* address) {
  const auto at = reinterpret_cast<DevicePointer>(address);
  return memory_at(at).page_retain(at, out);
}

// ---- streams and events --------------------------------------------------------------------------------

VRAM_NULL_API Result cuStreamCreate(Handle* out, unsigned) {
  *out = Order::get().stream_create(0);
  return kSuccess;
}
VRAM_NULL_API Result cuStreamCreateWithPriority(Handle* out, unsigned, int priority) {
  *out = Order::get().stream_create(priority);
  return kSuccess;
}
VRAM_NULL_API Result cuStreamDestroy_v2(Handle stream) { return Order::get().stream_destroy(stream); }
VRAM_NULL_API Result cuStreamSynchronize(Handle stream) {
  MemoryPool::synchronize_all();
  return Order::get().stream_query(stream);
}
VRAM_NULL_API Result cuStreamQuery(Handle stream) { return Order::get().stream_query(stream); }
VRAM_NULL_API Result cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
  return Order::get().stream_wait(stream, event);
}
VRAM_NULL_API Result cuStreamGetId(Handle stream, unsigned long long* out) {
  *out = Order::get().stream_id(stream);
  return kSuccess;
}
VRAM_NULL_API Result cuStreamGetCtx(Handle, Handle* context) { return cuCtxGetCurrent(context); }
VRAM_NULL_API Result cuStreamGetCtx_v2(Handle stream, Handle* context, Handle* green) {
  if (green != nullptr) *green = nullptr;
  return cuStreamGetCtx(stream, context);
}
VRAM_NULL_API Result cuStreamWriteValue32_v2(Handle, DevicePointer, std::uint32_t, unsigned) {
  return kSuccess;
}
VRAM_NULL_API Result cuStreamGetFlags(Handle stream, unsigned* flags) {
  *flags = stream != nullptr;  // non-blocking
  return kSuccess;
}
VRAM_NULL_API Result cuLaunchHostFunc(Handle stream, void (*function)(void*), void* argument) {
  if (Order::get().capture_of(stream) == 0) function(argument);
  return kSuccess;
}
VRAM_NULL_API Result cuEventCreate(Handle* out, unsigned) {
  *out = Order::get().event_create();
  return kSuccess;
}
VRAM_NULL_API Result cuEventDestroy_v2(Handle event) { return Order::get().event_destroy(event); }
VRAM_NULL_API Result cuEventRecord(Handle event, Handle stream) {
  return Order::get().event_record(event, stream);
}
VRAM_NULL_API Result cuEventQuery(Handle event) { return Order::get().event_query(event); }
VRAM_NULL_API Result cuEventSynchronize(Handle event) { return Order::get().event_synchronize(event); }
VRAM_NULL_API Result cuEventElapsedTime_v2(float* milliseconds, Handle, Handle) {
  *milliseconds = 1.0f;
  return kSuccess;
}
VRAM_NULL_API Result cuEventElapsedTime(float* milliseconds, Handle begin, Handle end) {
  return cuEventElapsedTime_v2(milliseconds, begin, end);
}

// ---- functions by name ----------------------------------------------------------------------------------

namespace {

// Forms of functions that are newer than cuGetProcAddress (CUDA 11.3), from CUDA 13.0's cudaTypedefs.h. Their
// parameters differ, so that a caller needs the one of the version it asks for.
constexpr struct LateForm {
  std::string_view name;
  int since;  // the version of CUDA that has it
  std::string_view form, before;
} kLateForms[] = {
    {"cuCtxCreate", 12050, "_v4", "_v3"},
    {"cuCtxGetDevice", 13000, "_v2", ""},
    {"cuCtxSynchronize", 13000, "_v2", ""},
    {"cuDeviceGetUuid", 11040, "_v2", ""},
    {"cuEventElapsedTime", 12080, "_v2", ""},
    {"cuGetProcAddress", 12000, "_v2", ""},
    {"cuGraphAddDependencies", 12030, "_v2", ""},
    {"cuGraphAddKernelNode", 12000, "_v2", ""},
    {"cuGraphAddNode", 12030, "_v2", ""},
    {"cuGraphExecKernelNodeSetParams", 12000, "_v2", ""},
    {"cuGraphExecUpdate", 12000, "_v2", ""},
    {"cuGraphGetEdges", 12030, "_v2", ""},
    {"cuGraphKernelNodeGetParams", 12000, "_v2", ""},
    {"cuGraphKernelNodeSetParams", 12000, "_v2", ""},
    {"cuGraphNodeGetDependencies", 12030, "_v2", ""},
    {"cuGraphNodeGetDependentNodes", 12030, "_v2", ""},
    {"cuGraphRemoveDependencies", 12030, "_v2", ""},
    {"cuMemAdvise", 12020, "_v2", ""},
    {"cuMemPrefetchAsync", 12020, "_v2", ""},
    {"cuMemcpy3DBatchAsync", 13000, "_v2", ""},
    {"cuMemcpyBatchAsync", 13000, "_v2", ""},
    {"cuStreamBatchMemOp", 11070, "_v2", ""},
    {"cuStreamGetCaptureInfo", 12030, "_v3", "_v2"},
    {"cuStreamGetCtx", 12050, "_v2", ""},
    {"cuStreamUpdateCaptureDependencies", 12030, "_v2", ""},
    {"cuStreamWaitValue32", 11070, "_v2", ""},
    {"cuStreamWaitValue64", 11070, "_v2", ""},
    {"cuStreamWriteValue32", 11070, "_v2", ""},
    {"cuStreamWriteValue64", 11070, "_v2", ""},
};

// A function of this library; null: it has none of that name.
void* own_function(const std::string& name) {
  static void* const library = [] {
    Dl_info file;
    link_map* loaded = nullptr;
    dladdr1(reinterpret_cast<void*>(&cuInit), &file, reinterpret_cast<void**>(&loaded), RTLD_DL_LINKMAP);
    const bool program = loaded->l_name[0] == 0;  // linked into the program itself
    return dlopen(program ? nullptr : loaded->l_name, RTLD_LAZY | RTLD_NOLOAD);
  }();
  return dlsym(library, name.c_str());
}

}  // namespace

namespace vram::null_gpu {

void* driver_function(const char* name, int version) {
  if (version == 0) version = Profile::get().driver;
  for (const LateForm& each : kLateForms) {
    if (name != each.name) continue;
    const std::string form = name + std::string(version >= each.since ? each.form : each.before);
    void* const found = own_function(form);
    return found != nullptr ? found : stub_for(form.c_str());
  }
  for (const char* const form : {"_v3", "_v2", ""})
    if (void* const found = own_function(std::string(name) + form)) return found;
  return stub_for(name);
}

}  // namespace vram::null_gpu

// Tables of functions that NVIDIA's libraries share and nobody documents. There are none here.
VRAM_NULL_API Result cuGetExportTable(const void** out, const Uuid*) {
  *out = nullptr;
  return kNotFound;
}
VRAM_NULL_API Result cuGetProcAddress_v2(const char* name, void** out, int version, std::uint64_t,
                                         int* status) {
  *out = driver_function(name, version);
  if (status != nullptr) *status = 0;
  return kSuccess;
}
VRAM_NULL_API Result cuGetProcAddress(const char* name, void** out, int version, std::uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}
