// Loads the driver's functions by name. See cuda_driver.hpp.
#include "backends/cuda_driver.hpp"

#include <dlfcn.h>

#include <mutex>

namespace vram {

template <typename Function>
void CudaDriver::load(const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && missing.empty())
    missing = std::string(kLibrary) + " has no " + name + " (a driver for CUDA 12.0 or later is required)";
}

void CudaDriver::load_all() {
  library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    missing = std::string("failed to load ") + kLibrary + " (the CUDA driver)";
    return;
  }
  load("cuInit", init);
  load("cuDriverGetVersion", version);
  load("cuGetErrorName", error_name);
  load("cuDeviceGetCount", device_count);
  load("cuDeviceGet", device_get);
  load("cuDeviceGetName", device_name);
  load("cuDeviceTotalMem_v2", device_total);
  load("cuDeviceGetAttribute", device_attribute);
  load("cuDevicePrimaryCtxRetain", primary_retain);
  load("cuDevicePrimaryCtxRelease_v2", primary_release);
  load("cuCtxPushCurrent_v2", context_push);
  load("cuCtxPopCurrent_v2", context_pop);
  load("cuCtxGetCurrent", context_current);
  load("cuCtxSynchronize", context_synchronize);
  load("cuMemGetInfo_v2", memory_info);
  load("cuMemAlloc_v2", memory_alloc);
  load("cuMemFree_v2", memory_free);
  load("cuMemAddressReserve", address_reserve);
  load("cuMemAddressFree", address_free);
  load("cuMemCreate", page_create);
  load("cuMemRelease", page_release);
  load("cuMemMap", map);
  load("cuMemUnmap", unmap);
  load("cuMemSetAccess", set_access);
  load("cuMemExportToShareableHandle", page_export);
  load("cuMemImportFromShareableHandle", page_import);
  load("cuIpcGetMemHandle", ipc_name);
  load("cuIpcOpenMemHandle_v2", ipc_open);
  load("cuIpcCloseMemHandle", ipc_close);
  load("cuStreamCreate", stream_create);
  load("cuStreamDestroy_v2", stream_destroy);
  load("cuStreamSynchronize", stream_synchronize);
  load("cuStreamQuery", stream_query);
  load("cuStreamWaitEvent", stream_wait);
  load("cuStreamGetId", stream_id);
  load("cuEventCreate", event_create);
  load("cuEventDestroy_v2", event_destroy);
  load("cuEventRecord", event_record);
  load("cuEventQuery", event_query);
  load("cuEventSynchronize", event_synchronize);
  load("cuEventElapsedTime", event_elapsed);
  load("cuMemcpyAsync", copy);
  load("cuMemsetD8Async", fill);
  load("cuDeviceCanAccessPeer", can_access);
  load("cuCtxEnablePeerAccess", open_context);
  load("cuMemcpyPeerAsync", copy_peer);
  load("cuLaunchHostFunc", launch_host);
  load("cuMemHostAlloc", host_alloc);
  load("cuMemFreeHost", host_free);
  load("cuMemHostRegister_v2", host_register);
  load("cuMemHostUnregister", host_unregister);
  load("cuPointerGetAttribute", pointer_attribute);
  load("cuModuleLoadData", module_load);
  load("cuModuleUnload", module_unload);
  load("cuModuleGetFunction", module_function);
  load("cuLaunchKernel", launch_kernel);
  load("cuStreamBeginCapture_v2", capture_begin);
  load("cuStreamEndCapture", capture_end);
  load("cuStreamGetCaptureInfo_v2", capture_info);
  load("cuStreamIsCapturing", capture_asked);
  load("cuGraphNodeGetDependencies", node_dependencies);
  load("cuThreadExchangeStreamCaptureMode", capture_mode);
  load("cuGraphInstantiateWithFlags", graph_instantiate);
  load("cuGraphLaunch", graph_launch);
  load("cuGraphExecDestroy", graph_executable_destroy);
  load("cuGraphDestroy", graph_destroy);
  load("cuUserObjectCreate", user_object_create);
  load("cuUserObjectRelease", user_object_release);
  load("cuGraphRetainUserObject", graph_retain_user_object);
  load("cuMemPoolCreate", pool_create);
  load("cuMemPoolDestroy", pool_destroy);
  load("cuDeviceGetDefaultMemPool", pool_default);
  load("cuMemPoolTrimTo", pool_trim);
  load("cuMemPoolSetAttribute", pool_set);
  load("cuMemPoolGetAttribute", pool_get);
  load("cuMemPoolGetAccess", pool_get_access);
  load("cuMemPoolSetAccess", pool_set_access);
  load("cuMemAllocFromPoolAsync", pool_allocate);
  load("cuMemFreeAsync", pool_free);
  load("cuMemPoolExportToShareableHandle", pool_export);
  load("cuMemPoolImportFromShareableHandle", pool_import);
  load("cuMemPoolExportPointer", pool_export_pointer);
  load("cuMemPoolImportPointer", pool_import_pointer);
  if (!missing.empty()) return;
  stream_flags = reinterpret_cast<decltype(stream_flags)>(dlsym(library, "cuStreamGetFlags"));
  if (const CuResult result = init(0); result != kCuSuccess)
    missing = "cuInit failed with code " + std::to_string(result);
}

const CudaDriver& CudaDriver::get() {
  static CudaDriver loaded;
  static std::once_flag once;
  std::call_once(once, [] { loaded.load_all(); });
  return loaded;
}

Status status_of(CuResult result, const char* call) {
  if (result >= kCuCaptureUnsupported && result <= kCuCapturedEvent) return {Code::capturing, result, call};
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

std::string cuda_error_text(CuResult result) {
  const CudaDriver& driver = CudaDriver::get();
  const char* name = nullptr;
  if (driver.error_name == nullptr || driver.error_name(result, &name) != kCuSuccess || name == nullptr)
    return std::to_string(result);
  return std::string(name) + " (" + std::to_string(result) + ")";
}

}  // namespace vram
