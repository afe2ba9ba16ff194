#include "planner/board.hpp"

#include <algorithm>
#include <array>
#include <limits>

namespace vram::planning {

namespace {

constexpr Size kNone = -1;
constexpr Number kMerged = 6;  // up to this many spans are merged; more are sorted

// Walks over occupied ranges by offset and keeps the best gap below them.
class Gaps {
 public:
  Gaps(Size size, Fit fit) : size_(size), fit_(fit) {}
  // Returns whether no better gap can follow.
  bool pass(Size offset, Size top) {
    const Size gap = offset - top_;
    if (gap >= size_ && gap < width_) {
      best_ = top_;
      width_ = gap;
      if (fit_ == Fit::lowest || gap == size_) return true;
    }
    top_ = std::max(top_, top);
    return false;
  }
  Size best() const { return best_ == kNone ? top_ : best_; }

 private:
  Size size_;
  Fit fit_;
  Size top_ = 0;
  Size best_ = kNone;
  Size width_ = std::numeric_limits<Size>::max();
};

bool lower(const Board::Placed& a, const Board::Placed& b) { return a.offset < b.offset; }

}  // namespace

Board::Board(const Problem& problem) : problem_(problem) {
  std::uint64_t lengths = 0;
  for (const Item& item : problem.items) lengths += item.end - item.first;
  span_ = static_cast<Number>(lengths / std::max<std::size_t>(problem.items.size(), 1)) + 1;
  spans_.resize(problem.sections / span_ + 1);
}

void Board::clear() {
  for (auto& span : spans_) span.clear();
}

Size Board::find(Number number, Fit fit) const {
  const Item& item = problem_.items[number];
  const Number from = item.first / span_, count = (item.end - 1) / span_ - from + 1;
  Gaps gaps(item.size, fit);
  const auto meets = [&](const Placed& placed) {
    return (placed.first < item.end) & (item.first < placed.end);
  };
  if (count == 1) {
    for (const Placed& placed : spans_[from])
      if (meets(placed) && gaps.pass(placed.offset, placed.top)) break;
    return gaps.best();
  }
  if (count > kMerged) {
    found_.clear();
    each_neighbour(number, [&](const Placed& placed) { found_.push_back(placed); });
    std::sort(found_.begin(), found_.end(), lower);
    for (const Placed& placed : found_)
      if (gaps.pass(placed.offset, placed.top)) break;
    return gaps.best();
  }
  // An item that lives in several spans is visited several times, which is harmless.
  std::array<const Placed*, kMerged> next{}, last{};
  for (Number s = 0; s < count; ++s) {
    next[s] = spans_[from + s].data();
    last[s] = next[s] + spans_[from + s].size();
  }
  while (true) {
    Number lowest = count;
    Size offset = std::numeric_limits<Size>::max();
    for (Number s = 0; s < count; ++s) {
      while (next[s] != last[s] && !meets(*next[s])) ++next[s];
      if (next[s] != last[s] && next[s]->offset < offset) {
        lowest = s;
        offset = next[s]->offset;
      }
    }
    if (lowest == count || gaps.pass(offset, next[lowest]->top)) return gaps.best();
    ++next[lowest];
  }
}

void Board::put(Number number, Size offset) {
  const Item& item = problem_.items[number];
  const Placed placed{offset, offset + item.size, item.first, item.end, number};
  for (Number s = item.first / span_; s <= (item.end - 1) / span_; ++s)
    spans_[s].insert(std::upper_bound(spans_[s].begin(), spans_[s].end(), placed, lower), placed);
}

void Board::take(Number number, Size offset) {
  const Item& item = problem_.items[number];
  const Placed placed{offset, 0, 0, 0, 0};
  for (Number s = item.first / span_; s <= (item.end - 1) / span_; ++s) {
    auto found = std::lower_bound(spans_[s].begin(), spans_[s].end(), placed, lower);
    while (found->item != number) ++found;
    spans_[s].erase(found);
  }
}

}  // namespace vram::planning
