// Where a request goes that finds no free addresses with their memory: the place that costs the driver least
// or, where the pool must grow for it, the one that takes least new memory. Part of Segments.
#include <algorithm>

#include "placement/segments.hpp"

namespace vram {

namespace {

// How much the search for the cheapest place looks at before it settles for the best so far, so that its cost
// does not grow with the addresses that were ever used. Recorded jobs need up to 800.
constexpr std::uint64_t kMostWeighed = 2048;

// Free blocks looked at for the place that takes least new memory.
constexpr int kThriftyCandidates = 32;

}  // namespace

// A window of slots that slides over the addresses of one free block and knows what it costs the driver to
// back it. A page to be made costs kMap, spread over its slots; a lost mapping costs more because it must be
// unmapped first, and one that queued work may still use, or that is suspended, cannot be had at all. A page
// that is mapped twice under the window serves only the first of the two; the other is as good as lost.
class Segments::Window {
 public:
  static constexpr std::int64_t kImpossible = std::int64_t{1} << 40;
  static constexpr std::int64_t kMap = 160;  // divisible by the slots of every page
  static constexpr std::int64_t kLost = 256;

  // Over slots below `past`, where one without a page costs `fresh`.
  Window(Segments& segments, const Want& want, Tick passed, std::uint32_t past, std::int64_t fresh)
      : segments_(segments),
        pieces_(segments.pieces_),
        stream_(want.stream),
        passed_(passed),
        past_(past),
        fresh_(fresh) {}

  // Moves on to [from, to); neither end goes back. Returns the cost.
  std::int64_t move(std::uint32_t from, std::uint32_t to) {
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
  void begin(std::uint32_t slot) {
    ++segments_.survey_;
    pieces_.clear();
    from_ = to_ = slot;
    left_ = right_ = 0;
    cost_ = 0;
    grow();
  }
  // pre: from < to_
  void leave(std::uint32_t from) {
    const Piece& piece = pieces_[left_];
    const std::uint32_t next = std::min(from, piece.past);
    cost_ -= (next - from_) * piece.cost;
    from_ = next;
    if (from_ < piece.past) return;
    cost_ -= piece.expires;
    ++left_;
  }
  void enter(std::uint32_t to) {
    const Piece& piece = pieces_[right_];
    const std::uint32_t next = std::min(to, piece.past);
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
    std::uint32_t slot = pieces_.empty() ? from_ : pieces_.back().past;
    if (slot >= past_) return;
    ++segments_.weighed_;
    const Index m = segments_.slots_[slot];
    if (m == 0) {
      while (slot < past_ && segments_.slots_[slot] == 0) ++slot;
      pieces_.push_back({slot, kNowhere, fresh_, 0, 0});
      return;
    }
    const Mapping& mapping = segments_.mappings_[m];
    Page& page = segments_.pages_[mapping.page];
    const std::uint32_t next = std::min(past_, mapping.slot + page.slots());
    const bool stays = mapping.tick > passed_ || page.suspended;
    const std::int64_t lost = stays ? kImpossible : kLost / page.slots();
    const bool ours = page.free() && page.owner == stream_ && mapping.usable;
    const bool again = ours && page.counted == segments_.survey_;
    if ((page.holder == m && !page.suspended) || ours)
      pieces_.push_back({next, again ? page.counted_at : kNowhere, 0, lost, 0});
    else
      pieces_.push_back({next, kNowhere, lost, 0, 0});
    page.counted = segments_.survey_;
    page.counted_at = static_cast<std::uint32_t>(pieces_.size() - 1);
  }

  Segments& segments_;
  std::vector<Piece>& pieces_;
  std::uint16_t stream_;
  Tick passed_;
  std::uint32_t past_;
  std::int64_t fresh_;
  std::uint32_t from_ = 0;  // the window is [from_, to_) …
  std::uint32_t to_ = 0;
  std::uint32_t left_ = 0;  // … and its ends lie in these pieces
  std::uint32_t right_ = 0;
  std::int64_t cost_ = 0;
};

// What a slot costs that has no page yet.
std::int64_t Segments::fresh_cost(const Want& want) const {
  return Window::kMap /
         kPageSlots[size_to_create(want.units / kSlotUnits + 1, std::uint64_t{want.units} * kUnit)];
}

// How far it is from `slot` until `count` slots are passed that are not lost, or everything up to `past`.
std::uint32_t Segments::slots_until(std::uint32_t slot, std::uint32_t past, std::uint64_t count) const {
  const std::uint32_t start = slot;
  while (slot < past) {
    const std::uint32_t next = std::min(past, (slot / 64 + 1) * 64);
    std::uint64_t kept = ~mapped_.word(slot) | backed_.word(slot);
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
void Segments::weigh(Index i, const Want& want, Tick passed, std::uint64_t until, Spot* best,
                     std::int64_t* least) {
  const Block& block = blocks_[i];
  const Spot at_front = first_fit(i, want);
  if (at_front.block == 0) return;
  const Units start = at_front.offset;
  const std::uint32_t first = start / kSlotUnits;
  const std::uint32_t touched = (segments_[block.segment].touched + kSlotUnits - 1) / kSlotUnits;
  const std::uint32_t past =
      std::min((block.end() - 1) / kSlotUnits + 1, std::max(first, touched) + want.units / kSlotUnits + 2);
  const std::int64_t fresh = fresh_cost(want);
  const std::int64_t lost = Window::kLost / kPageSlots[largest_page_];
  const std::int64_t dearest = std::max(fresh, lost);
  Window window(*this, want, passed, past, fresh);
  // Returns how many slots further a better place may be.
  const auto consider = [&](Units offset) -> std::uint64_t {
    const std::uint32_t from = offset / kSlotUnits;
    const std::uint32_t to = (offset + want.units - 1) / kSlotUnits + 1;
    if (to > past) return 1;
    ++weighed_;
    const std::int64_t mapped = mapped_.count(from, to);
    const std::int64_t bound = (mapped - backed_.count(from, to)) * lost + (to - from - mapped) * fresh;
    if (bound >= *least)
      return slots_until(to, past, static_cast<std::uint64_t>((bound - *least) / dearest + 1));
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
  const std::uint64_t next = aligned_up(block, start, align);
  const auto enough = [&] { return *least == 0 || (weighed_ >= until && best->block != 0); };
  for (std::uint64_t offset = next > start ? next : start + step; offset <= end && !enough();) {
    const std::uint64_t stride = consider(static_cast<Units>(offset)) * kSlotUnits;
    const std::uint64_t last = offset + (end - offset) / step * step;
    offset = offset < last ? std::min(offset + (align == kSlotBytes ? stride : step), last) : end + 1;
  }
  if (want.align <= kUnit && !enough()) consider(block.end() - want.units);
}

// The cheapest place, from `found` if nothing has changed since it was found.
FoundPlace& Segments::cheapest(const Want& want, Tick passed, FoundPlace& found) {
  if (found.changes == changes_ && found.passed == passed && found.band == want.band) return found;
  found = FoundPlace();
  found.spot = cheapest_spot(want, passed, &found.plan, &found.why);
  if (found.spot.block != 0) found.lacking = lacking_slots(want.stream, found.plan);
  found.band = want.band;
  found.passed = passed;
  found.changes = changes_;
  return found;
}

// The place for the request that costs the driver least, and what it takes. Where that is new memory,
// addresses that were never used may take less of it: no gap there is too short for a free page.
Spot Segments::cheapest_spot(const Want& want, Tick passed, Survey* plan, Status* why) {
  if (want.strip != 0) {
    const Spot spot = strip_spot(want);
    if (spot.block == 0) return {};
    *plan = survey(spot, want.units);
    return usable(*plan, passed) ? spot : Spot{};
  }
  Spot best;
  // Where addresses were never used, the request costs no more than new pages for all of its slots.
  std::int64_t least = Window::kImpossible;
  const Spot untouched = untouched_spot(want);
  if (untouched.block != 0) least = (want.units / kSlotUnits + 2) * fresh_cost(want) + 1;
  const std::uint64_t until = weighed_ + kMostWeighed;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto visit = [&](Index i) {
      weigh(i, want, passed, until, &best, &least);
      return least == 0 || (weighed_ >= until && (best.block != 0 || untouched.block != 0));
    };
    free_blocks(want.stream, want.band).candidates(blocks_, want.padded(), visit, [] { return false; });
    if (best.block == 0) best = untouched;
    if (best.block != 0 || !(*why = new_strip(want)).ok()) break;
  }
  if (best.block == 0) return best;
  *plan = survey(best, want.units);
  const std::uint32_t lacking = lacking_slots(want.stream, *plan);
  if (lacking == 0 || plan->gaps.size() == 1) return best;
  const Spot fresh = untouched_spot(want);
  if (fresh.block == 0) return best;
  Survey other = survey(fresh, want.units);
  if (lacking_slots(want.stream, other) >= lacking) return best;
  *plan = std::move(other);
  return fresh;
}

// A place behind everything that was ever mapped in some strip, if one has room.
Spot Segments::untouched_spot(const Want& want) const {
  for (Index s = shelf(want.stream).segments; s != 0; s = segments_[s].list_after, ++steps_) {
    const Segment& segment = segments_[s];
    if (segment.plain || segment.band != want.band || segment.touched == segment.end()) continue;
    const Block& tail = blocks_[segment.tail];
    if (!tail.is(BlockState::free)) continue;
    const Spot spot = first_fit(segment.tail, std::max(segment.touched, tail.offset), want);
    if (spot.block != 0) return spot;
  }
  return {};
}

// Whether the addresses may be mapped anew: no queued work uses those that lost their page.
bool Segments::usable(const Survey& plan, Tick passed) const {
  return !plan.suspended && std::none_of(plan.lost.begin(), plan.lost.end(),
                                         [&](Index m) { return mappings_[m].tick > passed; });
}

// Looks for an end of a free block that needs fewer new slots than the place; true: it is the place now.
bool Segments::save_memory(const Want& want, Tick passed, FoundPlace& place) {
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
    const Block& block = blocks_[i];
    consider(first_fit(i, want));
    if (want.align <= kUnit && block.end() <= segments_[block.segment].touched)
      consider({i, block.end() - want.units});
    return place.lacking == 0 || ++looked >= kThriftyCandidates;
  };
  free_blocks(want.stream, want.band).candidates(blocks_, want.padded(), visit, [] { return false; });
  return place.lacking < before;
}

}  // namespace vram
