// Blocks and the index that finds a free one: best fit by a two-level bitmap in constant time.
// Which blocks exist and which pages are under them is decided by AddressSpace and PageStock.
#pragma once

#include <atomic>
#include <bit>

#include "base/slab.hpp"

namespace vram {

using Blocks = GroupedSlab<Block>;  // by the stream they are made for

// The free blocks of one stream and kind, in bins of 5-bit mantissa: bin widths are within 1/32 of
// the size, at most kWalk blocks are looked at in a bin, so a search is O(1) and within 0.1 % of
// exact best fit on recorded jobs.
class FreeIndex {
 public:
  void add(Blocks& blocks, Index i) {
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
  void remove(Blocks& blocks, Index i) {
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
  // The best block of at least `units`, or 0. `walk` bounds how many are looked at in a bin.
  Index find(const Blocks& blocks, Units units, int walk = kWalk) const;
  // Calls visit(i) for each block that may hold `units`, tightest bins first; stops when it returns true, or
  // when content() does so after a bin: all blocks of later bins are larger.
  template <typename Visit, typename Content>
  void candidates(const Blocks& blocks, Units units, Visit visit, Content content) const {
    for (int bin = next_bin(bin_of(units)); bin < kBins; bin = next_bin(bin + 1)) {
      for (Index i = heads_[bin]; i != 0; i = blocks[i].link_after)
        if (blocks[i].units >= units && visit(i)) return;
      if (content()) return;
    }
  }
  // Calls visit(i) for each block; stops when it returns true.
  template <typename Visit>
  void each(const Blocks& blocks, Visit visit) const {
    for (int bin = 0; bin < kBins; ++bin)
      for (Index i = heads_[bin]; i != 0; i = blocks[i].link_after)
        if (visit(i)) return;
  }
  std::uint64_t bytes() const { return units_ * kUnit; }
  std::uint32_t count() const { return count_; }
  bool check(const Blocks& blocks) const;

  static constexpr int kWalk = 8;
  static constexpr int kLongWalk = 64;  // before giving up

 private:
  static constexpr int kMantissaBits = 5;
  static constexpr int kRow = 1 << kMantissaBits;
  static constexpr int kRows = 32 - kMantissaBits + 1;
  static constexpr int kBins = kRows * kRow;

  static int bin_of(Units units) {
    const int exponent = std::bit_width(units | kRow) - 1 - kMantissaBits;
    return exponent * kRow + static_cast<int>(units >> exponent);  // the leading one adds a row
  }
  // The first occupied bin >= from, or kBins.
  int next_bin(int from) const {
    if (from >= kBins) return kBins;
    int row = from / kRow;
    const std::uint32_t here = columns_[row] & (~0u << (from % kRow));
    if (here != 0) return row * kRow + std::countr_zero(here);
    const std::uint32_t above = row + 1 < 32 ? rows_ & (~0u << (row + 1)) : 0;
    if (above == 0) return kBins;
    row = std::countr_zero(above);
    return row * kRow + std::countr_zero(columns_[row]);
  }

  Index heads_[kBins] = {};
  std::uint32_t rows_ = 0;             // bit r: some bin of row r is occupied
  std::uint32_t columns_[kRows] = {};  // bit c of row r: bin (r, c) is occupied
  std::uint64_t units_ = 0;
  std::uint32_t count_ = 0;
};

}  // namespace vram
