// Where requests may lie at the ends of what can be asked: every alignment and size on devices of every size.
// A request is served where it was asked to lie or refused, and the books agree either way.
#include <memory>
#include <string>
#include <vector>

#include "backends/model.hpp"
#include "pool.hpp"
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
    Segments segments(device, {.space_bytes = space});
    Tick tick = 0;
    for (std::uint64_t align = kMaxRequest; align >= kUnit; align /= 2)
      for (const Units units : {Units{1}, Units{4096}, Units{1 << 20}, Units{1} << 31}) {
        const Want want{0, segments.band_of(units), units, align};
        Index block = segments.take(want);
        if (block == 0) (void)segments.back(want, kMaxSpaceBytes, tick, &block);
        std::string why;
        if (!segments.check(&why)) std::printf("     %s\n", why.c_str());
        REQUIRE(segments.check(nullptr));
        if (block == 0) continue;
        REQUIRE(segments.address_of(segments.blocks()[block]) % align == 0);
        REQUIRE(segments.blocks()[block].units == units);
        // Few pages are wanted in this test: what was large goes back to the driver.
        segments.put(block, ++tick);
        REQUIRE(segments.trim(kGiB, [](std::uint16_t, Tick) { return true; }, true).ok());
      }
  }
}

TEST_MAIN()
