// Where a request goes: the tightest free addresses that have their memory, or else the place that costs the
// driver least. Defines PlaceSearch. It changes nothing but adds a strip when a stream has no addresses left.
#pragma once

#include <vector>

#include "placement/page_stock.hpp"

namespace vram {

class PlaceSearch {
 public:
  PlaceSearch(const PlacementOptions& options, AddressSpace& space, const PageStock& stock);

  // Of the free blocks whose addresses have their memory, the tightest; of equal ones, the place that takes
  // the fewest free pages.
  Spot fit(const Want& want);
  // The place that costs the driver least, from `found` if nothing has changed since it was found.
  // `passed`: the tick of the stream up to which everything has completed.
  FoundPlace& cheapest(const Want& want, Tick passed, FoundPlace& found);
  // Looks for an end of a free block that needs fewer new slots than the place; true: it is the place now.
  bool save_memory(const Want& want, Tick passed, FoundPlace& place);
  // Of the tightest idle strips for growable buffers, the one that has most of its pages, or 0. Strips that
  // queued work may still use are not taken: if other memory gets their pages, the buffer could not grow
  // before that work completes.
  Index idle_strip(StreamNumber stream, Units units, Tick passed) const;

  // Grows with every change of what is free, of what is mapped where, and of the options.
  std::uint64_t changes() const { return space_.changes() + stock_.changes() + options_changed_; }
  void options_changed() { ++options_changed_; }
  // Places and pieces of addresses that the search for the cheapest place has examined so far.
  std::uint64_t weighed() const { return weighed_; }

 private:
  static constexpr std::uint32_t kNowhere = ~std::uint32_t{0};
  class Window;
  // Slots up to `past` that cost the driver the same each if a request is placed over them: those of one
  // mapping, or of none.
  struct Piece {
    Slot past = 0;
    std::uint32_t earlier = kNowhere;  // the piece that has the same page …
    std::int64_t cost = 0;
    std::int64_t again = 0;    // … and what a slot costs on top if the end of that one is covered, too
    std::int64_t expires = 0;  // of the costs `again` counted so far, those that end with this piece
  };
  // The last survey that counted on a page, and the piece where it did.
  struct Counted {
    std::uint32_t survey = 0;
    std::uint32_t piece = 0;
  };

  // The best place so far for a request, in a block of `units`; it takes `bytes` of pages.
  struct Fit {
    Spot spot;
    Units units = ~Units{0};
    std::uint64_t bytes = 0;
  };

  Index tightest(const Want& want) const;
  std::uint64_t newly_held(const Spot& spot, const Want& want);
  Spot behind_lost(const Spot& spot, const Want& want) const;
  void consider(const Spot& spot, const Want& want, Fit& best);
  bool counts_on(Index mapping, StreamNumber stream);
  Survey survey(const Spot& spot, Units units);
  Slot room_behind(const Block& block, Slot past, Index last_lost) const;
  Slot lacking_slots(StreamNumber stream, const Survey& survey) const;
  bool usable(const Survey& plan, Tick passed) const;
  Spot cheapest_spot(const Want& want, Tick passed, Survey* plan, Status* why);
  std::int64_t fresh_cost(const Want& want) const;
  Slot slots_until(Slot slot, Slot past, std::uint64_t count) const;
  void weigh(Index block, const Want& want, Tick passed, std::uint64_t until, Spot* best,
             std::int64_t* least);

  const PlacementOptions& options_;
  AddressSpace& space_;
  const PageStock& stock_;
  LazyArray<Counted> counted_;  // by page
  std::uint32_t survey_ = 0;    // number of the survey in progress
  std::vector<Piece> pieces_;   // scratch of Window
  std::uint64_t weighed_ = 0;
  std::uint64_t options_changed_ = 0;
};

}  // namespace vram
