// The CUDA driver's functions, loaded at run time from libcuda.so.1: building needs no toolkit, and importing
// works without a driver. This file has only the table and the types that its calls need. They are used in
// cuda.cpp (the contract, graphs, kernels), cuda_pools.cpp (the driver's own pools) and pinned.cpp (pinned
// memory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/types.hpp"

namespace vram {

// The driver's binary interface, as far as it is used here (CUDA 12.0 and later).
using CuResult = int;
inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuInvalidValue = 1;
inline constexpr CuResult kCuOutOfMemory = 2;
inline constexpr CuResult kCuInvalidHandle = 400;
inline constexpr CuResult kCuNotReady = 600;
inline constexpr CuResult kCuPeerAlreadyEnabled = 704;
inline constexpr CuResult kCuAlreadyRegistered = 712;
inline constexpr CuResult kCuNotSupported = 801;
inline constexpr CuResult kCuCaptureUnsupported = 900;  // … to kCuCapturedEvent: refused during a capture
inline constexpr CuResult kCuCaptureImplicit = 906;
inline constexpr CuResult kCuCapturedEvent = 907;

inline constexpr int kCuLocationDevice = 1;
inline constexpr int kCuLocationHost = 2;
inline constexpr int kCuLocationHostNuma = 3;
inline constexpr int kCuAllocationPinned = 1;
inline constexpr int kCuAllocationManaged = 2;  // CUDA 13
inline constexpr int kCuHandleFileDescriptor = 1;
inline constexpr int kCuAccessReadWrite = 3;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr int kCuPointerMemoryType = 2;
inline constexpr unsigned kCuMemoryHost = 1;
inline constexpr int kCuCaptureThreadLocal = 1;
inline constexpr int kCuCaptureRelaxed = 2;

// Numbers of device attributes.
inline constexpr int kCuAttributeVirtualMemory = 102;
inline constexpr int kCuAttributePageDescriptors = 103;
inline constexpr int kCuAttributeRdmaWithVirtualMemory = 110;
inline constexpr int kCuAttributeMemoryPools = 115;
inline constexpr int kCuAttributeHostNuma = 134;
inline constexpr int kCuAttributeHostNumaPages = 141;
inline constexpr unsigned kCuHostMapped = 2;

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
struct CuPoolProperties {
  int type;
  int handle_types;
  CuLocation location;
  void* win32_attributes;
  std::size_t max_size;
  unsigned short usage;
  unsigned char reserved[54];
};
struct CuPoolPointer {  // CUmemPoolPtrExportData
  unsigned char bytes[64];
};

struct CuIpcHandle {  // CUipcMemHandle
  char bytes[64];
};

struct CudaDriver {
  static constexpr const char* kLibrary = "libcuda.so.1";
  // Loaded once and kept: the driver's own threads outlive any attempt to unload it.
  static const CudaDriver& get();

  void* library = nullptr;
  std::string missing;  // why it cannot be used; empty: it is usable

  // ---- always set if `missing` is empty ----------------------------------------------------------------
  CuResult (*init)(unsigned);
  CuResult (*version)(int*);
  CuResult (*error_name)(CuResult, const char**);
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
  CuResult (*context_synchronize)();
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
  CuResult (*page_export)(void*, PageHandle, int, unsigned long long);
  CuResult (*page_import)(PageHandle*, void*, int);
  CuResult (*ipc_name)(CuIpcHandle*, Address);
  CuResult (*ipc_open)(Address*, CuIpcHandle, unsigned);
  CuResult (*ipc_close)(Address);
  CuResult (*stream_create)(void**, unsigned);
  CuResult (*stream_destroy)(void*);
  CuResult (*stream_synchronize)(void*);
  CuResult (*stream_query)(void*);
  CuResult (*stream_wait)(void*, void*, unsigned);
  CuResult (*stream_id)(void*, unsigned long long*);
  CuResult (*event_create)(void**, unsigned);
  CuResult (*event_destroy)(void*);
  CuResult (*event_record)(void*, void*);
  CuResult (*event_query)(void*);
  CuResult (*event_synchronize)(void*);
  CuResult (*event_elapsed)(float*, void*, void*);
  CuResult (*copy)(Address, Address, std::size_t, void*);
  CuResult (*fill)(Address, unsigned char, std::size_t, void*);
  // other devices
  CuResult (*can_access)(int*, int, int);
  CuResult (*open_context)(void*, unsigned);
  CuResult (*copy_peer)(Address, void*, Address, void*, std::size_t, void*);
  CuResult (*launch_host)(void*, void (*)(void*), void*);
  // pinned memory
  CuResult (*host_alloc)(void**, std::size_t, unsigned);
  CuResult (*host_free)(void*);
  CuResult (*host_register)(void*, std::size_t, unsigned);
  CuResult (*host_unregister)(void*);
  CuResult (*pointer_attribute)(void*, int, Address);
  // kernels
  CuResult (*module_load)(void**, const void*);
  CuResult (*module_unload)(void*);
  CuResult (*module_function)(void**, void*, const char*);
  CuResult (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            void*, void**, void**);
  // graphs
  CuResult (*capture_begin)(void*, int);
  CuResult (*capture_end)(void*, void**);
  CuResult (*capture_info)(void*, int*, std::uint64_t*, void**, const void* const**, std::size_t*);
  CuResult (*capture_asked)(void*, int*);
  CuResult (*node_dependencies)(void*, void**, std::size_t*);
  CuResult (*capture_mode)(int*);
  CuResult (*graph_instantiate)(void**, void*, unsigned long long);
  CuResult (*graph_launch)(void*, void*);
  CuResult (*graph_executable_destroy)(void*);
  CuResult (*graph_destroy)(void*);
  CuResult (*user_object_create)(void**, void*, void (*)(void*), unsigned, unsigned);
  CuResult (*user_object_release)(void*, unsigned);
  CuResult (*graph_retain_user_object)(void*, void*, unsigned, unsigned);
  // the driver's own pools
  CuResult (*pool_create)(void**, const CuPoolProperties*);
  CuResult (*pool_destroy)(void*);
  CuResult (*pool_default)(void**, int);
  CuResult (*pool_trim)(void*, std::size_t);
  CuResult (*pool_set)(void*, int, void*);
  CuResult (*pool_get)(void*, int, void*);
  CuResult (*pool_get_access)(int*, void*, CuLocation*);
  CuResult (*pool_set_access)(void*, const CuAccess*, std::size_t);
  CuResult (*pool_allocate)(Address*, std::size_t, void*, void*);
  CuResult (*pool_free)(Address, void*);
  CuResult (*pool_export)(void*, void*, int, unsigned long long);
  CuResult (*pool_import)(void**, void*, int, unsigned long long);
  CuResult (*pool_export_pointer)(CuPoolPointer*, Address);
  CuResult (*pool_import_pointer)(Address*, void*, CuPoolPointer*);

  // ---- null if the driver is too old -----------------------------------------------------------------
  CuResult (*stream_flags)(void*, unsigned*) = nullptr;

 private:
  template <typename Function>
  void load(const char* name, Function& function);
  void load_all();
};

// The Status of a result. `call` names the function and is a string literal.
Status status_of(CuResult result, const char* call);
// "CUDA_ERROR_OUT_OF_MEMORY (2)"; only the number if the driver is not loaded.
std::string cuda_error_text(CuResult result);

inline void* cu_pointer(std::uint64_t handle) { return reinterpret_cast<void*>(handle); }

}  // namespace vram
