// Pages under addresses: which ones a range has, which it lacks, where the missing ones come from and how
// they go back to the driver. Part of Segments; where a request goes is in places.cpp, blocks and segments
// themselves are in segments.cpp.
#include <algorithm>

#include "placement/segments.hpp"

namespace vram {

namespace {

// When larger pages are made. A page costs the driver about the same whatever its size, and strands what its
// holders leave of it, which matters the less the more the pool holds. Chosen by a sweep over four recorded
// jobs, those of benchmarks/jobs and variants of their sizes, among those under which the four keep to 1 % of
// waste and 2 % of driver time; their variants waste 0.7 to 1.1 % on average.
struct PageRule {
  int size;               // index into kPageSlots, for …
  std::uint64_t request;  // … requests of this many bytes or more, where …
  std::uint64_t held;     // … the pool holds this many
};
constexpr std::uint64_t kMiddlePagesFrom = 2200 * kMiB;  // held: pages of 8 MiB, and whole ones, for all
constexpr PageRule kPageRules[] = {
    {1, 0, kMiddlePagesFrom},
    {1, 16 * kMiB, 1500 * kMiB},
    {1, 128 * kMiB, 0},
    {2, 1792 * kMiB, 0},  // few other blocks ever share them
    // The recordings do not get there; with their sizes doubled and quadrupled they waste up to 1 % and spend
    // 3 to 45 % less time in the driver than without.
    {2, 0, 14 * kGiB},
};

// Fills a gap from counts of pages as fill_gap does from lists; what remains must be created.
std::uint32_t fill_by_count(std::uint32_t* counts, std::uint32_t slots, std::uint32_t room) {
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

// ---- free pages ----------------------------------------------------------------------------------------

void Segments::list_push(Index i) {
  ++changes_;
  Page& page = pages_[i];
  Shelf& owner = shelf(page.owner);
  PageList& list = owner.pages[page.size];
  page.list_after = 0;
  page.list_before = list.tail;
  (list.tail != 0 ? pages_[list.tail].list_after : list.head) = i;
  list.tail = i;
  ++list.count;
  if (owner.free_page_bytes == 0) free_page_owners_.add(page.owner);
  owner.free_page_bytes += page.bytes();
  free_page_bytes_ += page.bytes();
}

void Segments::list_remove(Index i) {
  ++changes_;
  Page& page = pages_[i];
  Shelf& owner = shelf(page.owner);
  PageList& list = owner.pages[page.size];
  (page.list_before != 0 ? pages_[page.list_before].list_after : list.head) = page.list_after;
  (page.list_after != 0 ? pages_[page.list_after].list_before : list.tail) = page.list_before;
  --list.count;
  owner.free_page_bytes -= page.bytes();
  free_page_bytes_ -= page.bytes();
  if (owner.free_page_bytes == 0) free_page_owners_.remove(page.owner);
}

// A page or plain segment more, or one less, belongs to the stream.
void Segments::own(std::uint16_t stream, bool more) {
  Shelf& owner = shelf(stream);
  owner.owned += more ? 1 : -1;
  if (owner.owned == 0) owners_.remove(stream);
  if (owner.owned == 1) owners_.add(stream);
}

void Segments::hold(Index page, Index mapping) {
  list_remove(page);
  pages_[page].holder = mapping;
  note_aliases(page);
}

void Segments::let_go(Index page, Tick tick) {
  pages_[page].holder = 0;
  pages_[page].tick = tick;
  list_push(page);
  note_aliases(page);
}

bool Segments::backs(Index m) const {
  const Mapping& mapping = mappings_[m];
  const Page& page = pages_[mapping.page];
  return (page.holder == m && !page.suspended) ||
         (page.free() && mapping.usable && page.owner == segments_[mapping.segment].stream);
}

// After the holder of a page has changed. Where it is held it is backed before and after, so only a page that
// is mapped elsewhere, too, is worth a look.
void Segments::note_aliases(Index i) {
  if (mappings_[pages_[i].mappings].next != 0) note_backed(i);
}

// After the owner of a page has changed, or its holder.
void Segments::note_backed(Index i) {
  ++changes_;
  const std::uint32_t slots = pages_[i].slots();
  for (Index m = pages_[i].mappings; m != 0; m = mappings_[m].next)
    backed_.set(mappings_[m].slot, mappings_[m].slot + slots, backs(m));
}

void Segments::transfer(Index i, std::uint16_t to, Tick tick) {
  list_remove(i);
  own(pages_[i].owner, false);
  own(to, true);
  pages_[i].owner = to;
  pages_[i].tick = tick;
  list_push(i);
  note_backed(i);
}

// ---- what a range has and lacks ---------------------------------------------------------------------

// Whether the mapping's page is free for the stream. A page that is mapped twice in the range under survey
// serves only the first of the two.
bool Segments::counts_on(Index m, std::uint16_t stream) {
  Page& page = pages_[mappings_[m].page];
  if (!page.free() || page.owner != stream || page.counted == survey_ || !mappings_[m].usable) return false;
  page.counted = survey_;
  return true;
}

Survey Segments::survey(const Spot& spot, Units units) {
  ++survey_;
  Survey result;
  const Block& block = blocks_[spot.block];
  const std::uint16_t stream = segments_[block.segment].stream;
  const std::uint32_t first = spot.offset / kSlotUnits;
  const std::uint32_t past = (spot.offset + units - 1) / kSlotUnits + 1;
  std::uint32_t open = 0;  // slots of the gap that ends at `slot`
  const auto close = [&](std::uint32_t slot) {
    if (open != 0) result.gaps.push_back({slot - open, open, 0});
    open = 0;
  };
  for (std::uint32_t slot = first; slot < past;) {
    const Index m = slots_[slot];
    if (m == 0) {
      ++open;
      ++slot;
      continue;
    }
    const Mapping& mapping = mappings_[m];
    const Page& page = pages_[mapping.page];
    const std::uint32_t next = std::min(past, mapping.slot + page.slots());
    result.suspended = result.suspended || page.suspended;
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
  if (!result.gaps.empty() && result.gaps.back().slot + result.gaps.back().slots == past) {
    // Whole slots of the same free block behind the request that have no page either, as far as they matter.
    const Index last_lost = result.lost.empty() ? 0 : result.lost.back();
    const std::uint64_t enough =
        std::max<std::uint64_t>(kPageSlots[kPageSizes - 1], options_.segment_size / kSlotBytes);
    std::uint32_t slot = past;
    while ((slot + 1) * std::uint64_t{kSlotUnits} <= block.end() && slot - past < enough &&
           (slots_[slot] == 0 || slots_[slot] == last_lost))
      ++slot;
    result.gaps.back().room = slot - past;
  }
  return result;
}

std::uint32_t Segments::lacking_slots(std::uint16_t stream, const Survey& result) const {
  std::uint32_t counts[kPageSizes];
  for (int size = 0; size < kPageSizes; ++size) counts[size] = shelf(stream).pages[size].count;
  for (Index m : result.own) --counts[pages_[mappings_[m].page].size];
  std::uint32_t lacking = 0;
  for (const Gap& gap : result.gaps) lacking += fill_by_count(counts, gap.slots, gap.room);
  return lacking;
}

std::uint64_t Segments::lacking(const Want& want, Tick passed, FoundPlace& found) {
  const FoundPlace& place = cheapest(want, passed, found);
  return place.spot.block == 0 ? std::uint64_t{want.units} * kUnit : place.lacking * kSlotBytes;
}

// ---- backing a range --------------------------------------------------------------------------------

Status Segments::back(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found,
                      Index* out) {
  *out = 0;
  if (!can_cut()) return {Code::out_of_memory, 0, "blocks"};
  if (!options_.pages) {
    if (Status status = new_plain(want, create_bytes); !status.ok()) return status;
    *out = take(want);
    return {};
  }
  // Pages that others hold already lie under the two ends of the request only; the rest must be free or new.
  const std::uint64_t at_hand = shelf(want.stream).free_page_bytes + create_bytes;
  const std::uint64_t ends = 2 * kPageSlots[kPageSizes - 1] * kSlotBytes;
  if (at_hand < std::uint64_t{want.units} * kUnit && std::uint64_t{want.units} * kUnit - at_hand > ends)
    return {Code::out_of_memory, 0, "page_create"};
  FoundPlace& place = cheapest(want, passed, found);
  if (place.spot.block == 0)
    return place.why.ok() ? Status{Code::out_of_memory, 0, "space_reserve"} : place.why;
  // What is found now is the thriftiest place rather than the cheapest, so the next call searches again.
  if (place.lacking > 0 && create_bytes > 0 && want.strip == 0 && save_memory(want, passed, place))
    place.changes = 0;
  if (place.lacking * kSlotBytes > create_bytes) return {Code::out_of_memory, 0, "page_create"};
  std::vector<Index> held;
  if (Status status = supply(want, place.plan, create_bytes, false, &held); !status.ok()) return status;
  *out = carve(place.spot, want.units);
  return {};
}

// Carries a plan out: afterwards the whole range has its pages, and those that were not held before are, and
// listed in *held. On failure none of them is.
Status Segments::supply(const Want& want, const Survey& plan, std::uint64_t create_bytes, bool spare,
                        std::vector<Index>* held) {
  moved_ = false;
  created_.clear();
  for (Index m : plan.own) {
    hold(mappings_[m].page, m);
    held->push_back(mappings_[m].page);
  }
  Status status;
  for (Index m : plan.lost)
    if (status.ok()) status = unmap(m);
  for (const Gap& gap : plan.gaps)
    if (status.ok()) status = fill_gap(want, gap, &create_bytes, spare, held);
  if (status.ok()) return status;
  // What was mapped meanwhile stays: free pages at free addresses. New pages go back to the driver.
  for (Index page : *held) let_go(page, pages_[page].tick);
  for (Index page : created_) (void)release_page(page);
  return status;
}

// Maps pages over the gap and holds them: free ones first, largest first, then new ones. Free
// pages that are promised to a growable buffer come last among them, with `spare` not at all.
Status Segments::fill_gap(const Want& want, const Gap& gap, std::uint64_t* create_bytes, bool spare,
                          std::vector<Index>* held) {
  std::vector<Index> pages;
  std::uint32_t left = gap.slots;
  Status status;
  const auto use = [&](Index page) {
    pages.push_back(page);
    moved_ = moved_ || pages_[page].mappings != 0;
    left -= std::min(left, pages_[page].slots());
    list_remove(page);  // so that it is not picked twice; hold() comes when it is mapped
  };
  Index next = 0;
  for (int size = kPageSizes - 1; size >= 0; --size)
    while (kPageSlots[size] <= left && (next = pick(want.stream, size, spare)) != 0) use(next);
  for (int size = 0; size < kPageSizes && left > 0; ++size)
    if (kPageSlots[size] <= left + gap.room && (next = pick(want.stream, size, spare)) != 0) use(next);
  // New memory beyond the need, where free addresses follow: the rest of a middling page, or what was
  // configured.
  const std::uint32_t grain =
      reserved_bytes_ >= kMiddlePagesFrom && options_.max_page >= 8 * kMiB ? kPageSlots[1] : 1;
  auto wished =
      static_cast<std::uint32_t>(std::max(options_.segment_size / kSlotBytes, round_up(left, grain)));
  if (left == 0) wished = 0;
  wished = std::min({wished, left + gap.room, static_cast<std::uint32_t>(*create_bytes / kSlotBytes)});
  std::uint32_t to_create = std::max(left, wished);
  if (left * kSlotBytes > *create_bytes) status = {Code::out_of_memory, 0, "page_create"};
  while (to_create > 0 && status.ok()) {
    Index page = 0;
    status = create_page(want, to_create, &page);
    if (!status.ok()) break;
    *create_bytes -= std::min(*create_bytes, pages_[page].bytes());
    to_create -= pages_[page].slots();
    use(page);
  }
  if (left == 0) status = Status{};  // what was only wished for may be missing
  for (Index page : pages) list_push(page);
  if (status.ok()) status = map_pages(gap.slot, pages);
  if (!status.ok()) return status;
  std::uint32_t slot = gap.slot;
  for (Index page : pages) {
    // Pages wholly behind the request stay free.
    if (slot < gap.slot + gap.slots) {
      hold(page, slots_[slot]);
      held->push_back(page);
    }
    slot += pages_[page].slots();
  }
  return {};
}

// One new page of at most `slots`; a smaller one where the driver has no larger left.
Status Segments::create_page(const Want& want, std::uint32_t slots, Index* out) {
  Status status;
  for (int size = size_to_create(slots, std::uint64_t{want.units} * kUnit); size >= 0; --size) {
    PageHandle handle = 0;
    const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
    if (!pages_.has_room()) return {Code::out_of_memory, 0, "page_create"};
    status = backend_.page_create(bytes, &handle);
    if (status.code == Code::out_of_memory) continue;
    if (!status.ok()) return status;
    const Index i = pages_.add();
    Page& page = pages_[i];
    page.handle = handle;
    page.size = static_cast<std::uint8_t>(size);
    page.owner = want.stream;
    largest_page_ = std::max(largest_page_, size);
    own(page.owner, true);
    list_push(i);
    created_.push_back(i);
    reserved_bytes_ += bytes;
    *out = i;
    return {};
  }
  return status;
}

int Segments::size_to_create(std::uint32_t slots, std::uint64_t request_bytes) const {
  int size = 0;
  const std::uint64_t held = reserved_bytes_ + suspended_bytes_;
  for (const PageRule& rule : kPageRules)
    if (request_bytes >= rule.request && held >= rule.held) size = rule.size;
  while (size > 0 && (kPageSlots[size] > slots || kPageSlots[size] * kSlotBytes > options_.max_page)) --size;
  return size;
}

// Maps pages one after another from `slot` on. On failure nothing stays mapped, except where the driver
// refuses to undo it; that is remembered as not usable.
Status Segments::map_pages(std::uint32_t slot, const std::vector<Index>& pages) {
  const Address base = slot_address(slot);
  std::uint64_t bytes = 0;
  Status status;
  std::size_t done = 0;
  for (; done < pages.size() && status.ok(); ++done) {
    const Page& page = pages_[pages[done]];
    status = backend_.map(base + bytes, page.bytes(), page.handle);
    if (!status.ok()) break;
    bytes += page.bytes();
  }
  if (status.ok()) status = backend_.set_access(base, bytes);
  if (!status.ok()) {
    for (std::size_t i = 0; i < done; ++i) {
      if (!backend_.unmap(slot_address(slot), pages_[pages[i]].bytes()).ok())
        enter_mapping(slot, pages[i], false);
      slot += pages_[pages[i]].slots();
    }
    return status;
  }
  for (Index p : pages) {
    enter_mapping(slot, p, true);
    slot += pages_[p].slots();
  }
  return {};
}

void Segments::enter_mapping(std::uint32_t slot, Index p, bool usable) {
  ++changes_;
  Page& page = pages_[p];
  const Index owner = blocks_[block_at(std::uint64_t{slot} * kSlotUnits)].segment;
  Segment& segment = segments_[owner];
  const Index m = mappings_.add();
  mappings_[m] = {p, page.mappings, owner, slot, 0, usable};
  page.mappings = m;
  for (std::uint32_t k = 0; k < page.slots(); ++k) slots_[slot + k] = m;
  mapped_.set(slot, slot + page.slots(), true);
  backed_.set(slot, slot + page.slots(), backs(m));
  ++segment.mappings;
  segment.touched = std::max(segment.touched, (slot + page.slots()) * kSlotUnits);
}

// ---- giving back ------------------------------------------------------------------------------------

// pre: the mapping does not hold its page, and nothing uses these addresses any more.
Status Segments::unmap(Index m) {
  Mapping& mapping = mappings_[m];
  Page& page = pages_[mapping.page];
  if (mapping.there)
    if (Status status = backend_.unmap(slot_address(mapping.slot), page.bytes()); !status.ok()) return status;
  forget_mapping(m);
  return {};
}

void Segments::forget_mapping(Index m) {
  ++changes_;
  Mapping& mapping = mappings_[m];
  Page& page = pages_[mapping.page];
  Index* link = &page.mappings;
  while (*link != m) link = &mappings_[*link].next;
  *link = mapping.next;
  for (std::uint32_t k = 0; k < page.slots(); ++k) slots_[mapping.slot + k] = 0;
  mapped_.set(mapping.slot, mapping.slot + page.slots(), false);
  backed_.set(mapping.slot, mapping.slot + page.slots(), false);
  --segments_[mapping.segment].mappings;
  mapping = Mapping();
  mappings_.drop(m);
}

Status Segments::release_page(Index i) {
  while (pages_[i].mappings != 0)
    if (Status status = unmap(pages_[i].mappings); !status.ok()) return status;
  if (Status status = backend_.page_release(pages_[i].handle, pages_[i].bytes()); !status.ok()) return status;
  list_remove(i);
  reserved_bytes_ -= pages_[i].bytes();
  forget_page(i);
  return {};
}

void Segments::forget_page(Index i) {
  own(pages_[i].owner, false);
  pages_[i] = Page();
  pages_.drop(i);
}

Status Segments::trim(std::uint64_t keep_bytes, const Finished& finished, bool may_wait, const Want* want) {
  const bool plain = may_wait || !backend_.info().release_waits;
  if (Status status = release_free_pages(keep_bytes, finished, ~std::uint32_t{0}, want); !status.ok())
    return status;
  for (Index s = 1; s < segments_.end(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.units == 0 || segment.in_use != 0 || segment.mappings != 0 || segment.growable != 0) continue;
    if (!segment.plain) {
      drop_segment(s);
    } else if (plain && reserved_bytes_ > keep_bytes &&
               finished(segment.stream, blocks_[segment.head].tick)) {
      if (Status status = release_plain(s); !status.ok()) return status;
    }
  }
  return {};
}

Status Segments::release_free_pages(std::uint64_t keep_bytes, const Finished& finished,
                                    std::uint32_t patience, const Want* want) {
  const bool spare = want != nullptr && has_addresses(*want);
  Status status;
  free_page_owners_.each([&](std::uint16_t stream) {
    Tick running = ~Tick{0};  // the stream has not come so far
    for (int size = spare && stream == want->stream ? 1 : 0; size < kPageSizes; ++size)
      for (Index i = oldest_page(stream, size), next = 0; i != 0; i = next) {
        if (reserved_bytes_ <= keep_bytes || patience == 0) return true;
        ++steps_;
        next = pages_[i].list_after;
        // Uses at other addresses, by other streams, are ordered before the last one.
        const Tick tick = pages_[i].tick;
        if (tick < running && finished(stream, tick)) {
          status = release_page(i);
          if (!status.ok()) return true;
        } else {
          running = std::min(running, tick);
          --patience;
        }
      }
    return false;
  });
  return status;
}

Status Segments::release_all() {
  Status first;
  const auto note = [&first](Status status) {
    if (first.ok() && !status.ok()) first = status;
  };
  for (Index m = 1; m < mappings_.end(); ++m)
    if (mappings_[m].page != 0 && mappings_[m].there)
      note(backend_.unmap(slot_address(mappings_[m].slot), pages_[mappings_[m].page].bytes()));
  for (Index p = 1; p < pages_.end(); ++p)
    if (pages_[p].handle != 0) note(backend_.page_release(pages_[p].handle, pages_[p].bytes()));
  for (const auto& [base, s] : plain_)
    note(backend_.release(base, std::uint64_t{segments_[s].units} * kUnit));
  if (space_ != 0) note(backend_.space_release(space_, options_.space_bytes));
  reserved_bytes_ = suspended_bytes_ = 0;
  return first;
}

// ---- suspended pages --------------------------------------------------------------------------------

void Segments::set_aside(Index i) {
  if (pages_[i].holder == 0) list_remove(i);
  ++aside_;
  pages_[i].suspended = true;
  note_backed(i);
}

void Segments::take_up(Index i) {
  --aside_;
  pages_[i].suspended = false;
  if (pages_[i].holder == 0) list_push(i);
  note_backed(i);
}

Status Segments::give_up(Index i, bool aliases) {
  Page& page = pages_[i];
  for (Index m = page.mappings; m != 0; m = mappings_[m].next) {
    if (!mappings_[m].there) continue;
    if (Status status = backend_.unmap(slot_address(mappings_[m].slot), page.bytes()); !status.ok())
      return status;
    mappings_[m].there = mappings_[m].usable = false;
  }
  if (page.handle != 0) {
    if (Status status = backend_.page_release(page.handle, page.bytes()); !status.ok()) return status;
    page.handle = 0;
    reserved_bytes_ -= page.bytes();
    suspended_bytes_ += page.bytes();
    ++suspended_pages_;
  }
  if (aliases) return {};
  for (Index m = page.mappings; m != 0;) {
    const Index next = mappings_[m].next;
    if (m != page.holder) forget_mapping(m);
    m = next;
  }
  return {};
}

Status Segments::bring_back(Index i) {
  Page& page = pages_[i];
  if (page.handle == 0) {
    if (Status status = backend_.page_create(page.bytes(), &page.handle); !status.ok()) {
      page.handle = 0;
      return status;
    }
    reserved_bytes_ += page.bytes();
    suspended_bytes_ -= page.bytes();
    --suspended_pages_;
  }
  for (Index m = page.mappings; m != 0; m = mappings_[m].next) {
    Mapping& mapping = mappings_[m];
    const Address address = slot_address(mapping.slot);
    if (!mapping.there)
      if (Status status = backend_.map(address, page.bytes(), page.handle); !status.ok()) return status;
    mapping.there = true;
    if (!mapping.usable)
      if (Status status = backend_.set_access(address, page.bytes()); !status.ok()) return status;
    mapping.usable = true;
  }
  return {};
}

bool Segments::resident(Index i) const {
  bool good = pages_[i].handle != 0;
  for (Index m = pages_[i].mappings; m != 0; m = mappings_[m].next)
    good = good && mappings_[m].there && mappings_[m].usable;
  return good;
}

// A suspended page that no block holds any more: nobody waits for it. What it still has of the driver becomes
// a free page like any other.
void Segments::discard(Index i, Tick tick) {
  Page& page = pages_[i];
  for (Index m = page.mappings; m != 0;) {
    const Index next = mappings_[m].next;
    if (!mappings_[m].there) forget_mapping(m);
    m = next;
  }
  --aside_;
  page.suspended = false;
  page.holder = 0;
  page.tick = tick;
  if (page.handle != 0) {
    list_push(i);
    note_backed(i);
    return;
  }
  suspended_bytes_ -= page.bytes();
  --suspended_pages_;
  forget_page(i);
}

// Each new page takes the place of whole old ones. So a block in use lies on every one of them, which would
// not hold if old pages were cut: one may be covered at its end alone.
void Segments::fuse(const std::vector<Index>& pages) {
  const auto alone = [&](Index i) {
    const Page& page = pages_[i];
    return page.handle == 0 && page.holder != 0 && page.mappings == page.holder &&
           mappings_[page.holder].next == 0;
  };
  for (std::size_t from = 0, to = 0; from < pages.size(); from = to) {
    to = from + 1;
    if (!alone(pages[from])) continue;
    const Mapping first = mappings_[pages_[pages[from]].holder];
    std::uint32_t past = first.slot + pages_[pages[from]].slots();
    for (; to < pages.size() && alone(pages[to]); ++to) {
      const Mapping& next = mappings_[pages_[pages[to]].holder];
      if (next.slot != past || next.segment != first.segment) break;
      past += pages_[pages[to]].slots();
    }
    const std::uint64_t bytes = (past - first.slot) * kSlotBytes;
    for (std::size_t at = from, next = from; at < to; at = next) {
      const std::uint32_t left = past - mappings_[pages_[pages[at]].holder].slot;
      const std::uint32_t most = kPageSlots[size_to_create(left, bytes)];
      std::uint32_t whole = 0;  // slots of the longest row of old pages from here that is one page
      std::uint32_t slots = 0;
      for (std::size_t k = at; k < to && (slots += pages_[pages[k]].slots()) <= most; ++k)
        if (std::find(std::begin(kPageSlots), std::end(kPageSlots), slots) != std::end(kPageSlots)) {
          whole = slots;
          next = k + 1;
        }
      next = std::max(next, at + 1);
      if (next > at + 1) fuse_row({pages.begin() + at, pages.begin() + next}, whole);
    }
  }
}

// Puts one suspended page of so many slots in the place of several.
void Segments::fuse_row(const std::vector<Index>& row, std::uint32_t slots) {
  const Index i = pages_.add();
  if (i == 0) return;
  const Mapping first = mappings_[pages_[row.front()].holder];
  Page& page = pages_[i];
  page.suspended = true;
  page.owner = pages_[row.front()].owner;
  while (page.slots() < slots) ++page.size;
  own(page.owner, true);
  Tick tick = 0;
  for (const Index old : row) {
    const Index m = pages_[old].holder;
    page.tick = std::max(page.tick, pages_[old].tick);
    tick = std::max(tick, mappings_[m].tick);
    forget_mapping(m);
    forget_page(old);
  }
  suspended_pages_ -= row.size() - 1;
  aside_ -= row.size() - 1;
  largest_page_ = std::max(largest_page_, static_cast<int>(page.size));
  enter_mapping(first.slot, i, false);
  page.holder = slots_[first.slot];
  mappings_[page.holder].there = false;
  mappings_[page.holder].tick = tick;
}

}  // namespace vram
