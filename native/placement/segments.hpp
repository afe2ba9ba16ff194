// Placement: segments tiled by blocks, with pages that move under them. Any free page may back any
// address, so memory is wasted only at the edges of holes. Knows streams as numbers and uses as
// ticks; when memory is safe to reuse is decided above, in streams.hpp and pool.hpp.
//
// How pages move. A page is *free* when no block holds a byte of it; it stays mapped where it was, and an
// address takes back the page it last had without a call to the driver. A request takes the tightest free
// addresses that have their memory; where there are none, the place that costs the driver least, or takes the
// least new memory if it cannot do without, and there pages that have gone elsewhere are replaced by free
// ones or new ones. A page may be mapped at many addresses, of which at most one *holds* it.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "placement/blocks.hpp"

namespace vram {

// A band of sizes. Each band has addresses of its own, so that blocks of one never break up the addresses of
// another; as any free page may serve any band, keeping them apart costs next to no memory.
using Band = std::uint8_t;
inline constexpr Band kSmall = 0;
inline constexpr Band kMiddle = 1;  // with pages only: would strand most of a page of 8 MiB
inline constexpr Band kLarge = 2;
inline constexpr Band kGrowing = 3;  // growable buffers: each has a strip to itself, with nothing else in it
inline constexpr int kBands = 4;
inline constexpr Units kMiddleUnits = static_cast<Units>(7 * kMiB / kUnit);
// Plain segments for large blocks are at least this long, so that middling blocks share one.
inline constexpr std::uint64_t kPlainSegmentBytes = 20 * kMiB;

// One physical page.
//   holder == 0  ⇔  no block in use holds a byte of it  ⇔  it is on its owner's list of free pages, or
//   suspended
// A suspended page has its place in everything but is no memory to be had: it may be unmapped at some or all
// of its addresses, and may have gone back to the driver (handle 0).
struct Page {
  PageHandle handle = 0;  // 0: no such page, or suspended
  Tick tick = 0;          // its last use in the order of `owner`, before the blocks that hold it now
  Index mappings = 0;     // head of the list of its mappings
  Index holder = 0;       // the mapping through which it is in use
  Index list_before = 0;  // neighbours in its owner's list of free pages
  Index list_after = 0;
  std::uint32_t counted = 0;     // the last survey that counted on it (Segments::counts_on)
  std::uint32_t counted_at = 0;  // and where (Segments::Window)
  std::uint16_t owner = 0;       // the stream whose order governs it
  std::uint8_t size = 0;         // index into kPageSlots
  bool suspended = false;
  bool free() const { return holder == 0 && !suspended; }
  bool exists() const { return handle != 0 || suspended; }
  std::uint32_t slots() const { return kPageSlots[size]; }
  std::uint64_t bytes() const { return slots() * kSlotBytes; }
};

// One page at one address. The addresses are in use only while the page's holder is this mapping.
struct Mapping {
  Index page = 0;  // 0: no such mapping
  Index next = 0;  // of the same page
  Index segment = 0;
  std::uint32_t slot = 0;
  Tick tick = 0;       // last use through this mapping, in the order of the segment's stream
  bool usable = true;  // false: access was refused and so was the unmapping; to be unmapped when possible
  bool there = true;   // false: of a suspended page, and the driver has unmapped it
};

// A contiguous range of addresses of one stream and band: one plain allocation, or a strip of the space.
struct Segment {
  Address base = 0;   // address of unit `first`
  Units first = 0;    // blocks tile [first, first + units)
  Units units = 0;    // 0: no such segment
  Units touched = 0;  // nothing was ever mapped from here on
  Index head = 0;     // its first and last block
  Index tail = 0;
  std::uint32_t mappings = 0;
  std::uint32_t in_use = 0;  // blocks that are not free
  // Band kGrowing only. Not 0: an open growable buffer has these addresses, and this is its number. Then
  //   blocks of the strip  ==  [in use, from `first` on]? [pending]* [free]?
  //   a free slot whose page has gone elsewhere was last used by work that has finished
  // so that growing in place needs no wait: what lies behind the block in use is taken back from pending,
  // or may be unmapped. All blocks begin and end on slots.
  std::uint64_t growable = 0;
  Units promised = 0;     // pages mapped up to here are for it, unless memory runs out (prepare)
  Index list_before = 0;  // neighbours in the list of its stream's segments
  Index list_after = 0;
  std::uint16_t stream = 0;
  Band band = 0;
  bool plain = false;
  Units end() const { return first + units; }
};

// Free pages of one stream and size, oldest first.
struct PageList {
  Index head = 0;
  Index tail = 0;
  std::uint32_t count = 0;
};

struct PlacementOptions {
  bool pages = true;
  std::uint64_t space_bytes = 0;
  std::uint64_t segment_size = 0;      // the least bytes to get from the driver at a time
  std::uint64_t max_page = 32 * kMiB;  // the largest page to create
  bool best_fit = true;                // else the first block of a sufficient bin
};

// What is to be placed, for whom.
struct Want {
  std::uint16_t stream = 0;
  Band band = 0;
  Units units = 0;
  std::uint64_t align = kUnit;  // bytes
  Index strip = 0;              // not 0: at the first free address of this strip, of …
  std::uint64_t growable = 0;   // … this growable buffer, as long as it is open
  Units padded() const { return units + static_cast<Units>(align / kUnit) - 1; }
};
static_assert(2 * kMaxRequest / kUnit - 1 <= ~Units{0}, "the largest request of the largest alignment");

// Consecutive slots that need pages. `room` more slots behind them could take the rest of a larger page.
struct Gap {
  std::uint32_t slot = 0;
  std::uint32_t slots = 0;
  std::uint32_t room = 0;
};

// What it takes to back a range of addresses.
struct Survey {
  std::vector<Index> own;   // mappings whose page is free
  std::vector<Index> lost;  // mappings to be unmapped: their page is elsewhere
  std::vector<Gap> gaps;
  bool suspended = false;  // part of the range is suspended, so nothing can be placed there
};

// Where in the addresses of a free block a request goes. block 0: nowhere.
struct Spot {
  Index block = 0;
  Units offset = 0;
};

// The cheapest place for a request, as Segments found it. A climb carries it from rung to rung; it is valid
// as long as nothing has changed since (Segments::cheapest).
struct FoundPlace {
  Spot spot;
  Survey plan;
  std::uint32_t lacking = 0;  // slots for which the stream has no free page
  Band band = 0;
  Tick passed = 0;
  std::uint64_t changes = 0;  // Segments::changes() when it was found; 0: not searched yet
  Status why;                 // why there is none
};

// Says whether everything up to a tick of a stream has finished.
using Finished = std::function<bool(std::uint16_t stream, Tick tick)>;

class Segments {
 public:
  Segments(Backend& backend, const PlacementOptions& options);

  // ---- blocks ---------------------------------------------------------------------------------
  // The stream's best free block, cut to size, in state moving, if its addresses have their memory.
  // `allowed`, if given, is asked about the last use of what would be taken, in the order of want.stream.
  Index take(const Want& want, const std::function<bool(Tick)>* allowed = nullptr);
  // The free block that take would cut, or 0; for asking before taking.
  Index peek(const Want& want) const;
  // As take, where addresses lack memory: maps free pages of the stream there, then at most
  // `create_bytes` of new ones. out_of_memory: it would need more; nothing has changed.
  // `passed`: the tick of the stream up to which everything has finished.
  // `found`: what earlier calls for the same request found.
  Status back(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found, Index* out);
  // Whether the last call of back or prepare left addresses behind that lost their page.
  bool moved() const { return moved_; }
  // Bytes of pages that back would need beyond the stream's own free ones.
  std::uint64_t lacking(const Want& want, Tick passed, FoundPlace& found);
  // Gives a block back to its segment's stream; merges it and frees the pages it was the last to hold.
  void put(Index block, Tick tick);
  // The band of a request.
  Band band_of(Units units) const {
    if (units <= kSmallUnits) return kSmall;
    return units <= kMiddleUnits && options_.pages ? kMiddle : kLarge;
  }
  // Whether there are blocks to cut for one more request: a new segment of one, a piece in front, the request
  // itself. Some are always left for those that are cut in use.
  bool can_cut(std::size_t blocks = 3) const { return blocks_.has_room(blocks + blocks_.capacity() / 64); }
  // Splits the first `units` off a block in use; both parts stay in use.
  Index split_in_use(Index block, Units units);

  // ---- growable buffers (growable.cpp) ----------------------------------------------------------
  // Addresses for a growable buffer: an idle strip whose last use is up to `passed`, else new ones.
  Status open_strip(std::uint16_t stream, std::uint32_t slots, std::uint64_t number, Tick passed, Index* out);
  // pre: no block in use but pending ones. Keeps addresses and mappings for the next buffer.
  void close_strip(Index strip);
  // The strip of the open buffer that begins at the address, or 0.
  Index strip_at(Address address) const;
  // Unmaps what idle strips have mapped, where their last use has finished, and takes their addresses back.
  Status drop_idle_strips(const Finished& finished);
  // Has pages mapped where want.strip will grow and leaves them free: taking them then calls nobody. Uses
  // free pages that are not another buffer's by the same promise, then new ones.
  Status prepare(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found);
  // Bytes in a row, from the strip's first free address on, that have their pages.
  std::uint64_t ready_bytes(Index strip) const;
  // Makes one block of two neighbours in use.
  void join(Index front, Index back);
  bool growing(const Block& block) const { return segments_[block.segment].band == kGrowing; }

  // ---- between streams --------------------------------------------------------------------------
  // The stream's oldest free page of a size, or 0.
  Index oldest_page(std::uint16_t stream, int size) const { return shelf(stream).pages[size].head; }
  // Makes a free page the property of another stream. pre: its last use is ordered before whatever that
  // stream is given next. `tick` is a point in the new owner's order that lies after that last use.
  void transfer(Index page, std::uint16_t to, Tick tick);
  // The shortest wholly free plain segments of at least so many units, whosever they are; and the same for
  // them. Stops when visit(segment) returns true.
  template <typename Visit>
  void free_plain_segments(Units units, Visit visit) const {
    for (auto it = free_plain_.lower_bound({units, 0}); it != free_plain_.end(); ++it, ++steps_)
      if (visit(it->second)) return;
  }
  void transfer_segment(Index segment, std::uint16_t to, Band band, Tick tick);
  // Every segment and page of a stream, free or not, goes to another. pre: nothing is running on it.
  void inherit(std::uint16_t from, std::uint16_t to);

  // ---- giving back ------------------------------------------------------------------------------
  // Releases free pages and wholly free plain segments whose last use has finished, until at most
  // `keep_bytes` stay reserved. Plain segments whose release would wait for running work go only where
  // the caller may wait. `want`, if given, is what the memory is needed for: its stream's own pages of the
  // smallest size stay, as they could serve it anywhere already, unless it is addresses that are missing.
  Status trim(std::uint64_t keep_bytes, const Finished& finished, bool may_wait, const Want* want = nullptr);
  // The part of it that is about pages; after `patience` of them that are still in use it ends.
  Status release_free_pages(std::uint64_t keep_bytes, const Finished& finished, std::uint32_t patience,
                            const Want* want = nullptr);
  Status release_all();  // pre: nothing on any stream uses any of it

  // ---- suspended pages (suspend.cpp decides which) ------------------------------------------------
  // Takes a page out of use: nothing more is placed on it, and it is given to nobody. take_up() undoes it.
  void set_aside(Index page);
  void take_up(Index page);  // pre: resident(page)
  // Gives a page that was set aside back to the driver; its place stays. pre: no work touches it any more.
  // Where it was mapped besides is forgotten unless `aliases` are to come back, too. On failure what was done
  // stays done, and either this or bring_back may follow.
  Status give_up(Index page, bool aliases);
  // Memory again, at the same addresses; the same of a failure.
  Status bring_back(Index page);
  bool resident(Index page) const;  // it has memory, mapped and usable, at all its addresses
  // Pages that lie side by side, given up and in order of their addresses, come back in larger ones: of sizes
  // up to that for one request of that length, each in the place of whole pages.
  void fuse(const std::vector<Index>& pages);
  // Calls visit(page, first, past) for each page that a block's addresses hold, with the units of the block
  // that lie on it.
  template <typename Visit>
  void each_page(const Block& block, Visit visit) const {
    const Segment& segment = segments_[block.segment];
    if (segment.plain) return;
    const Units end = std::min(block.end(), segment.touched);
    for (std::uint32_t slot = block.offset / kSlotUnits; slot * std::uint64_t{kSlotUnits} < end;) {
      const Index m = slots_[slot];
      const Index page = mappings_[m].page;
      const std::uint32_t next = m == 0 ? slot + 1 : mappings_[m].slot + pages_[page].slots();
      if (m != 0 && pages_[page].holder == m)
        visit(page, std::max(block.offset, mappings_[m].slot * kSlotUnits),
              std::min(block.end(), next * kSlotUnits));
      slot = next;
    }
  }
  std::uint64_t suspended_bytes() const { return suspended_bytes_; }  // of pages that have gone back

  // ---- looking ------------------------------------------------------------------------------------
  // The block that starts at the address, or 0. Needs no lock; the caller verifies the block under one.
  Index find(Address address) const;
  // The block that holds the address, or 0; under the mutex. Takes the same few steps whatever its length.
  Index containing(Address address) const;
  Address address_of(const Block& block) const {
    const Segment& segment = segments_[block.segment];
    return segment.base + std::uint64_t{block.offset - segment.first} * kUnit;
  }
  Blocks& blocks() { return blocks_; }
  const Blocks& blocks() const { return blocks_; }
  const Slab<Page>& pages() const { return pages_; }
  const Slab<Segment>& segments() const { return segments_; }
  const Slab<Mapping>& mappings() const { return mappings_; }
  std::uint64_t reserved_bytes() const { return reserved_bytes_; }
  std::uint64_t free_page_bytes(std::uint16_t stream) const { return shelf(stream).free_page_bytes; }
  std::uint64_t free_page_bytes() const { return free_page_bytes_; }  // of all streams
  // The streams that own memory, and those that have free pages.
  const StreamSet& owners() const { return owners_; }
  const StreamSet& free_page_owners() const { return free_page_owners_; }
  // The most bytes in one piece that the stream could have without new memory.
  std::uint64_t largest_free(std::uint16_t stream) const;
  const FreeIndex& free_blocks(std::uint16_t stream, Band band) const { return shelf(stream).free[band]; }
  // Places and pieces of addresses that the search for the cheapest place has looked at so far.
  std::uint64_t weighed() const { return weighed_; }
  // Counts every change of what is free and of what is mapped where.
  std::uint64_t changes() const { return changes_; }
  // Words, segments and streams that were looked at so far to find a block, its segment or memory of others.
  std::uint64_t steps() const { return steps_ + owners_.steps() + free_page_owners_.steps(); }
  // Of driver memory.
  std::uint64_t pieces() const { return pages_.size() - suspended_pages_ + plain_segments_; }
  bool paged() const { return options_.pages; }
  // Long plain segments serve both bands: one for each would reserve twice as much from the start.
  bool bands_share() const { return !options_.pages && options_.segment_size >= kPlainSegmentBytes; }
  // Takes over what can change: segment_size, max_page, best_fit.
  void configure(const PlacementOptions& options);
  // Addresses for whose tables there is room in the process: as many as wished for, else so many that most
  // of the room is left to others.
  static std::uint64_t affordable_space(std::uint64_t wished);
  bool check(std::string* why) const;

 private:
  // What one stream has free.
  struct Shelf {
    FreeIndex free[kBands];
    PageList pages[kPageSizes];
    std::uint64_t free_page_bytes = 0;
    Index segments = 0;       // head of the list of all its segments
    std::uint32_t owned = 0;  // pages and plain segments
  };
  static constexpr std::uint32_t kNowhere = ~std::uint32_t{0};
  class Window;
  // Slots up to `past` that cost the driver the same each if a request is placed over them: those of one
  // mapping, or of none.
  struct Piece {
    std::uint32_t past = 0;
    std::uint32_t earlier = kNowhere;  // the piece that has the same page …
    std::int64_t cost = 0;
    std::int64_t again = 0;    // … and what a slot costs on top if the end of that one is covered, too
    std::int64_t expires = 0;  // of the costs `again` counted so far, those that end with this piece
  };

  Shelf& shelf(std::uint16_t stream) {
    while (shelves_.size() <= stream) shelves_.push_back(std::make_unique<Shelf>());
    return *shelves_[stream];
  }
  const Shelf& shelf(std::uint16_t stream) const {
    static const Shelf kEmpty;
    return stream < shelves_.size() ? *shelves_[stream] : kEmpty;
  }
  FreeIndex& index_of(const Segment& segment) { return shelf(segment.stream).free[segment.band]; }

  // blocks
  void add_free(Index block) {
    ++changes_;
    index_of(segments_[blocks_[block].segment]).add(blocks_, block);
  }
  void remove_free(Index block) {
    ++changes_;
    index_of(segments_[blocks_[block].segment]).remove(blocks_, block);
  }
  Index new_block(Index segment, Units offset, Units units, BlockState state);
  void insert_before(Index block, Index next);
  void drop_block(Index block);
  void set_start(Index block, Units offset);
  Index cut_front(Index block, Units units);
  Index carve(const Spot& spot, Units units);
  Index merge(Index block);
  std::uint64_t aligned_up(const Block& block, std::uint64_t offset, std::uint64_t align) const;
  Spot first_fit(Index block, Units from, const Want& want) const;
  Spot first_fit(Index block, const Want& want) const {
    return block == 0 ? Spot{} : first_fit(block, blocks_[block].offset, want);
  }

  // pages
  bool counts_on(Index mapping, std::uint16_t stream);
  Survey survey(const Spot& spot, Units units);
  Spot find_spot(const Want& want);
  std::uint64_t newly_held(const Spot& spot, const Want& want);
  Tick last_use(const Spot& spot, Units units) const;
  FoundPlace& cheapest(const Want& want, Tick passed, FoundPlace& found);
  Spot cheapest_spot(const Want& want, Tick passed, Survey* plan, Status* why);
  bool save_memory(const Want& want, Tick passed, FoundPlace& place);
  Spot untouched_spot(const Want& want) const;
  bool usable(const Survey& plan, Tick passed) const;
  Spot strip_spot(const Want& want) const;
  Index idle_strip(std::uint16_t stream, Units units, Tick passed) const;
  bool promised(Index page) const;
  Index pick(std::uint16_t stream, int size, bool spare) const;
  std::uint32_t slots_until(std::uint32_t slot, std::uint32_t past, std::uint64_t count) const;
  std::int64_t fresh_cost(const Want& want) const;
  void weigh(Index block, const Want& want, Tick passed, std::uint64_t until, Spot* best,
             std::int64_t* least);
  std::uint32_t lacking_slots(std::uint16_t stream, const Survey& survey) const;
  void hold(Index page, Index mapping);
  void let_go(Index page, Tick tick);
  bool backs(Index mapping) const;
  void note_aliases(Index page);
  void note_backed(Index page);
  void own(std::uint16_t stream, bool more);
  void list_push(Index page);
  void list_remove(Index page);
  Status supply(const Want& want, const Survey& plan, std::uint64_t create_bytes, bool spare,
                std::vector<Index>* held);
  Status fill_gap(const Want& want, const Gap& gap, std::uint64_t* create_bytes, bool spare,
                  std::vector<Index>* held);
  Status create_page(const Want& want, std::uint32_t slots, Index* out);
  int size_to_create(std::uint32_t slots, std::uint64_t request_bytes) const;
  Status map_pages(std::uint32_t slot, const std::vector<Index>& pages);
  void enter_mapping(std::uint32_t slot, Index page, bool usable);
  Status unmap(Index mapping);
  void forget_mapping(Index mapping);
  void discard(Index page, Tick tick);
  void forget_page(Index page);
  Status release_page(Index page);
  void fuse_row(const std::vector<Index>& row, std::uint32_t slots);
  Address slot_address(std::uint32_t slot) const {
    return space_.load(std::memory_order_relaxed) + slot * kSlotBytes;
  }

  // segments
  std::uint64_t unit_at(Address address) const;
  Index block_at(std::uint64_t unit) const;
  Status reserve_space();
  bool has_addresses(const Want& want) const;
  void enlist(Index segment);
  void delist(Index segment);
  Status new_strip(const Want& want);
  Index add_strip(std::uint16_t stream, Band band, std::uint32_t slot, std::uint32_t slots);
  Status new_plain(const Want& want, std::uint64_t budget);
  Status release_plain(Index segment);
  void drop_segment(Index segment);
  std::uint32_t space_take(std::uint32_t slots);
  void space_give(std::uint32_t slot, std::uint32_t slots);

  Backend& backend_;
  PlacementOptions options_;
  std::atomic<Address> space_{0};                      // 0 until the first strip needs it; find() has no lock
  std::map<std::uint32_t, std::uint32_t> space_free_;  // slot → slots, in no segment
  std::map<Address, Index> plain_;                     // plain segments by base address
  std::set<std::pair<Units, Index>> free_plain_;       // those wholly free, by length
  mutable std::shared_mutex plain_lock_;  // guards plain_ against find(), which has no other lock
  Blocks blocks_;
  Slab<Page> pages_;
  Slab<Mapping> mappings_;
  Slab<Segment> segments_;
  LazyArray<std::atomic<Index>> starts_;         // unit → the block that starts there
  OrderedSet started_;                           // the units at which blocks start
  LazyArray<Index> slots_;                       // slot → the mapping there
  Bits mapped_;                                  // slots that have a mapping
  Bits backed_;                                  // those whose mapping holds its page, or could at once
  std::vector<std::unique_ptr<Shelf>> shelves_;  // by stream number
  StreamSet owners_;                             // streams whose `owned` is not 0
  StreamSet free_page_owners_;                   // streams whose `free_page_bytes` is not 0
  std::uint64_t free_page_bytes_ = 0;            // of all streams
  std::uint64_t reserved_bytes_ = 0;
  std::uint64_t suspended_bytes_ = 0;
  std::uint64_t suspended_pages_ = 0;  // that have gone back
  std::uint64_t aside_ = 0;            // pages that are suspended, gone or not
  std::uint64_t plain_segments_ = 0;
  std::uint32_t survey_ = 0;         // number of the survey under way
  std::vector<Piece> pieces_;        // scratch of Window
  std::uint64_t weighed_ = 0;        // see weighed()
  std::uint64_t changes_ = 1;        // see changes()
  mutable std::uint64_t steps_ = 0;  // see steps()
  int largest_page_ = 0;             // ever made, as an index into kPageSlots
  bool moved_ = false;
  std::vector<Index> created_;  // pages made by the call of back() or prepare() under way
};

}  // namespace vram
