// The functions of engine.h. See there. Those of other files are declared in engine_parts.hpp.
#include "plug/engine.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "plug/engine_parts.hpp"
#include "plug/plug.hpp"

#define VRAM_EXPORT __attribute__((visibility("default")))

namespace vram {

namespace {

StreamHandle handle_of(void* stream) { return reinterpret_cast<StreamHandle>(stream); }
void* stream_of(StreamHandle handle) { return reinterpret_cast<void*>(handle); }
Address address_of(void* pointer) { return reinterpret_cast<Address>(pointer); }
void* pointer_to(Address address) { return reinterpret_cast<void*>(address); }
HeapId id_of(VramHeap heap) { return {heap.first, heap.second}; }
VramHeap heap_of(HeapId id) { return {id.first, id.second}; }

// Calls visit(device, pool) for a device that has been used, or for all of them.
template <typename Visit>
void each_pool(int device, Visit visit) {
  for (int d = device < 0 ? 0 : device; d < (device < 0 ? Plug::kDevices : device + 1); ++d)
    if (Pool* const pool = Plug::pool(d)) visit(d, *pool);
}

// ---- device memory --------------------------------------------------------------------------------------

thread_local OutOfMemoryReport last_report;  // of the last allocation that failed on this thread
thread_local std::string last_words;

void* allocated(Status status, Address address, VramFailure* failure) {
  if (status.ok()) [[likely]]
    return pointer_to(address);
  const OutOfMemoryReport& report = last_report;
  *failure = {};
  failure->out_of_memory = status.code == Code::out_of_memory;
  failure->native = status.native;
  failure->call = status.call;
  if (failure->out_of_memory != 0) {
    failure->limit = report.limit;
    failure->device_total = report.device_total;
    failure->device_free = report.device_free;
    failure->reserved = report.reserved;
    failure->live = report.live;
  }
  return nullptr;
}

void* allocate(int device, size_t bytes, void* stream, VramFailure* failure) {
  Address address = 0;
  const Status status = Plug::allocate(device, bytes, handle_of(stream), &address, &last_report);
  return allocated(status, address, failure);
}

void* allocate_padded(int device, size_t bytes, size_t room, void* stream, VramFailure* failure) {
  Address address = 0;
  const Status status = Plug::allocate_padded(device, bytes, room, handle_of(stream), &address, &last_report);
  return allocated(status, address, failure);
}

int free_block(void* address) { return Plug::free(address_of(address)).ok(); }

int record_stream(void* address, void* stream) {
  return Plug::record_stream(address_of(address), handle_of(stream)).ok();
}

VramBlock described(const BlockInfo& block) {
  const bool live = block.state == BlockState::live || block.state == BlockState::suspended;
  return {block.address,
          block.bytes,
          block.requested,
          stream_of(block.stream),
          block.tag,
          live                                 ? VRAM_BLOCK_LIVE
          : block.state == BlockState::pending ? VRAM_BLOCK_PENDING
                                               : VRAM_BLOCK_FREE,
          block.used_elsewhere,
          heap_of(block.heap)};
}

int find(void* address, VramBlock* out, int* device) {
  BlockInfo block;
  if (!Plug::find(address_of(address), &block, device).ok()) return 0;
  *out = described(block);
  return 1;
}

const char* explain(int device, size_t bytes, void* stream) {
  last_words = Plug::explain(device, bytes, handle_of(stream), last_report);
  return last_words.c_str();
}

void set_limit(int device, uint64_t bytes) {
  if (Pool* const pool = Plug::serving(device)) (void)pool->set_limit(bytes);
}

uint64_t limit(int device) {
  Pool* const pool = Plug::pool(device);
  return pool != nullptr ? pool->config().limit : 0;
}

VramMeter meter(const Meter& from) { return {from.current, from.peak, from.total}; }

int stats(int device, VramStats* out) {
  *out = {};
  Pool* const pool = Plug::pool(device);
  if (pool == nullptr) return 0;
  const PoolStats from = pool->stats_of_framework();
  for (int kind = 0; kind < 2; ++kind) {
    out->allocations[kind] = meter(from.allocations[kind]);
    out->bytes[kind] = meter(from.bytes[kind]);
    out->requested[kind] = meter(from.requested[kind]);
  }
  out->reserved = meter(from.reserved);
  out->segments = meter(from.segments);
  out->pending = meter(from.pending);
  out->live = from.live;
  out->peak_live = from.peak_live;
  out->peak_active = from.peak_active;
  out->pending_blocks = from.pending_blocks;
  out->inactive = meter(from.inactive[0]);
  out->inactive_bytes = meter(from.inactive[1]);
  out->largest_free = from.largest_free;
  out->retries = from.retries;
  out->out_of_memory = from.out_of_memory;
  out->host_waits = from.rungs[static_cast<int>(Rung::host_wait)];
  return 1;
}

void reset_peaks(int device) {
  each_pool(device, [](int, Pool& pool) { pool.reset_peak_of_framework(); });
}

int add_peer(int device, int peer) {
  Pool* const pool = Plug::serving(device);
  return pool != nullptr && pool->add_peer(peer).ok();
}

void trim(int device, VramHeap heap) {
  each_pool(device, [&](int, Pool& pool) {
    if (heap.first == 0 && heap.second == 0) {
      (void)pool.trim(0, true);
    } else {
      (void)pool.heap_trim(id_of(heap), true);
    }
  });
}

void snapshot(int device, const VramSnapshot* visit) {
  Pool* const pool = Plug::pool(device);
  if (pool == nullptr) return;
  for (const SegmentInfo& segment : pool->backed_segments()) {
    const VramSegment told{segment.address,       segment.bytes, stream_of(segment.stream),
                           heap_of(segment.heap), segment.small, segment.plain};
    visit->segment(visit->context, &told);
    for (const BlockInfo& block : segment.blocks) {
      const VramBlock each = described(block);
      visit->block(visit->context, &each);
    }
  }
}

std::atomic<void (*)(const VramEvent*)> told{nullptr};

void pass_on(int device, const PoolEvent& event) {
  const VramEventKind kind = event.kind == PoolEvent::Kind::reserved   ? VRAM_EVENT_RESERVED
                             : event.kind == PoolEvent::Kind::released ? VRAM_EVENT_RELEASED
                                                                       : VRAM_EVENT_COMPLETED;
  const VramEvent passed{
      kind, device, event.plain, event.address, event.bytes, stream_of(event.stream), heap_of(event.heap)};
  if (const auto tell = told.load()) tell(&passed);
}

void listen(void (*tell)(const VramEvent*)) {
  told = tell;
  Plug::set_listen(tell != nullptr ? pass_on : nullptr);
}

// ---- heaps ----------------------------------------------------------------------------------------------

// What another library lends and takes back, dropped when the last copy is.
class ForeignSource : public Source {
 public:
  explicit ForeignSource(const VramSource& source) : source_(source) {}
  ~ForeignSource() override { source_.drop(source_.context); }
  ForeignSource(const ForeignSource&) = delete;
  ForeignSource& operator=(const ForeignSource&) = delete;
  Status reserve(std::uint64_t bytes, Address* out) override {
    *out = address_of(source_.reserve(source_.context, bytes));
    return *out != 0 ? Status{} : Status{Code::out_of_memory, 0, "reserve"};
  }
  Status release(Address address, std::uint64_t) override {
    source_.release(source_.context, pointer_to(address));
    return {};
  }

 private:
  const VramSource source_;
};

int heap_open(int device, VramHeap heap, const VramSource* source) {
  HeapOptions options;
  options.plain = true;
  if (source != nullptr) options.source = std::make_shared<ForeignSource>(*source);
  Pool* const pool = Plug::serving(device);
  return pool != nullptr && pool->heap_open(id_of(heap), options).ok();
}

int heap_begin(int device, VramHeap heap, VramServes serves) {
  const std::shared_ptr<void> context(serves.context, serves.drop);
  Pool* const pool = Plug::serving(device);
  if (pool == nullptr) return 0;
  const auto filter = [context, asked = serves.serves](StreamHandle stream) {
    return asked(context.get(), stream_of(stream)) != 0;
  };
  return pool->heap_begin(id_of(heap), filter).ok();
}

int heap_end(int device, VramHeap heap) {
  Pool* const pool = Plug::pool(device);
  return pool != nullptr && pool->heap_end(id_of(heap)).ok();
}

int heap_release(int device, VramHeap heap) {
  Pool* const pool = Plug::pool(device);
  return pool != nullptr && pool->heap_release(id_of(heap)).ok();
}

int heap_uses(int device, VramHeap heap) {
  Pool* const pool = Plug::pool(device);
  return pool != nullptr ? pool->heap_uses(id_of(heap)) : 0;
}

int heap_set(int device, VramHeap heap, int use_on_oom, int no_split) {
  Pool* const pool = Plug::pool(device);
  return pool != nullptr && pool->heap_set(id_of(heap), use_on_oom, no_split).ok();
}

void heap_live(int device, VramHeap heap, void* context, void (*visit)(void*, const VramBlock*)) {
  Pool* const pool = Plug::pool(device);
  if (pool == nullptr) return;
  for (const BlockInfo& block : pool->heap_live(id_of(heap))) {
    const VramBlock each = described(block);
    visit(context, &each);
  }
}

int heap_restore(int device, VramHeap heap, const VramBlock* blocks, size_t count) {
  Pool* const pool = Plug::pool(device);
  if (pool == nullptr) return 0;
  std::vector<BlockInfo> wanted(count);
  for (size_t i = 0; i < count; ++i) {
    wanted[i].address = blocks[i].address;
    wanted[i].bytes = blocks[i].bytes;
    wanted[i].requested = blocks[i].requested;
    wanted[i].stream = handle_of(blocks[i].stream);
    wanted[i].tag = blocks[i].tag;
  }
  return pool->heap_restore(id_of(heap), wanted).ok();
}

}  // namespace

}  // namespace vram

VRAM_EXPORT const VramEngine* vram_engine(void) {
  using namespace vram;
  static const VramEngine table = {
      .allocate = allocate,
      .allocate_padded = allocate_padded,
      .free = free_block,
      .record_stream = record_stream,
      .find = find,
      .explain = explain,
      .trim = trim,
      .set_limit = set_limit,
      .limit = limit,
      .stats = stats,
      .reset_peaks = reset_peaks,
      .add_peer = add_peer,
      .snapshot = snapshot,
      .listen = listen,
      .heap_open = heap_open,
      .heap_begin = heap_begin,
      .heap_end = heap_end,
      .heap_release = heap_release,
      .heap_uses = heap_uses,
      .heap_set = heap_set,
      .heap_live = heap_live,
      .heap_restore = heap_restore,
      .share = vram_engine_share,
      .attach = vram_engine_attach,
      .detach = vram_engine_detach,
      .pinned_allocate = vram_engine_pinned_allocate,
      .pinned_free = vram_engine_pinned_free,
      .pinned_record = vram_engine_pinned_record,
      .pinned_trim = vram_engine_pinned_trim,
      .pinned_stats = vram_engine_pinned_stats,
      .pinned_reset_peaks = vram_engine_pinned_reset_peaks,
  };
  return &table;
}
