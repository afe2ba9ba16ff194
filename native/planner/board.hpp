// The items that have an offset, kept so that the gaps an item could go to are found quickly. Which item goes
// where is for planner.cpp and planner_repair.cpp.
#pragma once

#include "planner/problem.hpp"

namespace vram::planning {

enum class Fit { lowest, tightest };  // of the gaps that an item fits into

// Time is cut into spans of equal length, and each span holds the placed items that live in it, in order of
// offset.
class Board {
 public:
  explicit Board(const Problem& problem);

  struct Placed {
    Size offset;
    Size top;
    Number first;  // as in Item
    Number end;
    Number item;
  };

  // The offset of the best gap; on top of all that is placed there if there is none.
  Size find(Number item, Fit fit) const;
  void put(Number item, Size offset);
  void take(Number item, Size offset);
  void clear();
  // Calls visit(const Placed&) for all that lives at the same time as `item`, once each, in order of span.
  template <typename Visit>
  void each_neighbour(Number item, Visit visit) const {
    const Item& own = problem_.items[item];
    const Number from = own.first / span_, to = (own.end - 1) / span_;
    for (Number s = from; s <= to; ++s)
      for (const Placed& placed : spans_[s])
        if (placed.first < own.end && own.first < placed.end && (s == from || placed.first / span_ == s))
          visit(placed);
  }

 private:
  const Problem& problem_;
  Number span_ = 1;  // sections
  std::vector<std::vector<Placed>> spans_;
  mutable std::vector<Placed> found_;  // scratch of find
};

}  // namespace vram::planning
