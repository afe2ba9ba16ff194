// Layouts are built in only one order: each item is placed at the lowest possible offset above the items
// below it, never lower than the previous one. Every layout, pushed down until nothing moves, can be built
// this way. Since nothing is placed below the last offset, the remaining space in each section is known.
#include "planner/search.hpp"

#include <algorithm>
#include <limits>

namespace vram::planning {

namespace {

constexpr std::uint64_t kStepsBetweenLooks = 256;  // steps between two checks of the clock

}  // namespace

Search::Search(const Problem& problem, Size capacity, const std::vector<Number>& rank)
    : problem_(problem),
      capacity_(capacity),
      rank_(rank),
      left_(problem.load),
      unseen_(problem.sections + 1),
      crossed_(problem.sections + 1) {}

Found Search::run(std::uint64_t steps, const Deadline& deadline, std::vector<Size>* offsets) {
  steps_ = steps;
  deadline_ = &deadline;
  offsets_ = offsets;
  offsets->assign(problem_.items.size(), 0);
  List open;
  for (Number i = 0; i < problem_.items.size(); ++i) open.push_back({0, rank_[i], i});
  std::sort(open.begin(), open.end());
  if (!fits(open, 0)) return Found::nothing;
  return split(open, {0, 0, 0});
}

Found Search::descend(const List& open, Open after) {
  Size bottom = std::numeric_limits<Size>::max();
  for (const Open& each : open) bottom = std::min(bottom, each.lowest + problem_.items[each.item].size);
  for (const Open& each : open) {
    if (each < after) continue;
    // An item that ends below could be placed there without affecting others: layouts with it placed higher
    // are not better.
    if (each.lowest >= bottom) break;
    const Found found = place(open, each);
    if (found != Found::nothing) return found;
  }
  return Found::nothing;
}

Found Search::place(const List& open, const Open& chosen) {
  if (steps_ == 0 || (steps_ % kStepsBetweenLooks == 0 && deadline_->passed())) return Found::unknown;
  --steps_;
  const Item& item = problem_.items[chosen.item];
  const Size top = chosen.lowest + item.size;
  (*offsets_)[chosen.item] = chosen.lowest;
  if (open.size() == 1) return Found::layout;

  List rest, raised;
  rest.reserve(open.size());
  for (const Open& each : open) {
    if (each.item == chosen.item) continue;
    if (each.lowest < top && meet(problem_.items[each.item], item)) {
      if (top + problem_.items[each.item].size > capacity_) return Found::nothing;
      raised.push_back({top, each.rank, each.item});
    } else {
      rest.push_back(each);
    }
  }
  std::sort(raised.begin(), raised.end());
  const auto middle = static_cast<std::ptrdiff_t>(rest.size());
  rest.insert(rest.end(), raised.begin(), raised.end());
  std::inplace_merge(rest.begin(), rest.begin() + middle, rest.end());

  change_left(item, -item.size);
  const Found found = fits(rest, chosen.lowest) ? split(rest, chosen) : Found::nothing;
  change_left(item, item.size);
  return found;
}

// If no open item lives in two neighboring sections, the two sides are independent problems.
Found Search::split(const List& open, const Open& chosen) {
  Number from = problem_.sections, to = 0;
  for (const Open& each : open) {
    from = std::min(from, problem_.items[each.item].first);
    to = std::max(to, problem_.items[each.item].end);
  }
  std::fill(crossed_.begin() + from, crossed_.begin() + to + 1, 0);
  for (const Open& each : open) {
    ++crossed_[problem_.items[each.item].first];
    --crossed_[problem_.items[each.item].end - 1];
  }
  std::vector<Number> part(to - from);
  std::uint32_t crossing = 0;
  Number parts = 0;
  for (Number s = from; s < to; ++s) {
    part[s - from] = parts;
    crossing += crossed_[s];
    if (crossing == 0) ++parts;
  }
  if (parts <= 1) return descend(open, chosen);
  std::vector<List> lists(parts);
  for (const Open& each : open) lists[part[problem_.items[each.item].first - from]].push_back(each);
  // Small problems first: they fail soonest.
  std::stable_sort(lists.begin(), lists.end(),
                   [](const List& a, const List& b) { return a.size() < b.size(); });
  for (const List& list : lists) {
    if (list.empty()) continue;  // a section without open items
    const Found found = descend(list, chosen);
    if (found != Found::layout) return found;
  }
  return Found::layout;
}

// Whether each section has enough space for its open items, above the lowest offset they could have.
bool Search::fits(const List& open, Size least) {
  Number from = problem_.sections, to = 0;
  for (const Open& each : open) {
    from = std::min(from, problem_.items[each.item].first);
    to = std::max(to, problem_.items[each.item].end);
  }
  for (Number s = from; s <= to; ++s) unseen_[s] = s;
  const auto next = [&](Number section) {
    while (unseen_[section] != section) section = unseen_[section] = unseen_[unseen_[section]];
    return section;
  };
  for (const Open& each : open) {
    const Item& item = problem_.items[each.item];
    const Size most = capacity_ - std::max(least, each.lowest);
    for (Number s = next(item.first); s < item.end; s = next(s)) {
      if (left_[s] > most) return false;
      unseen_[s] = s + 1;
    }
  }
  return true;
}

void Search::change_left(const Item& item, Size size) {
  for (Number s = item.first; s < item.end; ++s) left_[s] += size;
}

}  // namespace vram::planning
