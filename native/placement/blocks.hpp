// Blocks and the index that finds a free one: best fit by a two-level bitmap in constant time.
// Which blocks exist and which pages lie under them is the business of segments.hpp.
#pragma once

#include <atomic>
#include <bit>

#include "base/slab.hpp"

namespace vram {

enum class BlockState : std::uint8_t {
  none,     // not in use as a block
  live,     // handed out
  cached,   // freed, kept whole in its owner's stream cache
  moving,   // between two of the other states; only the thread that set it touches the block
  pending,  // freed, but a stream may still use it
  free,     // in the free index of its segment's stream
  // Handed out, but not to be used: its pages may be with the driver (Pool::suspend). Guarded as `live` is.
  suspended,
};

// A piece of a segment. Owner: the pool's slab. Units: kUnit bytes, offsets from the pool's space.
//   blocks of a segment tile it:  block.offset + block.units == after(block).offset
//   state == free  ⇒  neither neighbour is free, owner == the segment's stream
// Guarded by the pool's mutex, except while live or cached: then state, owner's list link and what
// describes the allocation are guarded by the owner stream's lock. `state` and `owner` are atomic so
// that a neighbour, or a misuse, may look without that lock.
struct Block {
  Units offset = 0;
  Units units = 0;
  Index before = 0;  // neighbours in address order, inside the segment
  Index after = 0;
  Index link_before = 0;  // neighbours in a bin, or `link_after` alone in a stream cache
  Index link_after = 0;
  Index segment = 0;
  std::uint64_t requested = 0;  // bytes asked for; units_of(requested) <= units
  Tick tick = 0;                // of a free block: its last use in its owner's order
  std::uint32_t tag = 0;
  std::uint32_t serial = 0;             // grows with every allocation of the pool (wraps)
  std::atomic<std::uint16_t> owner{0};  // the stream whose order governs it
  std::atomic<BlockState> state{BlockState::none};
  // record_stream was called; the uses are in the pool's table. Also of growable buffers: no cache takes it.
  bool used_elsewhere = false;
  bool keep = false;  // of a suspended block: its contents are to come back

  bool is(BlockState s) const { return state.load(std::memory_order_relaxed) == s; }
  void set(BlockState s) { state.store(s, std::memory_order_relaxed); }
  Units end() const { return offset + units; }
};
static_assert(sizeof(Block) <= 64, "a block is one cache line");

inline std::uint64_t bytes_of(const Block& block) { return std::uint64_t{block.units} * kUnit; }

using Blocks = Slab<Block>;

// Up to here blocks are small: they lie apart from the others, and a stream's cache has a place for every
// size.
inline constexpr Units kSmallUnits = static_cast<Units>(256 * kKiB / kUnit);

// A range of sizes; it has all of the small ones or none.
struct Sizes {
  Units least = 0;
  Units most = ~Units{0};
  bool hold(Units units) const { return least <= units && units <= most; }
};
inline constexpr Sizes kAllSizes{};
inline constexpr Sizes kOnlySmall{0, kSmallUnits};
inline constexpr Sizes kBeyondSmall{kSmallUnits + 1};
inline constexpr Sizes kBeyondMiB{kMiB / kUnit + 1};

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
