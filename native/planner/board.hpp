// The items that have an offset, organized so that the gaps for an item are found quickly. planner.cpp and
// repair.cpp decide which item goes where.
#pragma once

#include "planner/problem.hpp"

namespace vram::planning {

enum class Fit { lowest, tightest };  // which gap to choose for an item

// Time is divided into spans of equal length. Each span holds the placed items that live in it, by offset.
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

  // The offset of the best gap; above everything placed there if there is none.
  Size find(Number item, Fit fit) const;
  void put(Number item, Size offset);
  void take(Number item, Size offset);
  void clear();
  // Calls visit(const Placed&) once for each item that lives at the same time as `item`, by span.
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
