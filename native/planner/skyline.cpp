#include "planner/skyline.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace vram::planning {

namespace {

constexpr Number kNone = std::numeric_limits<Number>::max();
constexpr Size kGone = -1;  // as a height: the stretch was merged into another
constexpr float kPlaced = -1;
constexpr float kRaise = 1.2F;  // of a weight
constexpr std::size_t kStepsBetweenPolls = 256;

}  // namespace

Skyline::Skyline(const Problem& problem)
    : problem_(problem),
      by_first_(problem.items.size()),
      begin_(problem.sections + 1),
      offsets_(problem.items.size()) {
  const auto& items = problem.items;
  std::iota(by_first_.begin(), by_first_.end(), 0);
  std::stable_sort(by_first_.begin(), by_first_.end(),
                   [&](Number a, Number b) { return items[a].first < items[b].first; });
  for (const Item& item : items) ++begin_[item.first + 1];
  weight_.resize(items.size());
  weigh(kScarcity);
  std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
  while (leaves_ < items.size()) leaves_ *= 2;
}

void Skyline::weigh(double scarcity) {
  for (std::size_t i = 0; i < weight_.size(); ++i) {
    const Item& item = problem_.items[i];
    const double load = static_cast<double>(problem_.busiest(item)) / static_cast<double>(problem_.bound);
    weight_[i] = static_cast<float>(std::pow(load, scarcity) * (item.end - item.first));
  }
}

Layout Skyline::build(const Deadline& deadline) {
  plant();
  stretches_.assign(1, {0, problem_.sections, 0, kNone, kNone});
  heap_.assign(1, {0, 0});
  Layout layout;
  std::size_t steps = 0;
  for (std::size_t open = problem_.items.size(); open > 0;) {
    if (++steps % kStepsBetweenPolls == 0) deadline.poll();
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const auto [height, number] = heap_.back();
    heap_.pop_back();
    if (stretches_[number].height != height) continue;
    join(number);
    Stretch& valley = stretches_[number];
    const Number leaf = heaviest_within(valley.first, valley.end);
    if (leaf == kNone) {
      const Size left = valley.left == kNone ? -1 : stretches_[valley.left].height;
      const Size right = valley.right == kNone ? -1 : stretches_[valley.right].height;
      valley.height = left < 0 || right < 0 ? std::max(left, right) : std::min(left, right);
      push(number);
      continue;
    }
    const Number item = by_first_[leaf];
    offsets_[item] = height;
    layout.peak = std::max(layout.peak, height + problem_.items[item].size);
    remove(leaf);
    fill(number, problem_.items[item]);
    --open;
  }
  layout.offsets = offsets_;
  return layout;
}

void Skyline::raise_weights(Size target) {
  for (std::size_t i = 0; i < offsets_.size(); ++i)
    if (offsets_[i] + problem_.items[i].size > target) weight_[i] *= kRaise;
}

void Skyline::plant() {
  earliest_.assign(2 * leaves_, kNone);
  greatest_.assign(2 * leaves_, kPlaced);
  for (std::size_t leaf = 0; leaf < by_first_.size(); ++leaf) {
    earliest_[leaves_ + leaf] = problem_.items[by_first_[leaf]].end;
    greatest_[leaves_ + leaf] = weight_[by_first_[leaf]];
  }
  for (std::size_t node = leaves_ - 1; node > 0; --node) {
    earliest_[node] = std::min(earliest_[2 * node], earliest_[2 * node + 1]);
    greatest_[node] = std::max(greatest_[2 * node], greatest_[2 * node + 1]);
  }
}

void Skyline::remove(std::size_t leaf) {
  std::size_t node = leaves_ + leaf;
  earliest_[node] = kNone;
  greatest_[node] = kPlaced;
  while (node /= 2) {
    earliest_[node] = std::min(earliest_[2 * node], earliest_[2 * node + 1]);
    greatest_[node] = std::max(greatest_[2 * node], greatest_[2 * node + 1]);
  }
}

// Leaves from `first` to `last`, of items that end by section `end`; `best` has weight `weight`.
struct Skyline::Query {
  std::size_t first;
  std::size_t last;
  Number end;
  Number best = kNone;
  float weight = kPlaced;
};

// The leaf of the item, or kNone.
Number Skyline::heaviest_within(Number first, Number end) const {
  Query query{begin_[first], begin_[end], end};
  descend(1, 0, leaves_, &query);
  return query.best;
}

void Skyline::descend(std::size_t node, std::size_t from, std::size_t to, Query* query) const {
  if (to <= query->first || query->last <= from) return;
  if (earliest_[node] > query->end || greatest_[node] <= query->weight) return;
  if (to - from == 1) {
    query->best = static_cast<Number>(from);
    query->weight = greatest_[node];
    return;
  }
  const std::size_t middle = (from + to) / 2;
  const bool right_first = greatest_[2 * node + 1] > greatest_[2 * node];
  if (right_first) descend(2 * node + 1, middle, to, query);
  descend(2 * node, from, middle, query);
  if (!right_first) descend(2 * node + 1, middle, to, query);
}

// Merges neighbors of equal height into the stretch.
void Skyline::join(Number number) {
  Stretch& own = stretches_[number];
  while (own.left != kNone && stretches_[own.left].height == own.height) {
    Stretch& other = stretches_[own.left];
    own.first = other.first;
    own.left = other.left;
    other.height = kGone;
    if (own.left != kNone) stretches_[own.left].right = number;
  }
  while (own.right != kNone && stretches_[own.right].height == own.height) {
    Stretch& other = stretches_[own.right];
    own.end = other.end;
    own.right = other.right;
    other.height = kGone;
    if (own.right != kNone) stretches_[own.right].left = number;
  }
}

void Skyline::push(Number number) {
  heap_.emplace_back(stretches_[number].height, number);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

Number Skyline::append(Number first, Number end, Size height, Number left) {
  const auto number = static_cast<Number>(stretches_.size());
  stretches_.push_back({first, end, height, left, kNone});
  if (left != kNone) stretches_[left].right = number;
  push(number);
  return number;
}

// Places the item on the stretch, which is split into up to three.
void Skyline::fill(Number number, const Item& item) {
  const Stretch old = stretches_[number];
  stretches_[number].height = kGone;
  Number last = old.left;
  if (old.first < item.first) last = append(old.first, item.first, old.height, last);
  last = append(item.first, item.end, old.height + item.size, last);
  if (item.end < old.end) last = append(item.end, old.end, old.height, last);
  stretches_[last].right = old.right;
  if (old.right != kNone) stretches_[old.right].left = last;
}

}  // namespace vram::planning
