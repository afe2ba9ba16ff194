// Pools as other libraries use them: plain functions with the signatures of PyTorch's CUDAPluggableAllocator,
// which finds them in this library by name. Each device has one pool, which is kept until the process ends,
// so that a free may come from any thread, also while the interpreter exits.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "pool/pool.hpp"

namespace vram {

class Plug {
 public:
  static constexpr int kDevices = 64;
  // Sets the pool that serves a device from now on; null: none. Earlier pools are kept, because their memory
  // may be live.
  static void set_pool(int device, std::shared_ptr<Pool> pool);
  static Pool* pool(int device);
  // Formats the report of a failed allocation; called without any lock.
  using Explain = std::string (*)(int device, std::uint64_t size, StreamHandle stream,
                                  const OutOfMemoryReport& report);
  static void set_explain(Explain explain);
  // Throws the other library's out-of-memory error; it must not return. Null: std::runtime_error is thrown.
  using Throw = void (*)(const char* message);
  static void set_throw(Throw thrower);
  // Sets the pool of a device on its first use; called without any lock.
  using Make = void (*)(int device);
  static void set_make(Make make);
  // Adopts the streams of the other library that are never destroyed (Backend::stream_adopt). Called once per
  // device, before the first use of a stream other than the default one, without any lock.
  using Adopt = void (*)(int device);
  static void set_adopt(Adopt adopt);
  // Returns the label of an allocation; called without any lock. Null: no tag.
  using Label = std::uint32_t (*)(int device);
  static void set_label(Label label);
};

}  // namespace vram

// Every function accepts null pointers and unknown devices.
extern "C" {
void* vram_plug_allocate(std::size_t size, int device, void* stream);
void* vram_plug_try_allocate(std::size_t size, int device, void* stream);  // null if there is no memory
void vram_plug_free(void* address, std::size_t size, int device, void* stream);
void vram_plug_record_stream(void* address, void* stream);
void vram_plug_empty_cache();
void vram_plug_memory_fraction(double fraction, int device);
void* vram_plug_base(void* address, std::size_t* size);
}
// These pass C++ types by value, like the library that calls them.
void vram_plug_heap_begin(int device, vram::HeapId id, std::function<bool(void*)> serves);
void vram_plug_heap_end(int device, vram::HeapId id);
void vram_plug_heap_release(int device, vram::HeapId id);
