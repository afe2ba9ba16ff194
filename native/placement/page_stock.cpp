// Pages: free ones, those under addresses, those that come from the driver and go back to it.
#include "placement/page_stock.hpp"

#include <algorithm>
#include <utility>

#include "placement/room.hpp"

namespace vram {

namespace {

constexpr std::size_t kMaxPages = std::size_t{1} << 20;

// When larger pages are created. A page costs the driver about the same regardless of its size, and strands
// what its blocks leave of it, which matters less the more the pool holds. Chosen by a sweep over four
// recorded jobs, those of benchmarks/jobs and variants of their sizes, among rules that keep the four within
// 1 % of waste and 2 % of driver time; their variants waste 0.7 to 1.1 % on average.
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
    // The recordings do not reach this; with their sizes doubled and quadrupled they waste up to 1 % and
    // spend 3 to 45 % less time in the driver than without this rule.
    {2, 0, 14 * kGiB},
};

}  // namespace

PageStock::PageStock(Backend& backend, const PlacementOptions& options, AddressSpace& space)
    : backend_(backend),
      options_(options),
      space_(space),
      pages_(kMaxPages),
      mappings_(options.space_bytes / kSlotBytes + 1),  // a slot has at most one
      slots_(options.all_bytes() / kSlotBytes),
      mapped_(options.all_bytes() / kSlotBytes),
      backed_(options.all_bytes() / kSlotBytes) {}

Address PageStock::address_of(Index i) const {
  const Page& page = pages_[i];
  return space_.slot_address(mappings_[page.holder != 0 ? page.holder : page.mappings].slot);
}

// ---- free pages ----------------------------------------------------------------------------------------

inline void PageStock::link(PageList& list, Index i) {
  Page& page = pages_[i];
  page.list_after = 0;
  page.list_before = list.tail;
  (list.tail != 0 ? pages_[list.tail].list_after : list.head) = i;
  list.tail = i;
  ++list.count;
}

inline void PageStock::unlink(PageList& list, Index i) {
  const Page& page = pages_[i];
  (page.list_before != 0 ? pages_[page.list_before].list_after : list.head) = page.list_after;
  (page.list_after != 0 ? pages_[page.list_after].list_before : list.tail) = page.list_before;
  --list.count;
}

void PageStock::count_free(StreamNumber stream, Shelf& owner, std::uint64_t before) {
  ++changes_;
  free_bytes_ += owner.bytes - before;
  if (before == 0 && owner.bytes != 0) free_owners_.add(stream);
  if (before != 0 && owner.bytes == 0) free_owners_.remove(stream);
}

void PageStock::list_push(Index i) {
  const Page& page = pages_[i];
  if (page.unlent()) return link(spares_[page.size], i);
  Shelf& owner = shelf(page.owner);
  link(owner.pages[page.size], i);
  count_free(page.owner, owner, std::exchange(owner.bytes, owner.bytes + page.bytes()));
}

void PageStock::list_remove(Index i) {
  const Page& page = pages_[i];
  if (page.unlent()) return unlink(spares_[page.size], i);
  Shelf& owner = shelf(page.owner);
  unlink(owner.pages[page.size], i);
  count_free(page.owner, owner, std::exchange(owner.bytes, owner.bytes - page.bytes()));
}

// Counts what is spilled.
inline void PageStock::set_holder(Index i, Index m) {
  Page& page = pages_[i];
  if (page.host) spilled_bytes_ += (m != 0 ? page.bytes() : 0) - (page.holder != 0 ? page.bytes() : 0);
  page.holder = m;
}

// After the holder of a page has changed. Where it is held it is backed before and after, so only a page that
// is mapped elsewhere, too, needs to be examined.
inline void PageStock::note_aliases(Index i) {
  if (mappings_[pages_[i].mappings].next != 0) note_backed(i);
}

void PageStock::hold(Index page, Index mapping) {
  list_remove(page);
  set_holder(page, mapping);
  note_aliases(page);
}

void PageStock::unhold(Index page, Tick tick) {
  set_holder(page, 0);
  pages_[page].tick = tick;
  list_push(page);
  note_aliases(page);
}

bool PageStock::backs(Index m) const {
  const Mapping& mapping = mappings_[m];
  const Page& page = pages_[mapping.page];
  return (page.holder == m && !page.blocked()) ||
         (page.free() && mapping.usable && page.owner == space_.segments()[mapping.segment].stream);
}

// After the owner of a page has changed, or its holder.
void PageStock::note_backed(Index i) {
  ++changes_;
  const Slot slots = pages_[i].slots();
  for (Index m = pages_[i].mappings; m != 0; m = mappings_[m].next)
    backed_.set(mappings_[m].slot, mappings_[m].slot + slots, backs(m));
}

void PageStock::transfer(Index i, std::uint16_t to, Tick tick) {
  list_remove(i);
  owners_.move(pages_[i].owner, to);
  pages_[i].owner = to;
  pages_[i].tick = tick;
  list_push(i);
  note_backed(i);
}

// ---- ranges, and kept pages -----------------------------------------------------------------------------

// Pages [first, past) are inside the free block `whole` and not in use any more. False: they are not kept.
bool PageStock::keep(Slot first, Slot past, const Block& whole) {
  const Segment& segment = space_.segment(whole);
  if (aside_ != 0 || (segment.band != kMiddle && segment.band != kLarge)) return false;
  if (spilled_bytes_ != 0 && any_spilled(first, past)) return false;
  if (kept_count_ == kMostKept) settle_oldest();
  kept_[kept_count_++] = {first, past, whole.tick};
  return true;
}

bool PageStock::any_spilled(Slot first, Slot past) const {
  for (Slot slot = first; slot < past; slot += page_of(slots_[slot]).slots())
    if (page_of(slots_[slot]).host) return true;
  return false;
}

// Pages [first, past) are in use from now on.
void PageStock::use_kept(Slot first, Slot past) {
  for (std::size_t i = 0; i < kept_count_;) {
    Kept& run = kept_[i];
    const bool front = run.first < first, back = past < run.past;
    if (run.past <= first || past <= run.first) {
      ++i;
    } else if (front && back) {
      std::copy_backward(kept_ + i, kept_ + kept_count_, kept_ + kept_count_ + 1);
      ++kept_count_;
      run.past = first;
      kept_[i + 1].first = past;
      return;
    } else if (front) {
      run.past = first;
    } else if (back) {
      run.first = past;
    } else {
      std::copy(kept_ + i + 1, kept_ + kept_count_, kept_ + i);
      --kept_count_;
    }
  }
}

void PageStock::settle_oldest() {
  const Kept run = kept_[0];
  std::copy(kept_ + 1, kept_ + kept_count_, kept_);
  --kept_count_;
  const Index block = space_.block_at(std::uint64_t{run.first} * kSlotUnits);
  unhold_range(space_.segment(space_.blocks()[block]).stream, run);
}

void PageStock::settle() {
  while (kept_count_ != 0) settle_oldest();
}

// These two are most of what a block of many pages costs, so they count once what is the same for all pages.
// A page that is kept elsewhere comes from there.
void PageStock::hold_range(Units from, Units to, const Block& whole) {
  const StreamNumber stream = space_.segment(whole).stream;
  const Slot first = mappings_[slots_[from / kSlotUnits]].slot;
  const Slot last = (to - 1) / kSlotUnits;
  std::uint64_t bytes = 0;
  bool kept = false;
  Slot past = first;
  for (Slot slot = first; slot <= last;) {
    const Index m = slots_[slot];
    const Mapping& mapping = mappings_[m];
    Page& page = pages_[mapping.page];
    slot = past = mapping.slot + page.slots();
    if (page.holder == m) {
      if (!kept_under(whole, mapping)) continue;
      kept = true;
      if (last - mapping.slot <= kFewSlots) continue;
      if (const Kept* const run = kept_at(mapping.slot)) {
        const Mapping& end = mappings_[slots_[std::min(last, run->past - 1)]];
        slot = past = end.slot + pages_[end.page].slots();
      }
      continue;
    }
    if (page.holder == 0) {
      unlink(shelf(stream).pages[page.size], mapping.page);
      bytes += page.bytes();
    } else if (kept_count_ < kMostKept) {
      Mapping& elsewhere = mappings_[page.holder];
      elsewhere.tick = page.tick = kept_at(elsewhere.slot)->tick;
      use_kept(elsewhere.slot, elsewhere.slot + page.slots());
    } else {
      settle();
      slot = first;
      kept = false;
      continue;
    }
    set_holder(mapping.page, m);
    note_aliases(mapping.page);
  }
  if (kept) use_kept(first, past);
  if (kept_count_ > kMostKept) settle_oldest();
  if (bytes == 0) return;
  Shelf& owner = shelf(stream);
  count_free(stream, owner, std::exchange(owner.bytes, owner.bytes - bytes));
}

void PageStock::free_range(Units from, Units to, const Block& whole) {
  if (whole.units < kSlotUnits) return;
  const Mapping& front = mappings_[slots_[from / kSlotUnits]];
  const Mapping& back = mappings_[slots_[(to - 1) / kSlotUnits]];
  Slot first = front.slot, past = back.slot + pages_[back.page].slots();
  if (first * kSlotUnits < whole.offset) first += pages_[front.page].slots();
  if (past * kSlotUnits > whole.end()) past = back.slot;
  if (first >= past || keep(first, past, whole)) return;
  settle();  // what is kept was freed before
  unhold_range(space_.segment(whole).stream, {first, past, whole.tick});
}

// Others freed their part of a page before; the latest use counts, which need not be this one.
void PageStock::unhold_range(StreamNumber stream, const Kept& run) {
  Shelf& owner = shelf(stream);
  std::uint64_t bytes = 0;
  for (Slot slot = run.first; slot < run.past;) {
    Mapping& mapping = mappings_[slots_[slot]];
    const Index i = mapping.page;
    Page& page = pages_[i];
    slot += page.slots();
    if (page.suspended && !page.moving) {
      discard(i, run.tick);
      continue;
    }
    mapping.tick = page.tick = run.tick;
    set_holder(i, 0);
    if (page.suspended) continue;
    if (page.unlent()) {
      list_push(i);
      continue;
    }
    link(owner.pages[page.size], i);
    bytes += page.bytes();
    note_aliases(i);
  }
  count_free(stream, owner, std::exchange(owner.bytes, owner.bytes + bytes));
}

void PageStock::inherit(StreamNumber from, StreamNumber to) {
  // Pages that changed owners, and those mapped where the addresses did: which addresses they back is
  // examined again.
  std::vector<Index> touched;
  const auto take = [&](Index i) {
    Page& page = pages_[i];
    touched.push_back(i);
    if (page.owner != from) return;
    if (page.free()) return transfer(i, to, 0);
    if (!page.host) owners_.move(from, to);
    page.owner = to;
    if (page.holder == 0 && !page.host) return discard(i, 0);  // suspended with a graph that is gone
    page.tick = 0;
  };
  for (int size = 0; size < kPageSizes; ++size)
    while (oldest(from, size) != 0) take(oldest(from, size));
  for (Index s = space_.first_segment(from), next = 0; s != 0; s = next) {
    const Segment& segment = space_.segments()[s];
    next = segment.list_after;
    for (Slot slot = segment.first_slot(); slot < segment.touched / kSlotUnits; ++slot) {
      const Index m = slots_[slot];
      if (m == 0 || mappings_[m].slot != slot) continue;
      mappings_[m].tick = 0;
      take(mappings_[m].page);
    }
    space_.transfer(s, to, segment.band, 0);
  }
  // Suspended pages that no block holds are in no list, and need not be mapped in their stream's segments.
  for (Index i = 1; aside_ != 0 && i < pages_.end(); ++i)
    if (pages_[i].exists() && pages_[i].owner == from) take(i);
  for (const Index i : touched)
    if (pages_[i].exists()) note_backed(i);
}

// Whether a free page is where a growable buffer is to find it.
bool PageStock::promised(Index page) const {
  for (Index m = pages_[page].mappings; m != 0; m = mappings_[m].next) {
    const Segment& segment = space_.segments()[mappings_[m].segment];
    if (segment.growable != 0 && mappings_[m].usable && mappings_[m].slot * kSlotUnits < segment.promised)
      return true;
  }
  return false;
}

// The stream's oldest free page of a size that is not promised; without `spare` any, if all are
// promised; or 0.
Index PageStock::pick(StreamNumber stream, int size, bool spare) const {
  Index page = oldest(stream, size);
  while (page != 0 && promised(page)) page = pages_[page].list_after;
  return page != 0 || spare ? page : oldest(stream, size);
}

// ---- backing a range --------------------------------------------------------------------------------

Status PageStock::supply(const Want& want, const Survey& plan, std::uint64_t create_bytes, bool spare,
                         std::vector<Index>* held) {
  moved_ = false;
  created_.clear();
  make_room(*held, plan.own.size());
  // What was mapped meanwhile stays: free pages at free addresses. New pages are released again.
  const auto undo = [&] {
    for (Index page : *held) unhold(page, pages_[page].tick);
    for (Index page : created_) (void)release_page(page);
  };
  Status status;
  try {
    for (Index m : plan.own) {
      hold(mappings_[m].page, m);
      held->push_back(mappings_[m].page);
    }
    for (Index m : plan.lost)
      if (status.ok()) status = unmap(m);
    for (const Gap& gap : plan.gaps)
      if (status.ok()) status = fill_gap(want, gap, &create_bytes, spare, held);
  } catch (const std::bad_alloc&) {
    undo();
    throw;
  }
  if (!status.ok()) undo();
  return status;
}

// Maps pages over the gap and holds them.
Status PageStock::fill_gap(const Want& want, const Gap& gap, std::uint64_t* create_bytes, bool spare,
                           std::vector<Index>* held) {
  std::vector<Index> pages;
  const auto list_picked = [&] {
    for (Index page : pages) list_push(page);
  };
  Status status;
  try {
    status = pick_pages(want, gap, create_bytes, spare, &pages);
  } catch (const std::bad_alloc&) {
    list_picked();
    throw;
  }
  list_picked();
  make_room(*held, held->size() + pages.size());
  if (status.ok()) status = map_pages(gap.slot, pages);
  if (!status.ok()) return status;
  Slot slot = gap.slot;
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

// The pages for a gap: free ones first, largest first, then new ones. Free pages that are promised to a
// growable buffer come last among them, with `spare` not at all. They are in no list afterwards, so that none
// is picked twice.
Status PageStock::pick_pages(const Want& want, const Gap& gap, std::uint64_t* create_bytes, bool spare,
                             std::vector<Index>* pages) {
  Slot left = gap.slots;
  const auto use = [&](int size) {
    const Index page = pick(want.stream, size, spare);
    if (page == 0) return false;
    pages->push_back(page);
    moved_ = moved_ || pages_[page].mappings != 0;
    left -= std::min(left, pages_[page].slots());
    list_remove(page);
    return true;
  };
  for (int size = kPageSizes - 1; size >= 0; --size)
    while (kPageSlots[size] <= left && use(size)) {
    }
  for (int size = 0; size < kPageSizes && left > 0; ++size)
    if (kPageSlots[size] <= left + gap.room) use(size);
  return create_missing(want, gap, left, create_bytes, pages);
}

// Appends new pages for the slots of a gap that no free page covers, in no list. Where free addresses follow
// it creates more than that: the rest of a medium page, or what was configured.
Status PageStock::create_missing(const Want& want, const Gap& gap, Slot missing, std::uint64_t* create_bytes,
                                 std::vector<Index>* pages) {
  if (missing == 0) return {};
  if (missing * kSlotBytes > *create_bytes) return {Code::out_of_memory, 0, "page_create"};
  const Slot grain = bytes_ >= kMiddlePagesFrom && options_.max_page >= 8 * kMiB ? kPageSlots[1] : 1;
  const auto wished =
      static_cast<Slot>(std::min({std::max(options_.segment_size / kSlotBytes, round_up(missing, grain)),
                                  std::uint64_t{missing} + gap.room, *create_bytes / kSlotBytes}));
  Slot to_create = std::max(missing, wished);
  while (to_create > 0) {
    Index page = 0;
    make_room(*pages, pages->size() + 1);
    // Pages beyond the need are optional.
    if (Status status = create_page(want, to_create, &page); !status.ok())
      return missing == 0 ? Status{} : status;
    *create_bytes -= std::min(*create_bytes, pages_[page].bytes());
    to_create -= pages_[page].slots();
    missing -= std::min(missing, pages_[page].slots());
    pages->push_back(page);
    list_remove(page);
  }
  return {};
}

// One new page of at most `slots`; a smaller one if the driver has no larger page left.
Status PageStock::create_page(const Want& want, Slot slots, Index* out) {
  Status status;
  for (int size = size_to_create(slots, want.bytes()); size >= 0; --size) {
    make_room(created_, created_.size() + 1);
    status = create_free(size, want.stream, out);
    if (status.code == Code::out_of_memory && pages_.has_room()) continue;
    if (status.ok()) created_.push_back(*out);
    return status;
  }
  return status;
}

Status PageStock::create_free(int size, StreamNumber owner, Index* out) {
  PageHandle handle = 0;
  const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
  (void)shelf(owner);  // host memory is allocated before the page
  owners_.make_room(owner);
  if (!pages_.has_room()) return {Code::out_of_memory, 0, "page_create"};
  if (Status status = backend_.page_create(bytes, &handle); !status.ok()) return status;
  const Index i = pages_.add();
  Page& page = pages_[i];
  page.handle = handle;
  page.size = static_cast<std::uint8_t>(size);
  page.owner = owner;
  largest_page_ = std::max(largest_page_, size);
  owners_.add(page.owner);
  list_push(i);
  bytes_ += bytes;
  *out = i;
  return {};
}

int PageStock::size_to_create(Slot slots, std::uint64_t request_bytes) const {
  int size = 0;
  const std::uint64_t held = bytes_ + suspended_bytes_;
  for (const PageRule& rule : kPageRules)
    if (request_bytes >= rule.request && held >= rule.held) size = rule.size;
  while (size > 0 && (kPageSlots[size] > slots || kPageSlots[size] * kSlotBytes > options_.max_page)) --size;
  return size;
}

// Maps pages one after another from `slot` on. On failure nothing stays mapped, except where the driver
// refuses to undo it; that is remembered as not usable.
Status PageStock::map_pages(Slot slot, const std::vector<Index>& pages) {
  const Address base = space_.slot_address(slot);
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
      if (!backend_.unmap(space_.slot_address(slot), pages_[pages[i]].bytes()).ok()) {
        add_mapping(slot, pages[i], false);
        tell(true, slots_[slot]);
      }
      slot += pages_[pages[i]].slots();
    }
    return status;
  }
  for (Index p : pages) {
    add_mapping(slot, p, true);
    tell(true, slots_[slot]);
    slot += pages_[p].slots();
  }
  return {};
}

void PageStock::add_mapping(Slot slot, Index p, bool usable) {
  ++changes_;
  Page& page = pages_[p];
  const Index owner = space_.segment_of(slot);
  Segment& segment = space_.segments()[owner];
  const Index m = mappings_.add();
  mappings_[m] = {p, page.mappings, owner, slot, 0, usable};
  page.mappings = m;
  for (std::uint32_t k = 0; k < page.slots(); ++k) slots_[slot + k] = m;
  mapped_.set(slot, slot + page.slots(), true);
  backed_.set(slot, slot + page.slots(), backs(m));
  ++segment.mappings;
  segment.touched = std::max(segment.touched, (slot + page.slots()) * kSlotUnits);
}

// ---- releasing --------------------------------------------------------------------------------------

// pre: the mapping does not hold its page, and nothing uses these addresses any more.
Status PageStock::unmap(Index m) {
  Mapping& mapping = mappings_[m];
  Page& page = pages_[mapping.page];
  if (mapping.there) {
    if (Status status = backend_.unmap(space_.slot_address(mapping.slot), page.bytes()); !status.ok())
      return status;
    tell(false, m);
  }
  forget_mapping(m);
  return {};
}

void PageStock::forget_mapping(Index m) {
  ++changes_;
  Mapping& mapping = mappings_[m];
  Page& page = pages_[mapping.page];
  Index* link = &page.mappings;
  while (*link != m) link = &mappings_[*link].next;
  *link = mapping.next;
  for (std::uint32_t k = 0; k < page.slots(); ++k) slots_[mapping.slot + k] = 0;
  mapped_.set(mapping.slot, mapping.slot + page.slots(), false);
  backed_.set(mapping.slot, mapping.slot + page.slots(), false);
  --space_.segments()[mapping.segment].mappings;
  mapping = Mapping();
  mappings_.drop(m);
}

Status PageStock::release_page(Index i) {
  while (pages_[i].mappings != 0)
    if (Status status = unmap(pages_[i].mappings); !status.ok()) return status;
  if (Status status = backend_.page_release(pages_[i].handle, pages_[i].bytes()); !status.ok()) return status;
  list_remove(i);
  bytes_ -= pages_[i].bytes();
  forget_page(i);
  return {};
}

void PageStock::forget_page(Index i) {
  owners_.remove(pages_[i].owner);
  pages_[i] = Page();
  pages_.drop(i);
}

Status PageStock::release_free(std::uint64_t keep_bytes, const Finished& finished, std::uint32_t patience,
                               const StreamNumber* spared) {
  Status status;
  free_owners_.each([&](StreamNumber stream) {
    Tick running = ~Tick{0};  // the stream has not come this far
    for (int size = spared != nullptr && stream == *spared ? 1 : 0; size < kPageSizes; ++size)
      for (Index i = oldest(stream, size), next = 0; i != 0; i = next) {
        if (bytes_ <= keep_bytes || patience == 0) return true;
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

Status PageStock::release_all() {
  Status first;
  const auto note = [&first](Status status) {
    if (first.ok() && !status.ok()) first = status;
  };
  for (Index m = 1; m < mappings_.end(); ++m)
    if (mappings_[m].page != 0 && mappings_[m].there) {
      const Status status =
          backend_.unmap(space_.slot_address(mappings_[m].slot), pages_[mappings_[m].page].bytes());
      note(status);
      if (status.ok()) tell(false, m);
    }
  for (Index p = 1; p < pages_.end(); ++p) {
    const Page& page = pages_[p];
    if (page.handle == 0) continue;
    note(page.host ? backend_.host_page_release(page.handle, page.bytes(), page.copies)
                   : backend_.page_release(page.handle, page.bytes()));
  }
  bytes_ = suspended_bytes_ = host_bytes_ = spilled_bytes_ = lent_pages_ = 0;
  return first;
}

// ---- suspended pages --------------------------------------------------------------------------------

void PageStock::set_aside(Index i) {
  if (pages_[i].holder == 0) list_remove(i);
  ++aside_;
  pages_[i].suspended = true;
  note_backed(i);
}

void PageStock::reinstate(Index i) {
  --aside_;
  pages_[i].suspended = false;
  if (pages_[i].holder == 0) list_push(i);
  note_backed(i);
}

Status PageStock::evict(Index i, bool aliases) {
  Page& page = pages_[i];
  for (Index m = page.mappings; m != 0; m = mappings_[m].next) {
    if (!mappings_[m].there) continue;
    if (Status status = backend_.unmap(space_.slot_address(mappings_[m].slot), page.bytes()); !status.ok())
      return status;
    mappings_[m].there = mappings_[m].usable = false;
    tell(false, m);
  }
  if (page.handle != 0) {
    if (Status status = backend_.page_release(page.handle, page.bytes()); !status.ok()) return status;
    page.handle = 0;
    bytes_ -= page.bytes();
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

Status PageStock::restore(Index i) {
  Page& page = pages_[i];
  if (page.handle == 0) {
    if (Status status = backend_.page_create(page.bytes(), &page.handle); !status.ok()) {
      page.handle = 0;
      return status;
    }
    bytes_ += page.bytes();
    suspended_bytes_ -= page.bytes();
    --suspended_pages_;
  }
  for (Index m = page.mappings; m != 0; m = mappings_[m].next) {
    Mapping& mapping = mappings_[m];
    const Address address = space_.slot_address(mapping.slot);
    if (!mapping.there) {
      if (Status status = backend_.map(address, page.bytes(), page.handle); !status.ok()) return status;
      tell(true, m);
    }
    mapping.there = true;
    if (!mapping.usable)
      if (Status status = backend_.set_access(address, page.bytes()); !status.ok()) return status;
    mapping.usable = true;
  }
  return {};
}

Status PageStock::grant_again() {
  for (Index m = 1; m < mappings_.end(); ++m) {
    const Mapping& mapping = mappings_[m];
    if (mapping.page == 0 || !mapping.there || !mapping.usable) continue;
    const std::uint64_t bytes = pages_[mapping.page].bytes();
    if (Status status = backend_.set_access(space_.slot_address(mapping.slot), bytes); !status.ok())
      return status;
  }
  return {};
}

bool PageStock::resident(Index i) const {
  bool good = pages_[i].handle != 0;
  for (Index m = pages_[i].mappings; m != 0; m = mappings_[m].next)
    good = good && mappings_[m].there && mappings_[m].usable;
  return good;
}

// A suspended page that no block holds any more. If it still has memory, it becomes a free page.
void PageStock::discard(Index i, Tick tick) {
  Page& page = pages_[i];
  for (Index m = page.mappings; m != 0;) {
    const Index next = mappings_[m].next;
    if (!mappings_[m].there) forget_mapping(m);
    m = next;
  }
  --aside_;
  page.suspended = false;
  set_holder(i, 0);
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

// ---- host pages ----------------------------------------------------------------------------------------

Index PageStock::add_host(PageHandle handle, std::uint64_t bytes, Address copies) {
  const Index i = pages_.add();
  Page& page = pages_[i];
  page.handle = handle;
  while (page.bytes() < bytes) ++page.size;
  page.host = page.suspended = true;
  page.copies = copies;
  ++aside_;
  ++host_pages_;
  host_bytes_ += bytes;
  return i;
}

Status PageStock::take_spare(int size, const Finished& finished, Index* out) {
  *out = 0;
  for (Index i = spares_[size].head; i != 0; i = pages_[i].list_after) {
    const Page& page = pages_[i];
    if (page.mappings != 0 && !finished(page.owner, page.tick)) continue;
    while (page.mappings != 0)
      if (Status status = unmap(page.mappings); !status.ok()) return status;
    set_aside(i);
    *out = i;
    return {};
  }
  return {};
}

Status PageStock::release_spare(std::uint64_t keep, const Finished& finished) {
  for (int size = kPageSizes - 1; size >= 0; --size)
    while (host_bytes_ > keep) {
      Index i = 0;
      if (Status status = take_spare(size, finished, &i); !status.ok()) return status;
      if (i == 0) break;
      Page& page = pages_[i];
      if (Status status = backend_.host_page_release(page.handle, page.bytes(), page.copies); !status.ok()) {
        reinstate(i);
        return status;
      }
      --aside_;
      --host_pages_;
      host_bytes_ -= page.bytes();
      page = Page();
      pages_.drop(i);
    }
  return {};
}

// The driver shows a page at a mapping's addresses. Fails without a trace, except where it refuses to undo
// it.
Status PageStock::show(Index m, const Page& page) {
  Mapping& mapping = mappings_[m];
  const Address address = space_.slot_address(mapping.slot);
  Status status = backend_.map(address, page.bytes(), page.handle);
  if (!status.ok()) return status;
  mapping.there = true;
  status = backend_.set_access(address, page.bytes());
  if (status.ok())
    mapping.usable = true;
  else
    (void)hide(m);
  return status;
}

// Nothing is at a mapping's addresses any more. A driver that refuses is asked again: there is no other way.
Status PageStock::hide(Index m) {
  constexpr int kTries = 3;
  Mapping& mapping = mappings_[m];
  Status status;
  for (int i = 0; i < kTries && mapping.there; ++i) {
    status = backend_.unmap(space_.slot_address(mapping.slot), pages_[mapping.page].bytes());
    if (status.ok()) mapping.there = mapping.usable = false;
  }
  return status;
}

Status PageStock::exchange(Index from, Index to) {
  constexpr int kTries = 3;
  const Index m = pages_[from].holder;
  if (Status status = hide(m); !status.ok()) return status;
  if (Status status = show(m, pages_[to]); !status.ok()) {
    for (int i = 0; i < kTries && !mappings_[m].there; ++i) (void)show(m, pages_[from]);
    return status;
  }
  Index* link = &pages_[from].mappings;
  while (*link != m) link = &mappings_[*link].next;
  *link = mappings_[m].next;
  mappings_[m].page = to;
  mappings_[m].next = pages_[to].mappings;
  pages_[to].mappings = m;
  if (!pages_[to].host && pages_[to].owner != pages_[from].owner)
    owners_.move(pages_[to].owner, pages_[from].owner);
  pages_[to].owner = pages_[from].owner;
  pages_[to].tick = pages_[from].tick;
  pages_[from].tick = 0;  // nothing uses it any more
  set_holder(from, 0);
  set_holder(to, m);
  note_backed(from);
  note_backed(to);
  return {};
}

void PageStock::end_move(Index i) {
  pages_[i].moving = false;
  const Index holder = pages_[i].holder;
  if (holder != 0 && !(mappings_[holder].there && mappings_[holder].usable)) return;
  for (Index m = pages_[i].mappings, next = 0; m != 0; m = next) {
    next = mappings_[m].next;
    if (!mappings_[m].there) forget_mapping(m);
  }
  reinstate(i);
}

void PageStock::lend(Index i, StreamNumber to) {
  Page& page = pages_[i];
  largest_page_ = std::max(largest_page_, static_cast<int>(page.size));
  page.lent = true;
  page.owner = to;
  page.tick = 0;
  ++lent_pages_;
  set_parked(i, false);
  reinstate(i);
}

std::vector<Index> PageStock::lent_to(StreamNumber owner) const {
  std::vector<Index> result;
  for (Index i = 1; i < pages_.end() && lent_pages_ != 0; ++i)
    if (pages_[i].lent && pages_[i].owner == owner) result.push_back(i);
  return result;
}

void PageStock::end_loan(Index i) {
  Page& page = pages_[i];
  const bool listed = page.holder == 0 && !page.suspended;
  if (listed) list_remove(i);
  page.lent = page.parked = false;
  --lent_pages_;
  if (listed) list_push(i);
  note_backed(i);
}

Status PageStock::replace(Index i, Index device) {
  constexpr int kTries = 3;
  while (pages_[device].mappings != 0)
    if (Status status = unmap(pages_[device].mappings); !status.ok()) return status;
  Page& page = pages_[i];
  Status status;
  Index failed = 0;
  for (Index m = page.mappings; m != 0 && failed == 0; m = mappings_[m].next) {
    status = hide(m);
    if (status.ok()) status = show(m, pages_[device]);
    if (!status.ok()) failed = m;
  }
  for (Index m = page.mappings; failed != 0; m = mappings_[m].next) {
    if (hide(m).ok())
      for (int tries = 0; tries < kTries && !mappings_[m].there; ++tries) (void)show(m, page);
    if (m == failed) return status;
  }
  spilled_bytes_ -= page.spilled() ? page.bytes() : 0;
  owners_.move(pages_[device].owner, page.owner);
  for (Page* each : {&page, &pages_[device]}) each->host = !each->host;
  std::swap(page.handle, pages_[device].handle);
  std::swap(page.copies, pages_[device].copies);
  page.lent = page.parked = false;
  --lent_pages_;
  note_backed(i);
  return {};
}

bool PageStock::check_spares(std::string* why) const {
  for (int size = 0; size < kPageSizes; ++size) {
    std::uint32_t count = 0;
    Index previous = 0;
    for (Index p = spares_[size].head; p != 0; previous = p, p = pages_[p].list_after, ++count) {
      const Page& page = pages_[p];
      if (!page.unlent() || page.holder != 0 || page.suspended || page.size != size ||
          page.list_before != previous)
        return wrong(why, "list of spare host pages", p);
    }
    if (count != spares_[size].count || spares_[size].tail != previous)
      return wrong(why, "count of spare host pages", size);
  }
  return true;
}

bool PageStock::fusible(Index i) const {
  const Page& page = pages_[i];
  return page.handle == 0 && page.holder != 0 && page.mappings == page.holder &&
         mappings_[page.holder].next == 0;
}

void PageStock::fuse(const std::vector<Index>& pages) {
  for (std::size_t from = 0, to = 0; from < pages.size(); from = to) {
    to = from + 1;
    if (!fusible(pages[from])) continue;
    const Mapping first = mappings_[pages_[pages[from]].holder];
    Slot past = first.slot + pages_[pages[from]].slots();
    for (; to < pages.size() && fusible(pages[to]); ++to) {
      const Mapping& next = mappings_[pages_[pages[to]].holder];
      if (next.slot != past || next.segment != first.segment) break;
      past += pages_[pages[to]].slots();
    }
    fuse_run(pages, from, to);
  }
}

// The slots of the longest page from here on that is under one block only: freeing the block frees all of it.
// A small block may then take it, so it is a small part of what the pool holds.
Slot PageStock::within_block(Slot slot) const {
  constexpr std::uint64_t kShare = 64;
  const std::uint64_t held = bytes_ + suspended_bytes_;
  if (options_.max_page < kMostCreatedSlots * kSlotBytes) return 1;
  const Index b = space_.block_at(std::uint64_t{slot} * kSlotUnits);
  const Slot whole = b == 0 ? 0 : space_.blocks()[b].end() / kSlotUnits - slot;
  int size = kPageSizes - 1;
  while (size > 0 && (kPageSlots[size] > whole || kPageSlots[size] * kSlotBytes > held / kShare)) --size;
  return kPageSlots[size];
}

// Fuses adjacent pages [from, to). A new page replaces whole old ones, so a block in use is on every one of
// them. That would not hold if old pages were split: one may be covered at its end alone.
void PageStock::fuse_run(const std::vector<Index>& pages, std::size_t from, std::size_t to) {
  const auto slot_of = [&](std::size_t at) { return mappings_[pages_[pages[at]].holder].slot; };
  const Slot past = slot_of(to - 1) + pages_[pages[to - 1]].slots();
  const std::uint64_t bytes = (past - slot_of(from)) * kSlotBytes;
  for (std::size_t at = from, next = from; at < to; at = next) {
    const Slot most =
        std::max(kPageSlots[size_to_create(past - slot_of(at), bytes)], within_block(slot_of(at)));
    Slot whole = 0;  // slots of the longest row of old pages from here that is one page
    Slot slots = 0;
    for (std::size_t k = at; k < to && (slots += pages_[pages[k]].slots()) <= most; ++k)
      if (std::find(std::begin(kPageSlots), std::end(kPageSlots), slots) != std::end(kPageSlots)) {
        whole = slots;
        next = k + 1;
      }
    next = std::max(next, at + 1);
    if (next > at + 1) fuse_row(std::span(pages).subspan(at, next - at), whole);
  }
}

// Replaces several suspended pages by one.
void PageStock::fuse_row(std::span<const Index> row, Slot slots) {
  const Index i = pages_.add();
  if (i == 0) return;
  const Mapping first = mappings_[pages_[row.front()].holder];
  Page& page = pages_[i];
  page.suspended = true;
  page.owner = pages_[row.front()].owner;
  while (page.slots() < slots) ++page.size;
  owners_.add(page.owner);
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
  add_mapping(first.slot, i, false);
  page.holder = slots_[first.slot];
  mappings_[page.holder].there = false;
  mappings_[page.holder].tick = tick;
}

// ---- check ----------------------------------------------------------------------------------------------

bool PageStock::check_page(Index p, std::size_t* mappings, std::string* why) const {
  const Page& page = pages_[p];
  bool holder_found = page.holder == 0;
  for (Index m = page.mappings; m != 0; m = mappings_[m].next) {
    ++*mappings;
    const Mapping& mapping = mappings_[m];
    const Slot past = mapping.slot + page.slots();
    if (mapping.page != p) return wrong(why, "mapping in the list of another page", m);
    for (Slot slot = mapping.slot; slot < past; ++slot)
      if (slots_[slot] != m) return wrong(why, "mapping and slot disagree", m);
    if (backed_.count(mapping.slot, past) != (backs(m) ? page.slots() : 0))
      return wrong(why, "slots said to be backed", m);
    if (mapped_.count(mapping.slot, past) != page.slots()) return wrong(why, "slots said to be mapped", m);
    if (!mapping.there && !page.suspended) return wrong(why, "an address in use was unmapped", m);
    if (mapping.there && page.handle == 0) return wrong(why, "a page that is gone is mapped", m);
    if (space_.segments()[mapping.segment].units == 0) return wrong(why, "mapping in no segment", m);
    holder_found = holder_found || m == page.holder;
  }
  return holder_found || wrong(why, "holder of a page", p);
}

bool PageStock::check_lists(std::size_t* listed, std::string* why) const {
  std::uint64_t free_bytes = 0;
  for (std::size_t stream = 0; stream < shelves_.size(); ++stream) {
    const Shelf& owner = shelves_[stream];
    std::uint64_t bytes = 0;
    for (int size = 0; size < kPageSizes; ++size) {
      std::uint32_t count = 0;
      Index previous = 0;
      for (Index p = owner.pages[size].head; p != 0; previous = p, p = pages_[p].list_after, ++count) {
        const Page& page = pages_[p];
        if (!page.free() || page.owner != stream || page.size != size || page.list_before != previous)
          return wrong(why, "list of free pages", p);
        bytes += page.bytes();
      }
      if (count != owner.pages[size].count || owner.pages[size].tail != previous)
        return wrong(why, "count of free pages", stream);
      *listed += count;
    }
    if (bytes != owner.bytes) return wrong(why, "bytes of free pages", stream);
    free_bytes += bytes;
  }
  std::uint64_t owned = 0;
  bool empty = false;
  free_owners_.each([&](StreamNumber stream) {
    owned += shelf(stream).bytes;
    return empty = shelf(stream).bytes == 0;
  });
  if (empty || owned != free_bytes) return wrong(why, "streams that have free pages");
  return free_bytes == free_bytes_ || wrong(why, "bytes of all free pages");
}

bool PageStock::check(std::string* why) const {
  std::size_t mappings = 0, free = 0, listed = 0;
  std::uint64_t bytes = 0, suspended = 0, aside = 0, host = 0, spilled = 0, spare = 0, spares = 0, lent = 0;
  std::vector<std::uint32_t> owned;
  for (Index p = 1; p < pages_.end(); ++p) {
    const Page& page = pages_[p];
    if (!page.exists()) continue;
    (page.host ? host : page.handle != 0 ? bytes : suspended) += page.bytes();
    spilled += page.spilled() ? page.bytes() : 0;
    spare += page.unlent() && page.holder == 0 && !page.suspended;
    lent += page.lent;
    if (page.lent && !page.host) return wrong(why, "a device page is lent", p);
    aside += page.suspended;
    free += page.handle != 0 && page.free();
    owned.resize(std::max<std::size_t>(owned.size(), page.owner + 1u));
    owned[page.owner] += !page.host;
    if (!check_page(p, &mappings, why)) return false;
  }
  if (mappings != mappings_.size()) return wrong(why, "a mapping has no page");
  if (bytes != bytes_) return wrong(why, "bytes of pages");
  if (suspended != suspended_bytes_) return wrong(why, "suspended bytes");
  if (aside != aside_) return wrong(why, "count of pages set aside");
  if (!owners_.check(owned)) return wrong(why, "what a stream owns");
  if (host != host_bytes_ || spilled != spilled_bytes_) return wrong(why, "bytes of host pages");
  if (lent != lent_pages_) return wrong(why, "count of lent pages");
  for (const PageList& list : spares_) spares += list.count;
  if (spare != spares) return wrong(why, "a spare host page is in no list");
  if (!check_spares(why) || !check_lists(&listed, why)) return false;
  return free == listed || wrong(why, "a free page is in no list");
}

}  // namespace vram
