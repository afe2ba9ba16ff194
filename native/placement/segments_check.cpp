// Segments::check(): every invariant of segments.hpp, verified from scratch. Linear in what exists, so
// for tests and debug builds.
#include <unordered_map>
#include <unordered_set>

#include "placement/segments.hpp"

namespace vram {

namespace {

bool fail(std::string* why, const char* what, Index i) {
  if (why != nullptr) *why = std::string(what) + " (#" + std::to_string(i) + ")";
  return false;
}

}  // namespace

bool Segments::check(std::string* why) const {
  std::uint64_t reserved = 0;
  std::size_t block_count = 0;
  std::size_t free_count = 0;
  std::size_t segment_count = 0;
  std::uint64_t steps = 0;  // not counted
  std::vector<std::uint32_t> owned(shelves_.size());
  std::unordered_map<Index, bool> holds;  // mapping → some block in use lies on it
  std::unordered_set<std::uint64_t> growables;
  for (Index s = 1; s < segments_.end(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.units == 0) continue;
    ++segment_count;
    if (segment.plain) ++owned[segment.stream];
    if (segment.plain && (free_plain_.count({segment.units, s}) != 0) != (segment.in_use == 0))
      return fail(why, "wholly free plain segments", s);
    if (segment.plain) reserved += std::uint64_t{segment.units} * kUnit;
    if (segment.growable != 0 && (segment.band != kGrowing || !growables.insert(segment.growable).second))
      return fail(why, "growable buffer of two strips, or in a strip for all", s);
    Units at = segment.first;
    Index previous = 0;
    std::uint32_t in_use = 0;
    for (Index b = segment.head; b != 0; previous = b, b = blocks_[b].after) {
      const Block& block = blocks_[b];
      ++block_count;
      if (block.segment != s) return fail(why, "block names another segment", b);
      if (block.offset != at || block.units == 0) return fail(why, "blocks do not tile the segment", b);
      if (block.before != previous) return fail(why, "neighbour links disagree", b);
      if (starts_[block.offset].load(std::memory_order_relaxed) != b ||
          started_.last_up_to(block.end() - 1, &steps) != block.offset)
        return fail(why, "start not in the table", b);
      at += block.units;
      if (block.is(BlockState::none)) return fail(why, "block without a state", b);
      if (segment.band == kGrowing) {
        if (block.offset % kSlotUnits != 0 || block.units % kSlotUnits != 0)
          return fail(why, "part of a growable buffer between slots", b);
        if (block.is(BlockState::live) && (previous != 0 || segment.growable == 0))
          return fail(why, "live block in a strip that is not its buffer's beginning", b);
        if (block.is(BlockState::free) && segment.growable != 0 && block.after != 0)
          return fail(why, "hole in the strip of a growable buffer", b);
      }
      if (block.is(BlockState::free)) {
        ++free_count;
        if (previous != 0 && blocks_[previous].is(BlockState::free))
          return fail(why, "two free neighbours", b);
        if (block.owner.load(std::memory_order_relaxed) != segment.stream)
          return fail(why, "free block of a foreign owner", b);
        continue;
      }
      ++in_use;
      if (segment.plain) continue;
      for (std::uint32_t slot = block.offset / kSlotUnits; slot * kSlotUnits < block.end(); ++slot) {
        const Index m = slots_[slot];
        if (m == 0) return fail(why, "block in use over nothing", b);
        if (pages_[mappings_[m].page].holder != m)
          return fail(why, "block in use over a page it does not hold", b);
        if (pages_[mappings_[m].page].owner != segment.stream)
          return fail(why, "page in use belongs to another stream", m);
        holds[m] = true;
      }
    }
    if (segment.tail != previous) return fail(why, "tail of the segment", s);
    if (at != segment.end()) return fail(why, "end of the segment", s);
    if (in_use != segment.in_use) return fail(why, "count of blocks in use", s);
  }
  if (block_count != blocks_.size())
    return fail(why, "a block is in no segment", static_cast<Index>(blocks_.size()));

  std::size_t mapping_count = 0;
  std::uint64_t suspended = 0;
  std::uint64_t aside = 0;
  for (Index p = 1; p < pages_.end(); ++p) {
    const Page& page = pages_[p];
    if (!page.exists()) continue;
    (page.handle != 0 ? reserved : suspended) += page.bytes();
    aside += page.suspended;
    ++owned[page.owner];
    bool holder_found = page.holder == 0;
    for (Index m = page.mappings; m != 0; m = mappings_[m].next) {
      ++mapping_count;
      const Mapping& mapping = mappings_[m];
      if (mapping.page != p) return fail(why, "mapping in the list of another page", m);
      for (std::uint32_t k = 0; k < page.slots(); ++k)
        if (slots_[mapping.slot + k] != m) return fail(why, "mapping and slot disagree", m);
      if (backed_.count(mapping.slot, mapping.slot + page.slots()) != (backs(m) ? page.slots() : 0))
        return fail(why, "slots said to be backed", m);
      if (mapped_.count(mapping.slot, mapping.slot + page.slots()) != page.slots())
        return fail(why, "slots said to be mapped", m);
      if (!mapping.there && !page.suspended) return fail(why, "an address in use was unmapped", m);
      if (mapping.there && page.handle == 0) return fail(why, "a page that is gone is mapped", m);
      if (segments_[mapping.segment].units == 0) return fail(why, "mapping in no segment", m);
      if (m == page.holder) holder_found = true;
      if ((m == page.holder) != (holds.count(m) != 0))
        return fail(why, "a page is held by nobody, or by two", m);
    }
    if (!holder_found) return fail(why, "holder of a page", p);
  }
  if (mapping_count != mappings_.size()) return fail(why, "a mapping has no page", 0);
  if (reserved != reserved_bytes_) return fail(why, "reserved bytes", 0);
  if (suspended != suspended_bytes_) return fail(why, "suspended bytes", 0);
  if (aside != aside_) return fail(why, "count of pages set aside", 0);

  std::size_t indexed = 0;
  std::size_t listed = 0;
  std::size_t enlisted = 0;
  for (std::size_t stream = 0; stream < shelves_.size(); ++stream) {
    const Shelf& owner = *shelves_[stream];
    std::uint64_t bytes = 0;
    for (int size = 0; size < kPageSizes; ++size) {
      std::uint32_t count = 0;
      Index previous = 0;
      for (Index p = owner.pages[size].head; p != 0; previous = p, p = pages_[p].list_after, ++count) {
        const Page& page = pages_[p];
        if (!page.free() || page.owner != stream || page.size != size || page.list_before != previous)
          return fail(why, "list of free pages", p);
        bytes += page.bytes();
      }
      if (count != owner.pages[size].count || owner.pages[size].tail != previous)
        return fail(why, "count of free pages", static_cast<Index>(stream));
      listed += count;
    }
    for (Index s = owner.segments, previous = 0; s != 0;
         previous = s, s = segments_[s].list_after, ++enlisted)
      if (segments_[s].stream != stream || segments_[s].list_before != previous)
        return fail(why, "list of a stream's segments", s);
    if (bytes != owner.free_page_bytes) return fail(why, "bytes of free pages", static_cast<Index>(stream));
    for (const FreeIndex& index : owner.free) {
      if (!index.check(blocks_)) return fail(why, "free index", static_cast<Index>(stream));
      indexed += index.count();
    }
  }
  std::uint64_t free_bytes = 0;
  for (std::size_t stream = 0; stream < shelves_.size(); ++stream) {
    free_bytes += shelves_[stream]->free_page_bytes;
    if (owned[stream] != shelves_[stream]->owned)
      return fail(why, "what a stream owns", static_cast<Index>(stream));
  }
  if (free_bytes != free_page_bytes_) return fail(why, "bytes of all free pages", 0);
  if (enlisted != segment_count) return fail(why, "a segment is in no list", 0);
  if (indexed != free_count) return fail(why, "a free block is not in an index", 0);
  std::size_t free_pages = 0;
  for (Index p = 1; p < pages_.end(); ++p) free_pages += pages_[p].handle != 0 && pages_[p].free();
  if (free_pages != listed) return fail(why, "a free page is in no list", 0);
  return true;
}

}  // namespace vram
