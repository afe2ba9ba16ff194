// Plans: every one is valid, never below the lower bound, the same for the same input, and in time; problems
// whose answer is known are solved.
#include "planner/planner.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "testing.hpp"

using namespace vram;

namespace {

using Buffers = std::vector<PlanBuffer>;

std::uint64_t rounded(std::uint64_t size, std::uint64_t align) { return (size + align - 1) / align * align; }

// The most that is live at one time, the slow way.
std::uint64_t most_live(const Buffers& buffers, std::uint64_t align) {
  std::uint64_t most = 0;
  for (const PlanBuffer& at : buffers) {
    std::uint64_t live = 0;
    for (const PlanBuffer& each : buffers)
      if (each.lower <= at.lower && at.lower < each.upper) live += rounded(each.size, align);
    most = std::max(most, live);
  }
  return most;
}

bool valid(const Buffers& buffers, const PlanResult& result, std::uint64_t align) {
  if (result.offsets.size() != buffers.size()) return false;
  std::uint64_t top = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (result.offsets[i] % align != 0) return false;
    if (buffers[i].size != 0) top = std::max(top, result.offsets[i] + rounded(buffers[i].size, align));
    for (std::size_t j = 0; j < i; ++j) {
      const bool meet = buffers[i].lower < buffers[j].upper && buffers[j].lower < buffers[i].upper;
      const bool apart = result.offsets[i] + buffers[i].size <= result.offsets[j] ||
                         result.offsets[j] + buffers[j].size <= result.offsets[i];
      if (meet && !apart && buffers[i].size != 0 && buffers[j].size != 0) return false;
    }
  }
  return top == result.peak && result.peak >= result.lower_bound;
}

Buffers random_buffers(std::mt19937_64& random, std::size_t count, std::int64_t times,
                       std::uint64_t largest) {
  Buffers buffers;
  for (std::size_t i = 0; i < count; ++i) {
    const auto lower = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(times));
    const auto length = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(times)) / 3 + 1;
    buffers.push_back({lower, lower + length, random() % (largest + 1)});
  }
  return buffers;
}

// A rectangle of `side` by `side`, cut again and again into pieces: across, along, or, with `wheels`, into
// five that turn about the one in the middle.
Buffers cut(std::mt19937_64& random, std::size_t count, std::int64_t side, bool wheels) {
  struct Piece {
    std::int64_t left, right, low, high;
  };
  std::vector<Piece> pieces{{0, side, 0, side}};
  const auto between = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low));
  };
  while (pieces.size() < count) {
    const std::size_t which = random() % pieces.size();
    const Piece p = pieces[which];
    const std::int64_t width = p.right - p.left, height = p.high - p.low;
    if (width < 12 || height < 12) continue;
    pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(which));
    const std::int64_t x1 = between(p.left + width / 5, p.left + width / 2),
                       x2 = between(p.left + width / 2 + 1, p.right - width / 6),
                       y1 = between(p.low + height / 5, p.low + height / 2),
                       y2 = between(p.low + height / 2 + 1, p.high - height / 6);
    switch (random() % (wheels ? 3 : 2)) {
      case 0:
        pieces.insert(pieces.end(), {{p.left, x1, p.low, p.high}, {x1, p.right, p.low, p.high}});
        break;
      case 1:
        pieces.insert(pieces.end(), {{p.left, p.right, p.low, y1}, {p.left, p.right, y1, p.high}});
        break;
      default:
        pieces.insert(pieces.end(), {{p.left, x1, p.low, y2},
                                     {p.left, x2, y2, p.high},
                                     {x2, p.right, y1, p.high},
                                     {x1, p.right, p.low, y1},
                                     {x1, x2, y1, y2}});
    }
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  Buffers buffers;
  for (const Piece& p : pieces)
    buffers.push_back({p.left, p.right, static_cast<std::uint64_t>(p.high - p.low)});
  return buffers;
}

}  // namespace

TEST(nothing_needs_nothing) {
  const PlanResult nothing = plan({}, {});
  CHECK(nothing.peak == 0 && nothing.lower_bound == 0 && nothing.proven);
  const Buffers empty{{0, 5, 0}, {1, 2, 0}};
  const PlanResult zeros = plan(empty, {});
  CHECK(zeros.peak == 0 && zeros.offsets == std::vector<std::uint64_t>(2, 0));
}

TEST(plans_of_random_problems_are_valid) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 150; ++round) {
    const std::uint64_t align = std::uint64_t{1} << random() % 10;
    const Buffers buffers =
        random_buffers(random, 1 + random() % 60, 1 + static_cast<std::int64_t>(random() % 40),
                       std::uint64_t{1} << random() % 20);
    const PlanResult result = plan(buffers, {align, 0, 0.01, random()});
    REQUIRE(valid(buffers, result, align));
    CHECK(result.lower_bound == most_live(buffers, align));
  }
}

TEST(plans_of_larger_problems_are_valid) {
  std::mt19937_64 random(2);
  for (std::size_t count : {1000u, 4500u}) {
    const Buffers buffers = random_buffers(random, count, 3000, 1 << 20);
    REQUIRE(valid(buffers, plan(buffers, {512, 0, 0.3, 0}), 512));
  }
}

TEST(many_buffers_are_repaired_and_valid) {
  std::mt19937_64 random(3);
  Buffers buffers;
  for (int i = 0; i < 21'000; ++i) {
    const auto lower = static_cast<std::int64_t>(random() % 21'000);
    buffers.push_back(
        {lower, lower + 1 + static_cast<std::int64_t>(random() % 60), 1 + random() % (1 << 20)});
  }
  const PlanResult result = plan(buffers, {512, 0, 3, 0});
  CHECK(result.peak < result.lower_bound + result.lower_bound / 10);
  // Sorted by time, only near ones can meet.
  std::vector<std::size_t> order(buffers.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return buffers[a].lower < buffers[b].lower; });
  bool apart = true;
  for (std::size_t i = 0; i < order.size(); ++i)
    for (std::size_t j = i + 1; j < order.size() && buffers[order[j]].lower < buffers[order[i]].upper; ++j) {
      const std::uint64_t a = result.offsets[order[i]], b = result.offsets[order[j]];
      apart &= a + buffers[order[i]].size <= b || b + buffers[order[j]].size <= a;
    }
  CHECK(apart);
}

// Cut without a remainder, so that the capacity is what is live at every moment.
TEST(rectangles_are_put_together_again) {
  std::mt19937_64 random(4);
  for (const bool wheels : {false, true})
    for (std::size_t count : {5u, 50u, 200u, 500u})
      for (int round = 0; round < 3; ++round) {
        const std::int64_t side = std::int64_t{1} << 40;
        const Buffers buffers = cut(random, count, side, wheels);
        const PlanResult result = plan(buffers, {1, static_cast<std::uint64_t>(side), 20, 0});
        REQUIRE(valid(buffers, result, 1));
        CHECK(result.peak == static_cast<std::uint64_t>(side));
      }
}

TEST(the_same_problem_has_the_same_plan) {
  std::mt19937_64 random(5);
  const Buffers buffers = cut(random, 120, 1 << 20, true);
  const PlanOptions options{1, 1 << 20, 60, 7};
  const PlanResult one = plan(buffers, options), two = plan(buffers, options);
  CHECK(one.offsets == two.offsets && one.method == two.method && one.peak == two.peak);
}

TEST(what_is_proven_impossible_is_said) {
  // Five are live at one time, and four are offered.
  const Buffers buffers{{0, 2, 3}, {1, 3, 2}, {2, 4, 3}, {0, 1, 2}, {3, 5, 2}};
  const PlanResult result = plan(buffers, {1, 4, 1, 0});
  CHECK(result.lower_bound == 5 && result.peak >= 5 && result.proven);
}

// Without an end of time the search for a capacity that cannot be met would not end either.
TEST(a_search_that_runs_out_of_time_ends_with_a_plan) {
  std::mt19937_64 random(6);
  const Buffers buffers = random_buffers(random, 800, 400, 1 << 20);
  for (const double limit : {0.0, 0.05}) CHECK(valid(buffers, plan(buffers, {1, 1, limit, 0}), 1));
}

TEST(sizes_and_times_at_the_ends_of_their_range) {
  const std::int64_t first = std::numeric_limits<std::int64_t>::min(),
                     last = std::numeric_limits<std::int64_t>::max();
  const std::uint64_t quarter = std::uint64_t{1} << 60;
  const Buffers buffers{
      {first, last, quarter}, {first, 0, quarter}, {0, last, quarter}, {last - 1, last, quarter}};
  const PlanResult result = plan(buffers, {1, 0, 0.2, 0});
  REQUIRE(valid(buffers, result, 1));
  CHECK(result.lower_bound == 3 * quarter && result.peak == 3 * quarter);
  const Buffers small{{0, 1, 1}, {0, 1, 1}};
  const PlanResult wide = plan(small, {quarter, 0, 0.2, 0});
  CHECK(valid(small, wide, quarter) && wide.peak == 2 * quarter);
}

TEST_MAIN()
