// The driver's own pools: cuMemPool*, cuMemAllocFromPoolAsync and cuMemFreeAsync with the contract of
// driver_pool_backend.hpp. No call here synchronizes or disturbs a capture; on a captured stream, allocations
// and frees become nodes of its graph.
#include <cstring>

#include "backends/cuda.hpp"

namespace vram {

namespace {

constexpr bool is_flag(DriverPoolAttribute attribute) {
  return attribute <= DriverPoolAttribute::reuse_allow_internal_dependencies;
}

CuPoolProperties properties_of(const DriverPoolProperties& wanted, CuLocation location) {
  CuPoolProperties properties = {};
  properties.type = wanted.kind == DriverPoolKind::managed ? kCuAllocationManaged : kCuAllocationPinned;
  properties.handle_types = wanted.shareable ? kCuHandleFileDescriptor : 0;
  properties.location = location;
  properties.max_size = wanted.max_size;
  return properties;
}

}  // namespace

DriverPoolBackend* CudaBackend::driver_pools() {
  return attribute(kCuAttributeMemoryPools) != 0 ? this : nullptr;
}

// Device memory, managed memory that prefers the device, or pinned host memory: of any node, or of node 0 if
// the driver requires one.
Status CudaBackend::pool_create(const DriverPoolProperties& wanted, DriverPoolHandle* out) {
  void* pool = nullptr;
  const auto create = [&](CuLocation location) {
    const CuPoolProperties properties = properties_of(wanted, location);
    return unseen_by_captures("cuMemPoolCreate", [&] { return driver_.pool_create(&pool, &properties); });
  };
  const bool host = wanted.kind == DriverPoolKind::pinned;
  Status status = create({host ? kCuLocationHost : kCuLocationDevice, host ? 0 : device_});
  if (!status.ok() && host && status.code != Code::out_of_memory) status = create({kCuLocationHostNuma, 0});
  if (!status.ok()) return status;
  if (host)
    if (status = pool_grant(pool); !status.ok()) {
      (void)pool_destroy(reinterpret_cast<DriverPoolHandle>(pool));
      return status;
    }
  *out = reinterpret_cast<DriverPoolHandle>(pool);
  return {};
}

// Grants this device access to memory of a pool elsewhere, unless it already has it.
Status CudaBackend::pool_grant(void* pool) {
  int granted = 0;
  CuLocation here = {kCuLocationDevice, device_};
  const Status asked = unseen_by_captures("cuMemPoolGetAccess",
                                          [&] { return driver_.pool_get_access(&granted, pool, &here); });
  if (asked.ok() && granted == kCuAccessReadWrite) return {};
  const CuAccess access = {{kCuLocationDevice, device_}, kCuAccessReadWrite};
  return unseen_by_captures("cuMemPoolSetAccess", [&] { return driver_.pool_set_access(pool, &access, 1); });
}

Status CudaBackend::pool_default(DriverPoolHandle* out) {
  void* pool = nullptr;
  const Status status =
      unseen_by_captures("cuDeviceGetDefaultMemPool", [&] { return driver_.pool_default(&pool, device_); });
  *out = reinterpret_cast<DriverPoolHandle>(pool);
  return status;
}

Status CudaBackend::pool_destroy(DriverPoolHandle pool) {
  return unseen_by_captures("cuMemPoolDestroy", [&] { return driver_.pool_destroy(cu_pointer(pool)); });
}

Status CudaBackend::pool_allocate(DriverPoolHandle pool, std::uint64_t bytes, StreamHandle stream,
                                  Address* out) {
  return unseen_by_captures("cuMemAllocFromPoolAsync", [&] {
    return driver_.pool_allocate(out, bytes, cu_pointer(pool), for_work(stream));
  });
}

// May be called on another thread than the one whose default stream it is.
Status CudaBackend::pool_free(Address address, StreamHandle stream) {
  return unseen_by_captures("cuMemFreeAsync", [&] { return driver_.pool_free(address, for_order(stream)); });
}

Status CudaBackend::pool_trim(DriverPoolHandle pool, std::uint64_t keep) {
  return unseen_by_captures("cuMemPoolTrimTo", [&] { return driver_.pool_trim(cu_pointer(pool), keep); });
}

// The driver's flags are ints; all other attributes have 64 bits.
Status CudaBackend::pool_get(DriverPoolHandle pool, DriverPoolAttribute attribute, std::uint64_t* out) {
  int flag = 0;
  std::uint64_t number = 0;
  void* value = is_flag(attribute) ? static_cast<void*>(&flag) : &number;
  const Status status = unseen_by_captures("cuMemPoolGetAttribute", [&] {
    return driver_.pool_get(cu_pointer(pool), static_cast<int>(attribute), value);
  });
  if (status.ok()) *out = is_flag(attribute) ? static_cast<std::uint64_t>(flag) : number;
  return status;
}

Status CudaBackend::pool_set(DriverPoolHandle pool, DriverPoolAttribute attribute, std::uint64_t number) {
  int flag = static_cast<int>(number);
  void* value = is_flag(attribute) ? static_cast<void*>(&flag) : &number;
  return unseen_by_captures("cuMemPoolSetAttribute", [&] {
    return driver_.pool_set(cu_pointer(pool), static_cast<int>(attribute), value);
  });
}

Status CudaBackend::pool_open(DriverPoolHandle pool, int device) {
  const CuAccess access = {{kCuLocationDevice, device}, kCuAccessReadWrite};
  return unseen_by_captures("cuMemPoolSetAccess",
                            [&] { return driver_.pool_set_access(cu_pointer(pool), &access, 1); });
}

Status CudaBackend::pool_export(DriverPoolHandle pool, int* fd) {
  return unseen_by_captures("cuMemPoolExportToShareableHandle", [&] {
    return driver_.pool_export(fd, cu_pointer(pool), kCuHandleFileDescriptor, 0);
  });
}

Status CudaBackend::pool_import(int fd, DriverPoolHandle* out) {
  void* pool = nullptr;
  // The driver expects the descriptor itself where a pointer to a handle is declared.
  Status status = unseen_by_captures("cuMemPoolImportFromShareableHandle", [&] {
    return driver_.pool_import(&pool, cu_pointer(static_cast<std::uint64_t>(fd)), kCuHandleFileDescriptor, 0);
  });
  if (!status.ok()) return status;
  if (status = pool_grant(pool); !status.ok()) {
    (void)pool_destroy(reinterpret_cast<DriverPoolHandle>(pool));
    return status;
  }
  *out = reinterpret_cast<DriverPoolHandle>(pool);
  return {};
}

Status CudaBackend::pool_export_pointer(Address address, SharedPointer* out) {
  CuPoolPointer pointer = {};
  static_assert(sizeof pointer.bytes == sizeof(SharedPointer));
  const Status status = unseen_by_captures("cuMemPoolExportPointer",
                                           [&] { return driver_.pool_export_pointer(&pointer, address); });
  std::memcpy(out->data(), pointer.bytes, sizeof pointer.bytes);
  return status;
}

Status CudaBackend::pool_import_pointer(DriverPoolHandle pool, const SharedPointer& pointer, Address* out) {
  CuPoolPointer given = {};
  std::memcpy(given.bytes, pointer.data(), sizeof given.bytes);
  return unseen_by_captures("cuMemPoolImportPointer",
                            [&] { return driver_.pool_import_pointer(out, cu_pointer(pool), &given); });
}

}  // namespace vram
