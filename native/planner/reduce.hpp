// Makes a problem smaller: items that form a rectangle among themselves, without a gap, become one. Where
// there is no room to spare and moments differ they lie so in every layout, or nearly; elsewhere it is a
// guess: others can be had, and whoever asks for less must also try without it.
#pragma once

#include "planner/problem.hpp"

namespace vram::planning {

class Reduction {
 public:
  // With `random`, choices are made by chance where there are several, and go on until there are none.
  Reduction(const Problem& problem, const Deadline& deadline, std::mt19937_64* random = nullptr);

  // What is left, one buffer an item, with sections for times and an align of 1.
  std::vector<PlanBuffer> buffers() const;
  std::size_t size() const { return alive_; }
  // The offsets of all items of the problem, from those of what is left.
  std::vector<Size> expand(const std::vector<Size>& offsets) const;

 private:
  struct Part {
    Number node;
    Size offset;  // above the whole
  };
  // An item, or several that are one now.
  struct Node {
    Item item;
    bool alive = true;
    std::vector<Part> parts;  // empty: an item of the problem, of the same number
  };

  void reduce();
  void guess(std::mt19937_64& random);
  bool stack_equal();
  bool join_one(std::mt19937_64& random);
  bool join_rectangles(std::size_t most);
  bool close(Number boundary, std::size_t most);
  bool include(Number node, std::size_t most);
  bool level(Size* height) const;
  bool arrange(Size height, std::vector<Part>* parts) const;
  void unite(std::vector<Part> parts, const Item& whole);

  const Deadline& deadline_;
  Number items_;
  std::vector<Node> nodes_;
  std::vector<std::vector<Number>> begins_;  // by section, of what is alive
  std::vector<std::vector<Number>> ends_;
  std::size_t alive_;
  // The set that is being closed.
  std::vector<Number> set_;
  Number first_ = 0;
  Number end_ = 0;
};

}  // namespace vram::planning
