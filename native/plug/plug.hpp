// Pools as other libraries plug them in: plain functions with the signatures of PyTorch's
// CUDAPluggableAllocator, which finds them in this library by name. Each device has one pool here, kept for
// the rest of the process, so that a free may come from any thread, also while the interpreter ends.
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
  // The pool that serves a device from now on; null: none. Earlier ones are kept, as memory of theirs may
  // live.
  static void set_pool(int device, std::shared_ptr<Pool> pool);
  static Pool* pool(int device);
  // Words the report of a failed allocation; called without any lock.
  using Explain = std::string (*)(int device, std::uint64_t size, StreamHandle stream,
                                  const OutOfMemoryReport& report);
  static void set_explain(Explain explain);
  // Throws the other library's out-of-memory error; it must not return. Null: std::runtime_error is thrown.
  using Throw = void (*)(const char* message);
  static void set_throw(Throw thrower);
  // Sets the pool of a device that is used for the first time; called without any lock.
  using Make = void (*)(int device);
  static void set_make(Make make);
  // Has the streams of the other library that are never destroyed adopted (Backend::stream_adopt); called
  // once for a device, before a stream other than the default one is first used there, without any lock.
  using Adopt = void (*)(int device);
  static void set_adopt(Adopt adopt);
  // Says what every allocation is filed under; called without any lock. Null: under no tag.
  using Label = std::uint32_t (*)(int device);
  static void set_label(Label label);
};

}  // namespace vram

// Every function takes null pointers and unknown devices in its stride.
extern "C" {
void* vram_plug_allocate(std::size_t size, int device, void* stream);
void* vram_plug_try_allocate(std::size_t size, int device, void* stream);  // null where there is no memory
void vram_plug_free(void* address, std::size_t size, int device, void* stream);
void vram_plug_record_stream(void* address, void* stream);
void vram_plug_empty_cache();
void vram_plug_memory_fraction(double fraction, int device);
void* vram_plug_base(void* address, std::size_t* size);
}
// These pass C++ types by value, as the library that calls them does.
void vram_plug_heap_begin(int device, vram::HeapId id, std::function<bool(void*)> serves);
void vram_plug_heap_end(int device, vram::HeapId id);
void vram_plug_heap_release(int device, vram::HeapId id);
