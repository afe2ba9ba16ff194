// Placement: where blocks go and which pages back them. Defines Placer, which joins the addresses
// (AddressSpace), the pages (PageStock) and the search (PlaceSearch). It knows streams as numbers and uses as
// ticks; when memory may be reused is decided above, in order/ and pool/.
//
// How pages move. A page is *free* when no block in use covers a byte of it. It stays mapped where it was,
// and an address gets back the page that it last had without a driver call. A request takes the tightest free
// addresses that have their memory. If there are none, it takes the place that costs the driver least, or the
// one that takes the least new memory if the pool must grow; there, pages that were moved elsewhere are
// replaced by free or new ones. A page may be mapped at many addresses, of which at most one *holds* it.
#pragma once

#include <functional>
#include <string>

#include "placement/search.hpp"

namespace vram {

class Placer {
 public:
  Placer(Backend& backend, const PlacementOptions& options);
  AddressSpace& space() { return space_; }
  const AddressSpace& space() const { return space_; }
  PageStock& stock() {
    stock_.settle();
    return stock_;
  }

  // ---- blocks ---------------------------------------------------------------------------------
  Band band_of(Units units, const PlainHeap* heap = nullptr) const {
    if (units <= (heap != nullptr ? kHeapSmallUnits : kSmallUnits)) return kSmall;
    if (heap != nullptr) return kLarge;
    return units <= kMiddleUnits && options_.pages ? kMiddle : kLarge;
  }
  // The stream's best free block, split to size, in state moving, if its addresses have their memory.
  // `allowed`, if given, is called with the last use of what would be taken, in the order of want.stream.
  Index take(const Want& want, const std::function<bool(Tick)>* allowed = nullptr);
  // The same at a given place. pre: it is in a free block, and its addresses have their memory.
  Index take_at(const Spot& spot, Units units);
  // As take, where addresses lack memory: maps free pages of the stream there, then at most `create_bytes` of
  // new ones. out_of_memory: it would need more; nothing has changed. `passed`: the tick of the stream up to
  // which everything has completed. `found`: what earlier calls for the same request found.
  Status back(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found, Index* out);
  // Whether the last call of back or prepare left addresses behind that lost their page.
  bool moved() const { return moved_; }
  // Bytes of pages that back would need beyond the stream's own free ones.
  std::uint64_t lacking(const Want& want, Tick passed, FoundPlace& found);
  // Returns a block to its segment's stream; merges it and frees the pages that it was the last to hold.
  void put(Index block, Tick tick);

  // ---- growable buffers -------------------------------------------------------------------------
  // Addresses for a growable buffer: an idle strip whose last use is up to `passed`, else new ones.
  Status open_strip(StreamNumber stream, Slot slots, std::uint64_t number, Tick passed, Index* out);
  // pre: no block in use but pending ones. Keeps addresses and mappings for the next buffer.
  void close_strip(Index strip) { space_.segments()[strip].growable = 0; }
  // Unmaps and removes idle strips whose last use has completed.
  Status drop_idle_strips(const Finished& finished);
  // Maps pages where want.strip will grow and leaves them free, so that taking them needs no driver call.
  // Uses free pages that are not promised to another buffer, then new ones.
  Status prepare(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found);
  // Contiguous bytes, from the strip's first free address on, that have their pages.
  std::uint64_t ready_bytes(Index strip);

  // ---- streams and the driver -------------------------------------------------------------------
  // Every segment and page of a stream, free or not, goes to another. pre: nothing is running on it.
  void inherit(StreamNumber from, StreamNumber to) { stock().inherit(from, to); }
  // Releases free pages and wholly free plain segments whose last use has completed, until at most
  // `keep_bytes` stay reserved. Plain segments whose release would wait for running work are released only if
  // the caller may wait. `want`, if given, is what the memory is needed for: its stream's own pages of the
  // smallest size stay, as they could serve it anywhere, unless addresses are missing.
  Status trim(std::uint64_t keep_bytes, const Finished& finished, bool may_wait, const Want* want = nullptr);
  // The same without looking at every segment: examines at most `patience` pages and segments whose last use
  // has not completed, and keeps addresses.
  Status release_free(std::uint64_t keep_bytes, const Finished& finished, std::uint32_t patience,
                      bool may_wait);
  // Releases the wholly free plain segments of one stream whose last use has completed.
  Status release_plain_of(StreamNumber stream, const Finished& finished);
  Status release_all();  // pre: nothing on any stream uses any of it

  // ---- looking up -------------------------------------------------------------------------------
  // The streams that own memory; with pages, without heaps of plain segments.
  const StreamSet& owners() const { return (paged() ? stock_.owners() : space_.plain_owners()).set(); }
  std::uint64_t reserved_bytes() const { return space_.plain_bytes() + stock_.bytes(); }
  std::uint64_t pieces() const { return space_.plain_segments() + stock_.count(); }  // of driver memory
  // The most bytes in one piece that the stream could have without new memory.
  std::uint64_t largest_free(StreamNumber stream);
  std::uint64_t weighed() const { return search_.weighed(); }
  // Words, segments and streams that were examined so far to find a block, its segment or memory of others.
  std::uint64_t steps() const { return space_.steps() + stock_.steps(); }
  bool paged() const { return options_.pages; }
  bool paged(const Want& want) const { return options_.pages && want.heap == nullptr; }
  // Applies what can change: segment_size, max_page, best_fit.
  void configure(const PlacementOptions& options);
  bool check(std::string* why) const;

 private:
  Tick last_use(const Spot& spot, Units units) const;
  std::uint64_t keep_in_pages(std::uint64_t keep_bytes) const;
  bool check_pages(std::string* why) const;

  Backend& backend_;
  PlacementOptions options_;
  AddressSpace space_;
  PageStock stock_;
  PlaceSearch search_;
  bool moved_ = false;
};

}  // namespace vram
