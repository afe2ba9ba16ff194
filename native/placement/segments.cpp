// Blocks in segments: placing, cutting, merging, and the addresses they lie in. How pages come under
// them is in pages.cpp; the order of streams and the ladder are in streams.cpp and pool.cpp.
#include "placement/segments.hpp"

#include <algorithm>
#include <mutex>

namespace vram {

namespace {

constexpr std::size_t kMaxBlocks = std::size_t{1} << 26;
constexpr std::size_t kMaxPages = std::size_t{1} << 20;
// A slot has one mapping and is in one segment at most, so that neither ever runs out.
std::size_t most_mappings(std::uint64_t space_bytes) { return space_bytes / kSlotBytes + 1; }
// Few enough for a small space, and more than there can be units of memory under the addresses, which are
// sixteen times as many.
std::size_t most_blocks(std::uint64_t space_bytes) {
  return std::min<std::size_t>(kMaxBlocks, space_bytes / kUnit / 8);
}
// The tables that grow with the addresses.
std::uint64_t table_bytes(std::uint64_t space_bytes) {
  return most_blocks(space_bytes) * (sizeof(Block) + sizeof(Index)) +
         most_mappings(space_bytes) * (sizeof(Mapping) + sizeof(Segment) + 3 * sizeof(Index)) +
         space_bytes / kUnit * sizeof(Index);
}
// Addresses set aside for a strip; a larger request gets a strip of its own size.
constexpr std::uint32_t kStripSlots[] = {128, 8192, 8192};  // 256 MiB for small, 16 GiB for others
// The fewest addresses to begin with.
constexpr std::uint64_t kLeastSpace = 256 * kMiB;
// Free blocks looked at before the driver is asked, by band.
constexpr int kCandidates[] = {8, 16, 16};
constexpr std::uint64_t kNoMemory = ~std::uint64_t{0};

// The part of all addresses, as a divisor, that the next strip may take. It shrinks with their number, so
// that tens of thousands of streams find addresses: what n strips take grows with the logarithm of n.
std::uint32_t strip_share(std::size_t strips) {
  constexpr std::size_t kFewStrips = 24;
  return static_cast<std::uint32_t>(64 + 32 * (std::max(strips, kFewStrips) - kFewStrips));
}

// The fewest slots of a strip that has room for the request.
std::uint32_t slots_for(const Want& want) {
  return static_cast<std::uint32_t>(round_up(std::uint64_t{want.padded()} * kUnit, kSlotBytes) / kSlotBytes) +
         1;
}

}  // namespace

Segments::Segments(Backend& backend, const PlacementOptions& options)
    : backend_(backend),
      options_(options),
      blocks_(most_blocks(options.space_bytes)),
      pages_(kMaxPages),
      mappings_(most_mappings(options.space_bytes)),
      segments_(most_mappings(options.space_bytes)),
      starts_(options.space_bytes / kUnit),
      started_(options.space_bytes / kUnit),
      slots_(options.space_bytes / kSlotBytes),
      mapped_(options.space_bytes / kSlotBytes),
      backed_(options.space_bytes / kSlotBytes) {
  // Slot 0 stays unused so that no block has offset 0 by accident.
  space_free_[1] = static_cast<std::uint32_t>(options.space_bytes / kSlotBytes) - 1;
}

std::uint64_t Segments::affordable_space(std::uint64_t wished) {
  constexpr std::uint64_t kShare = 4;
  for (std::uint64_t space = wished; space >= kLeastSpace; space = round_up(space / 2, kSlotBytes)) {
    try {
      const LazyArray<char> probe(kShare * table_bytes(space));
      return space;
    } catch (const std::bad_alloc&) {
    }
  }
  throw std::bad_alloc();
}

void Segments::configure(const PlacementOptions& options) {
  options_.segment_size = options.segment_size;
  options_.max_page = options.max_page;
  options_.best_fit = options.best_fit;
  ++changes_;
}

// ---- addresses --------------------------------------------------------------------------------------

// The unit in which the address lies, or 0, where no block is. An address that is the pool's was handed out
// after the space was reserved, so its reader sees the space; for any other, whatever is read serves.
std::uint64_t Segments::unit_at(Address address) const {
  if (options_.pages) {
    const Address space = space_.load(std::memory_order_relaxed);
    const std::uint64_t unit = (address - space) / kUnit;
    return address < space || unit >= starts_.capacity() ? 0 : unit;
  }
  std::shared_lock lock(plain_lock_);
  auto it = plain_.upper_bound(address);
  if (it == plain_.begin()) return 0;
  const Segment& segment = segments_[std::prev(it)->second];
  const std::uint64_t unit = (address - segment.base) / kUnit;
  return unit >= segment.units ? 0 : segment.first + unit;
}

Index Segments::find(Address address) const {
  if (address % kUnit != 0) return 0;
  return starts_[unit_at(address)].load(std::memory_order_relaxed);
}

Index Segments::block_at(std::uint64_t unit) const {
  const Index i = starts_[started_.last_up_to(unit, &steps_)].load(std::memory_order_relaxed);
  return i != 0 && unit < blocks_[i].end() ? i : 0;
}

Index Segments::containing(Address address) const {
  const std::uint64_t unit = unit_at(address);
  return unit == 0 ? 0 : block_at(unit);
}

std::uint32_t Segments::space_take(std::uint32_t slots) {
  auto best = space_free_.end();
  for (auto it = space_free_.begin(); it != space_free_.end(); ++it)
    if (it->second >= slots && (best == space_free_.end() || it->second < best->second)) best = it;
  if (best == space_free_.end()) return 0;
  const auto [slot, length] = *best;
  space_free_.erase(best);
  if (length > slots) space_free_[slot + slots] = length - slots;
  return slot;
}

void Segments::space_give(std::uint32_t slot, std::uint32_t slots) {
  starts_.forget(std::size_t{slot} * kSlotUnits, std::size_t{slots} * kSlotUnits);
  started_.forget(std::size_t{slot} * kSlotUnits, std::size_t{slots} * kSlotUnits);
  auto next = space_free_.lower_bound(slot);
  if (next != space_free_.end() && next->first == slot + slots) {
    slots += next->second;
    next = space_free_.erase(next);
  }
  if (next != space_free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == slot) {
      previous->second += slots;
      return;
    }
  }
  space_free_[slot] = slots;
}

// ---- the list of blocks ------------------------------------------------------------------------------

Index Segments::new_block(Index segment, Units offset, Units units, BlockState state) {
  const Index i = blocks_.add();
  Block& block = blocks_[i];
  block.segment = segment;
  block.units = units;
  block.owner.store(segments_[segment].stream, std::memory_order_relaxed);
  block.set(state);
  set_start(i, offset);
  return i;
}

void Segments::set_start(Index i, Units offset) {
  blocks_[i].offset = offset;
  starts_[offset].store(i, std::memory_order_relaxed);
  started_.insert(offset);
}

void Segments::insert_before(Index block, Index next) {
  Segment& segment = segments_[blocks_[next].segment];
  const Index previous = blocks_[next].before;
  blocks_[block].before = previous;
  blocks_[block].after = next;
  blocks_[next].before = block;
  (previous != 0 ? blocks_[previous].after : segment.head) = block;
}

void Segments::drop_block(Index i) {
  Block& block = blocks_[i];
  Segment& segment = segments_[block.segment];
  (block.before != 0 ? blocks_[block.before].after : segment.head) = block.after;
  (block.after != 0 ? blocks_[block.after].before : segment.tail) = block.before;
  starts_[block.offset].store(0, std::memory_order_relaxed);
  started_.erase(block.offset);
  block.set(BlockState::none);
  blocks_.drop(i);
}

// Splits off the first `units` of a block as a new one. pre: the block is in no index.
Index Segments::cut_front(Index i, Units units) {
  Block& block = blocks_[i];
  const Index front = new_block(block.segment, block.offset, units, BlockState::moving);
  insert_before(front, i);
  set_start(i, block.offset + units);
  block.units -= units;
  blocks_[front].tick = block.tick;
  return front;
}

// The first offset at or after `offset`, counted as in the block's segment, that has the alignment. In 64
// bits: it may lie beyond the block and beyond what a block's offset can say.
std::uint64_t Segments::aligned_up(const Block& block, std::uint64_t offset, std::uint64_t align) const {
  if (align <= kUnit) return offset;
  const Segment& segment = segments_[block.segment];
  const Address address = segment.base + (offset - segment.first) * kUnit;
  return offset + (~address + 1) % align / kUnit;
}

// The first place in the block, at or after `from`, that has the alignment and room for the request; none
// where there is no such place.
Spot Segments::first_fit(Index i, Units from, const Want& want) const {
  const std::uint64_t offset = aligned_up(blocks_[i], from, want.align);
  if (offset + want.units > blocks_[i].end()) return {};
  return {i, static_cast<Units>(offset)};
}

// Joins a free block (in no index) with its free neighbours and indexes the result.
Index Segments::merge(Index i) {
  const Index before = blocks_[i].before;
  const Index after = blocks_[i].after;
  if (after != 0 && blocks_[after].is(BlockState::free)) {
    remove_free(after);
    blocks_[i].units += blocks_[after].units;
    blocks_[i].tick = std::max(blocks_[i].tick, blocks_[after].tick);
    drop_block(after);
  }
  if (before != 0 && blocks_[before].is(BlockState::free)) {
    remove_free(before);
    blocks_[before].units += blocks_[i].units;
    blocks_[before].tick = std::max(blocks_[i].tick, blocks_[before].tick);
    drop_block(i);
    i = before;
  }
  add_free(i);
  return i;
}

// Cuts [offset, offset + units) out of a free block; the rest stays free.
Index Segments::carve(const Spot& spot, Units units) {
  const Index i = spot.block;
  remove_free(i);
  if (const Units pad = spot.offset - blocks_[i].offset; pad != 0) {
    const Index front = cut_front(i, pad);
    blocks_[front].set(BlockState::free);
    add_free(front);
  }
  Index taken = i;
  if (blocks_[i].units > units) {
    taken = cut_front(i, units);
    add_free(i);
  }
  blocks_[taken].set(BlockState::moving);
  Segment& segment = segments_[blocks_[taken].segment];
  if (++segment.in_use == 1 && segment.plain) free_plain_.erase({segment.units, blocks_[taken].segment});
  return taken;
}

// ---- taking and giving back ----------------------------------------------------------------------------

Index Segments::peek(const Want& want) const {
  const int walk = options_.best_fit ? FreeIndex::kWalk : 1;
  const auto find = [&](Band band) {
    return free_blocks(want.stream, band).find(blocks_, want.padded(), walk);
  };
  const Index block = find(want.band);
  return block == 0 && bands_share() ? find(want.band == kSmall ? kLarge : kSmall) : block;
}

// Bytes of pages that a block at the spot would take, beyond those that its neighbours hold already; or
// kNoMemory where a page is neither held by a neighbour nor free for the stream.
std::uint64_t Segments::newly_held(const Spot& spot, const Want& want) {
  const std::uint32_t last = (spot.offset + want.units - 1) / kSlotUnits;
  std::uint64_t bytes = 0;
  ++survey_;
  for (std::uint32_t slot = spot.offset / kSlotUnits; slot <= last;) {
    const Index m = slots_[slot];
    if (m == 0) return kNoMemory;
    const Mapping& mapping = mappings_[m];
    const Page& page = pages_[mapping.page];
    if (page.suspended) return kNoMemory;
    if (page.holder != m) {
      if (!counts_on(m, want.stream)) return kNoMemory;
      bytes += page.bytes();
    }
    slot = mapping.slot + page.slots();
  }
  return bytes;
}

// Of the free blocks whose addresses have their memory, the tightest; of equal ones, the place that takes the
// least from the free pages.
Spot Segments::find_spot(const Want& want) {
  const FreeIndex& index = free_blocks(want.stream, want.band);
  if (!options_.pages) return first_fit(peek(want), want);
  if (want.strip != 0) {
    const Spot spot = strip_spot(want);
    return spot.block == 0 || newly_held(spot, want) == kNoMemory ? Spot{} : spot;
  }
  Spot best;
  Units best_units = ~Units{0};
  std::uint64_t least = kNoMemory;
  int looked = 0;
  const auto consider = [&](const Spot& spot, Units units) {
    if (spot.block == 0) return;
    const std::uint64_t bytes = newly_held(spot, want);
    if (bytes == kNoMemory) return;
    if (units == best_units && (bytes > least || (bytes == least && spot.offset >= best.offset))) return;
    best = spot;
    best_units = units;
    least = bytes;
  };
  const auto visit = [&](Index i) {
    const Block& block = blocks_[i];
    if (block.units <= best_units) {
      consider(first_fit(i, want), block.units);
      // At the block's other end it may share a page with the next neighbour. Blocks of the middle band keep
      // to one end: where they are replaced by slightly larger ones, again and again, theirs stay neighbours.
      if (want.band == kLarge && want.align <= kUnit && block.units > want.units)
        consider({i, block.end() - want.units}, block.units);
    }
    return ++looked >= kCandidates[want.band];
  };
  index.candidates(blocks_, want.padded(), visit, [&] { return best.block != 0; });
  return best;
}

// Of the addresses and of the pages under them, which may have been used elsewhere since. That holds for a
// page that a neighbour has taken meanwhile, too: it was in order for our stream, not for every other.
Tick Segments::last_use(const Spot& spot, Units units) const {
  Tick tick = blocks_[spot.block].tick;
  if (segments_[blocks_[spot.block].segment].plain) return tick;
  const std::uint32_t last = (spot.offset + units - 1) / kSlotUnits;
  for (std::uint32_t slot = spot.offset / kSlotUnits; slot <= last;) {
    const Mapping& mapping = mappings_[slots_[slot]];
    const Page& page = pages_[mapping.page];
    tick = std::max(tick, page.tick);
    slot = mapping.slot + page.slots();
  }
  return tick;
}

Index Segments::take(const Want& want, const std::function<bool(Tick)>* allowed) {
  const Spot spot = find_spot(want);
  if (spot.block == 0 || !can_cut()) return 0;
  if (allowed != nullptr && !(*allowed)(last_use(spot, want.units))) return 0;
  if (segments_[blocks_[spot.block].segment].plain) return carve(spot, want.units);
  const std::uint32_t last = (spot.offset + want.units - 1) / kSlotUnits;
  for (std::uint32_t slot = spot.offset / kSlotUnits; slot <= last;) {
    const Index m = slots_[slot];
    const Index page = mappings_[m].page;
    if (pages_[page].free()) hold(page, m);
    slot = mappings_[m].slot + pages_[page].slots();
  }
  return carve(spot, want.units);
}

void Segments::put(Index i, Tick tick) {
  Block& block = blocks_[i];
  const Units from = block.offset;
  const Units to = block.end();
  Segment& segment = segments_[block.segment];
  if (--segment.in_use == 0 && segment.plain) free_plain_.insert({segment.units, block.segment});
  block.tick = tick;
  block.owner.store(segment.stream, std::memory_order_relaxed);
  block.set(BlockState::free);
  const Block& whole = blocks_[merge(i)];
  if (segment.plain) return;
  // The pages that this block was the last to hold: they touch it and lie wholly in the merged block.
  for (std::uint32_t slot = from / kSlotUnits; slot * kSlotUnits < to;) {
    Mapping& mapping = mappings_[slots_[slot]];
    const std::uint32_t next = mapping.slot + pages_[mapping.page].slots();
    const bool last = mapping.slot * kSlotUnits >= whole.offset && next * kSlotUnits <= whole.end();
    if (last && pages_[mapping.page].suspended) {
      discard(mapping.page, whole.tick);
    } else if (last) {
      // Others freed their part of the page before; the latest use counts, which need not be this one.
      mapping.tick = whole.tick;
      let_go(mapping.page, whole.tick);
    }
    slot = next;
  }
}

// Any free page may serve any address, so with pages all of them count as one piece.
std::uint64_t Segments::largest_free(std::uint16_t stream) const {
  if (options_.pages) return free_page_bytes(stream);
  std::uint64_t most = 0;
  for (Band band = 0; band < kBands; ++band)
    free_blocks(stream, band).each(blocks_, [&](Index i) {
      most = std::max(most, std::uint64_t{blocks_[i].units} * kUnit);
      return false;
    });
  return most;
}

Index Segments::split_in_use(Index i, Units units) {
  const Index front = cut_front(i, units);
  ++segments_[blocks_[i].segment].in_use;
  return front;
}

// ---- segments ---------------------------------------------------------------------------------------

// All the addresses there will be. Where the system has not as many to give as wished for, a part of what it
// has: others need addresses, too.
Status Segments::reserve_space() {
  constexpr std::uint64_t kShare = 4;
  Address base = 0;
  std::uint64_t bytes = options_.space_bytes;
  Status status = backend_.space_reserve(bytes, &base);
  while (status.code == Code::out_of_memory && bytes >= 2 * kLeastSpace) {
    bytes = round_up(bytes / 2, kSlotBytes);
    status = backend_.space_reserve(bytes, &base);
  }
  if (!status.ok()) return status;
  if (bytes != options_.space_bytes) {
    // Where they cannot be given back, the pool keeps them all.
    if (backend_.space_release(base, bytes).ok()) {
      bytes = std::max(round_up(bytes / kShare, kSlotBytes), kLeastSpace);
      if (status = backend_.space_reserve(bytes, &base); !status.ok()) return status;
    }
    options_.space_bytes = bytes;
    space_free_ = {{1, static_cast<std::uint32_t>(bytes / kSlotBytes) - 1}};
  }
  space_.store(base, std::memory_order_relaxed);
  return status;
}

// Whether a strip could be made for the request.
bool Segments::has_addresses(const Want& want) const {
  if (want.strip != 0) return true;
  return std::any_of(space_free_.begin(), space_free_.end(),
                     [&](const auto& range) { return range.second >= slots_for(want); });
}

// New addresses for a stream and band: one free block without memory.
Status Segments::new_strip(const Want& want) {
  if (space_ == 0)
    if (Status status = reserve_space(); !status.ok()) return status;
  const std::uint32_t needed = slots_for(want);
  const auto all = static_cast<std::uint32_t>(options_.space_bytes / kSlotBytes);
  std::uint32_t slots =
      std::max(needed, std::min(kStripSlots[want.band], all / strip_share(segments_.size())));
  std::uint32_t slot = space_take(slots);
  if (slot == 0) slot = space_take(slots = needed);
  if (slot == 0) return {Code::out_of_memory, 0, "space_reserve"};
  add_strip(want.stream, want.band, slot, slots);
  return {};
}

Index Segments::add_strip(std::uint16_t stream, Band band, std::uint32_t slot, std::uint32_t slots) {
  const Index i = segments_.add();
  Segment& segment = segments_[i];
  segment.stream = stream;
  segment.band = band;
  segment.first = segment.touched = slot * kSlotUnits;
  segment.units = slots * kSlotUnits;
  segment.base = slot_address(slot);
  segment.head = segment.tail = new_block(i, segment.first, segment.units, BlockState::free);
  add_free(segment.head);
  enlist(i);
  return i;
}

// Memory from the driver in one piece, for devices without pages. It has room for a whole number of such
// blocks, so that no end is left over that the next one of them does not fit into.
Status Segments::new_plain(const Want& want, std::uint64_t budget) {
  const std::uint64_t each = std::uint64_t{want.padded()} * kUnit;
  const std::uint64_t need = round_up(each, kSlotBytes);
  std::uint64_t bytes = std::max(need, round_up(round_up(options_.segment_size, each), kSlotBytes));
  if (want.band != kSmall && need < kPlainSegmentBytes / 2) bytes = std::max(bytes, kPlainSegmentBytes);
  if (bytes > budget) bytes = bands_share() ? std::max(need, budget / kSlotBytes * kSlotBytes) : need;
  if (bytes > budget) return {Code::out_of_memory, 0, "reserve"};
  const auto slots = static_cast<std::uint32_t>(bytes / kSlotBytes);
  const std::uint32_t slot = space_take(slots);
  if (slot == 0) return {Code::out_of_memory, 0, "reserve"};
  Address base = 0;
  if (Status status = backend_.reserve(bytes, &base); !status.ok()) {
    space_give(slot, slots);
    // Where the driver has not as much to give, just what is needed.
    return status.code == Code::out_of_memory && bytes > need ? new_plain(want, need) : status;
  }
  const Index i = segments_.add();
  Segment& segment = segments_[i];
  segment.plain = true;
  segment.base = base;
  segment.first = slot * kSlotUnits;
  segment.units = slots * kSlotUnits;
  segment.stream = want.stream;
  segment.band = want.band;
  {
    std::unique_lock lock(plain_lock_);
    plain_[base] = i;
  }
  ++plain_segments_;
  reserved_bytes_ += bytes;
  segment.head = segment.tail = new_block(i, segment.first, segment.units, BlockState::free);
  add_free(segment.head);
  enlist(i);
  own(segment.stream, true);
  free_plain_.insert({segment.units, i});
  return {};
}

Status Segments::release_plain(Index s) {
  Segment& segment = segments_[s];
  const std::uint64_t bytes = std::uint64_t{segment.units} * kUnit;
  if (Status status = backend_.release(segment.base, bytes); !status.ok()) return status;
  {
    std::unique_lock lock(plain_lock_);
    plain_.erase(segment.base);
  }
  --plain_segments_;
  reserved_bytes_ -= bytes;
  free_plain_.erase({segment.units, s});
  own(segment.stream, false);
  drop_segment(s);
  return {};
}

// pre: one free block, nothing mapped.
void Segments::drop_segment(Index s) {
  Segment& segment = segments_[s];
  remove_free(segment.head);
  drop_block(segment.head);
  delist(s);
  space_give(segment.first / kSlotUnits, segment.units / kSlotUnits);
  segment = Segment();
  segments_.drop(s);
}

// Every segment is in its stream's list.
void Segments::enlist(Index s) {
  Segment& segment = segments_[s];
  Index& head = shelf(segment.stream).segments;
  segment.list_before = 0;
  segment.list_after = head;
  if (head != 0) segments_[head].list_before = s;
  head = s;
}

void Segments::delist(Index s) {
  const Segment& segment = segments_[s];
  (segment.list_before != 0 ? segments_[segment.list_before].list_after : shelf(segment.stream).segments) =
      segment.list_after;
  if (segment.list_after != 0) segments_[segment.list_after].list_before = segment.list_before;
}

void Segments::transfer_segment(Index i, std::uint16_t to, Band band, Tick tick) {
  Segment& segment = segments_[i];
  remove_free(segment.head);
  delist(i);
  own(segment.stream, false);
  own(to, true);
  segment.stream = to;
  segment.band = band;
  enlist(i);
  blocks_[segment.head].owner.store(to, std::memory_order_relaxed);
  blocks_[segment.head].tick = tick;
  add_free(segment.head);
}

void Segments::inherit(std::uint16_t from, std::uint16_t to) {
  // Pages that changed hands, and those mapped where the addresses did: for them it is looked again which
  // addresses they back.
  std::vector<Index> touched;
  const auto take_page = [&](Index i) {
    Page& page = pages_[i];
    touched.push_back(i);
    if (page.owner != from) return;
    if (page.free()) return transfer(i, to, 0);
    own(from, false);
    own(to, true);
    page.owner = to;
    if (page.holder == 0) return discard(i, 0);  // suspended with a graph that is gone
    page.tick = 0;
  };
  for (const PageList& list : shelf(from).pages)
    while (list.head != 0) take_page(list.head);
  for (Index s = shelf(from).segments, next = 0; s != 0; s = next) {
    Segment& segment = segments_[s];
    next = segment.list_after;
    for (std::uint32_t slot = segment.first / kSlotUnits; slot < segment.touched / kSlotUnits; ++slot) {
      const Index m = slots_[slot];
      if (m == 0 || mappings_[m].slot != slot) continue;
      mappings_[m].tick = 0;
      take_page(mappings_[m].page);
    }
    for (Index b = segment.head; b != 0; b = blocks_[b].after)
      if (blocks_[b].is(BlockState::free)) remove_free(b);
    delist(s);
    if (segment.plain) {
      own(from, false);
      own(to, true);
    }
    segment.stream = to;
    enlist(s);
    for (Index b = segment.head; b != 0; b = blocks_[b].after) {
      if (!blocks_[b].is(BlockState::free)) continue;
      blocks_[b].owner.store(to, std::memory_order_relaxed);
      blocks_[b].tick = 0;
      add_free(b);
    }
  }
  // Suspended pages that no block holds are in no list, and need not be mapped in their stream's segments.
  for (Index i = 1; aside_ != 0 && i < pages_.end(); ++i)
    if (pages_[i].exists() && pages_[i].owner == from) take_page(i);
  for (const Index i : touched)
    if (pages_[i].exists()) note_backed(i);
}

}  // namespace vram
