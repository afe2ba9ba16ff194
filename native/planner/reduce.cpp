// There are two ways to a rectangle. Items with the same lifetime are stacked. And if some items end exactly
// when others begin, these must be adjacent if no space is to be wasted; together with everything else that
// ends or begins inside their time they form a closed set. If the set has the same height at every moment, it
// is a rectangle as soon as a small search has arranged it.
#include "planner/reduce.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "planner/search.hpp"

namespace vram::planning {

namespace {

constexpr std::size_t kMostParts[] = {2, 6, 12, 24, 48};  // of a rectangle, smaller ones first
constexpr std::uint64_t kSteps = 20'000;                  // of the search that arranges one

void forget(std::vector<Number>& list, Number node) { std::erase(list, node); }

}  // namespace

Reduction::Reduction(const Problem& problem, const Deadline& deadline, std::mt19937_64* random)
    : deadline_(deadline),
      items_(static_cast<Number>(problem.items.size())),
      begins_(problem.sections + 1),
      ends_(problem.sections + 1),
      alive_(problem.items.size()) {
  for (Number i = 0; i < items_; ++i) {
    nodes_.push_back({problem.items[i], true, {}});
    begins_[problem.items[i].first].push_back(i);
    ends_[problem.items[i].end].push_back(i);
  }
  if (random == nullptr) {
    reduce();
  } else {
    guess(*random);
  }
}

void Reduction::reduce() {
  for (bool smaller = true; smaller && !deadline_.passed();) {
    smaller = stack_equal();
    for (std::size_t most : kMostParts)
      if (!smaller) smaller = join_rectangles(most);
  }
}

// Alternates between what is certain and one guess.
void Reduction::guess(std::mt19937_64& random) {
  const bool stacks = random() % 2 == 0;
  for (bool smaller = true; smaller && alive_ > 1 && !deadline_.passed();) {
    smaller = join_rectangles(2) || (stacks && stack_equal()) || join_rectangles(6) || join_one(random);
    if (!smaller) smaller = stack_equal();
  }
}

// Joins two items of equal size of which one begins when the other ends, if they could be neighbors: usually
// the pair with the fewest alternatives.
bool Reduction::join_one(std::mt19937_64& random) {
  double least = 0;
  Number left = 0, right = 0;
  for (Number boundary = 1; boundary + 1 < begins_.size(); ++boundary) {
    const auto &ends = ends_[boundary], &begins = begins_[boundary];
    for (Number a : ends)
      for (Number b : begins) {
        if (nodes_[a].item.size != nodes_[b].item.size) continue;
        const double chance = static_cast<double>(random() % 1024 + 1) / 1024;
        const double doubt = static_cast<double>(ends.size() * begins.size()) * chance;
        if (least != 0 && doubt >= least) continue;
        least = doubt;
        left = a;
        right = b;
      }
  }
  if (least == 0) return false;
  const Item &a = nodes_[left].item, &b = nodes_[right].item;
  unite({{left, 0}, {right, 0}}, {a.first, b.end, a.size});
  return true;
}

bool Reduction::stack_equal() {
  bool any = false;
  for (const auto& list : begins_) {
    std::map<Number, std::vector<Number>> by_end;
    for (Number node : list) by_end[nodes_[node].item.end].push_back(node);
    for (const auto& [end, equal] : by_end) {
      if (equal.size() < 2) continue;
      Item whole{nodes_[equal[0]].item.first, end, 0};
      std::vector<Part> parts;
      for (Number node : equal) {
        parts.push_back({node, whole.size});
        whole.size += nodes_[node].item.size;
      }
      unite(std::move(parts), whole);
      any = true;
    }
  }
  return any;
}

bool Reduction::join_rectangles(std::size_t most) {
  bool any = false;
  for (Number boundary = 1; boundary + 1 < begins_.size(); ++boundary) {
    if (begins_[boundary].empty() || ends_[boundary].empty()) continue;
    Size height = 0;
    if (deadline_.passed()) return any;
    std::vector<Part> parts;
    if (!close(boundary, most) || !level(&height) || !arrange(height, &parts)) continue;
    unite(std::move(parts), {first_, end_, height});
    any = true;
  }
  return any;
}

// Finds the smallest set with everything that ends or begins at the boundary, and at every moment inside its
// own time at which one of its items does. False: it has more than `most`.
bool Reduction::close(Number boundary, std::size_t most) {
  set_.clear();
  first_ = end_ = boundary;
  for (const auto* list : {&ends_[boundary], &begins_[boundary]})
    for (Number node : *list)
      if (!include(node, most)) return false;
  for (bool grown = true; grown;) {
    grown = false;
    for (std::size_t i = 0; i < set_.size(); ++i)
      for (Number moment : {nodes_[set_[i]].item.first, nodes_[set_[i]].item.end}) {
        if (moment <= first_ || moment >= end_) continue;
        const std::size_t before = set_.size();
        for (const auto* list : {&ends_[moment], &begins_[moment]})
          for (Number node : *list)
            if (!include(node, most)) return false;
        grown |= set_.size() != before;
      }
  }
  return true;
}

bool Reduction::include(Number node, std::size_t most) {
  if (std::find(set_.begin(), set_.end(), node) != set_.end()) return true;
  if (set_.size() >= most) return false;
  set_.push_back(node);
  first_ = std::min(first_, nodes_[node].item.first);
  end_ = std::max(end_, nodes_[node].item.end);
  return true;
}

// Whether the set has the same height at each of its moments.
bool Reduction::level(Size* height) const {
  std::map<Number, Size> changes;
  for (Number node : set_) {
    changes[nodes_[node].item.first] += nodes_[node].item.size;
    changes[nodes_[node].item.end] -= nodes_[node].item.size;
  }
  *height = changes.begin()->second;
  return std::all_of(std::next(changes.begin()), std::prev(changes.end()),
                     [](const auto& change) { return change.second == 0; });
}

bool Reduction::arrange(Size height, std::vector<Part>* parts) const {
  std::vector<PlanBuffer> buffers;
  for (Number node : set_) {
    const Item& item = nodes_[node].item;
    buffers.push_back({item.first, item.end, static_cast<std::uint64_t>(item.size)});
  }
  const Problem problem(buffers, 1);
  std::vector<Number> rank(set_.size());
  std::iota(rank.begin(), rank.end(), 0);
  std::sort(rank.begin(), rank.end(), [&](Number a, Number b) {
    const Item &left = problem.items[a], &right = problem.items[b];
    return left.end - left.first != right.end - right.first ? left.end - left.first > right.end - right.first
                                                            : left.size > right.size;
  });
  std::vector<Number> ranks(rank.size());
  for (Number i = 0; i < rank.size(); ++i) ranks[rank[i]] = i;
  std::vector<Size> offsets;
  if (Search(problem, height, ranks).run(kSteps, deadline_, &offsets) != Found::layout) return false;
  for (std::size_t i = 0; i < set_.size(); ++i) parts->push_back({set_[i], offsets[i]});
  return true;
}

void Reduction::unite(std::vector<Part> parts, const Item& whole) {
  for (const Part& part : parts) {
    Node& node = nodes_[part.node];
    node.alive = false;
    forget(begins_[node.item.first], part.node);
    forget(ends_[node.item.end], part.node);
  }
  alive_ -= parts.size() - 1;
  const auto number = static_cast<Number>(nodes_.size());
  nodes_.push_back({whole, true, std::move(parts)});
  begins_[whole.first].push_back(number);
  ends_[whole.end].push_back(number);
}

std::vector<PlanBuffer> Reduction::buffers() const {
  std::vector<PlanBuffer> all;
  for (const Node& node : nodes_)
    if (node.alive)
      all.push_back({node.item.first, node.item.end, static_cast<std::uint64_t>(node.item.size)});
  return all;
}

std::vector<Size> Reduction::expand(const std::vector<Size>& offsets) const {
  std::vector<Size> all(nodes_.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    if (nodes_[i].alive) all[i] = offsets[next++];
  // A node comes after its parts.
  for (std::size_t i = nodes_.size(); i-- > 0;)
    for (const Part& part : nodes_[i].parts) all[part.node] = all[i] + part.offset;
  all.resize(items_);
  return all;
}

}  // namespace vram::planning
