// The contract of a device with its own stream-ordered allocator (CUDA's cudaMallocAsync family): its pools,
// their properties and attributes, and their exchange between processes. The rules for every call are those
// of backend.hpp. driver_pool.hpp decides what a program may do with such a pool.
#pragma once

#include <array>

#include "base/types.hpp"

namespace vram {

using DriverPoolHandle = std::uint64_t;

enum class DriverPoolKind : std::uint8_t { device, pinned, managed };
inline constexpr const char* kDriverPoolKinds[] = {"device", "pinned", "managed"};

struct DriverPoolProperties {
  DriverPoolKind kind = DriverPoolKind::device;
  bool shareable = false;      // can be exported as a file descriptor
  std::uint64_t max_size = 0;  // maximum bytes the driver may reserve for it; 0: no limit of ours
};

// With CUDA's numbers.
enum class DriverPoolAttribute : std::uint8_t {
  reuse_follow_event_dependencies = 1,    // 0 or 1
  reuse_allow_opportunistic = 2,          // 0 or 1
  reuse_allow_internal_dependencies = 3,  // 0 or 1
  release_threshold = 4,                  // bytes to keep at synchronization points
  reserved_mem_current = 5,               // bytes the pool holds; read-only
  reserved_mem_high = 6,                  // can only be set to 0: restarts from the current value
  used_mem_current = 7,                   // bytes allocated from it, by all users; read-only
  used_mem_high = 8,                      // can only be set to 0
};
inline constexpr int kDriverPoolAttributes = 8;
// By number - 1.
inline constexpr const char* kDriverPoolAttributeNames[kDriverPoolAttributes] = {
    "reuse_follow_event_dependencies",
    "reuse_allow_opportunistic",
    "reuse_allow_internal_dependencies",
    "release_threshold",
    "reserved_mem_current",
    "reserved_mem_high",
    "used_mem_current",
    "used_mem_high"};

// What another process needs to find an allocation of an imported pool.
using SharedPointer = std::array<unsigned char, 64>;

class DriverPoolBackend {
 public:
  virtual ~DriverPoolBackend() = default;
  // unsupported: the driver has no pools of this kind or cannot share them.
  virtual Status pool_create(const DriverPoolProperties& properties, DriverPoolHandle* out) = 0;
  // The default pool of the device, shared by the whole process. It is never destroyed.
  virtual Status pool_default(DriverPoolHandle* out) = 0;
  // pre: nothing allocated from it is live. Memory whose free is still queued is released when it is reached.
  virtual Status pool_destroy(DriverPoolHandle pool) = 0;

  // Memory that is usable in stream order. post: *out is aligned to kUnit.
  virtual Status pool_allocate(DriverPoolHandle pool, std::uint64_t bytes, StreamHandle stream,
                               Address* out) = 0;
  // The driver may reuse the memory once the stream reaches the free.
  virtual Status pool_free(Address address, StreamHandle stream) = 0;
  // Releases unused memory until at most `keep` bytes are reserved.
  virtual Status pool_trim(DriverPoolHandle pool, std::uint64_t keep) = 0;
  virtual Status pool_get(DriverPoolHandle pool, DriverPoolAttribute attribute, std::uint64_t* out) = 0;
  virtual Status pool_set(DriverPoolHandle pool, DriverPoolAttribute attribute, std::uint64_t value) = 0;
  // Lets another device, by its number, use what is allocated from the pool now and later. pre: that device
  // can access the memory of this one.
  virtual Status pool_open(DriverPoolHandle pool, int device) = 0;

  // post: *fd belongs to the caller.
  virtual Status pool_export(DriverPoolHandle pool, int* fd) = 0;
  // Nothing can be allocated from an imported pool; it only gives access to the exporter's allocations.
  virtual Status pool_import(int fd, DriverPoolHandle* out) = 0;
  virtual Status pool_export_pointer(Address address, SharedPointer* out) = 0;
  // Must be freed here (pool_free) before the exporter frees it.
  virtual Status pool_import_pointer(DriverPoolHandle pool, const SharedPointer& pointer, Address* out) = 0;

  // The host may dereference addresses of such a pool.
  virtual bool pool_host_accessible(DriverPoolKind kind) const = 0;
};

}  // namespace vram
