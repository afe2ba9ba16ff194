// The functions that other libraries call. See plug.hpp.
#include "plug/plug.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <vector>

#define VRAM_EXPORT __attribute__((visibility("default")))

namespace vram {

namespace {

// Never destroyed: frees arrive until the process ends.
struct State {
  std::atomic<Pool*> pools[Plug::kDevices] = {};
  std::mutex mutex;
  std::vector<std::shared_ptr<Pool>> kept;
  std::atomic<Plug::Explain> explain{nullptr};
  std::atomic<Plug::Throw> thrower{nullptr};
  std::atomic<Plug::Make> make{nullptr};
  std::atomic<Plug::Label> label{nullptr};
  std::atomic<Plug::Adopt> adopt{nullptr};
  std::atomic<bool> adopted[Plug::kDevices] = {};
};
State& state() {
  static State* const leaked = new State();
  return *leaked;
}

StreamHandle handle_of(void* stream) { return reinterpret_cast<StreamHandle>(stream); }
Address address_of(void* pointer) { return reinterpret_cast<Address>(pointer); }

[[noreturn]] void fail_out_of_memory(const std::string& message) {
  if (const Plug::Throw thrower = state().thrower.load()) thrower(message.c_str());
  throw std::runtime_error(message);
}

// The pool of a device, created on first use.
Pool* serving(int device) {
  Pool* const pool = Plug::pool(device);
  if (pool != nullptr) [[likely]]
    return pool;
  if (const Plug::Make make = state().make.load()) make(device);
  return Plug::pool(device);
}

// Called before a stream is passed to a pool, which must know whether the stream is lasting.
void adopt_streams(int device, void* stream) {
  constexpr StreamHandle kNamesOfDefault = 2;
  if (handle_of(stream) <= kNamesOfDefault || device < 0 || device >= Plug::kDevices) return;
  const Plug::Adopt adopt = state().adopt.load();
  if (adopt != nullptr && !state().adopted[device].exchange(true)) adopt(device);
}

// Creates the pool first if there is none, because the pool may request labels.
std::uint32_t label_for(int device) {
  (void)serving(device);
  const Plug::Label label = state().label.load(std::memory_order_relaxed);
  return label == nullptr ? 0 : label(device);
}

// From the stream's cache, or null.
void* cached(std::size_t size, int device, void* stream, std::uint32_t label) {
  Pool* const pool = Plug::pool(device);
  Address address = 0;
  if (pool == nullptr || size > kMaxRequest) return nullptr;
  if (!pool->try_cached(size, handle_of(stream), label, &address)) return nullptr;
  return reinterpret_cast<void*>(address);
}

// Null if memory has run out, with `report` filled if it is given. Other failures throw.
void* searched(std::size_t size, int device, void* stream, std::uint32_t label, OutOfMemoryReport* report) {
  Pool* const pool = serving(device);
  adopt_streams(device, stream);
  if (pool == nullptr) throw std::runtime_error("vram is not installed for cuda:" + std::to_string(device));
  Address address = 0;
  const Status status = pool->allocate_slow(size, handle_of(stream), 0, label, &address, report);
  if (status.code == Code::out_of_memory) return nullptr;
  if (!status.ok())
    throw std::runtime_error(std::string("vram failed to allocate: ") + status.call + " failed, native " +
                             std::to_string(status.native));
  return reinterpret_cast<void*>(address);
}

// The pool that contains an address, and the allocation there. Most programs have one pool.
Pool* pool_of(Address address, BlockInfo* block) {
  const std::lock_guard lock(state().mutex);
  for (const auto& pool : state().kept)
    if (pool->find(address, block).ok()) return pool.get();
  return nullptr;
}

}  // namespace

void Plug::set_pool(int device, std::shared_ptr<Pool> pool) {
  if (device < 0 || device >= kDevices) throw std::out_of_range("the device does not exist");
  const std::lock_guard lock(state().mutex);
  state().pools[device].store(pool.get(), std::memory_order_release);
  if (pool != nullptr) state().kept.push_back(std::move(pool));
}

Pool* Plug::pool(int device) {
  return device >= 0 && device < kDevices ? state().pools[device].load(std::memory_order_acquire) : nullptr;
}

void Plug::set_explain(Explain explain) { state().explain = explain; }
void Plug::set_throw(Throw thrower) { state().thrower = thrower; }
void Plug::set_make(Make make) { state().make = make; }
void Plug::set_label(Label label) { state().label = label; }
void Plug::set_adopt(Adopt adopt) { state().adopt = adopt; }

}  // namespace vram

using namespace vram;

extern "C" {

VRAM_EXPORT void* vram_plug_allocate(std::size_t size, int device, void* stream) {
  if (size == 0) return nullptr;
  const std::uint32_t label = label_for(device);
  if (void* const address = cached(size, device, stream, label)) return address;
  OutOfMemoryReport report;
  if (void* const address = searched(size, device, stream, label, &report)) return address;
  const Plug::Explain explain = state().explain.load();
  fail_out_of_memory(explain != nullptr ? explain(device, size, handle_of(stream), report)
                                        : "out of memory: " + std::to_string(size) + " bytes requested");
}

VRAM_EXPORT void* vram_plug_try_allocate(std::size_t size, int device, void* stream) {
  if (size == 0) return nullptr;
  const std::uint32_t label = label_for(device);
  if (void* const address = cached(size, device, stream, label)) return address;
  return searched(size, device, stream, label, nullptr);
}

// The block knows its own size and stream; unknown and already freed addresses are ignored.
VRAM_EXPORT void vram_plug_free(void* address, std::size_t, int device, void*) {
  if (address == nullptr) return;
  Pool* pool = Plug::pool(device);
  if (pool != nullptr && pool->free(address_of(address)).ok()) return;
  BlockInfo block;
  pool = pool_of(address_of(address), &block);
  if (pool != nullptr) (void)pool->free(address_of(address));
}

VRAM_EXPORT void vram_plug_record_stream(void* address, void* stream) {
  BlockInfo block;
  if (address == nullptr) return;
  Pool* const pool = pool_of(address_of(address), &block);
  if (pool == nullptr) return;
  for (int device = 0; device < Plug::kDevices; ++device)
    if (Plug::pool(device) == pool) adopt_streams(device, stream);
  (void)pool->record_stream(address_of(address), handle_of(stream));
}

VRAM_EXPORT void vram_plug_empty_cache() {
  for (int device = 0; device < Plug::kDevices; ++device)
    if (Pool* const pool = Plug::pool(device)) (void)pool->trim(0, true);
}

VRAM_EXPORT void vram_plug_memory_fraction(double fraction, int device) {
  Pool* const pool = serving(device);
  if (pool == nullptr) return;
  const auto total = static_cast<double>(pool->backend().info().total_bytes);
  // A limit of 0 would mean no limit.
  (void)pool->set_limit(std::max<std::uint64_t>(1, static_cast<std::uint64_t>(fraction * total)));
}

VRAM_EXPORT void* vram_plug_base(void* address, std::size_t* size) {
  BlockInfo block;
  if (address == nullptr || pool_of(address_of(address), &block) == nullptr) return address;
  if (size != nullptr) *size = block.bytes;
  return reinterpret_cast<void*>(block.address);
}

}  // extern "C"

VRAM_EXPORT void vram_plug_heap_begin(int device, HeapId id, std::function<bool(void*)> serves) {
  if (Pool* const pool = serving(device))
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
