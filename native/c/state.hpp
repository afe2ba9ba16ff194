// What stands behind the handles of vram.h, and how a call of it reports. The calls themselves are in
// devices.cpp, pools.cpp and arenas.cpp; placement and order are the core's.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "arena/arena.hpp"
#include "backends/pinned.hpp"
#include "base/waits.hpp"
#include "pool/pool.hpp"
#include "registry.hpp"
#include "vram.h"

namespace vram::c {

// ---- what the handles stand for -------------------------------------------------------------------------

// One device, shared by its handles, pools and arenas.
class Device {
 public:
  explicit Device(std::shared_ptr<Backend> made);
  ~Device();  // waits for its work; what is still pinned is unlocked

  void add(const std::shared_ptr<Pool>& pool);
  void add(const std::shared_ptr<Arena>& arena);
  // Tells every pool and arena that the stream is about to go; the first failure.
  Status retire(StreamHandle stream);
  Status synchronize();
  bool inherited() const;  // this process is the child of the one that opened it

  const std::shared_ptr<Backend> backend;
  const std::unique_ptr<PageLock> lock;  // null: there is nobody to tell of host memory
  std::mutex mutex;                      // guards what follows
  std::set<StreamHandle> streams;        // made by vram_stream_create
  std::map<Address, std::uint64_t> pins;

 private:
  std::vector<std::weak_ptr<Pool>> pools_;
  std::vector<std::weak_ptr<Arena>> arenas_;
  const int process_;
};

struct DeviceHandle {
  std::shared_ptr<Device> device;
};

struct PoolHandle {
  std::shared_ptr<Device> device;
  std::shared_ptr<Pool> pool;
  bool pinned = false;  // page-locked for a GPU
};

struct ArenaHandle {
  std::shared_ptr<Device> device;
  std::shared_ptr<Arena> arena;
  bool pinned = false;
};

// Never destroyed: calls may come until the very end of the process.
extern constinit Registry<DeviceHandle, vram_device, 1> devices;
extern constinit Registry<PoolHandle, vram_pool, 2> pools;
extern constinit Registry<ArenaHandle, vram_arena, 3> arenas;

// The device behind a backend that a test has made.
vram_device* adopt(std::shared_ptr<Backend> backend);

// ---- how calls report -----------------------------------------------------------------------------------

// Keeps the text for vram_last_error and returns the status. `call` is the function of vram.h.
__attribute__((format(printf, 3, 4))) vram_status fail(vram_status status, const char* call,
                                                       const char* format, ...);
vram_status fail(const Status& status, const char* call);
vram_status fail_out_of_memory(const OutOfMemoryReport& report, const char* call, const Backend& backend,
                               StreamHandle stream);
inline vram_status result(const Status& status, const char* call) {
  return status.ok() ? VRAM_OK : fail(status, call);
}
vram_status bad_handle(const char* call, const char* kind);
vram_status null_pointer(const char* call, const char* argument);

// Nothing of C++ leaves through a C function.
template <class Body>
vram_status guarded(const char* call, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(VRAM_OUT_OF_MEMORY, call, "the host has no memory left for the library's own books");
  } catch (const std::exception& error) {
    return fail(VRAM_FAILED, call, "%s", error.what());
  } catch (...) {
    return fail(VRAM_FAILED, call, "an unknown exception");
  }
}

// Runs body(object) with what the handle stands for.
template <class Registry, class Handle, class Body>
vram_status with(Registry& registry, Handle* handle, const char* kind, const char* call, Body body) noexcept {
  auto* const object = registry.find(handle);
  if (object == nullptr) return bad_handle(call, kind);
  return guarded(call, [&] { return body(*object); });
}

// ---- structures that grow from version to version -------------------------------------------------------

// Fills as much as the caller's header knows of.
template <class Structure>
vram_status give(const Structure& full, Structure* out, const char* call) {
  if (out == nullptr) return null_pointer(call, "out");
  const std::size_t known = out->struct_size;
  if (known < sizeof(std::size_t))
    return fail(VRAM_BAD_ARGUMENT, call, "struct_size of the structure is %zu; set it to its sizeof", known);
  std::memcpy(out, &full, std::min(known, sizeof(Structure)));
  out->struct_size = known;
  return VRAM_OK;
}

// Reads what the caller's header knew of; the rest stays 0, the default. What only a newer library would
// understand must be 0, too.
template <class Structure>
vram_status take(const Structure* given, Structure* out, const char* call) {
  if (given == nullptr) return VRAM_OK;
  const std::size_t known = given->struct_size;
  if (known < sizeof(std::size_t))
    return fail(VRAM_BAD_ARGUMENT, call, "struct_size of the options is %zu; set it to their sizeof", known);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Structure); i < known; ++i)
    if (bytes[i] != 0)
      return fail(VRAM_UNSUPPORTED, call,
                  "an option beyond those of version " VRAM_VERSION_TEXT
                  " is set, or struct_size is wrong: %zu",
                  known);
  std::memcpy(out, given, std::min(known, sizeof(Structure)));
  return VRAM_OK;
}

// ---- the same in C and in the core ----------------------------------------------------------------------

inline StreamHandle handle_of(vram_stream stream) { return reinterpret_cast<StreamHandle>(stream); }
inline Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }
inline void* pointer_of(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace vram::c
