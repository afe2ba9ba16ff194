// The objects behind the handles of vram.h, and how calls report failures. The calls are in devices.cpp,
// pools.cpp and arenas.cpp; the core implements placement and order.
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
#include "driver_pool/driver_pool.hpp"
#include "pool/pool.hpp"
#include "registry.hpp"
#include "vram.h"

namespace vram::c {

// ---- objects behind the handles -------------------------------------------------------------------------

// One device, shared by its handles, pools and arenas.
class Device {
 public:
  explicit Device(std::shared_ptr<Backend> made);
  ~Device();  // waits for its work and unpins remaining memory

  void add(const std::shared_ptr<Allocator>& pool);
  void add(const std::shared_ptr<Arena>& arena);
  // Tells every pool and arena that the stream will be destroyed; returns the first failure.
  Status retire(StreamHandle stream);
  Status synchronize();
  // After the host has waited for a stream, or for everything: pools release what is above their thresholds.
  void release_unused(bool everything);
  bool inherited() const;  // this process is a child of the one that opened it

  const std::shared_ptr<Backend> backend;
  const std::unique_ptr<PageLock> lock;  // null: the device cannot pin host memory
  std::mutex mutex;                      // guards the members below
  std::set<StreamHandle> streams;        // created by vram_stream_create
  std::map<Address, std::uint64_t> pins;

 private:
  std::vector<std::weak_ptr<Allocator>> pools_;
  std::vector<std::weak_ptr<Arena>> arenas_;
  const int process_;
};

struct DeviceHandle {
  std::shared_ptr<Device> device;
};

// The peaks of a pool, kept apart for the pool itself and for each span. When one begins or ends, those of
// the pool are noted for all and restart from the current values.
class Peaks {
 public:
  struct Watch {
    std::uint64_t live = 0;
    std::uint64_t reserved = 0;
  };

  explicit Peaks(std::shared_ptr<Allocator> pool) : pool_(std::move(pool)) {}
  // Both return the statistics at that moment, with the peaks of the watch.
  PoolStats begin(Watch* watch);
  PoolStats end(Watch* watch);
  PoolStats stats(const Watch* watch = nullptr);  // null: those of the pool
  void reset();

 private:
  PoolStats settle();

  const std::shared_ptr<Allocator> pool_;
  std::mutex mutex_;
  Watch own_;
  std::vector<Watch*> watches_;
};

struct PoolHandle {
  std::shared_ptr<Device> device;
  std::shared_ptr<Allocator> allocator;
  Pool* pool = nullptr;          // one of ours,
  DriverPool* driver = nullptr;  // or the driver's
  std::shared_ptr<Peaks> peaks;
  bool pinned = false;  // pinned for a GPU
};

struct SpanHandle {
  ~SpanHandle() { (void)peaks->end(&watch); }
  std::shared_ptr<Peaks> peaks;
  PoolStats start;
  Peaks::Watch watch;
};

struct ArenaHandle {
  std::shared_ptr<Device> device;
  std::shared_ptr<Arena> arena;
  bool pinned = false;
};

// Never destroyed: calls may come until the process ends.
extern constinit Registry<DeviceHandle, vram_device, 1> devices;
extern constinit Registry<PoolHandle, vram_pool, 2> pools;
extern constinit Registry<ArenaHandle, vram_arena, 3> arenas;
extern constinit Registry<SpanHandle, vram_span, 4> spans;

// Returns a device for a backend that a test has created.
vram_device* adopt(std::shared_ptr<Backend> backend);

// ---- reporting ------------------------------------------------------------------------------------------

// Stores the text for vram_last_error and returns the status. `call` is the function of vram.h.
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

// Catches every exception: none may leave a C function.
template <class Body>
vram_status guarded(const char* call, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(VRAM_OUT_OF_MEMORY, call, "the host has no memory left for internal data");
  } catch (const std::exception& error) {
    return fail(VRAM_FAILED, call, "%s", error.what());
  } catch (...) {
    return fail(VRAM_FAILED, call, "an unknown exception");
  }
}

// Runs body(object) with the object of the handle.
template <class Registry, class Handle, class Body>
vram_status with(Registry& registry, Handle* handle, const char* kind, const char* call, Body body) noexcept {
  auto* const object = registry.find(handle);
  if (object == nullptr) return bad_handle(call, kind);
  return guarded(call, [&] { return body(*object); });
}

// ---- structures that grow between versions --------------------------------------------------------------

// Fills the members that the caller's header knows.
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

// Reads the members that the caller's header knows; the rest stay 0, the default. Members that only a newer
// library knows must be 0.
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
                  "an option that is unknown in version " VRAM_VERSION_TEXT
                  " is set, or struct_size is wrong: %zu",
                  known);
  std::memcpy(out, given, std::min(known, sizeof(Structure)));
  return VRAM_OK;
}

// ---- equal in C and in the core -------------------------------------------------------------------------

inline StreamHandle handle_of(vram_stream stream) { return reinterpret_cast<StreamHandle>(stream); }
inline Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }
inline void* pointer_of(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace vram::c
