// Pinned memory. The pool orders its reuse by the streams of the device that it was made for. Uses on streams
// of other devices wait here: the block is freed into the pool when events on those streams have passed.
#include "plug/pinned.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "backends/pinned.hpp"
#include "plug/engine_parts.hpp"
#include "plug/plug.hpp"

namespace vram {

namespace {

struct OtherUse {
  int device = 0;
  StreamHandle stream = 0;
  bool operator==(const OtherUse&) const = default;
};
struct OtherEvent {
  Backend* device = nullptr;
  EventHandle handle = 0;
};
// A block that was freed while other devices may use it.
struct Waiting {
  Address address = 0;
  std::vector<OtherEvent> events;
};

// Never destroyed: frees arrive until the process ends.
struct State {
  std::atomic<Pool*> pool{nullptr};
  std::atomic<PinnedPlug::Make> make{nullptr};
  std::atomic<bool> elsewhere{false};  // other devices have used blocks
  std::mutex mutex;                    // guards the members below; taken before the pool's
  std::vector<std::shared_ptr<Pool>> kept;
  std::unordered_map<Address, std::vector<OtherUse>> uses;  // of live blocks, on other devices
  std::vector<Waiting> waiting;
};
State& state() {
  static State* const leaked = new State();
  return *leaked;
}

Pool* serving(int device) {
  Pool* const known = PinnedPlug::pool();
  if (known != nullptr) [[likely]]
    return known;
  if (const PinnedPlug::Make make = state().make.load()) make(device);
  return PinnedPlug::pool();
}

// Frees blocks whose events have passed.
void free_passed() {
  if (!state().elsewhere.load(std::memory_order_relaxed)) [[likely]]
    return;
  const std::lock_guard lock(state().mutex);
  std::erase_if(state().waiting, [](Waiting& each) {
    std::erase_if(each.events, [](const OtherEvent& event) {
      if (event.device->event_query(event.handle).code == Code::not_ready) return false;
      (void)event.device->event_destroy(event.handle);
      return true;
    });
    if (!each.events.empty()) return false;
    (void)PinnedPlug::pool()->free(each.address);
    return true;
  });
}

// The uses of a block on other devices, which are forgotten here.
std::vector<OtherUse> take_uses(Address address) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().uses.find(address);
  if (found == state().uses.end()) return {};
  std::vector<OtherUse> uses = std::move(found->second);
  state().uses.erase(found);
  return uses;
}

// Whether the block waits for other devices, from now on.
bool wait_for_others(Address address) {
  if (!state().elsewhere.load(std::memory_order_relaxed)) [[likely]]
    return false;
  const std::vector<OtherUse> uses = take_uses(address);
  if (uses.empty()) return false;
  Waiting waiting{address, {}};
  for (const OtherUse& use : uses) {
    Pool* const pool = Plug::pool(use.device);
    if (pool == nullptr) continue;  // its device is no longer used
    OtherEvent event{&pool->backend(), 0};
    const bool made = event.device->event_create(&event.handle).ok();
    if (made) waiting.events.push_back(event);
    // If nothing can mark the stream's work, the host waits for all of the device's.
    if (!made || !event.device->event_record(event.handle, use.stream).ok())
      (void)event.device->synchronize();
  }
  const std::lock_guard lock(state().mutex);
  state().waiting.push_back(std::move(waiting));
  return true;
}

const char* say(std::size_t bytes, const Status& status) {
  thread_local char text[160];
  if (status.code == Code::out_of_memory)
    std::snprintf(
        text, sizeof text,
        "failed to allocate %zu bytes of pinned host memory: the machine has too little free memory", bytes);
  else
    std::snprintf(text, sizeof text, "failed to allocate %zu bytes of pinned host memory: %s failed, code %d",
                  bytes, status.call, status.native);
  return text;
}

VramMeter meter(const Meter& from) { return {from.current, from.peak, from.total}; }
VramMeter sum(const Meter (&kinds)[2]) {
  return {kinds[0].current + kinds[1].current, kinds[0].peak + kinds[1].peak,
          kinds[0].total + kinds[1].total};
}

}  // namespace

void PinnedPlug::set_pool(std::shared_ptr<Pool> pool) {
  const std::lock_guard lock(state().mutex);
  state().pool.store(pool.get(), std::memory_order_release);
  if (pool != nullptr) state().kept.push_back(std::move(pool));
}
Pool* PinnedPlug::pool() { return state().pool.load(std::memory_order_acquire); }
void PinnedPlug::set_make(Make make) { state().make = make; }

}  // namespace vram

using namespace vram;

extern "C" {

void* vram_engine_pinned_allocate(int device, std::size_t bytes, const char** why) try {
  Pool* const pool = serving(device);
  Address address = 0;
  if (pool == nullptr) {
    *why = "vram has no pool of pinned memory";
    return nullptr;
  }
  free_passed();
  if (const Status status = pool->allocate(bytes, 0, 0, 0, &address); !status.ok()) *why = say(bytes, status);
  return reinterpret_cast<void*>(address);
} catch (const std::bad_alloc&) {
  *why = "this process has no memory left";
  return nullptr;
}

int vram_engine_pinned_free(void* pointer) try {
  Pool* const pool = PinnedPlug::pool();
  if (pool == nullptr) return 0;
  const Address address = reinterpret_cast<Address>(pointer);
  free_passed();
  return wait_for_others(address) || pool->free(address).ok() ? 1 : 0;
} catch (const std::bad_alloc&) {
  return 0;
}

int vram_engine_pinned_record(void* pointer, int device, void* stream) try {
  Pool* const pool = PinnedPlug::pool();
  if (pool == nullptr) return 0;
  const Address address = reinterpret_cast<Address>(pointer);
  Pool* const used_by = Plug::pool(device);
  const bool ours = used_by == nullptr || used_by->backend().order() == pool->backend().order();
  const StreamHandle handle = reinterpret_cast<StreamHandle>(stream);
  if (ours) return pool->record_stream(address, handle).ok() ? 1 : 0;
  BlockInfo block;
  if (!pool->find(address, &block).ok()) return 0;
  const std::lock_guard lock(state().mutex);
  state().elsewhere = true;
  std::vector<OtherUse>& uses = state().uses[block.address];
  const OtherUse use{device, handle};
  if (std::find(uses.begin(), uses.end(), use) == uses.end()) uses.push_back(use);
  return 1;
} catch (const std::bad_alloc&) {
  return 0;
}

void vram_engine_pinned_trim(void) try {
  Pool* const pool = PinnedPlug::pool();
  if (pool == nullptr) return;
  free_passed();
  (void)pool->trim(0, true);  // the driver waits in any case
} catch (const std::bad_alloc&) {
  // Nothing more is released.
}

void vram_engine_pinned_stats(VramPinnedStats* out) try {
  *out = {};
  Pool* const pool = PinnedPlug::pool();
  if (pool == nullptr) return;
  free_passed();
  (void)pool->coalesce();  // blocks whose work has ended are no longer in use
  const PoolStats stats = pool->stats_of_framework();
  out->active = sum(stats.allocations);
  out->active.current += stats.pending_blocks;
  out->active_bytes = sum(stats.bytes);
  out->active_bytes.current += stats.pending.current;
  out->active_bytes.peak = stats.peak_active;
  out->reserved = meter(stats.segments);
  out->reserved_bytes = meter(stats.reserved);
  if (const auto* memory = dynamic_cast<const PinnedBackend*>(&pool->backend())) {
    out->allocate_us = memory->reserve_us();
    out->release_us = memory->release_us();
  }
} catch (const std::bad_alloc&) {
}

void vram_engine_pinned_reset_peaks(void) {
  if (Pool* const pool = PinnedPlug::pool()) pool->reset_peak_of_framework();
}
}  // extern "C"
