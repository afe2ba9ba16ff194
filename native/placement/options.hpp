// What the parts of placement share: their options, heaps of plain segments, and streams counted by what they
// own. Defines PlacementOptions, Source, PlainHeap and CountedStreams.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/slab.hpp"

namespace vram {

struct PlacementOptions {
  bool pages = true;
  std::uint64_t space_bytes = 0;
  // With pages: offsets for plain segments, behind those of the space, so that no address of the space leads
  // to them. Without pages, all offsets are for plain segments.
  std::uint64_t plain_bytes = 0;
  std::uint64_t all_bytes() const { return space_bytes + plain_bytes; }
  std::uint64_t segment_size = 0;      // the fewest bytes to get from the driver at a time
  std::uint64_t grain = kSlotBytes;    // of plain segments (DeviceInfo)
  std::uint64_t max_page = 32 * kMiB;  // the largest page to create
  bool best_fit = true;                // else the first block of a sufficient bin
  // Long plain segments serve both bands: one for each would reserve twice as much from the start.
  bool bands_share() const { return !pages && segment_size >= kPlainSegmentBytes; }
};

// Memory for the plain segments of a heap that does not come from the pool's device. Its calls are made with
// the pool's mutex held: they must not call the pool, and must not need the GIL.
class Source {
 public:
  virtual ~Source() = default;
  // pre: bytes is a multiple of kSlotBytes. post: *out is aligned to kUnit.
  virtual Status reserve(std::uint64_t bytes, Address* out) = 0;
  virtual Status release(Address address, std::uint64_t bytes) = 0;
};

// A heap of plain segments: each is one driver allocation, of the sizes that PyTorch uses, and serves nothing
// else. Guarded by the pool's mutex.
struct PlainHeap {
  std::shared_ptr<Source> source;  // null: the backend
  bool no_split = false;           // a request gets a whole free block
};

// Says whether everything up to a tick of a stream has completed.
using Finished = std::function<bool(StreamNumber stream, Tick tick)>;

// The streams that own something, with how much each owns.
class CountedStreams {
 public:
  // post: add() does not allocate for this stream.
  void make_room(StreamNumber stream) {
    if (counts_.size() <= stream) counts_.resize(stream + 1u);
  }
  void add(StreamNumber stream) {
    make_room(stream);
    if (++counts_[stream] == 1) set_.add(stream);
  }
  void remove(StreamNumber stream) {
    if (--counts_[stream] == 0) set_.remove(stream);
  }
  void move(StreamNumber from, StreamNumber to) {
    remove(from);
    add(to);
  }
  const StreamSet& set() const { return set_; }
  bool has(StreamNumber stream) const { return stream < counts_.size() && counts_[stream] != 0; }
  bool check(const std::vector<std::uint32_t>& expected) const {
    for (std::size_t i = 0; i < std::max(counts_.size(), expected.size()); ++i)
      if ((i < counts_.size() ? counts_[i] : 0) != (i < expected.size() ? expected[i] : 0)) return false;
    std::size_t owners = 0, listed = 0;
    for (std::uint32_t count : counts_) owners += count != 0;
    set_.each([&](StreamNumber stream) {
      listed += counts_[stream] != 0 ? 1 : owners + 1;
      return false;
    });
    return listed == owners;
  }

 private:
  std::vector<std::uint32_t> counts_;  // by stream number
  StreamSet set_;
};

// Says what check() found wrong.
inline bool wrong(std::string* why, const char* what, std::size_t i = 0) {
  if (why != nullptr) *why = std::string(what) + " (#" + std::to_string(i) + ")";
  return false;
}

}  // namespace vram
