// Heaps, and which captures are in progress.
#include "pool/captures.hpp"

#include <algorithm>
#include <utility>

namespace vram {

const Captures::Heap* Captures::find(HeapId id) const {
  const auto found =
      std::find_if(heaps_.begin(), heaps_.end(), [&](const Heap& each) { return each.id == id; });
  return found == heaps_.end() ? nullptr : &*found;
}

const Captures::Heap* Captures::heap_of(const StreamState& stream) const {
  const Heap* const heap = find(stream.heap);
  return heap != nullptr && stream.capture == heap->key ? heap : nullptr;
}

std::vector<StreamNumber> Captures::states_of(const Heap& heap) const {
  std::vector<StreamNumber> states;
  for (const StreamNumber number : graphs_)
    if (streams_[number].capture == heap.key) states.push_back(number);
  return states;
}

const Captures::Heap* Captures::heap_for(StreamHandle handle) const {
  for (auto filter = filters_.rbegin(); filter != filters_.rend(); ++filter)
    if (filter->serves(handle)) return find(filter->id);
  return nullptr;
}

Captures::Heap& Captures::add(HeapId id, const HeapOptions& options) {
  Heap heap{id, next_heap_ + 1, 0, options.use_on_oom, nullptr, std::make_shared<std::atomic<bool>>(false)};
  if (options.plain) {
    heap.plain = std::make_shared<PlainHeap>();
    heap.plain->no_split = options.no_split;
    heap.plain->source = options.source;
  }
  heaps_.push_back(std::move(heap));
  ++next_heap_;
  return heaps_.back();
}

// While a heap may have to serve them, caches serve no allocations.
void Captures::filters_changed() {
  state_.cache_generation.store(filters_.empty() ? process_generation() : 0, std::memory_order_relaxed);
}

Status Captures::open(HeapId id, const HeapOptions& options) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_open", &lock); !status.ok()) return status;
  Heap* const known = find(id);
  ++(known != nullptr ? *known : add(id, options)).uses;
  return {};
}

Status Captures::begin(HeapId id, std::function<bool(StreamHandle)> serves) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_begin", &lock); !status.ok()) return status;
  filters_.reserve(filters_.size() + 1);
  Heap* const known = find(id);
  ++(known != nullptr ? *known : add(id, {})).uses;
  filters_.push_back({id, std::move(serves), std::this_thread::get_id()});
  filters_changed();
  return {};
}

Status Captures::end(HeapId id, std::vector<StreamNumber>* states, bool* others) {
  Filter gone;  // destroyed without the lock
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_end", &lock); !status.ok()) return status;
  const Heap* const heap = find(id);
  if (heap == nullptr) return {Code::invalid, 0, "heap_end"};
  *states = states_of(*heap);
  auto ended = filters_.rend();
  for (auto filter = filters_.rbegin(); filter != filters_.rend(); ++filter) {
    if (filter->id != id) continue;
    const bool ours = filter->by == std::this_thread::get_id();
    if (ours || ended == filters_.rend()) ended = filter;
    if (ours) break;
  }
  if (ended != filters_.rend()) {
    gone = std::move(*ended);
    filters_.erase(std::next(ended).base());
  }
  *others = std::any_of(filters_.begin(), filters_.end(), [&](const Filter& filter) {
    return filter.id == id && filter.by != std::this_thread::get_id();
  });
  filters_changed();
  return {};
}

Status Captures::release(HeapId id) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_release", &lock); !status.ok()) return status;
  Heap* const heap = find(id);
  if (heap == nullptr) return {Code::invalid, 0, "heap_release"};
  if (--heap->uses > 0) return {};
  heap->over->store(true, std::memory_order_release);
  heaps_.erase(heaps_.begin() + (heap - heaps_.data()));
  std::erase_if(filters_, [&](const Filter& filter) { return filter.id == id; });
  filters_changed();
  return {};
}

Status Captures::set(HeapId id, int use_on_oom, int no_split) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_set", &lock); !status.ok()) return status;
  Heap* const heap = find(id);
  if (heap == nullptr || (no_split > 0 && heap->plain == nullptr)) return {Code::invalid, 0, "heap_set"};
  if (use_on_oom >= 0) heap->use_on_oom = use_on_oom != 0;
  if (no_split >= 0 && heap->plain != nullptr) heap->plain->no_split = no_split != 0;
  return {};
}

int Captures::uses(HeapId id) const {
  std::unique_lock<std::mutex> lock;
  if (!enter("heap_uses", &lock).ok()) return 0;
  const Heap* const heap = find(id);
  return heap == nullptr ? 0 : heap->uses;
}

bool Captures::under_way(bool foreign) const {
  return std::any_of(graphs_.begin(), graphs_.end(), [&](StreamNumber number) {
    const StreamState& graph = streams_[number];
    return graph.foreign ? foreign : backend_->capturing(graph.handle);
  });
}

}  // namespace vram
