// The two-level bitmap over free blocks.
#include "placement/blocks.hpp"

namespace vram {

Index FreeIndex::find(const Blocks& blocks, Units units, int walk) const {
  for (int bin = next_bin(bin_of(units)); bin < kBins; bin = next_bin(bin + 1)) {
    Index best = 0;
    int looked = 0;
    for (Index i = heads_[bin]; i != 0 && looked < walk; i = blocks[i].link_after, ++looked) {
      const Units size = blocks[i].units;
      if (size < units || (best != 0 && size >= blocks[best].units)) continue;
      best = i;
      if (size == units) return best;
    }
    if (best != 0) return best;
  }
  // Only the request's own bin can hold a fit that the walk missed, and only when it is crowded.
  return walk >= kLongWalk ? 0 : find(blocks, units, kLongWalk);
}

bool FreeIndex::check(const Blocks& blocks) const {
  if (count_ == 0) return rows_ == 0 && units_ == 0;
  std::uint64_t units = 0;
  std::uint32_t count = 0;
  for (int row = 0; row < kRows; ++row) {
    std::uint32_t occupied = 0;
    for (int column = 0; column < kRow; ++column)
      occupied |= static_cast<std::uint32_t>(heads_[row * kRow + column] != 0) << column;
    if (occupied != columns_[row] || ((rows_ >> row) & 1u) != (occupied != 0)) return false;
  }
  for (int bin = next_bin(0); bin < kBins; bin = next_bin(bin + 1)) {
    Index previous = 0;
    for (Index i = heads_[bin]; i != 0; previous = i, i = blocks[i].link_after) {
      const Block& block = blocks[i];
      if (!block.is(BlockState::free) || bin_of(block.units) != bin || block.link_before != previous)
        return false;
      units += block.units;
      ++count;
    }
  }
  return units == units_ && count == count_;
}

}  // namespace vram
