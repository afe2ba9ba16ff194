// Heaps, and which captures are in progress.
#include "pool/captures.hpp"

#include <algorithm>
#include <utility>

namespace vram {

std::vector<Captures::Heap>::iterator Captures::find(HeapId id) {
  return std::find_if(heaps_.begin(), heaps_.end(), [&](const Heap& each) { return each.id == id; });
}

Status Captures::begin(HeapId id, std::function<bool(StreamHandle)> serves) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_begin", &lock); !status.ok()) return status;
  auto heap = find(id);
  if (heap == heaps_.end())
    heap = heaps_.insert(heap, {id, ++next_heap_, 0, false, {}, std::make_shared<std::atomic<bool>>(false)});
  ++heap->begun;
  heap->open = true;
  heap->serves = std::move(serves);
  state_.cache_generation.store(0, std::memory_order_relaxed);
  return {};
}

Status Captures::end(HeapId id) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_end", &lock); !status.ok()) return status;
  bool known = false, open = false;
  for (Heap& heap : heaps_) {
    known |= heap.id == id;
    if (heap.id == id) heap.open = false;
    open |= heap.open;
  }
  if (!open) state_.cache_generation.store(process_generation(), std::memory_order_relaxed);
  return known ? Status{} : Status{Code::invalid, 0, "heap_end"};
}

Status Captures::release(HeapId id) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_release", &lock); !status.ok()) return status;
  const auto heap = find(id);
  if (heap == heaps_.end()) return {Code::invalid, 0, "heap_release"};
  if (--heap->begun > 0) return {};
  heap->over->store(true, std::memory_order_release);
  heaps_.erase(heap);
  return {};
}

bool Captures::under_way() const {
  // Other libraries' streams cannot be queried.
  return std::any_of(graphs_.begin(), graphs_.end(), [this](StreamNumber number) {
    const StreamState& graph = streams_[number];
    return graph.foreign || backend_->capturing(graph.handle);
  });
}

}  // namespace vram
