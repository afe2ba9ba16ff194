// The problem, the orders to try, and the schedule: first orders, then repair and search in turn.
#include "planner/planner.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "planner/board.hpp"
#include "planner/reduce.hpp"
#include "planner/repair.hpp"
#include "planner/search.hpp"
#include "planner/skyline.hpp"

namespace vram {

namespace planning {

namespace {

constexpr std::size_t kMany = 20'000;               // items; one layout takes much of the time
constexpr std::size_t kSearchable = 4000;           // items; the search examines all open ones in each step
constexpr std::uint64_t kSteps = 4;                 // of a short search or repair, for each item
constexpr double kRepairPart = 0.125;               // of that way; repair works better in small steps
constexpr double kParts[] = {1, 0.125, 0.25, 0.5};  // of the way from the best peak to the goal, in turn
constexpr double kNoises[] = {0, 0.02, 0.1, 0.3};   // of ranks, in turn

constexpr double kReducedPart = 0.1;  // of the time, for the reduced problem
constexpr double kGuessedPart = 0.4;  // of the remaining time, for guesses
constexpr double kTight = 0.995;      // of the area in use, above which rectangles are guessed
constexpr double kGuessSeconds = 0.05;
constexpr std::size_t kWorthSolving = 8;  // times fewer items

constexpr double kScarcities[] = {Skyline::kScarcity, 6, 48, 96};  // with many items
constexpr int kBuilds = 3;  // of the skyline, after each order and in each round

// An order sorts by descending keys.
using Key = double (*)(const Problem&, const Item&);

double length(const Item& item) { return item.end - item.first; }
double size_class(const Item& item, double classes_an_octave, double more = 0) {
  return std::floor(classes_an_octave * std::log2(static_cast<double>(item.size)) + more);
}
double relative_load(const Problem& problem, const Item& item) {
  return static_cast<double>(problem.busiest(item)) / static_cast<double>(problem.bound);
}
double from_peak(const Problem& problem, const Item& item) {
  if (item.first > problem.peak) return item.first - problem.peak;
  return item.end <= problem.peak ? problem.peak - item.end + 1 : 0;
}

// Keys of several parts, the first of which decides: each later part is below kPart.
constexpr double kPart = 1e9;

struct NamedKey {
  const char* name;
  Key key;
  Fit fit = Fit::lowest;
};

// Orders that work best with many items come first. Items of nearly equal size, placed together, leave gaps
// that fit the next of them; items at times of scarce memory come before others.
constexpr NamedKey kOrders[] = {
    {"size and load, then start",
     [](const Problem& p, const Item& i) {
       return kPart * size_class(i, 3, 72 * std::log2(relative_load(p, i))) - i.first;
     }},
    {"size, then load",
     [](const Problem& p, const Item& i) {
       return kPart * (size_class(i, 3) * 1000 + std::floor(100 * relative_load(p, i))) - i.first;
     }},
    {"size", [](const Problem&, const Item& i) { return static_cast<double>(i.size); }},
    {"size, then distance from the peak",
     [](const Problem& p, const Item& i) { return kPart * size_class(i, 3) - from_peak(p, i); }},
    {"area", [](const Problem&, const Item& i) { return static_cast<double>(i.size) * length(i); }},
    {"size, then start", [](const Problem&, const Item& i) { return kPart * size_class(i, 1) - i.first; }},
    {"size, then end", [](const Problem&, const Item& i) { return kPart * size_class(i, 3) + i.end; }},
    {"length", [](const Problem&, const Item& i) { return length(i); }},
    {"start", [](const Problem&, const Item& i) { return -static_cast<double>(i.first); }, Fit::tightest},
};

// For the search: which items go first among those that could be placed equally low.
constexpr NamedKey kRanks[] = {
    {"length, then size",
     [](const Problem& p, const Item& i) {
       return length(i) + static_cast<double>(i.size) / static_cast<double>(p.bound + 1);
     }},
    {"load, then area",
     [](const Problem& p, const Item& i) {
       return relative_load(p, i) * 1e6 +
              static_cast<double>(i.size) * length(i) / static_cast<double>(p.area);
     }},
    {"load, then length",
     [](const Problem& p, const Item& i) { return relative_load(p, i) * 1e6 + length(i) / p.sections; }},
    {"area", [](const Problem&, const Item& i) { return static_cast<double>(i.size) * length(i); }},
    {"size", [](const Problem&, const Item& i) { return static_cast<double>(i.size); }},
    {"length and area",
     [](const Problem&, const Item& i) { return static_cast<double>(i.size) * length(i) * length(i); }},
};

std::vector<Number> falling(const std::vector<double>& keys) {
  std::vector<Number> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](Number a, Number b) { return keys[a] > keys[b]; });
  return order;
}

// One planning run. It ends at `goal`.
class Planning {
 public:
  Planning(const Problem& problem, Size capacity, const Deadline& deadline, std::uint64_t seed)
      : problem_(problem),
        goal_(std::max(problem.bound, capacity)),
        asked_(capacity),
        deadline_(deadline),
        random_(seed),
        skyline_(problem),
        repair_(problem, seed) {
    best_.peak = std::numeric_limits<Size>::max();
  }

  Layout run() {
    build_up(problem_.items.size() > kMany ? static_cast<int>(std::size(kScarcities)) : 1);
    if (!over() && !reduced_ && problem_.items.size() <= kSearchable) reduce();
    for (const NamedKey& order : kOrders) {
      if (!over()) try_order(order);
      if (problem_.items.size() <= kMany || !repair_towards_goal()) build_up(kBuilds);
    }
    for (std::uint64_t round = 0; !over(); ++round) improve(round);
    return best_;
  }
  bool proven() const { return proven_; }

 private:
  bool over() const { return best_.peak <= goal_ || proven_ || deadline_.passed(); }

  // The first is always built, so that there is a plan.
  void build_up(int times) {
    for (int i = 0; i < times && (best_.offsets.empty() || !over()); ++i) {
      Layout layout = skyline_.build(deadline_);
      const bool better = layout.peak < best_.peak;
      if (better) best_ = std::move(layout);
      if (better) best_.method = "skyline: load and length";
      if (problem_.items.size() > kMany && ++built_ < std::size(kScarcities)) {
        skyline_.weigh(kScarcities[built_]);
      } else {
        skyline_.raise_weights(goal_ + (best_.peak - goal_) / 2);
      }
    }
  }

  void try_order(const NamedKey& order) {
    Layout layout;
    layout.offsets.resize(problem_.items.size());
    Board board(problem_);
    for (Number number : falling(keys_of(order, 0))) {
      const Size size = problem_.items[number].size, offset = board.find(number, order.fit);
      layout.peak = std::max(layout.peak, offset + size);
      if (layout.peak >= best_.peak || deadline_.passed()) return;
      layout.offsets[number] = offset;
      board.put(number, offset);
    }
    layout.method = std::string("order: ") + order.name;
    best_ = std::move(layout);
  }

  // Solves the problem with rectangles replaced by one item each, for a part of the time; then, if little
  // space is unused, with guesses.
  void reduce() {
    if (!solve_reduced(Reduction(problem_, deadline_), deadline_.within(kReducedPart * deadline_.left())))
      return;
    const double tight = static_cast<double>(goal_) * problem_.sections * kTight;
    if (static_cast<double>(problem_.area) < tight) return;
    const Deadline guessing = deadline_.within(kGuessedPart * deadline_.left());
    while (!over() && !guessing.passed()) {
      const Reduction guess(problem_, guessing, &random_);
      if (guess.size() * kWorthSolving < problem_.items.size())
        solve_reduced(guess, guessing.within(std::min(guessing.left(), kGuessSeconds)));
    }
  }

  // False: there is nothing to reduce.
  bool solve_reduced(const Reduction& reduction, const Deadline& deadline) {
    if (reduction.size() == problem_.items.size()) return false;
    const Problem smaller(reduction.buffers(), 1);
    Planning planning(smaller, asked_, deadline, random_());
    planning.reduced_ = true;
    Layout layout = planning.run();
    if (layout.peak >= best_.peak) return true;
    layout.offsets = reduction.expand(layout.offsets);
    layout.method = "rectangles, then " + layout.method;
    best_ = std::move(layout);
    return true;
  }

  // Many short searches with different ranks find more than one long search; some are longer. Without a
  // capacity, only every fourth round aims at the goal itself, the others at a part of the way.
  void improve(std::uint64_t round) {
    const std::uint64_t turn = asked_ > 0 ? round : round / std::size(kParts);
    const std::uint64_t steps = kSteps * problem_.items.size() << std::countr_zero(turn + 1);
    const double part = asked_ > 0 ? 1 : kParts[round % std::size(kParts)];
    const auto target = [&](double share) {
      return best_.peak -
             std::max<Size>(static_cast<Size>(share * static_cast<double>(best_.peak - goal_)), 1);
    };
    build_up(kBuilds);
    if (problem_.items.size() <= kSearchable)
      for (const NamedKey& rank : kRanks)
        if (!over()) search_for(target(part), rank, kNoises[turn % std::size(kNoises)], steps);
    if (!over()) repair_to(target(kRepairPart), steps);
  }

  void search_for(Size target, const NamedKey& key, double noise, std::uint64_t steps) {
    const std::vector<Number> order = falling(keys_of(key, noise));
    std::vector<Number> rank(order.size());
    for (Number i = 0; i < order.size(); ++i) rank[order[i]] = i;
    Layout layout;
    const Found found = Search(problem_, target, rank).run(steps, deadline_, &layout.offsets);
    if (found == Found::nothing) raise_goal(target);
    if (found != Found::layout) return;
    for (Number i = 0; i < order.size(); ++i)
      layout.peak = std::max(layout.peak, layout.offsets[i] + problem_.items[i].size);
    layout.method = std::string("search: ") + key.name;
    best_ = std::move(layout);
  }

  void repair_to(Size target, std::uint64_t steps) {
    if (!repair_.lower_to(target, steps, deadline_, &best_)) return;
    if (best_.method.rfind("repair", 0) != 0) best_.method = "repair of " + best_.method;
  }

  // With many items, a repair that makes progress is worth more than another layout. False: no progress.
  bool repair_towards_goal() {
    const std::uint64_t steps = problem_.items.size() / 4;
    if (over() || !repair_.lower_towards(goal_, kRepairPart, steps, deadline_, &best_)) return false;
    if (best_.method.rfind("repair", 0) != 0) best_.method = "repair of " + best_.method;
    return true;
  }

  // No layout with a peak of at most `target` exists.
  void raise_goal(Size target) {
    goal_ = target + 1;
    proven_ = best_.peak <= goal_ || (asked_ > 0 && goal_ > asked_);
  }

  std::vector<double> keys_of(const NamedKey& named, double noise) {
    std::vector<double> keys;
    keys.reserve(problem_.items.size());
    std::normal_distribution<double> bell;
    for (const Item& item : problem_.items)
      keys.push_back(named.key(problem_, item) * (noise > 0 ? std::exp(noise * bell(random_)) : 1));
    return keys;
  }

  const Problem& problem_;
  Size goal_;
  Size asked_;  // the capacity, or 0
  const Deadline deadline_;
  std::mt19937_64 random_;
  Skyline skyline_;
  Repair repair_;
  Layout best_;
  std::size_t built_ = 0;  // skylines
  bool proven_ = false;
  bool reduced_ = false;  // the problem is the result of a reduction
};

}  // namespace

Problem::Problem(std::span<const PlanBuffer> buffers, std::uint64_t align) : items(buffers.size()) {
  struct Change {
    std::int64_t time;
    bool begins;  // ends come first: a buffer's memory is free at its upper
    Number item;
  };
  std::vector<Change> changes;
  changes.reserve(2 * buffers.size());
  for (Number i = 0; i < buffers.size(); ++i) {
    items[i].size = static_cast<Size>((buffers[i].size + align - 1) / align);
    changes.push_back({buffers[i].lower, true, i});
    changes.push_back({buffers[i].upper, false, i});
  }
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return a.time != b.time ? a.time < b.time : a.begins < b.begins;
  });
  Size live = 0;
  bool grown = false;  // since the last section was closed
  for (const Change& change : changes) {
    Item& item = items[change.item];
    if (change.begins) {
      item.first = sections;
      live += item.size;
    } else {
      if (grown) {
        ++sections;
        load.push_back(live);
      }
      item.end = sections;
      live -= item.size;
    }
    grown = change.begins;
  }
  if (load.empty()) return;
  peak = static_cast<Number>(std::max_element(load.begin(), load.end()) - load.begin());
  bound = load[peak];
  area = std::accumulate(load.begin(), load.end(), Size{0});
  busiest_.push_back(load);
  for (Number width = 2; width <= sections; width *= 2) {
    const auto& half = busiest_.back();
    std::vector<Size> whole(sections - width + 1);
    for (Number s = 0; s < whole.size(); ++s) whole[s] = std::max(half[s], half[s + width / 2]);
    busiest_.push_back(std::move(whole));
  }
}

Size Problem::busiest(const Item& item) const {
  const Number width = item.end - item.first;
  const int level = std::bit_width(width) - 1;
  return std::max(busiest_[level][item.first], busiest_[level][item.end - (Number{1} << level)]);
}

}  // namespace planning

PlanResult plan(std::span<const PlanBuffer> buffers, const PlanOptions& options) {
  using namespace planning;
  const Deadline deadline(options.time_limit, options.poll ? &options.poll : nullptr);
  // Buffers of size 0 overlap with nothing; they stay at 0.
  std::vector<PlanBuffer> real;
  std::vector<std::size_t> place;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].size == 0) continue;
    real.push_back(buffers[i]);
    place.push_back(i);
  }
  PlanResult result;
  result.offsets.resize(buffers.size());
  result.proven = true;
  const Problem problem(real, options.align);
  result.lower_bound = static_cast<std::uint64_t>(problem.bound) * options.align;
  if (!real.empty()) {
    Planning planning(problem, static_cast<Size>(options.capacity / options.align), deadline, options.seed);
    const Layout layout = planning.run();
    for (std::size_t i = 0; i < real.size(); ++i)
      result.offsets[place[i]] = static_cast<std::uint64_t>(layout.offsets[i]) * options.align;
    result.peak = static_cast<std::uint64_t>(layout.peak) * options.align;
    result.method = layout.method;
    result.proven = planning.proven() || layout.peak == problem.bound;
  }
  result.seconds = deadline.spent();
  return result;
}

}  // namespace vram
