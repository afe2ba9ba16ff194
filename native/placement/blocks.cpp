// The two-level bitmap over free blocks.
#include "placement/blocks.hpp"

namespace vram {

void FreeIndex::add(Blocks& blocks, Index i) {
  Block& block = blocks[i];
  const int bin = bin_of(block.units);
  block.link_before = 0;
  block.link_after = heads_[bin];
  if (heads_[bin] != 0) blocks[heads_[bin]].link_before = i;
  heads_[bin] = i;
  rows_ |= 1u << (bin / kRow);
  columns_[bin / kRow] |= 1u << (bin % kRow);
  units_ += block.units;
  ++count_;
}

void FreeIndex::remove(Blocks& blocks, Index i) {
  Block& block = blocks[i];
  if (block.link_after != 0) blocks[block.link_after].link_before = block.link_before;
  if (block.link_before != 0) {
    blocks[block.link_before].link_after = block.link_after;
  } else {
    const int bin = bin_of(block.units);
    heads_[bin] = block.link_after;
    if (block.link_after == 0) {
      columns_[bin / kRow] &= ~(1u << (bin % kRow));
      if (columns_[bin / kRow] == 0) rows_ &= ~(1u << (bin / kRow));
    }
  }
  block.link_before = block.link_after = 0;
  units_ -= block.units;
  --count_;
}

int FreeIndex::next_bin(int from) const {
  if (from >= kBins) return kBins;
  int row = from / kRow;
  const std::uint32_t here = columns_[row] & (~0u << (from % kRow));
  if (here != 0) return row * kRow + std::countr_zero(here);
  const std::uint32_t above = row + 1 < 32 ? rows_ & (~0u << (row + 1)) : 0;
  if (above == 0) return kBins;
  row = std::countr_zero(above);
  return row * kRow + std::countr_zero(columns_[row]);
}

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
  std::size_t count = 0;
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
