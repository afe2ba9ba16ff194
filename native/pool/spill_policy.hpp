// Which pages go to host memory first. Defines SpillCandidate, SpillPolicy and the default. How pages move is
// in spiller.cpp.
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
};

// Puts the candidates into the order in which they go. Called under the pool's mutex; must not call the pool.
using SpillPolicy = std::function<void(std::vector<SpillCandidate>&)>;

// By wishes, then what was longest untouched, then the largest.
void longest_untouched(std::vector<SpillCandidate>& candidates);

}  // namespace vram
