// Improves a layout: items that exceed a target are removed and placed again below it, if needed by
// displacing others, which are then placed again. Items that are displaced often gain weight, so that they
// settle.
#pragma once

#include "planner/board.hpp"

namespace vram::planning {

class Repair {
 public:
  Repair(const Problem& problem, std::uint64_t seed);

  // Rearranges *layout, in which all offsets are set, to a peak of at most `target`. Returns whether this
  // succeeded before the deadline and within `steps`; otherwise *layout is unchanged.
  bool lower_to(Size target, std::uint64_t steps, const Deadline& deadline, Layout* layout);
  // The same towards `goal`, by a part of the way at a time, while each takes at most `steps`.
  bool lower_towards(Size goal, double part, std::uint64_t steps, const Deadline& deadline, Layout* layout);

 private:
  void load(const std::vector<Size>& offsets, Size target);
  bool settle_all(Size target, std::uint64_t steps, const Deadline& deadline);
  void store(Layout* layout) const;
  void take_above(Size target);
  void settle(Number item, Size target);
  Size cheapest_place(Number item, Size target);
  void displace(Number item, Size offset);
  Number next();

  const Problem& problem_;
  Board board_;
  std::mt19937_64 random_;
  std::vector<Size> offsets_;
  std::vector<double> weight_;
  std::vector<Number> waiting_;
  std::vector<Board::Placed> near_;
  std::vector<std::pair<Size, double>> tops_;
  std::vector<Size> places_;
};

}  // namespace vram::planning
