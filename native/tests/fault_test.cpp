// Every call to the device fails in turn, once and twice in a row, as out of memory and as a driver error.
// After each the pool holds its invariants, every live block can be freed, and nothing is lost.
#include <cstring>

#include "oracle.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::lagging;
using vram::testing::Random;
using vram::testing::Watched;

namespace {

constexpr std::uint64_t kCapacity = 40 * kMiB;

struct Setting {
  const char* name;
  PoolConfig config;
  std::uint64_t seed;
};

// A fixed program that meets every rung: growth, pages that move, pending blocks, lending, stream-waits,
// host waits, trimming, streams that go with live blocks. It carries on after whatever fails.
class Workload {
 public:
  explicit Workload(const Setting& setting)
      : random_(setting.seed), world(kCapacity, setting.config, lagging()) {
    for (int i = 0; i < 2; ++i) add_stream();
  }
  // False when an invariant broke.
  bool run(std::string* why) {
    for (int step = 0; step < kSteps; ++step) {
      act();
      if (!world.good(why)) {
        *why += " (step " + std::to_string(step) + ")";
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr int kSteps = 150;

  void add_stream() {
    StreamHandle stream = 0;
    if (world.device->stream_create(&stream).ok()) streams_.push_back(stream);
  }
  void act() {
    static const std::vector<std::uint64_t> kSizes = {
        0,        1000,     300 * kKiB, kMiB,       kMiB + 1,     2 * kMiB,     3 * kMiB,
        5 * kMiB, 9 * kMiB, 14 * kMiB,  400 * kKiB, 4 * kMiB + 1, 2 * kMiB + 1, 6 * kMiB};
    const StreamHandle stream = random_.of(streams_);
    const std::uint64_t dice = random_.below(100);
    const std::uint64_t size = random_.of(kSizes);
    const std::size_t i = world.held.empty() ? 0 : random_.below(world.held.size());
    if (dice < 40) {
      (void)world.allocate(size, stream, random_.chance(10) ? 4096 : 0);
    } else if (dice < 44) {
      std::vector<Address> out;
      const std::vector<std::uint64_t> sizes = {size, 700 * kKiB, size / 2};
      if (!world.pool->allocate_batch(sizes, stream, 0, out, nullptr).ok()) return;
      for (std::size_t k = 0; k < sizes.size(); ++k) {
        world.oracle->allocated(out[k], Watched::bytes_of(sizes[k]), stream);
        world.held.push_back({out[k], sizes[k], stream, {}});
      }
    } else if (dice < 48) {
      (void)world.pool->trim(random_.chance(50) ? 0 : 8 * kMiB, random_.chance(40));
    } else if (dice < 50) {
      (void)world.pool->coalesce();
    } else if (dice < 55) {
      world.device->advance(static_cast<double>(random_.below(150)));
    } else if (dice < 57) {
      if (streams_.size() < 4) add_stream();
    } else if (dice < 59) {
      if (streams_.size() > 1) retire();
    } else if (world.held.empty()) {
      return;
    } else if (dice < 70) {
      if (known(world.held[i].stream)) world.use(i);
    } else if (dice < 80) {
      if (known(world.held[i].stream)) (void)world.use_on(i, stream);
    } else {
      (void)world.free(i);
    }
  }
  bool known(StreamHandle stream) const {
    return std::find(streams_.begin(), streams_.end(), stream) != streams_.end();
  }
  void retire() {
    const StreamHandle stream = streams_.back();
    streams_.pop_back();
    if (world.pool->retire_stream(stream).ok()) (void)world.oracle->stream_destroy(stream);
  }

  Random random_;
  std::vector<StreamHandle> streams_{0};

 public:
  Watched world;
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const bool pages : {true, false})
    for (const CrossStream cross : {CrossStream::ready, CrossStream::wait}) {
      PoolConfig config;
      config.pages = pages;
      config.cross_stream = cross;
      config.stream_cache = 6;
      config.zero_on_allocate = config.zero_on_free = cross == CrossStream::wait;
      all.push_back({pages ? (cross == CrossStream::wait ? "pages, wait, zeroing" : "pages, ready")
                           : (cross == CrossStream::wait ? "plain, wait, zeroing" : "plain, ready"),
                     config, 7});
    }
  return all;
}

void report(const Setting& setting, std::uint64_t k, std::uint64_t width, Code code, const std::string& why) {
  std::printf("%s: call %llu%s fails with %d: %s\n", setting.name, static_cast<unsigned long long>(k),
              width > 1 ? " and the next" : "", static_cast<int>(code), why.c_str());
  ++vram::testing::failures;
}

// What remains once everything is freed and trimmed; empty: nothing.
std::string left_behind(Watched& world) {
  while (!world.held.empty())
    if (!world.free(world.held.size() - 1).ok()) return "a live block cannot be freed";
  if (!world.pool->trim(0, true).ok()) return "trim fails without a failure";
  std::string why;
  if (!world.good(&why)) return why;
  const PoolStats stats = world.pool->stats();
  const ModelCounts counts = world.device->counts();
  if (stats.live != 0) return "bytes are live that nobody has";
  if (stats.pending_blocks + stats.cached != 0) return "blocks stay pending or cached";
  if (stats.reserved.current != 0) return "the pool holds memory that it cannot give back";
  if (counts.page_bytes + counts.plain_bytes != 0) return "the device has memory that the pool forgot";
  if (counts.mappings != 0) return "the device has mappings that the pool forgot";
  if (!world.pool->close().ok()) return "close fails without a failure";
  if (world.device->counts().spaces + world.device->counts().events != 0)
    return "close forgets spaces or events";
  return "";
}

void fail_in_turn(std::uint64_t width, std::uint64_t stride) {
  for (const Setting& setting : settings()) {
    Workload whole(setting);
    std::string why;
    if (!whole.run(&why)) return report(setting, 0, 1, Code::ok, why);
    const std::uint64_t calls = whole.world.device->total_calls();
    for (std::uint64_t k = 1; k <= calls; k += stride)
      for (const Code code : {Code::out_of_memory, Code::failed}) {
        Workload workload(setting);
        const std::uint64_t before = workload.world.device->total_calls();
        if (k <= before) continue;
        for (std::uint64_t more = 0; more < width; ++more)
          workload.world.device->fail_any(k - before + more, {code, 700, ""});
        std::string broken;
        if (!workload.run(&broken)) return report(setting, k, width, code, broken);
        workload.world.device->clear_failures();
        broken = left_behind(workload.world);
        if (!broken.empty()) return report(setting, k, width, code, broken);
      }
    std::printf("     %s: %llu calls\n", setting.name, static_cast<unsigned long long>(calls));
  }
}

}  // namespace

TEST(any_one_call_may_fail) { fail_in_turn(1, vram::testing::sampling()); }

// The undoing of what failed fails, too.
TEST(any_two_calls_in_a_row_may_fail) { fail_in_turn(2, vram::testing::sampling()); }

// Closing carries on after a failure: only what the failed call itself was to give back stays behind.
TEST(close_leaves_behind_exactly_what_could_not_be_given_back) {
  for (const Setting& setting : settings()) {
    for (std::uint64_t k = 1;; ++k) {
      std::string why;
      const int failures = vram::testing::failures;
      Workload workload(setting);
      if (!workload.run(&why)) return report(setting, 0, 1, Code::ok, why);
      Watched& world = workload.world;
      world.oracle->closing = true;
      const std::uint64_t before = world.device->total_calls();
      world.device->fail_any(k, {Code::failed, 700, ""});
      const Status status = world.pool->close();
      const ModelCounts left = world.device->counts();
      const std::uint64_t calls = world.device->total_calls() - before;
      const auto is = [&](const char* call) { return std::strcmp(status.call, call) == 0; };
      const bool mapping = !status.ok() && is("unmap");
      const bool page = mapping || (!status.ok() && is("page_release"));
      const bool space = mapping || (!status.ok() && is("space_release"));
      CHECK(left.mappings == (mapping ? 1u : 0u));
      CHECK(left.pages == (page ? 1u : 0u));
      CHECK(left.spaces == (space ? 1u : 0u));
      CHECK(left.plain_ranges == (!status.ok() && is("release") ? 1u : 0u));
      CHECK(left.events == (!status.ok() && is("event_destroy") ? 1u : 0u));
      Address none = 0;
      CHECK(world.pool->allocate(1, 0, 0, 0, &none).code == Code::closed);
      CHECK(world.oracle->faults.empty());
      if (vram::testing::failures != failures) return report(setting, k, 1, status.code, status.call);
      if (calls < k) break;  // the failure never came
    }
  }
}

TEST_MAIN()
