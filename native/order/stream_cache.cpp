// Emptying a stream cache.
#include "order/stream_cache.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace vram {

// Appends a list of cached blocks to the list that ends at `end`; returns its new end.
inline Index* StreamCache::empty(Blocks& blocks, Index& head, Index* end) {
  *end = std::exchange(head, 0);
  for (; *end != 0; end = &blocks[*end].link_after) {
    count_one(blocks[*end].units, -1);
    blocks[*end].set(BlockState::moving);
  }
  return end;
}

Index StreamCache::drain_small(Blocks& blocks, Index rest) {
  Index first = 0;
  Index* end = &first;
  for (std::size_t word = 0; word < std::size(small_used_); ++word)
    for (std::uint64_t& left = small_used_[word]; left != 0; left &= left - 1)
      end = empty(blocks, small_[word * 64 + static_cast<std::size_t>(std::countr_zero(left))], end);
  *end = rest;
  return first;
}

Index StreamCache::drain_large(Blocks& blocks, const Sizes& sizes, Index rest) {
  Index first = 0;
  Index* end = &first;
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < listed_count_; ++i) {
    Place& place = places_[listed_[i]];
    place.listed = !sizes.contain(place.units);
    if (place.listed) {
      listed_[kept++] = listed_[i];
    } else {
      end = empty(blocks, place.head, end);
    }
  }
  listed_count_ = kept;
  *end = rest;
  return first;
}

void StreamCache::forget() {
  std::fill(std::begin(small_), std::end(small_), Index{0});
  std::fill(std::begin(places_), std::end(places_), Place{});
  std::fill(std::begin(small_used_), std::end(small_used_), std::uint64_t{0});
  listed_count_ = 0;
  count_ = 0;
  bytes_ = 0;
  large_count_.store(0, std::memory_order_relaxed);
}

}  // namespace vram
