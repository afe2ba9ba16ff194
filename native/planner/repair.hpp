// Improves a layout: what reaches above a target is taken out and put back below it, if need be by displacing
// others, which are then put back in turn. What is displaced often weighs more, so that it comes to rest.
#pragma once

#include "planner/board.hpp"

namespace vram::planning {

class Repair {
 public:
  Repair(const Problem& problem, std::uint64_t seed);

  // Rearranges *layout, whose offsets are all set, to a peak of at most `target`. Returns whether that came
  // about before the deadline and within so many steps; else *layout is as it was.
  bool lower_to(Size target, std::uint64_t steps, const Deadline& deadline, Layout* layout);
  // The same towards `goal`, by a part of the way at a time, as long as each takes no more than so many
  // steps.
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
