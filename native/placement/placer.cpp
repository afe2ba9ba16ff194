// Taking blocks and putting them back, with the pages under them; strips of growable buffers; releasing.
#include "placement/placer.hpp"

#include <algorithm>
#include <unordered_set>

namespace vram {

Placer::Placer(Backend& backend, const PlacementOptions& options)
    : backend_(backend),
      options_(options),
      space_(backend, options_),
      stock_(backend, options_, space_),
      search_(options_, space_, stock_) {}

void Placer::configure(const PlacementOptions& options) {
  options_.segment_size = options.segment_size;
  options_.max_page = options.max_page;
  options_.best_fit = options.best_fit;
  search_.options_changed();
}

// ---- blocks ---------------------------------------------------------------------------------------------

// The last use of the addresses and of the pages under them, which may have been used elsewhere since. This
// includes a page that a neighbour has taken meanwhile: it was in order for our stream, not for every other.
Tick Placer::last_use(const Spot& spot, Units units) const {
  Tick tick = space_.blocks()[spot.block].tick;
  if (space_.segment(space_.blocks()[spot.block]).plain) return tick;
  const Slot last = (spot.offset + units - 1) / kSlotUnits;
  for (Slot slot = spot.offset / kSlotUnits; slot <= last;) {
    const Mapping& mapping = stock_.mappings()[stock_.mapping_at(slot)];
    const Page& page = stock_.pages()[mapping.page];
    tick = std::max(tick, page.tick);
    slot = mapping.slot + page.slots();
  }
  return tick;
}

Index Placer::take(const Want& want, const std::function<bool(Tick)>* allowed) {
  if (allowed != nullptr) stock_.settle();  // it asks for last uses
  const Spot spot = search_.fit(want);
  if (spot.block == 0 || !space_.can_split()) return 0;
  Units units = want.units;
  if (want.heap != nullptr && want.heap->no_split) {
    units = space_.blocks()[spot.block].end() - spot.offset;
    if (!want.last_resort && bytes_of(units) > 2 * space_.plain_length(want)) return 0;
  }
  if (allowed != nullptr && !(*allowed)(last_use(spot, units))) return 0;
  return take_at(spot, units);
}

Index Placer::take_at(const Spot& spot, Units units) {
  const Block& whole = space_.blocks()[spot.block];
  if (!spot.held && !space_.segment(whole).plain) stock_.hold_range(spot.offset, spot.offset + units, whole);
  return space_.take(spot, units);
}

std::uint64_t Placer::lacking(const Want& want, Tick passed, FoundPlace& found) {
  stock_.settle();
  const FoundPlace& place = search_.cheapest(want, passed, found);
  return place.spot.block == 0 ? want.bytes() : place.lacking * kSlotBytes;
}

Status Placer::back(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found,
                    Index* out) {
  *out = 0;
  stock_.settle();
  if (!space_.can_split()) return {Code::out_of_memory, 0, "blocks"};
  if (!paged(want)) {
    moved_ = false;
    if (Status status = space_.add_plain(want, create_bytes); !status.ok()) return status;
    *out = take(want);
    return {};
  }
  // Pages that others hold already can be under the two ends of the request only; the rest must be free or
  // new.
  const std::uint64_t available = stock_.free_bytes(want.stream) + create_bytes;
  const std::uint64_t ends = 2 * kPageSlots[stock_.largest_page()] * kSlotBytes;
  if (available < want.bytes() && want.bytes() - available > ends)
    return {Code::out_of_memory, 0, "page_create"};
  FoundPlace& place = search_.cheapest(want, passed, found);
  if (place.spot.block == 0)
    return place.why.ok() ? Status{Code::out_of_memory, 0, AddressSpace::kNoPlace} : place.why;
  // What is found now is the thriftiest place rather than the cheapest, so the next call searches again.
  if (place.lacking > 0 && create_bytes > 0 && want.strip == 0 && search_.save_memory(want, passed, place))
    place.changes = 0;
  if (place.lacking * kSlotBytes > create_bytes) return {Code::out_of_memory, 0, "page_create"};
  std::vector<Index> held;
  const Status status = stock_.supply(want, place.plan, create_bytes, false, &held);
  moved_ = stock_.moved();
  if (status.ok()) *out = space_.take(place.spot, want.units);
  return status;
}

void Placer::put(Index i, Tick tick) {
  const Units from = space_.blocks()[i].offset;
  const Units to = space_.blocks()[i].end();
  const Block& whole = space_.blocks()[space_.put(i, tick)];
  if (space_.segment(whole).plain) return;
  stock_.free_range(from, to, whole);
}

// Any free page can serve any address, so with pages all of them count as one piece.
std::uint64_t Placer::largest_free(StreamNumber stream) {
  stock_.settle();
  std::uint64_t most = stock_.free_bytes(stream);
  if (!space_.plain_owners().has(stream)) return most;
  for (Band band = 0; band < kBands; ++band)
    space_.free_blocks(stream, band).each(space_.blocks(), [&](Index i) {
      if (!space_.segment(space_.blocks()[i]).plain) return false;
      most = std::max(most, bytes_of(space_.blocks()[i]));
      return false;
    });
  return most;
}

// ---- growable buffers -----------------------------------------------------------------------------------

Status Placer::open_strip(StreamNumber stream, Slot slots, std::uint64_t number, Tick passed, Index* out) {
  stock_.settle();
  if (!space_.can_split()) return {Code::out_of_memory, 0, "blocks"};
  *out = search_.idle_strip(stream, slots * kSlotUnits, passed);
  if (*out == 0)
    if (Status status = space_.add_growing_strip(stream, slots, out); !status.ok()) return status;
  Segment& strip = space_.segments()[*out];
  strip.growable = number;
  strip.promised = strip.first;
  return {};
}

Status Placer::drop_idle_strips(const Finished& finished) {
  stock_.settle();
  for (Index s = 1; s < space_.segments().end(); ++s) {
    const Segment& segment = space_.segments()[s];
    if (segment.units == 0 || segment.band != kGrowing || segment.growable != 0 || segment.in_use != 0 ||
        !finished(segment.stream, space_.blocks()[segment.head].tick))
      continue;
    for (Slot slot = segment.first_slot(); slot < segment.end() / kSlotUnits; ++slot)
      if (const Index m = stock_.mapping_at(slot); m != 0)
        if (Status status = stock_.unmap(m); !status.ok()) return status;
    space_.drop(s);
  }
  return {};
}

Status Placer::prepare(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found) {
  stock_.settle();
  moved_ = false;
  const FoundPlace& place = search_.cheapest(want, passed, found);
  if (place.spot.block == 0) return {Code::out_of_memory, 0, "prepare"};
  space_.segments()[want.strip].promised = place.spot.offset + want.units;
  if (place.plan.gaps.empty()) return {};
  std::vector<Index> held;
  const Status status = stock_.supply(want, place.plan, create_bytes, true, &held);
  moved_ = stock_.moved();
  if (!status.ok()) return status;
  for (Index page : held) stock_.unhold(page, stock_.pages()[page].tick);
  return {};
}

std::uint64_t Placer::ready_bytes(Index strip) {
  stock_.settle();
  const Block& tail = space_.blocks()[space_.segments()[strip].tail];
  if (!tail.is(BlockState::free)) return 0;
  const Slot first = tail.offset / kSlotUnits;
  Slot slot = first;
  while (slot < tail.end() / kSlotUnits && stock_.backed().count(slot, slot + 1) != 0) ++slot;
  return (slot - first) * kSlotBytes;
}

// ---- releasing ------------------------------------------------------------------------------------------

// Of the bytes that may stay reserved, those left to pages.
std::uint64_t Placer::keep_in_pages(std::uint64_t keep_bytes) const {
  return keep_bytes - std::min(keep_bytes, space_.plain_bytes());
}

Status Placer::trim(std::uint64_t keep_bytes, const Finished& finished, bool may_wait, const Want* want) {
  stock_.settle();
  const bool plain = may_wait || !backend_.info().release_waits;
  const bool spare = want != nullptr && space_.has_addresses(*want);
  if (Status status = stock_.release_free(keep_in_pages(keep_bytes), finished, ~std::uint32_t{0},
                                          spare ? &want->stream : nullptr);
      !status.ok())
    return status;
  for (Index s = 1; s < space_.segments().end(); ++s) {
    const Segment& segment = space_.segments()[s];
    if (segment.units == 0 || segment.in_use != 0 || segment.mappings != 0 || segment.growable != 0) continue;
    if (!segment.plain) {
      space_.drop(s);
    } else if (plain && reserved_bytes() > keep_bytes &&
               finished(segment.stream, space_.blocks()[segment.head].tick)) {
      if (Status status = space_.release_plain(s); !status.ok()) return status;
    }
  }
  return {};
}

Status Placer::release_free(std::uint64_t keep_bytes, const Finished& finished, std::uint32_t patience,
                            bool may_wait) {
  stock_.settle();
  if (Status status = stock_.release_free(keep_in_pages(keep_bytes), finished, patience, nullptr);
      !status.ok())
    return status;
  if (!may_wait && backend_.info().release_waits) return {};
  // A release changes the set of free segments, so each search begins anew, behind those still in use.
  for (std::pair<Units, Index> behind{0, 0}; reserved_bytes() > keep_bytes && patience != 0;) {
    const Index s = space_.free_plain_after(behind);
    if (s == 0) break;
    const Segment& segment = space_.segments()[s];
    behind = {segment.units, s};
    if (!finished(segment.stream, space_.blocks()[segment.head].tick)) {
      --patience;
    } else if (Status status = space_.release_plain(s); !status.ok()) {
      return status;
    }
  }
  return {};
}

Status Placer::release_plain_of(StreamNumber stream, const Finished& finished) {
  for (Index s = space_.first_segment(stream), next = 0; s != 0; s = next) {
    const Segment& segment = space_.segments()[s];
    next = segment.list_after;
    if (!segment.plain || segment.in_use != 0 || !finished(stream, space_.blocks()[segment.head].tick))
      continue;
    if (Status status = space_.release_plain(s); !status.ok()) return status;
  }
  return {};
}

Status Placer::release_all() {
  stock_.settle();
  const Status pages = stock_.release_all();
  const Status addresses = space_.release_all();
  return pages.ok() ? addresses : pages;
}

// ---- check ----------------------------------------------------------------------------------------------

// Blocks in use are on pages that they hold, and on no others.
bool Placer::check_pages(std::string* why) const {
  std::unordered_set<Index> held;  // mappings under blocks in use
  for (Index b = 1; b < space_.blocks().end(); ++b) {
    const Block& block = space_.blocks()[b];
    if (block.is(BlockState::none) || block.is(BlockState::free) || space_.segment(block).plain) continue;
    for (Slot slot = block.offset / kSlotUnits; slot * kSlotUnits < block.end(); ++slot) {
      const Index m = stock_.mapping_at(slot);
      if (m == 0) return wrong(why, "block in use over nothing", b);
      if (stock_.page_of(m).holder != m) return wrong(why, "block in use over a page it does not hold", b);
      if (stock_.page_of(m).owner != space_.segment(block).stream)
        return wrong(why, "page in use belongs to another stream", m);
      if (stock_.kept_at(slot) != nullptr) return wrong(why, "block in use over a kept page", b);
      held.insert(m);
    }
  }
  std::size_t holders = 0;
  for (Index p = 1; p < stock_.pages().end(); ++p) {
    const Page& page = stock_.pages()[p];
    if (!page.exists() || page.holder == 0) continue;
    const Slot slot = stock_.mappings()[page.holder].slot;
    if (stock_.kept_at(slot) == nullptr) {
      ++holders;
      continue;
    }
    const Block& block = space_.blocks()[space_.block_at(std::uint64_t{slot} * kSlotUnits)];
    if (!block.is(BlockState::free) || slot * kSlotUnits < block.offset ||
        (slot + page.slots()) * kSlotUnits > block.end())
      return wrong(why, "a kept page is in use", p);
  }
  return holders == held.size() || wrong(why, "a page is held by no block");
}

bool Placer::check(std::string* why) const {
  return space_.check(why) && stock_.check(why) && (!paged() || check_pages(why));
}

}  // namespace vram
