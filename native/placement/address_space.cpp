// Segments and the blocks that tile them: adding, splitting, merging, moving between streams.
#include "placement/address_space.hpp"

#include <algorithm>
#include <bit>
#include <mutex>
#include <unordered_set>

#include "placement/room.hpp"

namespace vram {

namespace {

constexpr std::size_t kMaxBlocks = std::size_t{1} << 26;
// A slot has at most one mapping and is in at most one segment, so neither ever runs out.
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
// Addresses for a strip, by band; a larger request gets a strip of its own size.
constexpr Slot kStripSlots[] = {128, 8192, 8192};  // 256 MiB for small, 16 GiB for others
// The fewest addresses to begin with.
constexpr std::uint64_t kLeastSpace = 256 * kMiB;
// The part of the addresses or tables that a pool takes if it cannot have as many as it wishes.
constexpr std::uint64_t kShare = 4;

// The part of all addresses, as a divisor, that the next strip may take. It shrinks with the number of
// strips, so that tens of thousands of streams find addresses: n strips take addresses that grow with log n.
Slot strip_share(std::size_t strips) {
  constexpr std::size_t kFewStrips = 24;
  return static_cast<Slot>(64 + 32 * (std::max(strips, kFewStrips) - kFewStrips));
}

// The fewest slots of a strip that has room for the request.
Slot slots_for(const Want& want) {
  return static_cast<Slot>(round_up(bytes_of(want.padded()), kSlotBytes) / kSlotBytes) + 1;
}

}  // namespace

AddressSpace::AddressSpace(Backend& backend, const PlacementOptions& options)
    : backend_(backend),
      options_(options),
      space_bytes_(options.space_bytes),
      strip_units_(options.pages ? options.space_bytes / kUnit : 0),
      blocks_(most_blocks(options.all_bytes())),
      segments_(most_mappings(options.all_bytes())),
      starts_(options.all_bytes() / kUnit),
      started_(options.all_bytes() / kUnit) {
  // Slot 0 stays unused so that no block has offset 0 by accident.
  const auto first_plain = static_cast<Slot>(std::max<std::uint64_t>(strip_units_ / kSlotUnits, 1));
  const auto all = static_cast<Slot>(options.all_bytes() / kSlotBytes);
  if (first_plain > 1) space_free_[1] = first_plain - 1;
  if (all > first_plain) plain_free_[first_plain] = all - first_plain;
}

std::uint64_t AddressSpace::affordable(std::uint64_t wished) {
  for (std::uint64_t space = wished; space >= kLeastSpace; space = round_up(space / 2, kSlotBytes)) {
    try {
      const LazyArray<char> probe(kShare * table_bytes(space));
      return space;
    } catch (const std::bad_alloc&) {
    }
  }
  throw std::bad_alloc();
}

// ---- addresses ------------------------------------------------------------------------------------------

// The unit at the address, or 0, where no block is. An address that is the pool's was allocated after the
// space was reserved, so its reader sees the space; for any other address, any value will do.
std::uint64_t AddressSpace::unit_at(Address address) const {
  const Address space = space_.load(std::memory_order_relaxed);
  const std::uint64_t unit = (address - space) / kUnit;
  return address < space || unit >= strip_units_ ? plain_unit_at(address) : unit;
}

std::uint64_t AddressSpace::plain_unit_at(Address address) const {
  std::shared_lock lock(plain_lock_);
  auto it = plain_.upper_bound(address);
  if (it == plain_.begin()) return 0;
  const Segment& segment = segments_[std::prev(it)->second];
  const std::uint64_t unit = (address - segment.base) / kUnit;
  return unit >= segment.units ? 0 : segment.first + unit;
}

Index AddressSpace::find(Address address) const {
  if (address % kUnit != 0) return 0;
  return starts_[unit_at(address)].load(std::memory_order_relaxed);
}

Index AddressSpace::block_at(std::uint64_t unit) const {
  const Index i = starts_[started_.last_up_to(unit, &steps_)].load(std::memory_order_relaxed);
  return i != 0 && unit < blocks_[i].end() ? i : 0;
}

Index AddressSpace::containing(Address address) const {
  const std::uint64_t unit = unit_at(address);
  return unit == 0 ? 0 : block_at(unit);
}

// The tightest range of slots in no segment, or 0.
Slot AddressSpace::reserve_slots(Ranges& free, Slot slots) {
  auto best = free.end();
  for (auto it = free.begin(); it != free.end(); ++it)
    if (it->second >= slots && (best == free.end() || it->second < best->second)) best = it;
  if (best == free.end()) return 0;
  const auto [slot, length] = *best;
  auto node = free.extract(best);  // used again for the rest, so that nothing is allocated here
  if (length > slots) {
    node.key() = slot + slots;
    node.mapped() = length - slots;
    free.insert(std::move(node));
  }
  return slot;
}

void AddressSpace::return_slots(Slot slot, Slot slots) {
  starts_.forget(std::size_t{slot} * kSlotUnits, std::size_t{slots} * kSlotUnits);
  started_.forget(std::size_t{slot} * kSlotUnits, std::size_t{slots} * kSlotUnits);
  Ranges& free = slot < strip_units_ / kSlotUnits ? space_free_ : plain_free_;
  auto next = free.lower_bound(slot);
  Ranges::node_type node;
  if (next != free.end() && next->first == slot + slots) {
    slots += next->second;
    const auto behind = std::next(next);
    node = free.extract(next);
    next = behind;
  }
  if (next != free.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == slot) {
      previous->second += slots;
      return;
    }
  }
  if (!node.empty()) {
    node.key() = slot;
    node.mapped() = slots;
    free.insert(std::move(node));
    return;
  }
  try {
    free.emplace(slot, slots);
  } catch (const std::bad_alloc&) {
    // The host has no memory left: these addresses are not used again, of which there are plenty.
  }
}

// All the addresses there will be. If the system has fewer than wished for, the pool takes a part of what
// there is, because others need addresses, too.
Status AddressSpace::reserve_space() {
  if (space_ != 0) return {};
  Address base = 0;
  std::uint64_t bytes = space_bytes_;
  Status status = backend_.space_reserve(bytes, &base);
  while (status.code == Code::out_of_memory && bytes >= 2 * kLeastSpace) {
    bytes = round_up(bytes / 2, kSlotBytes);
    status = backend_.space_reserve(bytes, &base);
  }
  if (!status.ok()) return status;
  if (bytes != space_bytes_) {
    // If they cannot be released, the pool keeps them all.
    if (backend_.space_release(base, bytes).ok()) {
      bytes = std::max(round_up(bytes / kShare, kSlotBytes), kLeastSpace);
      if (status = backend_.space_reserve(bytes, &base); !status.ok()) return status;
    }
    space_bytes_ = bytes;
    space_free_ = {{1, static_cast<Slot>(bytes / kSlotBytes) - 1}};
  }
  space_.store(base, std::memory_order_relaxed);
  return status;
}

// ---- places ---------------------------------------------------------------------------------------------

std::uint64_t AddressSpace::aligned_up(const Block& block, std::uint64_t offset, std::uint64_t align) const {
  if (align <= kUnit) return offset;
  const Segment& in = segment(block);
  const Address address = in.base + (offset - in.first) * kUnit;
  return offset + (~address + 1) % align / kUnit;
}

Spot AddressSpace::first_fit(Index i, Units from, const Want& want) const {
  const std::uint64_t offset = aligned_up(blocks_[i], from, want.align);
  if (offset + want.units > blocks_[i].end()) return {};
  return {i, static_cast<Units>(offset)};
}

Spot AddressSpace::untouched_spot(const Want& want) const {
  for (Index s = first_segment(want.stream); s != 0; s = segments_[s].list_after, ++steps_) {
    const Segment& each = segments_[s];
    if (each.plain || each.band != want.band || each.touched == each.end()) continue;
    const Block& tail = blocks_[each.tail];
    if (!tail.is(BlockState::free)) continue;
    const Spot spot = first_fit(each.tail, std::max(each.touched, tail.offset), want);
    if (spot.block != 0) return spot;
  }
  return {};
}

Spot AddressSpace::strip_spot(const Want& want) const {
  const Segment& strip = segments_[want.strip];
  const Block& tail = blocks_[strip.tail];
  if (strip.growable != want.growable || !tail.is(BlockState::free) || tail.units < want.units) return {};
  return {strip.tail, tail.offset};
}

// ---- blocks ---------------------------------------------------------------------------------------------

void AddressSpace::add_shelves(std::size_t count) {
  while (shelves_.size() < count) shelves_.push_back(std::make_unique<Shelf>());
}

// The index of the free blocks of a segment, which is about to change.
inline FreeIndex& AddressSpace::index_of(const Segment& in) {
  ++changes_;
  return shelf(in.stream).free[in.band];
}

inline void AddressSpace::drop_block(Index i) {
  Block& block = blocks_[i];
  Segment& in = segments_[block.segment];
  (block.before != 0 ? blocks_[block.before].after : in.head) = block.after;
  (block.after != 0 ? blocks_[block.after].before : in.tail) = block.before;
  starts_[block.offset].store(0, std::memory_order_relaxed);
  started_.erase(block.offset);
  block.set(BlockState::none);
  blocks_.drop(i);
}

// Splits off the first `units` of a block as a new one, in state moving. pre: the block is in no index.
inline Index AddressSpace::split_front(Index i, Units units) {
  Block& block = blocks_[i];
  const StreamNumber stream = segments_[block.segment].stream;
  const Index front = blocks_.add(stream);
  Block& made = blocks_[front];
  made.offset = block.offset;
  made.units = units;
  made.before = block.before;
  made.after = i;
  made.segment = block.segment;
  made.tick = block.tick;
  made.owner.store(stream, std::memory_order_relaxed);
  made.set(BlockState::moving);
  (made.before != 0 ? blocks_[made.before].after : segments_[block.segment].head) = front;
  block.before = front;
  block.offset += units;
  block.units -= units;
  starts_[made.offset].store(front, std::memory_order_relaxed);
  starts_[block.offset].store(i, std::memory_order_relaxed);
  started_.insert(block.offset);
  return front;
}

Index AddressSpace::take(const Spot& spot, Units units) {
  const Index i = spot.block;
  Block& block = blocks_[i];
  Segment& in = segments_[block.segment];
  FreeIndex& index = index_of(in);
  index.remove(blocks_, i);
  if (const Units pad = spot.offset - block.offset; pad != 0) {
    const Index front = split_front(i, pad);
    blocks_[front].set(BlockState::free);
    index.add(blocks_, front);
  }
  Index taken = i;
  if (block.units > units) {
    taken = split_front(i, units);
    index.add(blocks_, i);
  } else {
    block.set(BlockState::moving);
  }
  if (++in.in_use == 1 && in.plain) [[unlikely]] {
    used_plain_.push_back(free_plain_.extract({in.units, block.segment}));
    count_free_plain(in, false);
  }
  return taken;
}

Index AddressSpace::put(Index i, Tick tick) {
  Block* block = &blocks_[i];
  Segment& in = segments_[block->segment];
  if (--in.in_use == 0 && in.plain) [[unlikely]] {
    used_plain_.back().value() = {in.units, block->segment};
    free_plain_.insert(std::move(used_plain_.back()));
    used_plain_.pop_back();
    count_free_plain(in, true);
  }
  FreeIndex& index = index_of(in);
  block->tick = tick;
  block->owner.store(in.stream, std::memory_order_relaxed);
  block->set(BlockState::free);
  if (const Index after = block->after; after != 0 && blocks_[after].is(BlockState::free)) {
    index.remove(blocks_, after);
    block->units += blocks_[after].units;
    block->tick = std::max(block->tick, blocks_[after].tick);
    drop_block(after);
  }
  if (const Index before = block->before; before != 0 && blocks_[before].is(BlockState::free)) {
    index.remove(blocks_, before);
    blocks_[before].units += block->units;
    blocks_[before].tick = std::max(block->tick, blocks_[before].tick);
    drop_block(i);
    i = before;
  }
  index.add(blocks_, i);
  return i;
}

Index AddressSpace::split_in_use(Index i, Units units) {
  const Index front = split_front(i, units);
  ++segments_[blocks_[i].segment].in_use;
  return front;
}

void AddressSpace::join(Index front, Index back) {
  blocks_[front].units += blocks_[back].units;
  --segments_[blocks_[front].segment].in_use;
  drop_block(back);
}

// ---- segments -------------------------------------------------------------------------------------------

// Adds a segment of one free block.
Index AddressSpace::add_segment(const Segment& segment) {
  (void)shelf(segment.stream);  // the only step that may throw
  const Index i = segments_.add();
  Segment& added = segments_[i] = segment;
  added.head = added.tail = blocks_.add(added.stream);
  Block& block = blocks_[added.head];
  block.offset = added.first;
  block.units = added.units;
  block.segment = i;
  block.owner.store(added.stream, std::memory_order_relaxed);
  block.set(BlockState::free);
  starts_[block.offset].store(added.head, std::memory_order_relaxed);
  started_.insert(block.offset);
  index_of(added).add(blocks_, added.head);
  enlist(i);
  return i;
}

Status AddressSpace::add_strip(const Want& want) {
  if (Status status = reserve_space(); !status.ok()) return status;
  const Slot needed = slots_for(want);
  const auto all = static_cast<Slot>(space_bytes_ / kSlotBytes);
  const std::uint64_t wished =
      std::max<std::uint64_t>(kStripSlots[want.band], options_.segment_size / kSlotBytes);
  Slot slots = std::max(
      needed, static_cast<Slot>(std::min<std::uint64_t>(wished, all / strip_share(segments_.size()))));
  Slot slot = reserve_slots(space_free_, slots);
  if (slot == 0) slot = reserve_slots(space_free_, slots = needed);
  if (slot == 0) return {Code::out_of_memory, 0, kNoPlace};
  const Units first = slot * kSlotUnits;
  add_segment({.base = slot_address(slot),
               .first = first,
               .units = slots * kSlotUnits,
               .touched = first,
               .stream = want.stream,
               .band = want.band});
  return {};
}

Status AddressSpace::add_growing_strip(StreamNumber stream, Slot slots, Index* out) {
  if (Status status = reserve_space(); !status.ok()) return status;
  const Slot slot = reserve_slots(space_free_, slots);
  if (slot == 0) return {Code::out_of_memory, 0, kNoPlace};
  const Units first = slot * kSlotUnits;
  *out = add_segment({.base = slot_address(slot),
                      .first = first,
                      .units = slots * kSlotUnits,
                      .touched = first,
                      .stream = stream,
                      .band = kGrowing});
  return {};
}

Index AddressSpace::strip_at(Address address) const {
  const Index block = find(address);
  if (block == 0) return 0;
  const Index strip = blocks_[block].segment;
  return segments_[strip].growable != 0 && segments_[strip].base == address ? strip : 0;
}

bool AddressSpace::has_addresses(const Want& want) const {
  if (want.strip != 0) return true;
  return std::any_of(space_free_.begin(), space_free_.end(),
                     [&](const auto& range) { return range.second >= slots_for(want); });
}

// A segment has room for a whole number of such blocks, so that no end is left over that the next one does
// not fit into. In heaps the sizes are PyTorch's. Where memory is fine-grained, a segment is as long as the
// request, or a small share of what there is, so that little is unused at any size. Its length then has seven
// binary digits, so that similar requests can use it.
std::uint64_t AddressSpace::plain_length(const Want& want) const {
  if (want.heap == nullptr && options_.grain < kSlotBytes && options_.segment_size == 0) {
    constexpr std::uint64_t kShare = 64, kSteps = 64;
    const std::uint64_t asked = bytes_of(want.padded());
    const std::uint64_t exact = round_up(asked, std::max(options_.grain, std::bit_floor(asked) / kSteps));
    return std::max({exact, kSlotBytes, plain_bytes_ / kShare / options_.grain * options_.grain});
  }
  const std::uint64_t need = round_up(bytes_of(want.padded()), kSlotBytes);
  if (want.heap != nullptr && want.band == kSmall) return need;
  if (want.heap != nullptr)
    return bytes_of(want.padded()) < kPlainSegmentBytes / 2 ? kPlainSegmentBytes : need;
  const std::uint64_t wished = round_up(options_.segment_size, bytes_of(want.padded()));
  const std::uint64_t bytes = std::max(need, round_up(wished, kSlotBytes));
  return want.band != kSmall && need < kPlainSegmentBytes / 2 ? std::max(bytes, kPlainSegmentBytes) : bytes;
}

Status AddressSpace::add_plain(const Want& want, std::uint64_t budget) {
  const std::uint64_t need =
      round_up(bytes_of(want.padded()), want.heap == nullptr ? options_.grain : kSlotBytes);
  std::uint64_t bytes = plain_length(want);
  if (bytes > budget)
    bytes = options_.bands_share() && want.heap == nullptr ? std::max(need, budget / kSlotBytes * kSlotBytes)
                                                           : need;
  if (bytes > budget) return {Code::out_of_memory, 0, "reserve"};
  const Status status = add_plain_of(want, bytes);
  // If the driver has less, exactly what is needed.
  return status.code == Code::out_of_memory && bytes > need ? add_plain_of(want, need) : status;
}

Status AddressSpace::add_plain_of(const Want& want, std::uint64_t bytes) {
  // unit_at tells strips and plain segments apart by the addresses of the space.
  if (options_.pages)
    if (Status status = reserve_space(); !status.ok()) return status;
  const auto slots = static_cast<Slot>(round_up(bytes, kSlotBytes) / kSlotBytes);
  const auto units = static_cast<Units>(bytes / kUnit);
  const Slot slot = reserve_slots(plain_free_, slots);
  if (slot == 0) return {Code::out_of_memory, 0, "reserve"};
  std::shared_ptr<Source> source = want.heap != nullptr ? want.heap->source : nullptr;
  // All host memory that the tables need is allocated before they change.
  std::set<std::pair<Units, Index>> added;
  std::map<Address, Index> based;
  decltype(sources_) sourced;
  Address base = 0;
  try {
    added.insert({units, 0});
    based.emplace(0, 0);
    if (source != nullptr) sourced.emplace(0, source);
    make_room(used_plain_, free_plain_.size() + used_plain_.size() + 1);
    plain_owners_.make_room(want.stream);
    (void)shelf(want.stream);
  } catch (const std::bad_alloc&) {
    return_slots(slot, slots);
    throw;
  }
  Status status = source != nullptr ? source->reserve(bytes, &base) : backend_.reserve(bytes, &base);
  // Blocks begin on units, which memory from elsewhere might not.
  if (status.ok() && base % kUnit != 0) {
    (void)source->release(base, bytes);
    status = {Code::invalid, 0, "reserve"};
  }
  if (!status.ok()) {
    return_slots(slot, slots);
    return status;
  }
  const Index i = add_segment({.base = base,
                               .first = slot * kSlotUnits,
                               .units = units,
                               .stream = want.stream,
                               .band = want.band,
                               .plain = true});
  {
    auto node = based.extract(based.begin());
    node.key() = base;
    node.mapped() = i;
    std::unique_lock lock(plain_lock_);
    plain_.insert(std::move(node));
  }
  if (source != nullptr) {
    auto node = sourced.extract(sourced.begin());
    node.key() = i;
    sources_.insert(std::move(node));
  }
  plain_bytes_ += bytes;
  plain_owners_.add(want.stream);
  auto node = added.extract(added.begin());
  node.value().second = i;
  free_plain_.insert(std::move(node));
  count_free_plain(segments_[i], true);
  tell(true, i, base, bytes);
  return {};
}

// Returns the memory of a plain segment to where it came from.
Status AddressSpace::release_memory(Index s) {
  const Segment& segment = segments_[s];
  const std::uint64_t bytes = bytes_of(segment.units);
  const auto source = sources_.find(s);
  const Status status = source != sources_.end() ? source->second->release(segment.base, bytes)
                                                 : backend_.release(segment.base, bytes);
  if (status.ok()) tell(false, s, segment.base, bytes);
  return status;
}

Status AddressSpace::release_plain(Index s) {
  const Segment segment = segments_[s];
  if (Status status = release_memory(s); !status.ok()) return status;
  {
    std::unique_lock lock(plain_lock_);
    plain_.erase(segment.base);
  }
  sources_.erase(s);
  plain_bytes_ -= bytes_of(segment.units);
  plain_owners_.remove(segment.stream);
  free_plain_.erase({segment.units, s});
  count_free_plain(segment, false);
  drop(s);
  return {};
}

void AddressSpace::drop(Index s) {
  Segment& segment = segments_[s];
  index_of(segment).remove(blocks_, segment.head);
  drop_block(segment.head);
  delist(s);
  return_slots(segment.first_slot(), static_cast<Slot>(round_up(segment.units, kSlotUnits) / kSlotUnits));
  segment = Segment();
  segments_.drop(s);
}

void AddressSpace::enlist(Index s) {
  Segment& segment = segments_[s];
  Index& head = shelf(segment.stream).segments;
  segment.list_before = 0;
  segment.list_after = head;
  if (head != 0) segments_[head].list_before = s;
  head = s;
}

void AddressSpace::delist(Index s) {
  const Segment& segment = segments_[s];
  (segment.list_before != 0 ? segments_[segment.list_before].list_after : shelf(segment.stream).segments) =
      segment.list_after;
  if (segment.list_after != 0) segments_[segment.list_after].list_before = segment.list_before;
}

void AddressSpace::transfer(Index s, StreamNumber to, Band band, Tick tick) {
  Segment& segment = segments_[s];
  const auto each_free = [&](auto visit) {
    for (Index b = segment.head; b != 0; b = blocks_[b].after)
      if (blocks_[b].is(BlockState::free)) visit(b);
  };
  each_free([&](Index b) { index_of(segment).remove(blocks_, b); });
  delist(s);
  if (segment.plain) plain_owners_.move(segment.stream, to);
  const bool counted = segment.plain && segment.in_use == 0;
  if (counted) count_free_plain(segment, false);
  segment.stream = to;
  if (counted) count_free_plain(segment, true);
  segment.band = band;
  enlist(s);
  each_free([&](Index b) {
    blocks_[b].owner.store(to, std::memory_order_relaxed);
    blocks_[b].tick = tick;
    index_of(segment).add(blocks_, b);
  });
}

Status AddressSpace::release_all() {
  Status first;
  for (const auto& [base, s] : plain_)
    if (Status status = release_memory(s); first.ok()) first = status;
  sources_.clear();
  if (space_ != 0)
    if (Status status = backend_.space_release(space_, space_bytes_); first.ok()) first = status;
  plain_bytes_ = 0;
  return first;
}

// ---- check ----------------------------------------------------------------------------------------------

bool AddressSpace::check_block(Index b, Index previous, Units at, std::string* why) const {
  const Block& block = blocks_[b];
  const Segment& in = segment(block);
  std::uint64_t steps = 0;  // not counted
  if (block.offset != at || block.units == 0) return wrong(why, "blocks do not tile the segment", b);
  if (block.before != previous) return wrong(why, "neighbour links disagree", b);
  if (starts_[block.offset].load(std::memory_order_relaxed) != b ||
      started_.last_up_to(block.end() - 1, &steps) != block.offset)
    return wrong(why, "start not in the table", b);
  if (block.is(BlockState::none)) return wrong(why, "block without a state", b);
  if (in.band == kGrowing) {
    if (block.offset % kSlotUnits != 0 || block.units % kSlotUnits != 0)
      return wrong(why, "part of a growable buffer between slots", b);
    if (block.is(BlockState::live) && (previous != 0 || in.growable == 0))
      return wrong(why, "live block in a strip that is not its buffer's beginning", b);
    if (block.is(BlockState::free) && in.growable != 0 && block.after != 0)
      return wrong(why, "hole in the strip of a growable buffer", b);
  }
  if (!block.is(BlockState::free)) return true;
  if (previous != 0 && blocks_[previous].is(BlockState::free)) return wrong(why, "two free neighbours", b);
  return block.owned_by() == in.stream || wrong(why, "free block of a foreign owner", b);
}

bool AddressSpace::check_segment(Index s, std::size_t* blocks, std::size_t* free, std::string* why) const {
  const Segment& segment = segments_[s];
  if (segment.plain && (free_plain_.count({segment.units, s}) != 0) != (segment.in_use == 0))
    return wrong(why, "wholly free plain segments", s);
  Units at = segment.first;
  Index previous = 0;
  std::uint32_t in_use = 0;
  for (Index b = segment.head; b != 0; previous = b, b = blocks_[b].after) {
    if (blocks_[b].segment != s) return wrong(why, "block names another segment", b);
    if (!check_block(b, previous, at, why)) return false;
    at += blocks_[b].units;
    ++*blocks;
    if (blocks_[b].is(BlockState::free)) {
      ++*free;
    } else {
      ++in_use;
    }
  }
  if (segment.tail != previous) return wrong(why, "tail of the segment", s);
  if (at != segment.end()) return wrong(why, "end of the segment", s);
  return in_use == segment.in_use || wrong(why, "count of blocks in use", s);
}

bool AddressSpace::check(std::string* why) const {
  std::size_t blocks = 0, free = 0, segments = 0;
  std::uint64_t plain_bytes = 0;
  std::vector<std::uint32_t> plain;
  std::unordered_set<std::uint64_t> growables;
  for (Index s = 1; s < segments_.end(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.units == 0) continue;
    ++segments;
    if (segment.growable != 0 && (segment.band != kGrowing || !growables.insert(segment.growable).second))
      return wrong(why, "growable buffer of two strips, or in a strip for all", s);
    if (segment.plain) {
      plain_bytes += bytes_of(segment.units);
      plain.resize(std::max<std::size_t>(plain.size(), segment.stream + 1u));
      ++plain[segment.stream];
    }
    if (!check_segment(s, &blocks, &free, why)) return false;
  }
  if (blocks != blocks_.size()) return wrong(why, "a block is in no segment", blocks_.size());
  if (free_plain_.size() + used_plain_.size() != plain_.size())
    return wrong(why, "plain segments, free and in use", plain_.size());
  if (plain_bytes != plain_bytes_) return wrong(why, "bytes of plain segments");
  std::uint64_t free_plain_bytes = 0;
  for (const auto& [units, segment] : free_plain_) free_plain_bytes += bytes_of(units);
  if (free_plain_bytes != free_plain_bytes_) return wrong(why, "bytes of free plain segments");
  for (const auto& each : shelves_) free_plain_bytes -= each->free_plain;
  if (free_plain_bytes != 0) return wrong(why, "bytes of free plain segments by stream");
  if (!plain_owners_.check(plain)) return wrong(why, "owners of plain segments");
  std::size_t indexed = 0, enlisted = 0;
  for (std::size_t stream = 0; stream < shelves_.size(); ++stream) {
    for (Index s = shelves_[stream]->segments, previous = 0; s != 0;
         previous = s, s = segments_[s].list_after, ++enlisted)
      if (segments_[s].stream != stream || segments_[s].list_before != previous)
        return wrong(why, "list of a stream's segments", s);
    for (const FreeIndex& index : shelves_[stream]->free) {
      if (!index.check(blocks_)) return wrong(why, "free index", stream);
      indexed += index.count();
    }
  }
  if (enlisted != segments) return wrong(why, "a segment is in no list");
  return indexed == free || wrong(why, "a free block is not in an index");
}

}  // namespace vram
