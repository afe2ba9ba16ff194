// Builds layouts from the bottom up: the lowest valley of the outline is filled with the heaviest item that
// fits between its walls, or raised to the lower wall if none fits. The time is proportional to the number of
// items, not of pairs, so that it can be repeated: items that end up too high weigh more the next time.
#pragma once

#include "planner/problem.hpp"

namespace vram::planning {

class Skyline {
 public:
  explicit Skyline(const Problem& problem);

  // The weight of an item is its length times the load during its life to this power.
  static constexpr double kScarcity = 24;
  void weigh(double scarcity);
  // Always completes, unless the deadline's poll throws.
  Layout build(const Deadline& deadline);
  // Increases the weight of items of the last layout that exceed `target`.
  void raise_weights(Size target);

 private:
  // A range of sections of equal height; linked by `left` and `right`, kNone at the ends.
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
  // A tree over the leaves that are not placed: the earliest end and the largest weight below each node.
  std::size_t leaves_ = 1;
  std::vector<Number> earliest_;
  std::vector<float> greatest_;
  std::vector<Stretch> stretches_;
  std::vector<std::pair<Size, Number>> heap_;  // heights of stretches, lowest first; old entries are skipped
};

}  // namespace vram::planning
