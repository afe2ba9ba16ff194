// The search for addresses that have their memory, and for those that cost the driver least to back.
#include "placement/search.hpp"

#include <algorithm>
#include <utility>

namespace vram {

namespace {

// How much the search for the cheapest place examines before it takes the best so far, so that its cost does
// not grow with the addresses that were ever used. Recorded jobs need up to 800.
constexpr std::uint64_t kMostWeighed = 2048;

// Free blocks examined for the place that takes least new memory.
constexpr int kThriftyCandidates = 32;

// Free blocks examined before the driver is called, by band.
constexpr int kCandidates[] = {8, 16, 16};

// Idle strips of one size examined for the one that has most of its pages.
constexpr int kMostStrips = 64;

constexpr std::uint64_t kNoMemory = ~std::uint64_t{0};

// Fills a gap from counts of pages as PageStock::fill_gap does from lists; returns what must be created.
std::uint32_t fill_by_count(std::uint32_t* counts, Slot slots, std::uint32_t room) {
  for (int size = kPageSizes - 1; size >= 0; --size) {
    const std::uint32_t used = std::min(counts[size], slots / kPageSlots[size]);
    counts[size] -= used;
    slots -= used * kPageSlots[size];
  }
  for (int size = 0; size < kPageSizes && slots > 0; ++size) {
    if (counts[size] == 0 || kPageSlots[size] > slots + room) continue;
    --counts[size];
    slots = 0;
  }
  return slots;
}

}  // namespace

PlaceSearch::PlaceSearch(const PlacementOptions& options, AddressSpace& space, const PageStock& stock)
    : options_(options), space_(space), stock_(stock), counted_(stock.pages().capacity()) {}

// ---- addresses that have their memory ---------------------------------------------------------------------

Index PlaceSearch::tightest(const Want& want) const {
  const int walk = options_.best_fit ? FreeIndex::kWalk : 1;
  const auto find = [&](Band band) {
    return space_.free_blocks(want.stream, band).find(space_.blocks(), want.padded(), walk);
  };
  const Index block = find(want.band);
  return block == 0 && options_.bands_share() && want.heap == nullptr
             ? find(want.band == kSmall ? kLarge : kSmall)
             : block;
}

// Bytes of pages that a block at the spot would take, beyond those that its neighbours hold already; or
// kNoMemory where a page is neither held by a neighbour nor free for the stream.
inline std::uint64_t PlaceSearch::newly_held(const Spot& spot, const Want& want) {
  const Block& block = space_.blocks()[spot.block];
  const Slot first = spot.offset / kSlotUnits;
  const Slot last = (spot.offset + want.units - 1) / kSlotUnits;
  std::uint64_t bytes = 0;
  ++survey_;
  for (Slot slot = first; slot <= last;) {
    const Index m = stock_.mapping_at(slot);
    if (m == 0) return kNoMemory;
    const Mapping& mapping = stock_.mappings()[m];
    const Page& page = stock_.pages()[mapping.page];
    if (page.blocked()) return kNoMemory;
    Slot past = mapping.slot + page.slots();
    if (page.holder != m) {
      if (!counts_on(m, want.stream)) return kNoMemory;
      // A page that is kept in the same range cannot serve twice.
      if (const Slot there = stock_.mappings()[page.holder].slot;
          page.holder != 0 && there <= last && there + page.slots() > first)
        return kNoMemory;
      bytes += page.bytes();
    } else if (stock_.kept_under(block, mapping)) {
      const PageStock::Kept* const run =
          last - mapping.slot > PageStock::kFewSlots ? stock_.kept_at(slot) : nullptr;
      if (run != nullptr) {
        const Mapping& end = stock_.mappings()[stock_.mapping_at(std::min(last, run->past - 1))];
        past = end.slot + stock_.pages()[end.page].slots();
      }
      bytes += (past - mapping.slot) * kSlotBytes;
    }
    slot = past;
  }
  return bytes;
}

// Pages that were freed just now, behind addresses at a spot whose pages serve other blocks by now; no place
// if they do not suffice.
Spot PlaceSearch::behind_lost(const Spot& spot, const Want& want) const {
  constexpr Slot kFar = 256;  // four words of bits: the look costs the same however long the block is
  if (spot.block == 0 || want.align > kSlotBytes) return {};
  const Slot front = spot.offset / kSlotUnits;
  const Slot past = std::min(front + kFar, (space_.blocks()[spot.block].end() - 1) / kSlotUnits + 1);
  const auto slot = static_cast<Slot>(stock_.backed().first_from(front, past));
  if (slot == front || slot == past) return {};
  const std::uint64_t offset = std::uint64_t{slot} * kSlotUnits;
  for (Slot at = slot; at * std::uint64_t{kSlotUnits} < offset + want.units;) {
    const PageStock::Kept* const run = stock_.kept_at(at);
    if (run == nullptr) return {};
    at = run->past;
  }
  return {spot.block, static_cast<Units>(offset)};
}

// Makes a place the best one if it has memory, and of two in blocks of equal size takes less, or is in front.
void PlaceSearch::consider(const Spot& spot, const Want& want, Fit& best) {
  const Units units = space_.blocks()[spot.block].units;
  const std::uint64_t bytes = newly_held(spot, want);
  if (bytes == kNoMemory) return;
  if (units == best.units && (bytes > best.bytes || (bytes == best.bytes && spot.offset >= best.spot.offset)))
    return;
  best = {{spot.block, spot.offset, bytes == 0}, units, bytes};
}

Spot PlaceSearch::fit(const Want& want) {
  if (!options_.pages || want.heap != nullptr) return space_.first_fit(tightest(want), want);
  if (want.strip != 0) {
    const Spot spot = space_.strip_spot(want);
    return spot.block == 0 || newly_held(spot, want) == kNoMemory ? Spot{} : spot;
  }
  Fit best;
  int left = kCandidates[want.band];
  const auto visit = [&](Index i) {
    const Block& block = space_.blocks()[i];
    if (block.units <= best.units) {
      if (const Spot front = space_.first_fit(i, want); front.block != 0) {
        consider(front, want, best);
        if (best.spot.block != i)
          if (const Spot behind = behind_lost(front, want); behind.block != 0) consider(behind, want, best);
      }
      // At the block's other end it may share a page with the next neighbour. Blocks of the middle band keep
      // to one end: where they are replaced by slightly larger ones, again and again, theirs stay neighbours.
      if (want.band == kLarge && want.align <= kUnit && block.units > want.units)
        consider({i, block.end() - want.units}, want, best);
    }
    return --left == 0;
  };
  space_.free_blocks(want.stream, want.band).candidates(space_.blocks(), want.padded(), visit, [&] {
    return best.spot.block != 0;
  });
  return best.spot;
}

// ---- what a range has and lacks -------------------------------------------------------------------------

// Whether the mapping's page is free for the stream. A page that is mapped twice in the range under survey
// serves only the first of the two.
bool PlaceSearch::counts_on(Index m, StreamNumber stream) {
  const Mapping& mapping = stock_.mappings()[m];
  const Page& page = stock_.pages()[mapping.page];
  if (page.owner != stream || !mapping.usable || !stock_.idle(page)) return false;
  if (page.mappings == m && mapping.next == 0) return true;
  return std::exchange(counted_[mapping.page].survey, survey_) != survey_;
}

// Whole slots of the same free block behind the request that have no page either, as far as they matter.
Slot PlaceSearch::room_behind(const Block& block, Slot past, Index last_lost) const {
  const std::uint64_t enough = std::max<std::uint64_t>(kMostCreatedSlots, options_.segment_size / kSlotBytes);
  Slot slot = past;
  while ((slot + 1) * std::uint64_t{kSlotUnits} <= block.end() && slot - past < enough &&
         (stock_.mapping_at(slot) == 0 || stock_.mapping_at(slot) == last_lost))
    ++slot;
  return slot - past;
}

Survey PlaceSearch::survey(const Spot& spot, Units units) {
  ++survey_;
  Survey result;
  const Block& block = space_.blocks()[spot.block];
  const StreamNumber stream = space_.segment(block).stream;
  const Slot first = spot.offset / kSlotUnits;
  const Slot past = (spot.offset + units - 1) / kSlotUnits + 1;
  std::uint32_t open = 0;  // slots of the gap that ends at `slot`
  const auto close = [&](Slot slot) {
    if (open != 0) result.gaps.push_back({slot - open, open, 0});
    open = 0;
  };
  for (Slot slot = first; slot < past;) {
    const Index m = stock_.mapping_at(slot);
    if (m == 0) {
      ++open;
      ++slot;
      continue;
    }
    const Mapping& mapping = stock_.mappings()[m];
    const Page& page = stock_.pages()[mapping.page];
    const Slot next = std::min(past, mapping.slot + page.slots());
    result.suspended = result.suspended || page.blocked();
    if (page.holder == m) {
      close(slot);
    } else if (counts_on(m, stream)) {
      close(slot);
      result.own.push_back(m);
    } else {
      result.lost.push_back(m);
      open += next - slot;
    }
    slot = next;
  }
  close(past);
  if (!result.gaps.empty() && result.gaps.back().slot + result.gaps.back().slots == past)
    result.gaps.back().room = room_behind(block, past, result.lost.empty() ? 0 : result.lost.back());
  return result;
}

std::uint32_t PlaceSearch::lacking_slots(StreamNumber stream, const Survey& result) const {
  std::uint32_t counts[kPageSizes];
  for (int size = 0; size < kPageSizes; ++size) counts[size] = stock_.free_pages(stream, size);
  for (Index m : result.own) --counts[stock_.page_of(m).size];
  std::uint32_t lacking = 0;
  for (const Gap& gap : result.gaps) lacking += fill_by_count(counts, gap.slots, gap.room);
  return lacking;
}

// ---- the cheapest place ---------------------------------------------------------------------------------

// A window of slots that slides over the addresses of one free block and knows what it costs the driver to
// back it. A page to be created costs kMap, spread over its slots; a lost mapping costs more because it must
// be unmapped first, and one that queued work may still use, or that is suspended, cannot be replaced at all.
// A page that is mapped twice under the window serves only the first of the two; the other counts as lost.
class PlaceSearch::Window {
 public:
  static constexpr std::int64_t kImpossible = std::int64_t{1} << 40;
  static constexpr std::int64_t kMap = 160;  // divisible by the slots of every page
  static constexpr std::int64_t kLost = 256;

  // Over slots below `past`, where one without a page costs `fresh`.
  Window(PlaceSearch& search, const Want& want, Tick passed, Slot past, std::int64_t fresh)
      : search_(search),
        pieces_(search.pieces_),
        stream_(want.stream),
        passed_(passed),
        past_(past),
        fresh_(fresh) {}

  // Moves on to [from, to); neither end goes back. Returns the cost.
  std::int64_t move(Slot from, Slot to) {
    if (from >= to_) begin(from);
    while (from_ < from) leave(from);
    while (to_ < to) enter(to);
    return cost_;
  }
  // How far it may move, its length kept, without passing a place where the cost stops falling, or a possible
  // one.
  std::uint32_t stride() const {
    if (cost_ >= kImpossible)
      for (std::uint32_t i = right_; i > left_; --i)
        if (i < pieces_.size() && pieces_[i].cost >= kImpossible && pieces_[i - 1].past < to_)
          return pieces_[i].past - from_;
    const std::uint32_t least = pieces_[left_].past - from_;
    return to_ < past_ ? std::min(least, pieces_[right_].past - to_) : least;
  }

 private:
  void begin(Slot slot) {
    ++search_.survey_;
    pieces_.clear();
    from_ = to_ = slot;
    left_ = right_ = 0;
    cost_ = 0;
    grow();
  }
  // pre: from < to_
  void leave(Slot from) {
    const Piece& piece = pieces_[left_];
    const Slot next = std::min(from, piece.past);
    cost_ -= (next - from_) * piece.cost;
    from_ = next;
    if (from_ < piece.past) return;
    cost_ -= piece.expires;
    ++left_;
  }
  void enter(Slot to) {
    const Piece& piece = pieces_[right_];
    const Slot next = std::min(to, piece.past);
    const std::int64_t slots = next - to_;
    cost_ += slots * piece.cost;
    if (piece.earlier != kNowhere && piece.earlier >= left_) {
      cost_ += slots * piece.again;
      pieces_[piece.earlier].expires += slots * piece.again;
    }
    to_ = next;
    if (to_ == piece.past && ++right_ == pieces_.size()) grow();
  }
  // Looks at the next mapping, or the next slots without one.
  void grow() {
    Slot slot = pieces_.empty() ? from_ : pieces_.back().past;
    if (slot >= past_) return;
    ++search_.weighed_;
    const Index m = search_.stock_.mapping_at(slot);
    if (m == 0) {
      while (slot < past_ && search_.stock_.mapping_at(slot) == 0) ++slot;
      pieces_.push_back({slot, kNowhere, fresh_, 0, 0});
      return;
    }
    const Mapping& mapping = search_.stock_.mappings()[m];
    const Page& page = search_.stock_.pages()[mapping.page];
    Counted& counted = search_.counted_[mapping.page];
    const Slot next = std::min(past_, mapping.slot + page.slots());
    const bool stays = mapping.tick > passed_ || page.blocked();
    const std::int64_t lost = stays ? kImpossible : kLost / page.slots();
    const bool ours = page.free() && page.owner == stream_ && mapping.usable;
    const bool again = ours && counted.survey == search_.survey_;
    if ((page.holder == m && !page.blocked()) || ours)
      pieces_.push_back({next, again ? counted.piece : kNowhere, 0, lost, 0});
    else
      pieces_.push_back({next, kNowhere, lost, 0, 0});
    counted = {search_.survey_, static_cast<std::uint32_t>(pieces_.size() - 1)};
  }

  PlaceSearch& search_;
  std::vector<Piece>& pieces_;
  StreamNumber stream_;
  Tick passed_;
  Slot past_;
  std::int64_t fresh_;
  Slot from_ = 0;  // the window is [from_, to_) …
  Slot to_ = 0;
  std::uint32_t left_ = 0;  // … and its ends lie in these pieces
  std::uint32_t right_ = 0;
  std::int64_t cost_ = 0;
};

// What a slot costs that has no page yet.
std::int64_t PlaceSearch::fresh_cost(const Want& want) const {
  return Window::kMap / kPageSlots[stock_.size_to_create(want.units / kSlotUnits + 1, want.bytes())];
}

// How far it is from `slot` until `count` slots are passed that are not lost, or everything up to `past`.
std::uint32_t PlaceSearch::slots_until(Slot slot, Slot past, std::uint64_t count) const {
  const std::uint32_t start = slot;
  while (slot < past) {
    const Slot next = std::min(past, (slot / 64 + 1) * 64);
    std::uint64_t kept = ~stock_.mapped().word(slot) | stock_.backed().word(slot);
    kept = kept >> (slot % 64) << (64 - (next - slot)) >> (64 - (next - slot));
    const auto ones = static_cast<std::uint64_t>(std::popcount(kept));
    if (ones >= count) {
      for (; count > 1; --count) kept &= kept - 1;
      return slot + static_cast<std::uint32_t>(std::countr_zero(kept)) + 1 - start;
    }
    count -= ones;
    slot = next;
  }
  return past - start + 1;
}

// Slides the request over the addresses of a free block and keeps the place where the driver has least to do,
// if that is less than *least. Between two strides of the window the cost rises or falls evenly, so the ends
// are enough; and where too few slots have their page it moves on until there can be enough of them.
void PlaceSearch::weigh(Index i, const Want& want, Tick passed, std::uint64_t until, Spot* best,
                        std::int64_t* least) {
  const Block& block = space_.blocks()[i];
  const Spot at_front = space_.first_fit(i, want);
  if (at_front.block == 0) return;
  const Units start = at_front.offset;
  const Slot first = start / kSlotUnits;
  const Slot touched = (space_.segment(block).touched + kSlotUnits - 1) / kSlotUnits;
  const Slot past =
      std::min((block.end() - 1) / kSlotUnits + 1, std::max(first, touched) + want.units / kSlotUnits + 2);
  const std::int64_t fresh = fresh_cost(want);
  const std::int64_t lost = Window::kLost / kPageSlots[stock_.largest_page()];
  const std::int64_t most_expensive = std::max(fresh, lost);
  Window window(*this, want, passed, past, fresh);
  // Returns how many slots further a better place may be.
  const auto consider = [&](Units offset) -> std::uint64_t {
    const Slot from = offset / kSlotUnits;
    const Slot to = (offset + want.units - 1) / kSlotUnits + 1;
    if (to > past) return 1;
    ++weighed_;
    const std::int64_t mapped = stock_.mapped().count(from, to);
    const std::int64_t bound =
        (mapped - stock_.backed().count(from, to)) * lost + (to - from - mapped) * fresh;
    if (bound >= *least)
      return slots_until(to, past, static_cast<std::uint64_t>((bound - *least) / most_expensive + 1));
    const std::int64_t cost = window.move(from, to);
    if (cost < *least) {
      *best = {i, offset};
      *least = cost;
    }
    return window.stride();
  };
  consider(start);
  const std::uint64_t align = std::max<std::uint64_t>(want.align, kSlotBytes);
  const std::uint64_t step = align / kUnit;
  const std::uint64_t slots = (want.units - 1) / kSlotUnits + 1;
  const std::uint64_t end = std::min<std::uint64_t>(block.end() - want.units, (past - slots) * kSlotUnits);
  const std::uint64_t next = space_.aligned_up(block, start, align);
  const auto enough = [&] { return *least == 0 || (weighed_ >= until && best->block != 0); };
  for (std::uint64_t offset = next > start ? next : start + step; offset <= end && !enough();) {
    const std::uint64_t stride = consider(static_cast<Units>(offset)) * kSlotUnits;
    const std::uint64_t last = offset + (end - offset) / step * step;
    offset = offset < last ? std::min(offset + (align == kSlotBytes ? stride : step), last) : end + 1;
  }
  if (want.align <= kUnit && !enough()) consider(block.end() - want.units);
}

FoundPlace& PlaceSearch::cheapest(const Want& want, Tick passed, FoundPlace& found) {
  if (found.changes == changes() && found.passed == passed && found.band == want.band) return found;
  found = FoundPlace();
  found.spot = cheapest_spot(want, passed, &found.plan, &found.why);
  if (found.spot.block != 0) found.lacking = lacking_slots(want.stream, found.plan);
  found.band = want.band;
  found.passed = passed;
  found.changes = changes();
  return found;
}

// The place for the request that costs the driver least, and what it takes. Where that is new memory,
// addresses that were never used may take less of it: no gap there is too short for a free page.
Spot PlaceSearch::cheapest_spot(const Want& want, Tick passed, Survey* plan, Status* why) {
  if (want.strip != 0) {
    const Spot spot = space_.strip_spot(want);
    if (spot.block == 0) return {};
    *plan = survey(spot, want.units);
    return usable(*plan, passed) ? spot : Spot{};
  }
  Spot best;
  // Where addresses were never used, the request costs no more than new pages for all of its slots.
  std::int64_t least = Window::kImpossible;
  const Spot untouched = space_.untouched_spot(want);
  if (untouched.block != 0) least = (want.units / kSlotUnits + 2) * fresh_cost(want) + 1;
  const std::uint64_t until = weighed_ + kMostWeighed;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto visit = [&](Index i) {
      weigh(i, want, passed, until, &best, &least);
      return least == 0 || (weighed_ >= until && (best.block != 0 || untouched.block != 0));
    };
    space_.free_blocks(want.stream, want.band).candidates(space_.blocks(), want.padded(), visit, [] {
      return false;
    });
    if (best.block == 0) best = untouched;
    if (best.block != 0 || !(*why = space_.add_strip(want)).ok()) break;
  }
  if (best.block == 0) return best;
  *plan = survey(best, want.units);
  const std::uint32_t lacking = lacking_slots(want.stream, *plan);
  if (lacking == 0 || plan->gaps.size() == 1) return best;
  const Spot fresh = space_.untouched_spot(want);
  if (fresh.block == 0) return best;
  Survey other = survey(fresh, want.units);
  if (lacking_slots(want.stream, other) >= lacking) return best;
  *plan = std::move(other);
  return fresh;
}

// Whether the addresses may be mapped again: no queued work uses those that lost their page.
bool PlaceSearch::usable(const Survey& plan, Tick passed) const {
  return !plan.suspended && std::none_of(plan.lost.begin(), plan.lost.end(),
                                         [&](Index m) { return stock_.mappings()[m].tick > passed; });
}

bool PlaceSearch::save_memory(const Want& want, Tick passed, FoundPlace& place) {
  const std::uint32_t before = place.lacking;
  int looked = 0;
  const auto consider = [&](const Spot& spot) {
    if (spot.block == 0) return;
    Survey other = survey(spot, want.units);
    const std::uint32_t needed = lacking_slots(want.stream, other);
    if (needed >= place.lacking || !usable(other, passed)) return;
    place.lacking = needed;
    place.spot = spot;
    place.plan = std::move(other);
  };
  const auto visit = [&](Index i) {
    const Block& block = space_.blocks()[i];
    consider(space_.first_fit(i, want));
    if (want.align <= kUnit && block.end() <= space_.segment(block).touched)
      consider({i, block.end() - want.units});
    return place.lacking == 0 || ++looked >= kThriftyCandidates;
  };
  space_.free_blocks(want.stream, want.band).candidates(space_.blocks(), want.padded(), visit, [] {
    return false;
  });
  return place.lacking < before;
}

Index PlaceSearch::idle_strip(StreamNumber stream, Units units, Tick passed) const {
  Index best = 0;
  std::uint32_t most = 0;
  int looked = 0;
  const auto visit = [&](Index i) {
    const Block& block = space_.blocks()[i];
    const Segment& segment = space_.segment(block);
    if (segment.growable != 0 || block.units != segment.units || block.tick > passed) return false;
    const std::uint32_t backed =
        stock_.backed().count(segment.first / kSlotUnits, segment.end() / kSlotUnits);
    if (best == 0 || backed > most) {
      best = block.segment;
      most = backed;
    }
    return ++looked >= kMostStrips;
  };
  space_.free_blocks(stream, kGrowing).candidates(space_.blocks(), units, visit, [&] { return best != 0; });
  return best;
}

}  // namespace vram
