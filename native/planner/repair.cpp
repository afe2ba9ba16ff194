#include "planner/repair.hpp"

#include <algorithm>
#include <limits>

namespace vram::planning {

namespace {

constexpr Size kWaiting = -1;
constexpr std::uint64_t kStepsBetweenLooks = 64;  // steps between two checks of the clock

}  // namespace

Repair::Repair(const Problem& problem, std::uint64_t seed)
    : problem_(problem), board_(problem), random_(seed) {}

bool Repair::lower_to(Size target, std::uint64_t steps, const Deadline& deadline, Layout* layout) {
  load(layout->offsets, target);
  if (!settle_all(target, steps, deadline)) return false;
  store(layout);
  return true;
}

bool Repair::lower_towards(Size goal, double part, std::uint64_t steps, const Deadline& deadline,
                           Layout* layout) {
  const auto next_target = [&] {
    const auto way = static_cast<Size>(part * static_cast<double>(layout->peak - goal));
    return layout->peak - std::max<Size>(way, 1);
  };
  Size target = next_target();
  load(layout->offsets, target);
  bool lowered = false;
  while (settle_all(target, steps, deadline)) {
    store(layout);
    lowered = true;
    if (layout->peak <= goal) break;
    target = next_target();
    take_above(target);
  }
  return lowered;
}

bool Repair::settle_all(Size target, std::uint64_t steps, const Deadline& deadline) {
  for (std::uint64_t step = 0; !waiting_.empty(); ++step) {
    if (step == steps || (step % kStepsBetweenLooks == 0 && deadline.passed())) return false;
    settle(next(), target);
  }
  return true;
}

void Repair::store(Layout* layout) const {
  layout->offsets = offsets_;
  layout->peak = 0;
  for (std::size_t i = 0; i < offsets_.size(); ++i)
    layout->peak = std::max(layout->peak, offsets_[i] + problem_.items[i].size);
}

void Repair::take_above(Size target) {
  for (Number i = 0; i < offsets_.size(); ++i) {
    if (offsets_[i] + problem_.items[i].size <= target) continue;
    board_.take(i, offsets_[i]);
    offsets_[i] = kWaiting;
    waiting_.push_back(i);
  }
}

void Repair::load(const std::vector<Size>& offsets, Size target) {
  board_.clear();
  waiting_.clear();
  offsets_ = offsets;
  weight_.resize(offsets.size());
  for (Number i = 0; i < offsets.size(); ++i) {
    const Item& item = problem_.items[i];
    weight_[i] = static_cast<double>(item.size) * (item.end - item.first);
    if (offsets[i] + item.size <= target) {
      board_.put(i, offsets[i]);
    } else {
      offsets_[i] = kWaiting;
      waiting_.push_back(i);
    }
  }
}

// The largest of a few waiting items: large ones are hard to place later, and randomness breaks cycles.
Number Repair::next() {
  std::size_t best = random_() % waiting_.size();
  for (int i = 0; i < 3; ++i) {
    const std::size_t other = random_() % waiting_.size();
    if (problem_.items[waiting_[other]].size > problem_.items[waiting_[best]].size) best = other;
  }
  std::swap(waiting_[best], waiting_.back());
  const Number item = waiting_.back();
  waiting_.pop_back();
  return item;
}

void Repair::settle(Number item, Size target) {
  Size offset = board_.find(item, Fit::tightest);
  if (offset + problem_.items[item].size > target) {
    offset = cheapest_place(item, target);
    displace(item, offset);
  }
  offsets_[item] = offset;
  board_.put(item, offset);
}

// Among the places that touch a neighbor, the bottom or the target, the one with the least weight in the way:
// items that begin below the place's end, minus items that end at or below its start.
Size Repair::cheapest_place(Number item, Size target) {
  const Size size = problem_.items[item].size;
  near_.clear();
  tops_.clear();
  places_.assign({0, target - size});
  board_.each_neighbour(item, [&](const Board::Placed& placed) {
    near_.push_back(placed);
    tops_.emplace_back(placed.top, weight_[placed.item]);
    if (placed.top + size <= target) places_.push_back(placed.top);
    if (placed.offset >= size) places_.push_back(placed.offset - size);
  });
  std::sort(near_.begin(), near_.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  std::sort(tops_.begin(), tops_.end());
  std::sort(places_.begin(), places_.end());
  Size best = 0;
  double least = std::numeric_limits<double>::max(), cost = 0;
  std::size_t begun = 0, ended = 0, equal = 0;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Size place = places_[i];
    if (i > 0 && place == places_[i - 1]) continue;
    while (begun < near_.size() && near_[begun].offset < place + size) cost += weight_[near_[begun++].item];
    while (ended < tops_.size() && tops_[ended].first <= place) cost -= tops_[ended++].second;
    if (cost < least * (1 - 1e-9)) {
      least = cost;
      best = place;
      equal = 1;
    } else if (cost <= least * (1 + 1e-9) && random_() % ++equal == 0) {
      best = place;
    }
  }
  return best;
}

void Repair::displace(Number item, Size offset) {
  const Size top = offset + problem_.items[item].size;
  for (const Board::Placed& placed : near_) {
    if (placed.offset >= top || placed.top <= offset) continue;
    board_.take(placed.item, placed.offset);
    offsets_[placed.item] = kWaiting;
    waiting_.push_back(placed.item);
    weight_[placed.item] *= 1.2;
  }
}

}  // namespace vram::planning
