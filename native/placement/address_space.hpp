// The addresses of a pool: segments, the blocks that tile them, and the index of free blocks of each stream.
// Defines AddressSpace. What memory is under the addresses is PageStock's responsibility; plain segments
// bring their own.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "placement/blocks.hpp"
#include "placement/options.hpp"

namespace vram {

class AddressSpace {
 public:
  AddressSpace(Backend& backend, const PlacementOptions& options);

  // ---- looking up -----------------------------------------------------------------------------
  // The block that starts at the address, or 0. Needs no lock; the caller verifies the block under one.
  Index find(Address address) const;
  // The block that contains the address, or 0; under the mutex. Its cost does not depend on the block's
  // length.
  Index containing(Address address) const;
  Index block_at(std::uint64_t unit) const;  // that contains the offset, or 0; under the mutex
  Index segment_of(Slot slot) const { return blocks_[block_at(std::uint64_t{slot} * kSlotUnits)].segment; }
  Address address_of(const Block& block) const {
    const Segment& segment = segments_[block.segment];
    return segment.base + bytes_of(block.offset - segment.first);
  }
  // Status::call where no addresses are left for a request.
  static constexpr const char* kNoPlace = "space_reserve";
  std::uint64_t bytes() const { return space_bytes_; }  // of all addresses
  Address slot_address(Slot slot) const { return space_.load(std::memory_order_relaxed) + slot * kSlotBytes; }
  Blocks& blocks() { return blocks_; }
  const Blocks& blocks() const { return blocks_; }
  Slab<Segment>& segments() { return segments_; }
  const Slab<Segment>& segments() const { return segments_; }
  const Segment& segment(const Block& block) const { return segments_[block.segment]; }
  bool growing(const Block& block) const { return segment(block).band == kGrowing; }
  const FreeIndex& free_blocks(StreamNumber stream, Band band) const { return shelf(stream).free[band]; }
  Index first_segment(StreamNumber stream) const { return shelf(stream).segments; }  // Segment::list_after

  // ---- places ---------------------------------------------------------------------------------
  // The first place in a free block, at or after `from`, that has the alignment and room for the request.
  Spot first_fit(Index block, Units from, const Want& want) const;
  Spot first_fit(Index block, const Want& want) const {
    if (want.align > kUnit || block == 0)
      return block == 0 ? Spot{} : first_fit(block, blocks_[block].offset, want);
    return blocks_[block].units < want.units ? Spot{} : Spot{block, blocks_[block].offset};
  }
  // The first offset at or after `offset`, counted as in the block's segment, that has the alignment. In 64
  // bits: it may be beyond the block and beyond what a block's offset can express.
  std::uint64_t aligned_up(const Block& block, std::uint64_t offset, std::uint64_t align) const;
  // A place behind everything that was ever mapped in a strip of the stream and band, if one has room.
  Spot untouched_spot(const Want& want) const;
  // Where the buffer of want.strip will grow to, if there is room.
  Spot strip_spot(const Want& want) const;

  // ---- blocks ---------------------------------------------------------------------------------
  // Whether there are blocks for one more request to be split: one for a new segment, one for a piece in
  // front, one for the request. Some are always left for blocks that are split in use.
  bool can_split(std::size_t blocks = 3) const { return blocks_.has_room(blocks + blocks_.capacity() / 64); }
  // Takes `units` at the spot out of a free block, in state moving; the rest stays free.
  Index take(const Spot& spot, Units units);
  // Makes a block free, merged with its free neighbours; returns the merged block.
  Index put(Index block, Tick tick);
  // Splits the first `units` off a block in use; both parts stay in use.
  Index split_in_use(Index block, Units units);
  // Makes one block of two neighbours in use.
  void join(Index front, Index back);

  // ---- segments -------------------------------------------------------------------------------
  // Addresses without memory for a stream and band.
  Status add_strip(const Want& want);
  // A strip of exactly so many slots for a growable buffer.
  Status add_growing_strip(StreamNumber stream, Slot slots, Index* out);
  // The strip of the open growable buffer that begins at the address, or 0.
  Index strip_at(Address address) const;
  // Whether a strip could be added for the request.
  bool has_addresses(const Want& want) const;
  // Memory from the driver, or from the source of want.heap, in one piece.
  Status add_plain(const Want& want, std::uint64_t budget);
  // The length of a plain segment for the request, if memory is not scarce.
  std::uint64_t plain_length(const Want& want) const;
  Status release_plain(Index segment);
  // Removes a strip. pre: one free block, nothing mapped.
  void drop(Index segment);
  // Makes a segment another stream's, with its free blocks; `tick` is a point in that stream's order after
  // their last use.
  void transfer(Index segment, StreamNumber to, Band band, Tick tick);
  // Calls visit(segment) for the wholly free plain segments of at least so many units, regardless of the
  // owner, shortest first; stops when it returns true.
  template <typename Visit>
  void free_plain_segments(Units units, Visit visit) const {
    for (auto it = free_plain_.lower_bound({units, 0}); it != free_plain_.end(); ++it, ++steps_)
      if (visit(it->second)) return;
  }
  // The next of these behind a length and number; 0: none.
  Index free_plain_after(const std::pair<Units, Index>& behind) const {
    const auto it = free_plain_.upper_bound(behind);
    ++steps_;
    return it == free_plain_.end() ? 0 : it->second;
  }
  // Releases the plain segments and the space. pre: nothing uses them.
  Status release_all();
  // Calls back when memory appears at an address, or disappears there; empty: no more.
  using OnMemory = std::function<void(bool there, Index segment, Address address, std::uint64_t bytes)>;
  void listen(OnMemory on_memory) { on_memory_ = std::move(on_memory); }
  void tell(bool there, Index segment, Address address, std::uint64_t bytes) const {
    if (on_memory_) on_memory_(there, segment, address, bytes);
  }

  // Addresses for whose tables there is room in the process: `wished`, or fewer, so that most of the room is
  // left to others.
  static std::uint64_t affordable(std::uint64_t wished);
  std::uint64_t plain_bytes() const { return plain_bytes_; }
  std::uint64_t free_plain_bytes() const { return free_plain_bytes_; }  // in wholly free plain segments
  std::uint64_t free_plain_bytes(StreamNumber stream) const { return shelf(stream).free_plain; }
  std::size_t plain_segments() const { return plain_.size(); }
  const CountedStreams& plain_owners() const { return plain_owners_; }
  // Counts every change of what is free.
  std::uint64_t changes() const { return changes_; }
  // Words and segments that were looked at so far.
  std::uint64_t steps() const { return steps_ + plain_owners_.set().steps(); }
  bool check(std::string* why) const;

 private:
  // What one stream has.
  struct Shelf {
    FreeIndex free[kBands];
    Index segments = 0;            // head of the list of all its segments
    std::uint64_t free_plain = 0;  // bytes of its wholly free plain segments
  };
  Shelf& shelf(StreamNumber stream) {
    if (shelves_.size() <= stream) [[unlikely]]
      add_shelves(stream + 1u);
    return *shelves_[stream];
  }
  const Shelf& shelf(StreamNumber stream) const {
    static const Shelf kEmpty;
    return stream < shelves_.size() ? *shelves_[stream] : kEmpty;
  }

  void add_shelves(std::size_t count);
  std::uint64_t unit_at(Address address) const;
  std::uint64_t plain_unit_at(Address address) const;
  FreeIndex& index_of(const Segment& segment);
  void drop_block(Index block);
  Index split_front(Index block, Units units);
  Index add_segment(const Segment& segment);
  void enlist(Index segment);
  void delist(Index segment);
  Status reserve_space();
  // Offsets that are in no segment, by the kind of segment that they are for.
  using Ranges = std::map<Slot, Slot>;  // slot → slots
  static Slot reserve_slots(Ranges& free, Slot slots);
  void return_slots(Slot slot, Slot slots);
  Status add_plain_of(const Want& want, std::uint64_t bytes);
  Status release_memory(Index segment);
  void count_free_plain(const Segment& segment, bool add) {
    const std::uint64_t bytes = bytes_of(segment.units);
    free_plain_bytes_ += add ? bytes : -bytes;
    shelf(segment.stream).free_plain += add ? bytes : -bytes;
  }
  bool check_segment(Index s, std::size_t* blocks, std::size_t* free, std::string* why) const;
  bool check_block(Index b, Index previous, Units at, std::string* why) const;

  Backend& backend_;
  const PlacementOptions& options_;
  std::uint64_t space_bytes_;                     // of addresses, at most what was asked for
  std::atomic<Address> space_{0};                 // 0 until the first strip needs it; find() has no lock
  const std::uint64_t strip_units_;               // offsets from here on are for plain segments
  Ranges space_free_;                             // for strips
  Ranges plain_free_;                             // for plain segments
  std::map<Address, Index> plain_;                // plain segments by base address
  mutable std::shared_mutex plain_lock_;          // guards plain_ against find(), which has no other lock
  std::set<std::pair<Units, Index>> free_plain_;  // those wholly free, by length
  std::vector<std::set<std::pair<Units, Index>>::node_type> used_plain_;  // a node for each of the others
  std::map<Index, std::shared_ptr<Source>> sources_;  // of plain segments whose memory is not the backend's
  CountedStreams plain_owners_;
  std::uint64_t plain_bytes_ = 0;
  std::uint64_t free_plain_bytes_ = 0;  // of free_plain_
  Blocks blocks_;
  Slab<Segment> segments_;
  LazyArray<std::atomic<Index>> starts_;         // unit → the block that starts there
  OrderedSet started_;                           // the units at which blocks start
  std::vector<std::unique_ptr<Shelf>> shelves_;  // by stream number
  std::uint64_t changes_ = 1;
  mutable std::uint64_t steps_ = 0;
  OnMemory on_memory_;
};

}  // namespace vram
