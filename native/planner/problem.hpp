// What the parts of the planner share: the problem, with time reduced to the relevant moments, and the clock.
// Internal to this folder.
#pragma once

#include <bit>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "planner/planner.hpp"

namespace vram::planning {

using Size = std::int64_t;     // a count of `align` bytes
using Number = std::uint32_t;  // a buffer, or a section

// Only the moments at which no further buffer could be added are relevant: each is a section, in order of
// time. Two buffers live at the same time if and only if they share a section.
struct Item {
  Number first = 0;  // its sections: first, ..., end - 1
  Number end = 0;
  Size size = 0;
};

inline bool meet(const Item& a, const Item& b) { return a.first < b.end && b.first < a.end; }

struct Problem {
  explicit Problem(std::span<const PlanBuffer> buffers, std::uint64_t align);

  std::vector<Item> items;
  Number sections = 0;
  std::vector<Size> load;  // live in each section
  Number peak = 0;         // the section with the highest load
  Size bound = 0;          // its load
  Size area = 0;           // the sum of all loads

  Size busiest(const Item& item) const;  // the maximum load in the item's sections

 private:
  std::vector<std::vector<Size>> busiest_;  // [k][s]: maximum load in the 2^k sections from s
};

struct Layout {
  std::vector<Size> offsets;
  Size peak = 0;
  std::string method;
};

// How long to continue. The caller may abandon the planning by throwing from `poll`, which is called often.
class Deadline {
 public:
  explicit Deadline(double seconds, const std::function<void()>* poll = nullptr)
      : poll_(poll), start_(Clock::now()), seconds_(seconds) {}
  // A shorter deadline from now on.
  Deadline within(double seconds) const { return Deadline(seconds, poll_); }
  double spent() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double left() const { return seconds_ - spent(); }
  bool passed() const {
    poll();
    return left() <= 0;
  }
  void poll() const {
    if (poll_ != nullptr) (*poll_)();
  }

 private:
  const std::function<void()>* poll_;
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  double seconds_;
};

}  // namespace vram::planning
