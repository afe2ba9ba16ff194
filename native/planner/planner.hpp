// Static memory planning: fixed offsets for buffers whose lifetimes are known in advance, in as little memory
// as can be found in the given time. Pure computation: the same input gives the same answer unless time runs
// out.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace vram {

// A buffer needs `size` bytes from time `lower` to `upper`, excluding `upper`. Precondition: lower < upper.
struct PlanBuffer {
  std::int64_t lower = 0;
  std::int64_t upper = 0;
  std::uint64_t size = 0;
};

struct PlanOptions {
  std::uint64_t align = 512;   // alignment of offsets and sizes; at least 1
  std::uint64_t capacity = 0;  // planning ends when the plan fits into this; 0: minimize
  double time_limit = 1;       // seconds; the first layout is always completed
  std::uint64_t seed = 0;      // of the random improvements
  // Called about every millisecond. If it throws, planning is abandoned.
  std::function<void()> poll = nullptr;
};

// Invariant: lower_bound <= peak, and two buffers that live at the same time share no byte.
struct PlanResult {
  std::vector<std::uint64_t> offsets;  // one per buffer, in the given order
  std::uint64_t peak = 0;              // bytes: the end of the highest buffer
  std::uint64_t lower_bound = 0;       // bytes: the maximum that is live at one time
  std::string method;   // how it was found: "skyline", "order", "search" or "repair of" these, with details
  bool proven = false;  // no plan below peak (with a capacity: none within it) exists
  double seconds = 0;
};

// Postcondition: see PlanResult. Sizes may add up to at most 2^62 bytes.
PlanResult plan(std::span<const PlanBuffer> buffers, const PlanOptions& options);

}  // namespace vram
