// Requests at the ends of what can be asked: every alignment and size on devices of every size. A request is
// served where it was asked to lie or refused, and the accounts agree either way. And what calls cost where
// blocks are long or many, or streams are: steps, counted, not timed.
#include <sys/resource.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "backends/model.hpp"
#include "pool/pool.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

constexpr std::uint64_t kTiB = 1024 * kGiB;

bool pool_agrees(const Pool& pool) {
  std::string why;
  const bool good = pool.check(&why);
  if (!good) std::printf("     %s\n", why.c_str());
  return good;
}

// Every power of two as alignment, up and down, with small, middling and large blocks; some stay.
void every_alignment(std::uint64_t capacity, bool pages) {
  PoolConfig config;
  config.pages = pages;
  Pool pool(std::make_shared<ModelBackend>(capacity), config);
  static constexpr std::uint64_t kSizes[] = {1, 100 * kKiB, 3 * kMiB, 40 * kMiB, 3 * kGiB};
  std::vector<Address> kept;
  int served = 0;
  for (int step = 0; step < 128; ++step) {
    const std::uint64_t align = std::uint64_t{1} << (step < 64 ? step : 127 - step);
    for (const std::uint64_t size : kSizes) {
      Address address = 0;
      const Status status = pool.allocate(size, 0, align, 0, &address);
      REQUIRE(pool_agrees(pool));
      if (!status.ok()) {
        REQUIRE(status.code == (align > kMaxRequest ? Code::invalid : Code::out_of_memory));
        continue;
      }
      ++served;
      REQUIRE(address % align == 0);
      if (size < kMiB && step % 3 == 0) {
        kept.push_back(address);
      } else {
        REQUIRE(pool.free(address).ok());
      }
    }
  }
  REQUIRE(served > 100);
  for (const Address address : kept) REQUIRE(pool.free(address).ok());
  CHECK(pool_agrees(pool));
  CHECK(pool.trim(0, true).ok());
  CHECK(pool.stats().reserved.current == 0);
}

}  // namespace

TEST(every_alignment_is_kept_or_refused) {
  for (const bool pages : {true, false})
    for (const std::uint64_t capacity :
         {64 * kMiB, kGiB, 24 * kGiB, 141 * kGiB, 511 * kGiB, kTiB, 64 * kTiB, std::uint64_t{1} << 62})
      every_alignment(capacity, pages);
}

// The last aligned address before the end of all addresses is found, and none beyond it.
TEST(alignments_near_the_end_of_all_addresses) {
  ModelBackend device(1024 * kTiB);
  for (const std::uint64_t space : {kTiB, kMaxSpaceBytes / 2 + kSlotBytes, kMaxSpaceBytes - kSlotBytes}) {
    // A sanitizer may leave few addresses.
    if (AddressSpace::affordable(space) < space) {
      std::printf("     no room for the tables of %u GiB\n", static_cast<unsigned>(space / kGiB));
      continue;
    }
    Placer memory(device, {.space_bytes = space});
    Tick tick = 0;
    for (std::uint64_t align = kMaxRequest; align >= kUnit; align /= 2)
      for (const Units units : {Units{1}, Units{4096}, Units{1 << 20}, Units{1} << 31}) {
        const Want want{0, memory.band_of(units), units, align};
        Index block = memory.take(want);
        FoundPlace found;
        if (block == 0) (void)memory.back(want, kMaxSpaceBytes, tick, found, &block);
        std::string why;
        if (!memory.check(&why)) std::printf("     %s\n", why.c_str());
        REQUIRE(memory.check(nullptr));
        if (block == 0) continue;
        REQUIRE(memory.space().address_of(memory.space().blocks()[block]) % align == 0);
        REQUIRE(memory.space().blocks()[block].units == units);
        // Few pages are wanted in this test: what was large goes back to the driver.
        memory.put(block, ++tick);
        REQUIRE(memory.trim(kGiB, [](std::uint16_t, Tick) { return true; }, true).ok());
      }
  }
}

// ---- what calls cost
// ----------------------------------------------------------------------------------------------------------

namespace {

constexpr std::uint64_t kFewSteps = 16;  // at most two for each level of a set of all units

}  // namespace

TEST(a_block_is_found_by_any_address_inside_it_in_a_few_steps) {
  for (const bool pages : {true, false}) {
    PoolConfig config;
    config.pages = pages;
    const auto device = std::make_shared<ModelBackend>(512 * kGiB);
    Pool pool(device, config);
    StreamHandle side = 0;
    REQUIRE(device->stream_create(&side).ok());
    for (std::uint64_t size = 1000; size <= 100 * kGiB; size *= 10) {
      Address address = 0;
      REQUIRE(pool.allocate(size, 0, 0, 0, &address).ok());
      for (const std::uint64_t offset : {size / 2, size - 1, std::uint64_t{1}}) {
        const std::uint64_t before = pool.steps();
        BlockInfo found;
        CHECK(pool.find(address + offset, &found).ok() && found.address == address);
        CHECK(pool.record_stream(address + offset, side).ok());
        CHECK(pool.steps() - before <= 2 * kFewSteps);
      }
      BlockInfo found;
      const std::uint64_t past = round_up(size, kUnit);
      CHECK(!pool.find(address + past, &found).ok() || found.address != address);
      CHECK(pool.free(address).ok());
    }
  }
}

TEST(calls_cost_the_same_among_a_million_blocks) {
  Pool pool(std::make_shared<ModelBackend>(64 * kGiB), {});
  std::vector<Address> live;
  const auto steps_of_a_few = [&] {
    const std::uint64_t before = pool.steps();
    for (std::size_t i = 0; i < 100; ++i) {
      BlockInfo found;
      Address address = 0;
      CHECK(pool.find(live[i * live.size() / 100] + 100, &found).ok());
      CHECK(pool.allocate(700 * kKiB, 0, 0, 0, &address).ok());
      CHECK(pool.free(address).ok());
    }
    return pool.steps() - before;
  };
  std::uint64_t first = 0;
  const std::size_t most = 1'000'000 / vram::testing::kSlowdown;
  while (live.size() < most) {
    Address address = 0;
    REQUIRE(pool.allocate(512, 0, 0, 0, &address).ok());
    live.push_back(address);
    if (live.size() == 1000) first = steps_of_a_few();
  }
  const std::uint64_t last = steps_of_a_few();
  std::printf("     %llu steps among 1000, %llu among a million\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(last));
  CHECK(last <= 2 * first + 100 * kFewSteps);
}

namespace {

// The steps of 50 requests on one stream, for which the pool must grow, beside others that have used it and
// are idle now. All hold a cached block, and every other one a live one.
std::uint64_t growth_beside(int idle, bool pages) {
  PoolConfig config;
  config.pages = pages;
  const auto device = std::make_shared<ModelBackend>(512 * kGiB);
  Pool pool(device, config);
  const auto get = [&](std::uint64_t size, StreamHandle stream) {
    Address address = 0;
    CHECK(pool.allocate(size, stream, 0, 0, &address).ok());
    return address;
  };
  for (int i = 0; i < idle; ++i) {
    StreamHandle stream = 0;
    CHECK(device->stream_create(&stream).ok());
    CHECK(pool.free(get(4 * kKiB, stream)).ok());
    CHECK(pool.free(get(3 * kMiB, stream)).ok());
    if (i % 2 == 0) (void)get(100 * kKiB, stream);
    device->advance(1e4);  // its work has finished
  }
  (void)get(64 * kMiB, 0);  // takes from the others what they have cached
  const std::uint64_t before = pool.steps();
  for (int i = 0; i < 50; ++i) {
    (void)get((2 + i % 7) * 3 * kMiB, 0);
    (void)get(100 * kKiB, 0);
  }
  const std::uint64_t steps = pool.steps() - before;
  CHECK(pool_agrees(pool));
  return steps;
}

}  // namespace

TEST(idle_streams_cost_nothing) {
  for (const bool pages : {true, false}) {
    const std::uint64_t few = growth_beside(150, pages);
    const std::uint64_t many = growth_beside(3000, pages);
    std::printf("     %llu steps beside 150 streams, %llu beside 3000\n",
                static_cast<unsigned long long>(few), static_cast<unsigned long long>(many));
    CHECK(many < 4 * few);
  }
}

// Numbers of streams are 16 bits wide; what does not fit is refused, and what is there works on.
TEST(more_streams_than_there_are_numbers_are_refused) {
  if (vram::testing::kSlowdown != 1) return;  // takes 300 MiB, and nothing of it is about memory errors
  const auto device = std::make_shared<ModelBackend>(kGiB);
  Pool pool(device, {});
  Address address = 0;
  Address first = 0;
  REQUIRE(pool.allocate(1000, 0, 0, 0, &first).ok());
  Status status;
  StreamHandle stream = 0;
  std::uint32_t served = 0;
  for (; served <= StreamTable::kMaxStreams && status.ok(); ++served) {
    REQUIRE(device->stream_create(&stream).ok());
    status = pool.record_stream(first, stream);
  }
  CHECK(served == StreamTable::kMaxStreams);  // the default stream is one of them
  CHECK(status.code == Code::unsupported && status.call == Pool::kTooManyStreams);
  CHECK(pool.allocate(1000, stream, 0, 0, &address).code == Code::unsupported);
  CHECK(pool.growable_open(kMiB, stream, &address).code == Code::unsupported);
  CHECK(pool.allocate(1000, 0, 0, 0, &address).ok());
}

// A process with few addresses gets a pool with fewer.
TEST(tables_take_no_more_than_there_is_room_for) {
  constexpr std::uint64_t kWished = kMaxSpaceBytes - kSlotBytes;
  CHECK(AddressSpace::affordable(kWished) <= kWished);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  std::uint64_t used = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    unsigned long long pages = 0;
    if (std::fscanf(file, "%llu", &pages) == 1)
      used = pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    std::fclose(file);
  }
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  const rlimit tight{used + 2 * kGiB, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_AS, &tight) == 0);
  {
    PoolConfig config;
    Pool pool(std::make_shared<ModelBackend>(141 * kGiB), config);
    Address address = 0;
    CHECK(pool.allocate(40 * kMiB, 0, 0, 0, &address).ok());
    CHECK(pool_agrees(pool));
  }
  REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
#endif
}

TEST_MAIN()
