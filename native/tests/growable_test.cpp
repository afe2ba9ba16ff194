// Growable buffers under the oracle: among other allocations and streams, with any call of the device
// failing, with too little memory, and with their promises about calls and waits counted.
#include <cstring>
#include <thread>

#include "oracle.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::lagging;
using vram::testing::Random;
using vram::testing::Watched;

namespace {

constexpr StreamHandle kGone = ~StreamHandle{0};  // its stream was destroyed

struct Grown {
  Address address;
  std::uint64_t bytes;
  std::uint64_t max;
  StreamHandle stream;
};

// To the oracle every slot of a growable buffer is an allocation of its own: they come and go one by one.
struct World : Watched {
  using Watched::Watched;

  Status open(std::uint64_t max, StreamHandle stream) {
    Address address = 0;
    const Status status = pool->growable_open(max, stream, &address);
    if (status.ok()) grown.push_back({address, 0, round_up(max, kSlotBytes), stream});
    return status;
  }
  Status resize(std::size_t i, std::uint64_t bytes, std::uint64_t ahead = 0) {
    Grown& buffer = grown[i];
    const std::uint64_t before = buffer.bytes;
    for (std::uint64_t at = bytes; at < before; at += kSlotBytes) oracle->freed(buffer.address + at);
    const Status status = pool->growable_resize(buffer.address, bytes, ahead, 0);
    if (status.ok()) {
      for (std::uint64_t at = before; at < bytes; at += kSlotBytes)
        oracle->allocated(buffer.address + at, kSlotBytes, buffer.stream == kGone ? 0 : buffer.stream);
      buffer.bytes = bytes;
    } else {
      for (std::uint64_t at = bytes; at < before; at += kSlotBytes)
        oracle->kept(buffer.address + at, kSlotBytes);
    }
    GrowableInfo info;
    if (!pool->growable_info(buffer.address, &info).ok() || info.bytes != buffer.bytes)
      oracle->faults.push_back("the length is not what the last resize left");
    return status;
  }
  Status close(std::size_t i) {
    const Grown gone = grown[i];
    for (std::uint64_t at = 0; at < gone.bytes; at += kSlotBytes) oracle->freed(gone.address + at);
    const Status status = pool->growable_close(gone.address);
    if (status.ok()) grown.erase(grown.begin() + static_cast<std::ptrdiff_t>(i));
    return status;
  }
  void work_on(std::size_t i) { oracle->used(grown[i].address, grown[i].bytes, grown[i].stream); }
  Status work_elsewhere(std::size_t i, StreamHandle stream) {
    if (grown[i].bytes == 0) return {};
    if (Status status = pool->record_stream(grown[i].address + grown[i].bytes / 2, stream); !status.ok())
      return status;
    EventHandle event = 0;
    if (Status status = device->event_create(&event); !status.ok()) return status;
    const bool ordered =
        oracle->event_record(event, grown[i].stream).ok() && oracle->stream_wait(stream, event).ok();
    while (!oracle->event_destroy(event).ok()) {
    }
    if (ordered) oracle->used(grown[i].address, grown[i].bytes, stream);
    return {};
  }
  std::uint64_t created() { return device->calls("page_create"); }

  std::vector<Grown> grown;
};

struct Setting {
  const char* name;
  PoolConfig config;
};

std::vector<Setting> settings() {
  PoolConfig plain;
  plain.stream_cache = 4;
  PoolConfig frugal = plain;
  frugal.cross_stream = CrossStream::wait;
  frugal.zero_on_allocate = frugal.zero_on_free = true;
  PoolConfig bounded = plain;
  bounded.limit = 24 * kMiB;
  bounded.release_threshold = 6 * kMiB;
  bounded.max_page = 2 * kMiB;
  return {{"ready", plain}, {"wait, zeroing", frugal}, {"limit, idle limit", bounded}};
}

// A fixed program: growable buffers that come, grow, shrink and go among blocks that do.
class Workload {
 public:
  Workload(const Setting& setting, std::uint64_t seed, int steps)
      : world(40 * kMiB, setting.config, lagging()), random_(seed), steps_(steps) {
    for (int i = 0; i < 2; ++i) add_stream();
  }
  bool run(std::string* why) {
    for (int step = 0; step < steps_; ++step) {
      act();
      if (!world.good(why)) {
        *why += " (step " + std::to_string(step) + ")";
        return false;
      }
      const std::uint64_t limit = world.pool->config().limit;
      if (limit != 0 && world.pool->stats().reserved.current > limit) {
        *why = "more is reserved than the limit allows";
        return false;
      }
    }
    return true;
  }
  World world;

 private:
  void add_stream() {
    StreamHandle stream = 0;
    if (world.device->stream_create(&stream).ok()) streams_.push_back(stream);
  }
  void act() {
    static const std::vector<std::uint64_t> kSizes = {1000, 700 * kKiB, 2 * kMiB, 3 * kMiB, 9 * kMiB};
    const StreamHandle stream = random_.of(streams_);
    const std::uint64_t dice = random_.below(100);
    const std::size_t i = world.grown.empty() ? 0 : random_.below(world.grown.size());
    const std::size_t k = world.held.empty() ? 0 : random_.below(world.held.size());
    if (dice < 8 && world.grown.size() < 5) {
      (void)world.open((1 + random_.below(10)) * 2 * kMiB - random_.below(2), stream);
    } else if (dice < 45 && !world.grown.empty()) {
      const std::uint64_t slots = world.grown[i].max / kSlotBytes;
      (void)world.resize(i, random_.below(slots + 1) * kSlotBytes);
    } else if (dice < 50 && !world.grown.empty()) {
      (void)world.pool->growable_prepare(world.grown[i].address, random_.below(5) * kSlotBytes);
    } else if (dice < 57 && !world.grown.empty()) {
      if (known(world.grown[i].stream)) world.work_on(i);
    } else if (dice < 62 && !world.grown.empty()) {
      if (known(world.grown[i].stream)) (void)world.work_elsewhere(i, stream);
    } else if (dice < 67 && !world.grown.empty()) {
      (void)world.close(i);
    } else if (dice < 77) {
      (void)world.allocate(random_.of(kSizes), stream);
    } else if (dice < 87 && !world.held.empty()) {
      if (known(world.held[k].stream)) world.use(k);
      (void)world.free(k);
    } else if (dice < 92) {
      world.device->advance(static_cast<double>(random_.below(150)));
    } else if (dice < 95) {
      (void)world.pool->trim(random_.chance(50) ? 0 : 8 * kMiB, random_.chance(40));
    } else if (dice < 97) {
      if (streams_.size() < 4) add_stream();
    } else if (dice < 99 && streams_.size() > 1) {
      const StreamHandle gone = streams_.back();
      streams_.pop_back();
      if (!world.pool->retire_stream(gone).ok()) return;
      (void)world.oracle->stream_destroy(gone);
      for (Grown& buffer : world.grown)
        if (buffer.stream == gone) buffer.stream = kGone;  // it grows on the default stream, some time later
    }
  }
  bool known(StreamHandle stream) const {
    return std::find(streams_.begin(), streams_.end(), stream) != streams_.end();
  }

  Random random_;
  int steps_;
  std::vector<StreamHandle> streams_{0};
};

// What remains once everything is closed, freed and trimmed; empty: nothing.
std::string left_behind(World& world) {
  while (!world.grown.empty())
    if (!world.close(world.grown.size() - 1).ok()) return "a growable buffer cannot be closed";
  while (!world.held.empty())
    if (!world.free(world.held.size() - 1).ok()) return "a live block cannot be freed";
  if (!world.pool->trim(0, true).ok()) return "trim fails without a failure";
  std::string why;
  if (!world.good(&why)) return why;
  const PoolStats stats = world.pool->stats();
  const ModelCounts counts = world.device->counts();
  if (stats.live != 0) return "bytes are live that nobody has";
  if (stats.pending_blocks + stats.cached != 0) return "blocks stay pending or cached";
  if (stats.reserved.current != 0 || counts.page_bytes != 0) return "memory stays";
  if (counts.mappings != 0) return "mappings stay";
  if (!world.pool->close().ok()) return "close fails without a failure";
  return world.device->counts().spaces + world.device->counts().events != 0 ? "spaces or events stay" : "";
}

}  // namespace

TEST(random_programs_keep_every_promise) {
  for (const Setting& setting : settings())
    for (std::uint64_t seed = 1; seed <= 120 / vram::testing::sampling(); ++seed) {
      Workload workload(setting, seed, 300);
      std::string why;
      const bool good = workload.run(&why);
      if (good) why = left_behind(workload.world);
      if (!good || !why.empty()) {
        std::printf("%s, seed %llu: %s\n", setting.name, static_cast<unsigned long long>(seed), why.c_str());
        ++vram::testing::failures;
        return;
      }
    }
}

TEST(any_call_may_fail) {
  for (const Setting& setting : settings()) {
    Workload whole(setting, 11, 120);
    std::string why;
    REQUIRE(whole.run(&why));
    const std::uint64_t calls = whole.world.device->total_calls();
    for (std::uint64_t k = 1; k <= calls; k += vram::testing::sampling())
      for (const std::uint64_t width : {1, 2})
        for (const Code code : {Code::out_of_memory, Code::failed}) {
          Workload workload(setting, 11, 120);
          const std::uint64_t before = workload.world.device->total_calls();
          if (k <= before) continue;
          for (std::uint64_t more = 0; more < width; ++more)
            workload.world.device->fail_any(k - before + more, {code, 700, ""});
          std::string broken;
          const bool good = workload.run(&broken);
          workload.world.device->clear_failures();
          if (good) broken = left_behind(workload.world);
          if (!good || !broken.empty()) {
            std::printf("%s: call %llu fails with %d: %s\n", setting.name, static_cast<unsigned long long>(k),
                        static_cast<int>(code), broken.c_str());
            ++vram::testing::failures;
            return;
          }
        }
    std::printf("     %s: %llu calls\n", setting.name, static_cast<unsigned long long>(calls));
  }
}

TEST(a_growth_that_does_not_fit_leaves_the_old_length) {
  World world(16 * kMiB, {}, lagging());
  REQUIRE(world.open(64 * kMiB, 0).ok());
  REQUIRE(world.resize(0, 8 * kMiB).ok());
  REQUIRE(world.allocate(6 * kMiB, 0).ok());
  CHECK(world.resize(0, 12 * kMiB).code == Code::out_of_memory);
  CHECK(world.pool->stats().live == 14 * kMiB);
  CHECK(world.resize(0, 10 * kMiB).ok());
  CHECK(world.resize(0, 66 * kMiB).code == Code::invalid);
  CHECK(world.resize(0, kMiB).code == Code::invalid);
  CHECK(world.oracle->faults.empty());
}

TEST(a_shrink_waits_for_nobody_and_its_pages_wait_for_the_stream) {
  World world(64 * kMiB, {}, lagging(1e6));
  REQUIRE(world.open(32 * kMiB, 0).ok());
  REQUIRE(world.resize(0, 16 * kMiB).ok());
  world.work_on(0);
  REQUIRE(world.resize(0, 2 * kMiB).ok());
  CHECK(world.pool->stats().pending.current == 14 * kMiB);
  // Another allocation of the same stream gets other pages: the addresses must stay free for the buffer.
  const std::uint64_t created = world.created();
  REQUIRE(world.allocate(4 * kMiB, 0).ok());
  CHECK(world.created() > created);
  // The buffer itself takes them back, with no call but that.
  const std::uint64_t calls = world.device->memory_calls();
  REQUIRE(world.resize(0, 10 * kMiB).ok());
  CHECK(world.device->memory_calls() == calls);
  CHECK(world.pool->stats().pending.current == 6 * kMiB);
  world.device->advance(2e6);
  REQUIRE(world.pool->coalesce().ok());
  CHECK(world.pool->stats().pending.current == 0);
  const std::uint64_t later = world.created();
  REQUIRE(world.allocate(6 * kMiB, 0).ok());
  CHECK(world.created() == later);
  CHECK(world.device->host_waits() == 0);
  CHECK(world.oracle->faults.empty());
}

TEST(requests_of_random_length_create_no_page_in_the_long_run) {
  World world(kGiB, {}, lagging());
  Random random(3);
  const auto request = [&] {
    REQUIRE(world.open(64 * kMiB, 0).ok());
    const std::size_t last = world.grown.size() - 1;
    const std::uint64_t slots = 1 + random.below(32);
    for (std::uint64_t n = 1; n <= slots; ++n) REQUIRE(world.resize(last, n * kSlotBytes).ok());
    world.work_on(last);
    if (world.grown.size() > 3) REQUIRE(world.close(random.below(world.grown.size())).ok());
    world.device->advance(30);
  };
  // The most that four requests at a time can need.
  for (std::size_t i = 0; i < 4; ++i) {
    REQUIRE(world.open(64 * kMiB, 0).ok());
    REQUIRE(world.resize(i, 64 * kMiB).ok());
  }
  REQUIRE(world.close(0).ok());
  const std::uint64_t created = world.created();
  const std::uint64_t calls = world.device->memory_calls();
  for (int n = 0; n < 1000; ++n) request();
  std::printf("     %llu pages created, %llu memory calls in 1000 requests\n",
              static_cast<unsigned long long>(world.created() - created),
              static_cast<unsigned long long>(world.device->memory_calls() - calls));
  CHECK(world.created() == created);
  CHECK(world.device->host_waits() == 0);
  CHECK(world.oracle->faults.empty());
}

TEST(idle_addresses_come_back_when_there_are_no_others) {
  World world(64 * kMiB, {}, lagging());  // a space of 16 GiB
  for (int n = 0; n < 200; ++n) {
    REQUIRE(world.open((1 + static_cast<std::uint64_t>(n) % 7) * kGiB, 0).ok());
    REQUIRE(world.resize(0, 6 * kMiB).ok());
    world.work_on(0);
    REQUIRE(world.close(0).ok());
  }
  CHECK(world.open(15 * kGiB, 0).ok());
  CHECK(world.open(2 * kGiB, 0).code == Code::out_of_memory);
  CHECK(world.oracle->faults.empty());
  std::string why;
  CHECK(world.good(&why));
}

TEST(pages_are_ready_before_they_are_asked_for) {
  World world(256 * kMiB, {}, lagging());
  REQUIRE(world.open(128 * kMiB, 0).ok());
  std::uint64_t calls = 0;
  for (std::uint64_t bytes = 0; bytes < 64 * kMiB; bytes += kSlotBytes) {
    REQUIRE(world.resize(0, bytes, 8 * kMiB).ok());
    GrowableInfo info;
    while (world.pool->growable_info(world.grown[0].address, &info).ok() && info.ready < 8 * kMiB)
      std::this_thread::yield();
    calls = world.device->memory_calls();
    REQUIRE(world.resize(0, bytes + kSlotBytes).ok());  // asks for none
    CHECK(world.device->memory_calls() == calls);
  }
  CHECK(world.pool->growable_prepare(world.grown[0].address, kGiB).ok());
  // They are free pages like any others, and within the limit.
  REQUIRE(world.pool->set_limit(world.pool->stats().reserved.current).ok());
  const std::uint64_t created = world.created();
  REQUIRE(world.allocate(6 * kMiB, 0).ok());
  CHECK(world.created() == created);
  std::string why;
  CHECK(world.good(&why));
}

// For ThreadSanitizer: buffers that grow on several threads, with the one that works ahead.
TEST(threads_grow_side_by_side) {
  auto device = std::make_shared<ModelBackend>(kGiB, lagging());
  Pool pool(device, {});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&pool, t] {
      Random random(static_cast<std::uint64_t>(t));
      for (int n = 0; n < 40; ++n) {
        Address address = 0;
        Address block = 0;
        if (!pool.growable_open(32 * kMiB, 0, &address).ok()) return;
        for (int k = 0; k < 10; ++k)
          (void)pool.growable_resize(address, random.below(17) * kSlotBytes, random.below(3) * kSlotBytes, 0);
        if (pool.allocate(3 * kMiB, 0, 0, 0, &block).ok()) (void)pool.free(block);
        (void)pool.growable_close(address);
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::string why;
  CHECK(pool.check(&why));
  CHECK(pool.stats().live == 0);
  CHECK(pool.close().ok());
  CHECK(device->counts().pages == 0);
}

TEST(what_it_refuses) {
  World world(64 * kMiB, {}, lagging());
  Address address = 0;
  CHECK(world.pool->growable_open(0, 0, &address).code == Code::invalid);
  CHECK(world.pool->growable_open(kMaxRequest + 1, 0, &address).code == Code::invalid);
  CHECK(world.pool->growable_open(kMiB, 77, &address).code == Code::invalid);
  REQUIRE(world.open(8 * kMiB, 0).ok());
  REQUIRE(world.resize(0, 4 * kMiB).ok());
  const Address buffer = world.grown[0].address;
  CHECK(world.pool->free(buffer).code == Code::invalid);
  CHECK(world.pool->growable_close(buffer + kSlotBytes).code == Code::invalid);
  CHECK(world.pool->growable_resize(buffer + kSlotBytes, 0, 0, 0).code == Code::invalid);
  REQUIRE(world.allocate(4 * kMiB, 0).ok());
  CHECK(world.pool->growable_close(world.held[0].address).code == Code::invalid);
  CHECK(world.close(0).ok());
  CHECK(world.pool->growable_close(buffer).code == Code::invalid);
  PoolConfig without;
  without.pages = false;
  World plain(64 * kMiB, without, lagging());
  CHECK(plain.pool->growable_open(kMiB, 0, &address).code == Code::unsupported);
  CHECK(world.pool->close().ok());
  CHECK(world.pool->growable_open(kMiB, 0, &address).code == Code::closed);
}

TEST_MAIN()
