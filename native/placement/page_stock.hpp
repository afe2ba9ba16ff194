// The pages of a pool and where they are mapped: creating, mapping and releasing them, and the free pages of
// each stream. Defines PageStock. Which addresses a request gets is PlaceSearch's decision; when a page may
// be reused is decided in pool/.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "placement/address_space.hpp"

namespace vram {

// Invariants, beside those of Page and Mapping (base/types.hpp):
//   bytes() == Σ bytes of pages with a handle,  suspended_bytes() == Σ bytes of suspended pages without
//   host_bytes() == Σ bytes of host pages, which are in neither;  spilled_bytes() of those that are held
//   every free page is in the list of its owner and size, oldest first
//   every held page is under a block in use, or kept
//   `backed` of a slot  ⇔  its mapping holds its page, or could hold it at once
class PageStock {
 public:
  PageStock(Backend& backend, const PlacementOptions& options, AddressSpace& space);

  // ---- looking up -----------------------------------------------------------------------------
  const Slab<Page>& pages() const { return pages_; }
  const Slab<Mapping>& mappings() const { return mappings_; }
  Index mapping_at(Slot slot) const { return slots_[slot]; }
  const Page& page_of(Index mapping) const { return pages_[mappings_[mapping].page]; }
  Address address_of(Index page) const;  // where it is held, or else mapped
  const Bits& mapped() const { return mapped_; }
  const Bits& backed() const { return backed_; }
  // Calls visit(page, first, past) for each page that a block's addresses hold, with the units of the block
  // that are on it.
  template <typename Visit>
  void each_page(const Block& block, Visit visit) const {
    const Segment& segment = space_.segment(block);
    if (segment.plain) return;
    const Units end = std::min(block.end(), segment.touched);
    for (Slot slot = block.offset / kSlotUnits; slot * std::uint64_t{kSlotUnits} < end;) {
      const Index m = slots_[slot];
      const Index page = mappings_[m].page;
      const Slot next = m == 0 ? slot + 1 : mappings_[m].slot + pages_[page].slots();
      if (m != 0 && pages_[page].holder == m)
        visit(page, std::max(block.offset, mappings_[m].slot * kSlotUnits),
              std::min(block.end(), next * kSlotUnits));
      slot = next;
    }
  }
  // The index into kPageSlots of a page to create where `slots` are needed by a request of that length.
  int size_to_create(Slot slots, std::uint64_t request_bytes) const;
  int largest_page() const { return largest_page_; }  // ever created, as an index into kPageSlots

  // ---- free pages -----------------------------------------------------------------------------
  // The stream's oldest free page of a size, or 0, and how many it has.
  Index oldest(StreamNumber stream, int size) const { return shelf(stream).pages[size].head; }
  std::uint32_t free_pages(StreamNumber stream, int size) const { return shelf(stream).pages[size].count; }
  std::uint64_t free_bytes(StreamNumber stream) const { return shelf(stream).bytes; }
  std::uint64_t free_bytes() const { return free_bytes_; }  // of all streams
  const StreamSet& free_owners() const { return free_owners_; }
  const CountedStreams& owners() const { return owners_; }
  // A free page comes into use through a mapping; a page in use becomes free.
  void hold(Index page, Index mapping);
  void unhold(Index page, Tick tick);
  // The same for every free page under [from, to), a part of the free block `whole`. pre: all of it has
  // memory.
  void hold_range(Units from, Units to, const Block& whole);
  // [from, to) was freed and is now part of the free block `whole`: its pages become free, those that are
  // suspended go. Pages that reach beyond the free block are still in use.
  void free_range(Units from, Units to, const Block& whole);

  // ---- kept pages -----------------------------------------------------------------------------
  // A program often takes what it has just freed again, in the same or in other sizes. So free_range leaves
  // pages held, and hold_range finds them so, without looking at each of them. Such pages are *kept*;
  // settle() frees them, in the order in which they were freed, so that nothing depends on when it is called.
  // All functions of this class but these and the look-ups want it settled.
  void settle();
  // Pages that were freed together, or what is left of them. `tick`: their last use, in the order of their
  // stream.
  struct Kept {
    Slot first = 0;
    Slot past = 0;
    Tick tick = 0;
  };
  // Whether the page that this mapping holds under a free block is kept: a neighbour uses it only if it
  // reaches beyond the block.
  bool kept_under(const Block& free, const Mapping& mapping) const {
    const std::uint64_t first = std::uint64_t{mapping.slot} * kSlotUnits;
    return free.offset <= first && first + pages_[mapping.page].slots() * kSlotUnits <= free.end();
  }
  // Looking for a run costs about as much as looking at so many slots.
  static constexpr Slot kFewSlots = 4;
  // The run that contains a slot, or null.
  const Kept* kept_at(Slot slot) const {
    for (std::size_t i = 0; i < kept_count_; ++i)
      if (kept_[i].first <= slot && slot < kept_[i].past) return &kept_[i];
    return nullptr;
  }
  // Whether a page is free, or would be if the stock were settled.
  bool idle(const Page& page) const {
    if (page.free()) return true;
    return page.holder != 0 && !page.suspended && kept_at(mappings_[page.holder].slot) != nullptr;
  }

  // Makes a page another stream's. pre: its last use is ordered before whatever that stream gets next. `tick`
  // is a point in the new owner's order after that last use.
  void transfer(Index page, StreamNumber to, Tick tick);
  // Every page of a segment that moves to another stream, and every free or suspended page of its stream.
  void inherit(StreamNumber from, StreamNumber to);

  // ---- backing addresses ----------------------------------------------------------------------
  // Carries a plan out: afterwards the whole range has its pages, and those that were not held before are
  // held, and listed in *held. On failure none of them is. At most `create_bytes` of pages are created. With
  // `spare`, free pages that are promised to a growable buffer are left alone.
  Status supply(const Want& want, const Survey& plan, std::uint64_t create_bytes, bool spare,
                std::vector<Index>* held);
  // Whether the last call of supply left addresses behind that lost their page.
  bool moved() const { return moved_; }
  // pre: the mapping does not hold its page, and nothing uses these addresses any more.
  Status unmap(Index mapping);

  // ---- releasing ------------------------------------------------------------------------------
  // Releases free pages whose last use has completed until at most `keep_bytes` are left. Stops after
  // `patience` pages that are still in use. Small pages of the stream `spared`, if given, stay.
  Status release_free(std::uint64_t keep_bytes, const Finished& finished, std::uint32_t patience,
                      const StreamNumber* spared);
  Status release_all();  // pre: nothing on any stream uses any of it

  // ---- suspended pages (pool/suspender.cpp decides which) -----------------------------------------
  // Takes a page out of use: nothing more is placed on it, and no stream gets it. reinstate() undoes it.
  void set_aside(Index page);
  void reinstate(Index page);  // pre: resident(page)
  // Releases a page that was set aside to the driver; its place stays. pre: no work touches it any more.
  // Its other mappings are forgotten unless `aliases` are to come back, too. On failure what was done stays
  // done, and either this or restore may follow.
  Status evict(Index page, bool aliases);
  // Memory again, at the same addresses; a failure leaves the page as evict does.
  Status restore(Index page);
  bool any_aside() const { return aside_ != 0; }
  Status grant_again();             // access to everything that is mapped, after Backend::add_peer
  bool resident(Index page) const;  // it has memory, mapped and usable, at all its addresses
  // Evicted pages, in order of their addresses: adjacent ones will come back as larger pages, of sizes for a
  // request of their length. Each new page replaces whole old ones.
  void fuse(const std::vector<Index>& pages);

  // ---- host pages (pool/spiller.cpp decides which) ------------------------------------------------
  // A host page that no block holds is *spare*. It may still be mapped where it was, until it is taken.
  // Adds one, set aside. pre: has_room_for_page().
  Index add_host(PageHandle handle, std::uint64_t bytes, Address copies);
  bool has_room_for_page() const { return pages_.has_room(); }
  // A new free device page of a size (index into kPageSlots).
  Status create_free(int size, StreamNumber owner, Index* out);
  // A spare host page of a size whose last use has completed, unmapped and set aside; 0: none.
  Status take_spare(int size, const Finished& finished, Index* out);
  // Releases spare host pages whose last use has completed until at most `keep` bytes of host memory are
  // left, or no more are spare.
  Status release_spare(std::uint64_t keep, const Finished& finished);
  // The contents of a page that is set aside move from now on: if its blocks are freed, it stays set aside.
  void begin_move(Index page) { pages_[page].moving = true; }
  // … until now: it is reinstated, unless the driver has refused to put it back where it is held.
  void end_move(Index page);
  // The addresses where `from` is held have `to` from now on, which is held there in its place. On failure
  // `from` is still there, unless the driver refuses that, too, several times; then it stays set aside. pre:
  // both are set aside and equally long, `to` is not held, and no work uses these addresses.
  Status exchange(Index from, Index to);
  void set_parked(Index page, bool parked) { pages_[page].parked = parked; }
  // Lends a host page to a graph or heap, as a free page of its own. pre: make_room_for(to); it is set aside
  // and not mapped.
  void lend(Index page, StreamNumber to);
  void make_room_for(StreamNumber owner) {
    (void)shelf(owner);
    owners_.make_room(owner);
  }
  // The pages lent to an owner.
  std::vector<Index> lent_to(StreamNumber owner) const;
  // The page is not lent any more: it becomes spare, or the page of the blocks that hold it.
  void end_loan(Index page);
  // A lent page gets the memory of a device page: at all addresses where it is mapped, and for good. The host
  // memory becomes the other page's. On failure nothing has changed, unless the driver refuses that several
  // times. pre: both are set aside and equally long, and no work uses these addresses, or those where the
  // device page is mapped.
  Status replace(Index lent, Index device);
  std::uint64_t host_bytes() const { return host_bytes_; }
  std::uint64_t spare_bytes(int size) const { return spares_[size].count * kPageSlots[size] * kSlotBytes; }
  std::uint64_t spare_bytes() const {
    std::uint64_t bytes = 0;
    for (int size = 0; size < kPageSizes; ++size) bytes += spare_bytes(size);
    return bytes;
  }
  std::uint64_t spilled_bytes() const { return spilled_bytes_; }

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t suspended_bytes() const { return suspended_bytes_; }
  std::size_t count() const { return pages_.size() - suspended_pages_ - host_pages_; }  // with device memory
  // Counts every change of what is free or mapped.
  std::uint64_t changes() const { return changes_; }
  std::uint64_t steps() const { return steps_ + owners_.set().steps() + free_owners_.steps(); }
  bool check(std::string* why) const;

 private:
  static constexpr std::size_t kMostKept = 16;

  // Free pages of one stream and size, oldest first.
  struct PageList {
    Index head = 0;
    Index tail = 0;
    std::uint32_t count = 0;
  };
  struct Shelf {
    PageList pages[kPageSizes];
    std::uint64_t bytes = 0;
  };
  Shelf& shelf(StreamNumber stream) {
    if (shelves_.size() <= stream) shelves_.resize(stream + 1u);
    return shelves_[stream];
  }
  const Shelf& shelf(StreamNumber stream) const {
    static const Shelf kEmpty;
    return stream < shelves_.size() ? shelves_[stream] : kEmpty;
  }

  bool keep(Slot first, Slot past, const Block& whole);
  void use_kept(Slot first, Slot past);
  void settle_oldest();
  bool any_spilled(Slot first, Slot past) const;
  void unhold_range(StreamNumber stream, const Kept& run);
  void set_holder(Index page, Index mapping);
  Status show(Index mapping, const Page& page);
  Status hide(Index mapping);
  void link(PageList& list, Index page);
  void unlink(PageList& list, Index page);
  // The free bytes of a stream have changed.
  void count_free(StreamNumber stream, Shelf& owner, std::uint64_t before);
  void list_push(Index page);
  void list_remove(Index page);
  bool backs(Index mapping) const;
  void note_aliases(Index page);
  void note_backed(Index page);
  bool promised(Index page) const;
  Index pick(StreamNumber stream, int size, bool spare) const;
  Status fill_gap(const Want& want, const Gap& gap, std::uint64_t* create_bytes, bool spare,
                  std::vector<Index>* held);
  Status pick_pages(const Want& want, const Gap& gap, std::uint64_t* create_bytes, bool spare,
                    std::vector<Index>* pages);
  Status create_missing(const Want& want, const Gap& gap, Slot missing, std::uint64_t* create_bytes,
                        std::vector<Index>* pages);
  Status create_page(const Want& want, Slot slots, Index* out);
  Status map_pages(Slot slot, const std::vector<Index>& pages);
  void add_mapping(Slot slot, Index page, bool usable);
  // Memory has appeared at the mapping's addresses, or is no longer there.
  void tell(bool there, Index mapping) const {
    const Mapping& at = mappings_[mapping];
    space_.tell(there, at.segment, space_.slot_address(at.slot), pages_[at.page].bytes());
  }
  void forget_mapping(Index mapping);
  void discard(Index page, Tick tick);
  void forget_page(Index page);
  Status release_page(Index page);
  bool fusible(Index page) const;
  Slot within_block(Slot slot) const;
  void fuse_run(const std::vector<Index>& pages, std::size_t from, std::size_t to);
  void fuse_row(std::span<const Index> row, Slot slots);
  bool check_page(Index page, std::size_t* mappings, std::string* why) const;
  bool check_spares(std::string* why) const;
  bool check_lists(std::size_t* listed, std::string* why) const;

  Backend& backend_;
  const PlacementOptions& options_;
  AddressSpace& space_;
  Slab<Page> pages_;
  Slab<Mapping> mappings_;
  LazyArray<Index> slots_;      // slot → the mapping there
  Bits mapped_;                 // slots that have a mapping
  Bits backed_;                 // those whose mapping holds its page, or could at once
  std::vector<Shelf> shelves_;  // by stream number
  CountedStreams owners_;       // by the pages that are theirs, free or not
  StreamSet free_owners_;       // streams that have free pages
  std::uint64_t free_bytes_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t suspended_bytes_ = 0;
  std::uint64_t suspended_pages_ = 0;  // that were released to the driver
  std::uint64_t aside_ = 0;            // pages that are suspended, released or not
  PageList spares_[kPageSizes];        // host pages that no block holds, oldest first
  std::uint64_t host_pages_ = 0;
  std::uint64_t host_bytes_ = 0;
  std::uint64_t spilled_bytes_ = 0;
  std::uint64_t lent_pages_ = 0;
  int largest_page_ = 0;
  bool moved_ = false;
  Kept kept_[kMostKept + 1];  // oldest first
  std::size_t kept_count_ = 0;
  std::vector<Index> created_;  // pages made by the call of supply() in progress
  std::uint64_t changes_ = 1;
  std::uint64_t steps_ = 0;
};

}  // namespace vram
