// Which pages go to host memory first. Defines SpillCandidate, SpillPolicy and SpillOrder, the default. How
// pages move is in spiller.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/types.hpp"

namespace vram {

// What the program says about the memory of a tag, or about an allocation.
enum class SpillWish : std::uint8_t {
  none,
  first,  // spill it before other memory
  last,   // … after other memory
  never,
};

// A page that may go, with what is known of the blocks on it.
struct SpillCandidate {
  Index page = 0;
  std::uint64_t bytes = 0;
  std::uint64_t age = 0;          // allocations on its stream since the youngest of its blocks was allocated
  std::uint64_t block_bytes = 0;  // of the largest of its blocks
  bool first = false;             // all of its blocks have the wish
  bool last = false;              // one of its blocks has the wish
  StreamNumber stream = 0;
  Index block = 0;             // the youngest of its blocks
  std::uint32_t serial = 0;    // … when it was allocated
  StreamNumber counts_on = 0;  // … on this stream
};

// Puts the candidates into the order in which they go. Called under the pool's mutex; must not call the pool.
using SpillPolicy = std::function<void(std::vector<SpillCandidate>&)>;

// By wishes, then what was allocated longest ago, then the largest.
//
// What has lived long usually lives on. But if a program replaces all of its memory again and again, as
// decoding does with caches that grow by copies, it frees next what is oldest, and moving that helps only for
// a moment. So this learns from the blocks that went: if most of them are freed soon, the youngest go first,
// because they stay longest.
class SpillOrder {
 public:
  void sort(std::vector<SpillCandidate>& candidates) const;
  // The page has gone.
  void note(const SpillCandidate& gone);
  // Learns from what has gone, if it is `enough` bytes. `now`: the serial of the next allocation on a stream;
  // `live`: whether a block is live and has the serial.
  void learn(const std::function<std::uint32_t(StreamNumber)>& now,
             const std::function<bool(Index, std::uint32_t)>& live, std::uint64_t enough);
  bool youngest_first() const { return youngest_first_; }

 private:
  struct Gone {
    Index block = 0;
    std::uint32_t serial = 0;
    StreamNumber stream = 0;
    std::uint32_t age = 0;  // when it went
    std::uint32_t at = 0;
    std::uint64_t bytes = 0;
  };

  std::vector<Gone> gone_;
  bool youngest_first_ = false;
  std::uint32_t life_ = 0;     // allocations that a block lives, if the youngest go first
  std::uint32_t longest_ = 0;  // life of the blocks that were freed, since it was decided last
  std::uint64_t stayed_ = 0;   // bytes of blocks that lived on for long
  std::uint64_t freed_ = 0;    // … and of those that were freed soon
};

}  // namespace vram
