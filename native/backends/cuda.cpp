// The driver's functions, loaded by name, and the contract in their terms. See cuda.hpp.
#include "backends/cuda.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <mutex>
#include <stdexcept>

namespace vram {

namespace {

// The driver's binary interface, as far as it is used here (CUDA 11.2 and later).
using CuResult = int;
constexpr CuResult kCuSuccess = 0;
constexpr CuResult kCuInvalidValue = 1;
constexpr CuResult kCuOutOfMemory = 2;
constexpr CuResult kCuInvalidHandle = 400;
constexpr CuResult kCuNotReady = 600;
constexpr CuResult kCuNotSupported = 801;
constexpr int kCuAttributeVirtualMemory = 102;
constexpr int kCuAttributeRdmaWithVirtualMemory = 110;
constexpr int kCuMemPinned = 1;
constexpr int kCuLocationDevice = 1;
constexpr int kCuAccessReadWrite = 3;
constexpr unsigned kCuStreamNonBlocking = 1;
constexpr unsigned kCuEventDisableTiming = 2;

struct CuLocation {
  int type;
  int id;
};
struct CuAllocationProperties {
  int type;
  int handle_types;
  CuLocation location;
  void* win32_metadata;
  struct {
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct CuAccess {
  CuLocation location;
  int flags;
};

constexpr const char* kLibrary = "libcuda.so.1";

}  // namespace

struct CudaDriver {
  void* library = nullptr;
  std::string missing;  // why it cannot be used
  CuResult (*init)(unsigned);
  CuResult (*device_count)(int*);
  CuResult (*device_get)(int*, int);
  CuResult (*device_name)(char*, int, int);
  CuResult (*device_total)(std::size_t*, int);
  CuResult (*device_attribute)(int*, int, int);
  CuResult (*primary_retain)(void**, int);
  CuResult (*primary_release)(int);
  CuResult (*context_push)(void*);
  CuResult (*context_pop)(void**);
  CuResult (*context_current)(void**);
  CuResult (*memory_info)(std::size_t*, std::size_t*);
  CuResult (*memory_alloc)(Address*, std::size_t);
  CuResult (*memory_free)(Address);
  CuResult (*address_reserve)(Address*, std::size_t, std::size_t, Address, unsigned long long);
  CuResult (*address_free)(Address, std::size_t);
  CuResult (*page_create)(PageHandle*, std::size_t, const CuAllocationProperties*, unsigned long long);
  CuResult (*page_release)(PageHandle);
  CuResult (*map)(Address, std::size_t, std::size_t, PageHandle, unsigned long long);
  CuResult (*unmap)(Address, std::size_t);
  CuResult (*set_access)(Address, std::size_t, const CuAccess*, std::size_t);
  CuResult (*stream_create)(void**, unsigned);
  CuResult (*stream_destroy)(void*);
  CuResult (*stream_synchronize)(void*);
  CuResult (*stream_query)(void*);
  CuResult (*stream_wait)(void*, void*, unsigned);
  CuResult (*event_create)(void**, unsigned);
  CuResult (*event_destroy)(void*);
  CuResult (*event_record)(void*, void*);
  CuResult (*event_query)(void*);
  CuResult (*event_synchronize)(void*);
  CuResult (*copy)(Address, Address, std::size_t, void*);
  CuResult (*fill)(Address, unsigned char, std::size_t, void*);
  CuResult (*launch_host)(void*, void (*)(void*), void*);

  template <typename Function>
  void load(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = std::string(kLibrary) + " has no " + name;
  }
};

namespace {

// Loaded once and kept: the driver's own threads outlive any attempt to unload it.
const CudaDriver& driver() {
  static CudaDriver loaded;
  static std::once_flag once;
  std::call_once(once, [] {
    CudaDriver& d = loaded;
    d.library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
    if (d.library == nullptr) {
      d.missing = std::string("no ") + kLibrary + " (the CUDA driver) could be loaded";
      return;
    }
    d.load("cuInit", d.init);
    d.load("cuDeviceGetCount", d.device_count);
    d.load("cuDeviceGet", d.device_get);
    d.load("cuDeviceGetName", d.device_name);
    d.load("cuDeviceTotalMem_v2", d.device_total);
    d.load("cuDeviceGetAttribute", d.device_attribute);
    d.load("cuDevicePrimaryCtxRetain", d.primary_retain);
    d.load("cuDevicePrimaryCtxRelease_v2", d.primary_release);
    d.load("cuCtxPushCurrent_v2", d.context_push);
    d.load("cuCtxPopCurrent_v2", d.context_pop);
    d.load("cuCtxGetCurrent", d.context_current);
    d.load("cuMemGetInfo_v2", d.memory_info);
    d.load("cuMemAlloc_v2", d.memory_alloc);
    d.load("cuMemFree_v2", d.memory_free);
    d.load("cuMemAddressReserve", d.address_reserve);
    d.load("cuMemAddressFree", d.address_free);
    d.load("cuMemCreate", d.page_create);
    d.load("cuMemRelease", d.page_release);
    d.load("cuMemMap", d.map);
    d.load("cuMemUnmap", d.unmap);
    d.load("cuMemSetAccess", d.set_access);
    d.load("cuStreamCreate", d.stream_create);
    d.load("cuStreamDestroy_v2", d.stream_destroy);
    d.load("cuStreamSynchronize", d.stream_synchronize);
    d.load("cuStreamQuery", d.stream_query);
    d.load("cuStreamWaitEvent", d.stream_wait);
    d.load("cuEventCreate", d.event_create);
    d.load("cuEventDestroy_v2", d.event_destroy);
    d.load("cuEventRecord", d.event_record);
    d.load("cuEventQuery", d.event_query);
    d.load("cuEventSynchronize", d.event_synchronize);
    d.load("cuMemcpyAsync", d.copy);
    d.load("cuMemsetD8Async", d.fill);
    d.load("cuLaunchHostFunc", d.launch_host);
    if (!d.missing.empty()) return;
    if (const CuResult result = d.init(0); result != kCuSuccess)
      d.missing = "cuInit failed with code " + std::to_string(result);
  });
  return loaded;
}

Status status_of(CuResult result, const char* call) {
  switch (result) {
    case kCuSuccess:
      return {};
    case kCuNotReady:
      return {Code::not_ready, 0, call};
    case kCuOutOfMemory:
      return {Code::out_of_memory, result, call};
    case kCuInvalidValue:
    case kCuInvalidHandle:
      return {Code::invalid, result, call};
    case kCuNotSupported:
      return {Code::unsupported, result, call};
    default:
      return {Code::failed, result, call};
  }
}

void* pointer(std::uint64_t handle) { return reinterpret_cast<void*>(handle); }

}  // namespace

int CudaBackend::device_count(std::string* why) {
  const CudaDriver& d = driver();
  if (why != nullptr) *why = d.missing;
  int count = 0;
  if (!d.missing.empty() || d.device_count(&count) != kCuSuccess) return 0;
  return count;
}

CudaBackend::CudaBackend(int index) : driver_(driver()) {
  if (!driver_.missing.empty()) throw std::runtime_error(driver_.missing);
  const int count = device_count(nullptr);
  if (index < 0 || index >= count)
    throw std::runtime_error("the driver has " + std::to_string(count) + " device(s)");
  const auto require = [](CuResult result, const char* call) {
    if (result != kCuSuccess)
      throw std::runtime_error(std::string(call) + " failed with code " + std::to_string(result));
  };
  std::size_t total = 0;
  require(driver_.device_get(&device_, index), "cuDeviceGet");
  require(driver_.device_total(&total, device_), "cuDeviceTotalMem");
  require(driver_.primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  int pages = 0;
  int rdma = 0;
  (void)driver_.device_attribute(&pages, kCuAttributeVirtualMemory, device_);
  (void)driver_.device_attribute(&rdma, kCuAttributeRdmaWithVirtualMemory, device_);
  rdma_ = rdma != 0;
  process_ = getpid();
  info_ = {"cuda:" + std::to_string(index), total, pages != 0, false};
}

CudaBackend::~CudaBackend() {
  if (context_ != nullptr && !inherited()) (void)driver_.primary_release(device_);
}

bool CudaBackend::inherited() const { return getpid() != process_; }

template <typename Call>
Status CudaBackend::in_context(const char* name, Call call) const {
  if (inherited()) return {Code::closed, 0, name};
  void* current = nullptr;
  if (driver_.context_current(&current) == kCuSuccess && current == context_) return status_of(call(), name);
  if (const CuResult result = driver_.context_push(context_); result != kCuSuccess)
    return status_of(result, "cuCtxPushCurrent");
  const CuResult result = call();
  (void)driver_.context_pop(&current);
  return status_of(result, name);
}

Status CudaBackend::memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) {
  std::size_t free = 0;
  std::size_t total = 0;
  const Status status = in_context("cuMemGetInfo", [&] { return driver_.memory_info(&free, &total); });
  *free_bytes = free;
  *total_bytes = total;
  return status;
}

// ---- memory ---------------------------------------------------------------------------------------------

Status CudaBackend::reserve(std::uint64_t bytes, Address* out) {
  return in_context("cuMemAlloc", [&] { return driver_.memory_alloc(out, bytes); });
}
Status CudaBackend::release(Address address, std::uint64_t) {
  return in_context("cuMemFree", [&] { return driver_.memory_free(address); });
}
Status CudaBackend::space_reserve(std::uint64_t bytes, Address* out) {
  return in_context("cuMemAddressReserve",
                    [&] { return driver_.address_reserve(out, bytes, kSlotBytes, 0, 0); });
}
Status CudaBackend::space_release(Address address, std::uint64_t bytes) {
  return in_context("cuMemAddressFree", [&] { return driver_.address_free(address, bytes); });
}
Status CudaBackend::page_create(std::uint64_t bytes, PageHandle* out) {
  CuAllocationProperties properties = {};
  properties.type = kCuMemPinned;
  properties.location = {kCuLocationDevice, device_};
  properties.flags.rdma = rdma_ ? 1 : 0;
  return in_context("cuMemCreate", [&] { return driver_.page_create(out, bytes, &properties, 0); });
}
Status CudaBackend::page_release(PageHandle page, std::uint64_t) {
  return in_context("cuMemRelease", [&] { return driver_.page_release(page); });
}
Status CudaBackend::map(Address address, std::uint64_t bytes, PageHandle page) {
  return in_context("cuMemMap", [&] { return driver_.map(address, bytes, 0, page, 0); });
}
Status CudaBackend::set_access(Address address, std::uint64_t bytes) {
  const CuAccess access = {{kCuLocationDevice, device_}, kCuAccessReadWrite};
  return in_context("cuMemSetAccess", [&] { return driver_.set_access(address, bytes, &access, 1); });
}
Status CudaBackend::unmap(Address address, std::uint64_t bytes) {
  return in_context("cuMemUnmap", [&] { return driver_.unmap(address, bytes); });
}

// ---- streams and events
// -------------------------------------------------------------------------------------

Status CudaBackend::stream_create(StreamHandle* out) {
  void* stream = nullptr;
  const Status status =
      in_context("cuStreamCreate", [&] { return driver_.stream_create(&stream, kCuStreamNonBlocking); });
  *out = reinterpret_cast<StreamHandle>(stream);
  return status;
}
Status CudaBackend::stream_destroy(StreamHandle stream) {
  if (stream == 0) return {Code::invalid, 0, "cuStreamDestroy"};
  return in_context("cuStreamDestroy", [&] { return driver_.stream_destroy(pointer(stream)); });
}
Status CudaBackend::stream_synchronize(StreamHandle stream) {
  return in_context("cuStreamSynchronize", [&] { return driver_.stream_synchronize(pointer(stream)); });
}
Status CudaBackend::stream_query(StreamHandle stream) {
  return in_context("cuStreamQuery", [&] { return driver_.stream_query(pointer(stream)); });
}
Status CudaBackend::stream_wait(StreamHandle stream, EventHandle event) {
  return in_context("cuStreamWaitEvent",
                    [&] { return driver_.stream_wait(pointer(stream), pointer(event), 0); });
}
Status CudaBackend::event_create(EventHandle* out) {
  void* event = nullptr;
  const Status status =
      in_context("cuEventCreate", [&] { return driver_.event_create(&event, kCuEventDisableTiming); });
  *out = reinterpret_cast<EventHandle>(event);
  return status;
}
Status CudaBackend::event_destroy(EventHandle event) {
  return in_context("cuEventDestroy", [&] { return driver_.event_destroy(pointer(event)); });
}
Status CudaBackend::event_record(EventHandle event, StreamHandle stream) {
  return in_context("cuEventRecord", [&] { return driver_.event_record(pointer(event), pointer(stream)); });
}
Status CudaBackend::event_query(EventHandle event) {
  return in_context("cuEventQuery", [&] { return driver_.event_query(pointer(event)); });
}
Status CudaBackend::event_synchronize(EventHandle event) {
  return in_context("cuEventSynchronize", [&] { return driver_.event_synchronize(pointer(event)); });
}

// ---- work
// -----------------------------------------------------------------------------------------------------

Status CudaBackend::copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) {
  return in_context("cuMemcpyAsync", [&] { return driver_.copy(to, from, bytes, pointer(stream)); });
}
Status CudaBackend::fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) {
  return in_context("cuMemsetD8Async", [&] { return driver_.fill(to, value, bytes, pointer(stream)); });
}
Status CudaBackend::launch(StreamHandle stream, std::function<void()> work) {
  auto* owned = new std::function<void()>(std::move(work));
  const auto run = [](void* argument) {
    const std::unique_ptr<std::function<void()>> function(static_cast<std::function<void()>*>(argument));
    (*function)();
  };
  const Status status =
      in_context("cuLaunchHostFunc", [&] { return driver_.launch_host(pointer(stream), run, owned); });
  if (!status.ok()) delete owned;
  return status;
}

}  // namespace vram
