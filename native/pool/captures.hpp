// Memory kept apart for graphs: heaps that a program begins, and states of streams under capture. Defines
// Captures. Creating and ending those states is StreamLives' responsibility.
//
// What is allocated on a stream while it is captured becomes part of a graph: its address is used whenever
// the graph is launched. A captured stream therefore has a second state, hidden from its handle, whose memory
// serves nothing else until the graph and its copies are gone. A block freed during the capture serves
// later captured work of the same stream at once, as in any stream's order.
#pragma once

#include "pool/state.hpp"

namespace vram {

// An object that says when a graph or heap is over.
using Over = std::shared_ptr<std::atomic<bool>>;

class Captures : PoolPart {
 public:
  struct Heap {
    HeapId id;
    CaptureId key = 0;  // of the states that stand for it
    int begun = 0;      // and not released
    bool open = false;
    std::function<bool(StreamHandle)> serves;
    Over over;
  };

  explicit Captures(PoolState& state) : PoolPart(state) {}
  // See Pool.
  Status begin(HeapId id, std::function<bool(StreamHandle)> serves);
  Status end(HeapId id);
  Status release(HeapId id);
  // The open heap that serves a stream, or null.
  const Heap* heap_for(StreamHandle handle) const {
    for (const Heap& heap : heaps_)
      if (heap.open && heap.serves(handle)) return &heap;
    return nullptr;
  }

  // Numbers of the states that stand for graphs and heaps.
  std::vector<StreamNumber>& graphs() { return graphs_; }
  const std::vector<StreamNumber>& graphs() const { return graphs_; }
  // Whether a stream is being captured, as far as the pool knows; a wait for the device would break it.
  bool under_way() const;

 private:
  static constexpr CaptureId kHeapBit = CaptureId{1} << 63;  // tells heaps from captures of the device
  std::vector<Heap>::iterator find(HeapId id);

  std::vector<Heap> heaps_;  // those not yet released
  std::vector<StreamNumber> graphs_;
  CaptureId next_heap_ = kHeapBit;
};

}  // namespace vram
