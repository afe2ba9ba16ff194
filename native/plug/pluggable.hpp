// Functions with the signatures of PyTorch's CUDAPluggableAllocator, which finds them in this library by
// name: for `vram.torch.mem_pool()`, and for `install()` where nothing can be compiled against PyTorch.
#pragma once

#include <cstddef>
#include <functional>

#include "base/types.hpp"

namespace vram {

// Throws the other library's out-of-memory error; it must not return. Null: std::runtime_error is thrown.
using ThrowOutOfMemory = void (*)(const char* message);
void set_throw_out_of_memory(ThrowOutOfMemory thrower);

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
