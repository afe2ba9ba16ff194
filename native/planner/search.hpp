// An exact search for a layout within a capacity, for problems that no order solves and that are small
// enough. It builds layouts from the bottom up and backtracks when the remaining items cannot fit.
#pragma once

#include "planner/problem.hpp"

namespace vram::planning {

enum class Found { layout, nothing, unknown };  // nothing: none exists; unknown: out of time or steps

class Search {
 public:
  // rank: of each item; the lowest goes first among those that could be placed equally low.
  Search(const Problem& problem, Size capacity, const std::vector<Number>& rank);

  // Uses at most `steps` steps; each places one item.
  Found run(std::uint64_t steps, const Deadline& deadline, std::vector<Size>* offsets);

 private:
  // An item without an offset, and the lowest offset that the placed items leave for it.
  struct Open {
    Size lowest;
    Number rank;
    Number item;
    friend bool operator<(const Open& a, const Open& b) {
      return a.lowest != b.lowest ? a.lowest < b.lowest : a.rank < b.rank;
    }
  };
  using List = std::vector<Open>;  // in order

  Found descend(const List& open, Open after);
  Found place(const List& open, const Open& chosen);
  Found split(const List& open, const Open& chosen);
  bool fits(const List& open, Size least);
  void change_left(const Item& item, Size size);

  const Problem& problem_;
  Size capacity_;
  const std::vector<Number>& rank_;
  std::vector<Size> left_;      // sizes without an offset in each section
  std::vector<Number> unseen_;  // scratch of fits: the next uncovered section at or after this one
  std::vector<std::uint32_t> crossed_;
  std::vector<Size>* offsets_ = nullptr;
  const Deadline* deadline_ = nullptr;
  std::uint64_t steps_ = 0;
};

}  // namespace vram::planning
