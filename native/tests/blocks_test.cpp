// The index of free blocks and the cache of a stream, each beside a simple model of itself.
#include "placement/blocks.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "order/stream_cache.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

Index add(Blocks& blocks, Units units, BlockState state) {
  const Index i = blocks.add(0);
  blocks[i].units = units;
  blocks[i].set(state);
  return i;
}

// Sizes of all magnitudes, small ones more often.
Units some_size(std::mt19937& random) {
  const int bits = static_cast<int>(random() % 31) + 1;
  return std::max<Units>(1, static_cast<Units>(random()) >> (32 - bits));
}

}  // namespace

TEST(a_free_block_serves_every_size_up_to_its_own) {
  Blocks blocks(1 << 10);
  std::mt19937 random(1);
  for (int step = 0; step < 20'000; ++step) {
    const Units units = step < 5'000 ? static_cast<Units>(step + 1) : some_size(random);
    FreeIndex index;
    const Index i = add(blocks, units, BlockState::free);
    index.add(blocks, i);
    CHECK(index.check(blocks) && index.bytes() == bytes_of(units) && index.count() == 1);
    CHECK(index.find(blocks, units) == i && index.find(blocks, 1) == i);
    CHECK(index.find(blocks, units + 1) == 0);
    index.remove(blocks, i);
    CHECK(index.check(blocks) && index.find(blocks, 1) == 0);
    blocks.drop(i);
  }
}

TEST(the_index_finds_a_block_within_a_bin_of_the_best) {
  Blocks blocks(1 << 10);
  FreeIndex index;
  std::mt19937 random(2);
  std::vector<Index> free;
  for (int step = 0; step < 20'000; ++step) {
    if (free.size() < 200 && random() % 2 == 0) {
      free.push_back(add(blocks, some_size(random), BlockState::free));
      index.add(blocks, free.back());
    } else if (!free.empty()) {
      std::swap(free[random() % free.size()], free.back());
      index.remove(blocks, free.back());
      blocks.drop(free.back());
      free.pop_back();
    }
    const Units units = some_size(random);
    Units best = 0;
    for (Index i : free)
      if (blocks[i].units >= units && (best == 0 || blocks[i].units < best)) best = blocks[i].units;
    const Index found = index.find(blocks, units);
    CHECK((found != 0) == (best != 0));
    if (found != 0) CHECK(blocks[found].units >= units && blocks[found].units <= best + best / 32);
    bool first_bin = true;
    index.candidates(
        blocks, units,
        [&](Index i) {
          CHECK(blocks[i].units >= units && (!first_bin || blocks[i].units <= best + best / 32));
          return false;
        },
        [&] { return first_bin = false; });
  }
  CHECK(index.check(blocks));
}

// Last in, first out for each size; sizes that share a place are refused while another has it.
TEST(a_cache_serves_the_sizes_that_it_took_until_they_are_drained) {
  Blocks blocks(1 << 12);
  StreamCache cache;
  std::mt19937 random(3);
  std::map<Units, std::vector<Index>> held;
  const Sizes ranges[] = {kAllSizes, kOnlySmall, kBeyondSmall, kBeyondMiB};
  std::size_t refused = 0, drained = 0;
  for (int step = 0; step < 50'000; ++step) {
    // Enough sizes beyond small that some share a place.
    const Units units = random() % 2 == 0 ? 1 + random() % kSmallUnits : kSmallUnits + 1 + random() % 4000;
    if (random() % 3 != 0) {
      const Index i = add(blocks, units, BlockState::cached);
      if (cache.push(blocks, i)) {
        held[units].push_back(i);
      } else {
        CHECK(units > kSmallUnits && held[units].empty());
        blocks.drop(i);
        ++refused;
      }
    } else {
      const Index i = cache.pop(blocks, units);
      CHECK(i == (held[units].empty() ? 0 : held[units].back()));
      if (i == 0) continue;
      held[units].pop_back();
      blocks.drop(i);
    }
    if (random() % 200 != 0) continue;
    const Sizes& sizes = ranges[random() % 4];
    const Index rest = add(blocks, 1, BlockState::moving);
    std::vector<Index> out;
    Index i = cache.drain(blocks, sizes, rest);
    for (; i != rest && i != 0; i = blocks[i].link_after) out.push_back(i);
    CHECK(i == rest);
    std::vector<Index> expected;
    for (auto& [size, list] : held)
      if (sizes.contain(size)) {
        expected.insert(expected.end(), list.begin(), list.end());
        list.clear();
      }
    for (Index each : out) CHECK(blocks[each].is(BlockState::moving));
    drained += out.size();
    std::sort(out.begin(), out.end());
    std::sort(expected.begin(), expected.end());
    CHECK(out == expected);
    for (Index each : out) blocks.drop(each);
    blocks.drop(rest);
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    bool large = false;
    for (const auto& [size, list] : held) {
      count += list.size();
      bytes += list.size() * bytes_of(size);
      large = large || (size > kSmallUnits && !list.empty());
    }
    CHECK(cache.count() == count && cache.bytes() == bytes && cache.has_large() == large);
  }
  CHECK(refused > 100 && drained > 1000);
}

TEST_MAIN()
