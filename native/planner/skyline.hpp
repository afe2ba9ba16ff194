// Builds layouts from the bottom up: the lowest valley of the outline is filled with the item that weighs
// most among those that fit between its walls, or raised to the lower wall if none does. Takes time in
// proportion to the items, not to pairs of them, so that it can be repeated: what came to lie too high weighs
// more the next time.
#pragma once

#include "planner/problem.hpp"

namespace vram::planning {

class Skyline {
 public:
  explicit Skyline(const Problem& problem);

  // What an item weighs: its length, times the load where it lives to this power.
  static constexpr double kScarcity = 24;
  void weigh(double scarcity);
  // Finishes it whatever it takes, unless the deadline's poll throws.
  Layout build(const Deadline& deadline);
  // Items of the last layout that reach above `target` weigh more from now on.
  void raise_weights(Size target);

 private:
  // A stretch of sections of equal height; a list by `left` and `right`, kNone at the ends.
  struct Stretch {
    Number first;
    Number end;
    Size height;
    Number left;
    Number right;
  };
  void plant();
  void remove(std::size_t leaf);
  Number heaviest_within(Number first, Number end) const;
  struct Query;
  void descend(std::size_t node, std::size_t from, std::size_t to, Query* query) const;
  void join(Number stretch);
  void push(Number stretch);
  Number append(Number first, Number end, Size height, Number left);
  void fill(Number stretch, const Item& item);

  const Problem& problem_;
  std::vector<Number> by_first_;  // items in order of their first section: the leaves of the tree
  std::vector<Number> begin_;     // begin_[s]: the first leaf whose item begins at section s or later
  std::vector<float> weight_;     // of each item
  std::vector<Size> offsets_;
  // A tree over the leaves that are not placed: the earliest end and the greatest weight below each node.
  std::size_t leaves_ = 1;
  std::vector<Number> earliest_;
  std::vector<float> greatest_;
  std::vector<Stretch> stretches_;
  std::vector<std::pair<Size, Number>> heap_;  // heights of stretches, lowest first; old entries are skipped
};

}  // namespace vram::planning
