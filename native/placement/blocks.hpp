// Blocks and the index that finds a free one: best fit by a two-level bitmap in constant time.
// Which blocks exist and which pages are under them is decided by AddressSpace and PageStock.
#pragma once

#include <atomic>
#include <bit>

#include "base/slab.hpp"

namespace vram {

using Blocks = Slab<Block>;

// The free blocks of one stream and kind, in bins of 5-bit mantissa: bin widths are within 1/32 of
// the size, at most kWalk blocks are looked at in a bin, so a search is O(1) and within 0.1 % of
// exact best fit on recorded jobs.
class FreeIndex {
 public:
  void add(Blocks& blocks, Index i);
  void remove(Blocks& blocks, Index i);
  // The best block of at least `units`, or 0. `walk` bounds how many are looked at in a bin.
  Index find(const Blocks& blocks, Units units, int walk = kWalk) const;
  // Calls visit(i) for each block that may hold `units`, tightest bins first; stops when it returns true, or
  // when content() does so between two bins: all blocks of later bins are larger.
  template <typename Visit, typename Content>
  void candidates(const Blocks& blocks, Units units, Visit visit, Content content) const {
    for (int bin = next_bin(bin_of(units)); bin < kBins && !content(); bin = next_bin(bin + 1))
      for (Index i = heads_[bin]; i != 0; i = blocks[i].link_after)
        if (blocks[i].units >= units && visit(i)) return;
  }
  // Calls visit(i) for each block; stops when it returns true.
  template <typename Visit>
  void each(const Blocks& blocks, Visit visit) const {
    for (int bin = 0; bin < kBins; ++bin)
      for (Index i = heads_[bin]; i != 0; i = blocks[i].link_after)
        if (visit(i)) return;
  }
  std::uint64_t bytes() const { return units_ * kUnit; }
  std::size_t count() const { return count_; }
  bool check(const Blocks& blocks) const;

  static constexpr int kWalk = 8;
  static constexpr int kLongWalk = 64;  // before giving up

 private:
  static constexpr int kMantissaBits = 5;
  static constexpr int kRow = 1 << kMantissaBits;
  static constexpr int kRows = 32 - kMantissaBits + 1;
  static constexpr int kBins = kRows * kRow;

  static int bin_of(Units units) {
    if (units < kRow) return static_cast<int>(units);
    const int exponent = std::bit_width(units) - 1 - kMantissaBits;
    return (exponent + 1) * kRow + static_cast<int>((units >> exponent) & (kRow - 1));
  }
  int next_bin(int from) const;  // the first occupied bin >= from, or kBins

  Index heads_[kBins] = {};
  std::uint32_t rows_ = 0;             // bit r: some bin of row r is occupied
  std::uint32_t columns_[kRows] = {};  // bit c of row r: bin (r, c) is occupied
  std::uint64_t units_ = 0;
  std::size_t count_ = 0;
};

}  // namespace vram
