// What it costs to find pages for a request: promises about the work itself, counted, not timed. That what is
// found is right is the business of the pool's tests.
#include <cmath>
#include <random>
#include <vector>

#include "backends/model.hpp"
#include "segments.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

// A program at 95 % of a limit, whose sizes never repeat and whose blocks live for random times, on one
// stream.
class Pressure {
 public:
  // With `busy` the device finishes nothing, so that no address can be mapped anew.
  explicit Pressure(bool busy) : busy_(busy) {}

  void request() {
    const Units units = 4096 + static_cast<Units>(4096 * std::exp2(size_(chance_)));
    while (std::uint64_t{held_ + units} * kUnit > kLimit / 100 * 95) drop();
    Index block = 0;
    while ((block = place(units)) == 0 && !live_.empty()) {
      ++refused_;
      drop();
    }
    live_.push_back(block);
    held_ += units;
  }
  std::uint64_t weighed() const { return segments_.weighed(); }
  std::uint64_t calls() { return device_.memory_calls(); }
  std::uint64_t refused() const { return refused_; }
  bool good() const { return segments_.check(nullptr); }

 private:
  static constexpr std::uint64_t kLimit = 8 * kGiB;

  Index place(Units units) {
    const Want want{0, band_of(units), units, kUnit};
    Index block = segments_.take(want);
    const Tick passed = busy_ ? 0 : tick_;
    if (block == 0) (void)segments_.back(want, 0, passed, &block);
    if (block == 0) (void)segments_.back(want, kLimit - segments_.reserved_bytes(), passed, &block);
    if (block != 0) segments_.blocks()[block].set(BlockState::live);
    return block;
  }
  void drop() {
    std::swap(live_[chance_() % live_.size()], live_.back());
    held_ -= segments_.blocks()[live_.back()].units;
    segments_.put(live_.back(), ++tick_);
    live_.pop_back();
  }

  bool busy_;
  ModelBackend device_{64 * kGiB};
  Segments segments_{device_, {.space_bytes = 1024 * kGiB}};
  std::mt19937 chance_{7};
  std::uniform_real_distribution<double> size_{0, 7};
  std::vector<Index> live_;
  Units held_ = 0;
  Tick tick_ = 0;
  std::uint64_t refused_ = 0;
};

void stays_as_cheap(bool busy) {
  Pressure program(busy);
  std::vector<std::uint64_t> weighed;
  std::vector<std::uint64_t> calls;
  for (int i = 0; i <= 7; ++i) {
    weighed.push_back(program.weighed());
    calls.push_back(program.calls());
    for (int n = 0; n < 1000; ++n) program.request();
  }
  CHECK(program.good());
  CHECK(program.refused() < 100);
  // The first thousand fills the pool.
  const auto of = [](const std::vector<std::uint64_t>& counts, int n) { return counts[n + 1] - counts[n]; };
  std::printf("     looked at %.0f, then %.0f places a request; %.1f, then %.1f calls\n",
              of(weighed, 1) / 1e3, of(weighed, 6) / 1e3, of(calls, 1) / 1e3, of(calls, 6) / 1e3);
  CHECK(of(weighed, 6) <= 2 * of(weighed, 1));
  CHECK(of(calls, 6) <= 2 * of(calls, 1));
}

}  // namespace

TEST(under_pressure_a_request_costs_no_more_the_longer_the_program_runs) { stays_as_cheap(false); }

TEST(nor_while_the_device_is_busy_and_addresses_pile_up) { stays_as_cheap(true); }

TEST_MAIN()
