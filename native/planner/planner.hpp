// Static memory planning: fixed offsets for buffers whose lifetimes are known beforehand, in as little memory
// as can be found in the time given. Pure arithmetic, the same answer for the same input unless time runs
// out; where lifetimes come from and what is done with the offsets is for others.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace vram {

// A buffer needs `size` bytes from time `lower` up to, not including, `upper`. Precondition: lower < upper.
struct PlanBuffer {
  std::int64_t lower = 0;
  std::int64_t upper = 0;
  std::uint64_t size = 0;
};

struct PlanOptions {
  std::uint64_t align = 512;   // offsets are multiples of it, and sizes count as rounded up to it; at least 1
  std::uint64_t capacity = 0;  // bytes that are enough, so that planning ends there; 0 asks for the least
  double time_limit = 1;       // seconds; the first layout is finished whatever it takes
  std::uint64_t seed = 0;      // of the improvements made at random
  // Called every millisecond or so. What it throws abandons the planning.
  std::function<void()> poll = nullptr;
};

// Invariant: lower_bound <= peak, and two buffers that live at the same time share no byte.
struct PlanResult {
  std::vector<std::uint64_t> offsets;  // one a buffer, in the order given
  std::uint64_t peak = 0;              // bytes: the end of the highest buffer
  std::uint64_t lower_bound = 0;       // bytes: the most that is live at one time
  std::string method;   // what found it: "skyline", "order", "search" or "repair of" these, and how
  bool proven = false;  // nothing smaller than peak (with a capacity: nothing within it) exists
  double seconds = 0;
};

// Postcondition: as PlanResult says. Sizes may add up to at most 2^62 bytes.
PlanResult plan(std::span<const PlanBuffer> buffers, const PlanOptions& options);

}  // namespace vram
