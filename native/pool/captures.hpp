// Memory kept apart: heaps that a program opens or begins, and states of streams under capture. Defines
// Captures and HeapOptions. Creating and ending those states is StreamLives' responsibility.
//
// What is allocated on a stream while it is captured becomes part of a graph: its address is used whenever
// the graph is launched. A captured stream therefore has a second state, hidden from its handle, whose memory
// serves nothing else until the graph and its copies are gone. A block freed during the capture serves
// later captured work of the same stream at once, as in any stream's order.
#pragma once

#include <thread>

#include "pool/state.hpp"

namespace vram {

// An object that says when a graph or heap is over.
using Over = std::shared_ptr<std::atomic<bool>>;

struct HeapOptions {
  bool plain = false;       // segments that are one driver allocation each, of the sizes that PyTorch uses
  bool no_split = false;    // plain: a request gets a whole segment, or a whole block that was freed
  bool use_on_oom = false;  // its free memory serves other requests before they fail
  std::shared_ptr<Source> source =
      nullptr;  // plain: kept until its last segment is released; null: the device
};

class Captures : PoolPart {
 public:
  struct Heap {
    HeapId id;
    CaptureId key = 0;  // of the states that stand for it
    int uses = 0;       // opened or begun, and not released
    bool use_on_oom = false;
    std::shared_ptr<PlainHeap> plain;  // null: pages, if the pool has them
    Over over;
  };

  explicit Captures(PoolState& state) : PoolPart(state) {}
  // See Pool.
  Status open(HeapId id, const HeapOptions& options);
  Status begin(HeapId id, std::function<bool(StreamHandle)> serves);
  // *states: those that stand for the heap; *others: another thread still captures into it, too.
  Status end(HeapId id, std::vector<StreamNumber>* states, bool* others);
  Status release(HeapId id);
  Status set(HeapId id, int use_on_oom, int no_split);
  int uses(HeapId id) const;
  // The heap that serves a stream in the calling thread, or null: of those begun and not ended, the latest
  // that accepts it.
  const Heap* heap_for(StreamHandle handle) const;
  // The heap in use with that id, or that the state stands for; null: none.
  const Heap* find(HeapId id) const;
  const Heap* heap_of(const StreamState& stream) const;
  std::vector<StreamNumber> states_of(const Heap& heap) const;

  // Numbers of the states that stand for graphs and heaps.
  std::vector<StreamNumber>& graphs() { return graphs_; }
  const std::vector<StreamNumber>& graphs() const { return graphs_; }
  // Whether a stream is being captured, as far as the pool knows; a wait for the device would break it. Other
  // libraries' streams cannot be queried: those that have a graph may be captured.
  bool under_way(bool foreign = true) const;

 private:
  static constexpr CaptureId kHeapBit = CaptureId{1} << 63;  // tells heaps from captures of the device
  struct Filter {
    HeapId id;
    std::function<bool(StreamHandle)> serves;
    std::thread::id by;
  };
  Heap& add(HeapId id, const HeapOptions& options);
  Heap* find(HeapId id) { return const_cast<Heap*>(std::as_const(*this).find(id)); }
  void filters_changed();

  std::vector<Heap> heaps_;      // those not yet released
  std::vector<Filter> filters_;  // in the order in which they began
  std::vector<StreamNumber> graphs_;
  CaptureId next_heap_ = kHeapBit;
};

}  // namespace vram
