// The functions that PyTorch's pluggable allocator calls. See pluggable.hpp.
#include "plug/pluggable.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "plug/plug.hpp"

#define VRAM_EXPORT __attribute__((visibility("default")))

namespace vram {

namespace {

std::atomic<ThrowOutOfMemory> throw_out_of_memory{nullptr};

StreamHandle handle_of(void* stream) { return reinterpret_cast<StreamHandle>(stream); }
Address address_of(void* pointer) { return reinterpret_cast<Address>(pointer); }

// Null if memory has run out. Other failures throw.
void* allocate(std::size_t size, int device, void* stream, OutOfMemoryReport* report) {
  if (size == 0) return nullptr;
  Address address = 0;
  const Status status = Plug::allocate(device, size, handle_of(stream), &address, report);
  if (status.ok() || status.code == Code::out_of_memory) return reinterpret_cast<void*>(address);
  if (Plug::pool(device) == nullptr)
    throw std::runtime_error("vram is not installed for cuda:" + std::to_string(device));
  throw std::runtime_error(std::string("vram failed to allocate: ") + status.call + " failed, native " +
                           std::to_string(status.native));
}

}  // namespace

void set_throw_out_of_memory(ThrowOutOfMemory thrower) { throw_out_of_memory = thrower; }

}  // namespace vram

using namespace vram;

extern "C" {

VRAM_EXPORT void* vram_plug_allocate(std::size_t size, int device, void* stream) {
  OutOfMemoryReport report;
  void* const address = allocate(size, device, stream, &report);
  if (address != nullptr || size == 0) return address;
  const std::string message = Plug::explain(device, size, handle_of(stream), report);
  if (const ThrowOutOfMemory thrower = throw_out_of_memory.load()) thrower(message.c_str());
  throw std::runtime_error(message);
}

VRAM_EXPORT void* vram_plug_try_allocate(std::size_t size, int device, void* stream) {
  return allocate(size, device, stream, nullptr);
}

// The block knows its own size and stream; unknown and already freed addresses are ignored.
VRAM_EXPORT void vram_plug_free(void* address, std::size_t, int device, void*) {
  if (address != nullptr) (void)Plug::free(address_of(address), device);
}

VRAM_EXPORT void vram_plug_record_stream(void* address, void* stream) {
  if (address != nullptr) (void)Plug::record_stream(address_of(address), handle_of(stream));
}

VRAM_EXPORT void vram_plug_empty_cache() {
  for (int device = 0; device < Plug::kDevices; ++device)
    if (Pool* const pool = Plug::pool(device)) (void)pool->trim(0, true);
}

VRAM_EXPORT void vram_plug_memory_fraction(double fraction, int device) {
  Pool* const pool = Plug::serving(device);
  if (pool == nullptr) return;
  const auto total = static_cast<double>(pool->backend().info().total_bytes);
  // A limit of 0 would mean no limit.
  (void)pool->set_limit(std::max<std::uint64_t>(1, static_cast<std::uint64_t>(fraction * total)));
}

VRAM_EXPORT void* vram_plug_base(void* address, std::size_t* size) {
  BlockInfo block;
  int device = 0;
  if (address == nullptr || !Plug::find(address_of(address), &block, &device).ok()) return address;
  if (size != nullptr) *size = block.bytes;
  return reinterpret_cast<void*>(block.address);
}

}  // extern "C"

VRAM_EXPORT void vram_plug_heap_begin(int device, HeapId id, std::function<bool(void*)> serves) {
  if (Pool* const pool = Plug::serving(device))
    (void)pool->heap_begin(id, [serves = std::move(serves)](StreamHandle stream) {
      return serves(reinterpret_cast<void*>(stream));
    });
}
VRAM_EXPORT void vram_plug_heap_end(int device, HeapId id) {
  if (Pool* const pool = Plug::pool(device)) (void)pool->heap_end(id);
}
VRAM_EXPORT void vram_plug_heap_release(int device, HeapId id) {
  if (Pool* const pool = Plug::pool(device)) (void)pool->heap_release(id);
}
