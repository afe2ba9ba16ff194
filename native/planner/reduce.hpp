// Makes a problem smaller: items that form a rectangle without gaps become one item. If no space is unused
// and moments differ, they are arranged like this in (nearly) every layout. Otherwise it is a guess: other
// layouts exist, and a caller that needs less memory must also try without it.
#pragma once

#include "planner/problem.hpp"

namespace vram::planning {

class Reduction {
 public:
  // With `random`, ambiguous choices are made at random, and joining continues until there are none.
  Reduction(const Problem& problem, const Deadline& deadline, std::mt19937_64* random = nullptr);

  // What remains, one buffer per item, with sections as times and an align of 1.
  std::vector<PlanBuffer> buffers() const;
  std::size_t size() const { return alive_; }
  // The offsets of all items of the problem, from those of the remaining ones.
  std::vector<Size> expand(const std::vector<Size>& offsets) const;

 private:
  struct Part {
    Number node;
    Size offset;  // relative to the node
  };
  // An item, or several that were merged.
  struct Node {
    Item item;
    bool alive = true;
    std::vector<Part> parts;  // empty: an item of the problem with the same number
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
  std::vector<std::vector<Number>> begins_;  // by section, of live nodes
  std::vector<std::vector<Number>> ends_;
  std::size_t alive_;
  // The set under construction.
  std::vector<Number> set_;
  Number first_ = 0;
  Number end_ = 0;
};

}  // namespace vram::planning
