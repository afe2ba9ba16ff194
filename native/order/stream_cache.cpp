// Emptying a stream cache.
#include "order/stream_cache.hpp"

#include <algorithm>
#include <bit>

namespace vram {

void StreamCache::drain(Blocks& blocks, const Sizes& sizes, std::vector<Index>& out) {
  const auto empty = [&](Index& head) {
    for (Index i = head; i != 0; i = blocks[i].link_after) {
      out.push_back(i);
      count_one(blocks[i].units, -1);
      blocks[i].set(BlockState::moving);
    }
    head = 0;
  };
  const auto each = [](auto& words, auto visit) {
    std::size_t at = 0;
    for (std::uint64_t& word : words) {
      for (std::uint64_t left = word; left != 0; left &= left - 1)
        if (visit(at + static_cast<std::size_t>(std::countr_zero(left)))) word ^= left & -left;
      at += 64;
    }
  };
  const bool any_small = has_small();
  if (sizes.most > kSmallUnits && has_large())
    each(places_used_, [&](std::size_t i) {
      const bool asked = sizes.contain(places_[i].units);
      if (asked) empty(places_[i].head);
      return asked;
    });
  if (sizes.least <= kSmallUnits && any_small)
    each(small_used_, [&](std::size_t i) {
      empty(small_[i]);
      return true;
    });
}

void StreamCache::forget() {
  std::fill(std::begin(small_), std::end(small_), Index{0});
  std::fill(std::begin(places_), std::end(places_), Place{});
  std::fill(std::begin(small_used_), std::end(small_used_), std::uint64_t{0});
  std::fill(std::begin(places_used_), std::end(places_used_), std::uint64_t{0});
  count_ = 0;
  bytes_ = 0;
  large_count_.store(0, std::memory_order_relaxed);
}

}  // namespace vram
