// The vocabulary of the core: units, limits, results, and every structure that memory is made of, each with
// its owner, units and invariants. It holds no behaviour beyond trivial arithmetic. placement/ operates on
// these structures; what the pool keeps for each stream is in order/stream_state.hpp. The words are those of
// docs/internals/architecture.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace vram {

using Address = std::uint64_t;       // a device address; 0 is "none"
using StreamHandle = std::uint64_t;  // the backend's own handle; 0 is the device's default stream
using StreamId = std::uint64_t;      // tells streams apart that had the same handle one after the other
using StreamNumber = std::uint16_t;  // the pool's number of a stream; 0 is the default stream
using EventHandle = std::uint64_t;
using PageHandle = std::uint64_t;
using GateHandle = std::uint64_t;
using CaptureId = std::uint64_t;                         // a graph under capture; 0 is "none"
using GraphNode = std::uint64_t;                         // of a graph under capture
using HeapId = std::pair<std::uint64_t, std::uint64_t>;  // chosen by the caller that begins the heap
using Index = std::uint32_t;                             // an index into one of the pool's slabs; 0 is "none"
using Units = std::uint32_t;                             // a count of kUnit bytes
using Slot = std::uint32_t;  // a number of a slot, or a count of slots (kSlotBytes)
using Tick = std::uint64_t;  // a point in one stream's order, as counted by the pool (stream_state.hpp)

inline constexpr std::uint64_t kKiB = 1024;
inline constexpr std::uint64_t kMiB = 1024 * kKiB;
inline constexpr std::uint64_t kGiB = 1024 * kMiB;

// Sizes are counted in units, addresses in units from the start of the pool's space. Every block
// starts on a unit, so 512 bytes is the smallest alignment.
inline constexpr std::uint64_t kUnit = 512;
// A slot is the granule of pages: a page covers 1, 4, 16 or 64 slots and can be mapped at any slot.
inline constexpr std::uint64_t kSlotBytes = 2 * kMiB;
inline constexpr Units kSlotUnits = kSlotBytes / kUnit;
inline constexpr Slot kPageSlots[] = {1, 4, 16, 64};  // 2, 8, 32 and 128 MiB
inline constexpr int kPageSizes = 4;
// The longest page that a request creates. Only memory that is resumed comes back as longer ones.
inline constexpr Slot kMostCreatedSlots = 16;
// Offsets are 32-bit counts of units, so one space spans at most 2 TiB of addresses.
inline constexpr std::uint64_t kMaxSpaceBytes = (std::uint64_t{1} << 32) * kUnit;
// The largest request that can be placed; larger ones are refused before any arithmetic on them.
inline constexpr std::uint64_t kMaxRequest = kMaxSpaceBytes / 2;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
// Size 0 occupies one unit, so that every live allocation has its own address.
constexpr Units units_of(std::uint64_t bytes) {
  return bytes == 0 ? 1 : static_cast<Units>((bytes + kUnit - 1) / kUnit);
}
constexpr std::uint64_t bytes_of(Units units) { return std::uint64_t{units} * kUnit; }

// ---- results --------------------------------------------------------------------------------------------

enum class Code : std::uint8_t {
  ok,
  not_ready,      // an event has not completed yet; not an error
  out_of_memory,  // the device (or the pool's limit) has no room
  invalid,        // a bad argument: unknown handle, foreign pointer, misaligned range
  unsupported,    // the backend lacks the capability
  failed,         // the driver failed; `native` says how
  closed,         // the pool or device was closed, or belongs to the parent of a fork
  capturing,      // the stream's work goes into a graph, so it cannot be queried or waited for
  suspended,      // the allocation's memory was released to the device (Pool::suspend)
  absent,         // another library's stream that no call names now: it may no longer exist
  deadlock,       // the wait would never end: it waits for work queued behind the waiting work (waits.hpp)
  interrupted,    // the waiting thread was asked to stop (waits.hpp)
};

// The result of a call. `call` names the backend call that failed and is a string literal.
struct [[nodiscard]] Status {
  Code code = Code::ok;
  std::int32_t native = 0;
  const char* call = "";
  bool ok() const { return code == Code::ok; }
  // A wait that this thread cannot make now. The work continues, so nothing it uses may be released.
  bool unwaited() const { return code == Code::deadlock || code == Code::interrupted; }
};

// ---- blocks ---------------------------------------------------------------------------------------------

enum class BlockState : std::uint8_t {
  none,     // not in use as a block
  live,     // allocated
  cached,   // freed, kept whole in its owner's stream cache
  moving,   // between two of the other states; only the thread that set it touches the block
  pending,  // freed, but a stream may still use it
  free,     // in the free index of its segment's stream
  // Allocated, but not to be used: its pages may be with the driver (Pool::suspend). Guarded as `live` is.
  suspended,
};

// A piece of a segment. Owner: AddressSpace. Offsets count from the start of the pool's space.
//   blocks of a segment tile it:  block.offset + block.units == after(block).offset
//   state == free  ⇒  neither neighbour is free, owner == the segment's stream
// Guarded by the pool's mutex, except while live or cached: then state, owner's list link and what
// describes the allocation are guarded by the owner stream's lock. `state` and `owner` are atomic so
// that a neighbour, or a misuse, may read them without that lock.
struct Block {
  Units offset = 0;
  Units units = 0;
  Index before = 0;  // neighbours in address order, inside the segment
  Index after = 0;
  Index link_before = 0;  // neighbours in a bin; `link_after` alone: in a stream cache
  Index link_after = 0;   // of a pending block: the stream whose queue it is in, plus 1 (Pending)
  Index segment = 0;
  std::uint64_t requested = 0;  // bytes; units_of(requested) <= units
  Tick tick = 0;                // of a free block: its last use in its owner's order
  std::uint32_t tag = 0;
  std::uint32_t serial = 0;            // grows with every allocation of the pool (wraps)
  std::atomic<StreamNumber> owner{0};  // the stream whose order governs it
  std::atomic<BlockState> state{BlockState::none};
  // record_stream was called; the uses are in Pending's table. Also set for growable buffers and for what is
  // shared with other processes: no cache takes them.
  bool used_elsewhere = false;
  bool keep = false;  // of a suspended block: its contents are to come back
  // Live, and its new owner has yet to zero it or to queue the zeros (zero_on_allocate): its pages stay.
  std::atomic<bool> unzeroed{false};

  bool is(BlockState s) const { return state.load(std::memory_order_relaxed) == s; }
  void set(BlockState s) { state.store(s, std::memory_order_relaxed); }
  StreamNumber owned_by() const { return owner.load(std::memory_order_relaxed); }
  bool allocated() const { return is(BlockState::live) || is(BlockState::suspended); }
  Units end() const { return offset + units; }
};
static_assert(sizeof(Block) <= 64, "a block is one cache line");

inline std::uint64_t bytes_of(const Block& block) { return bytes_of(block.units); }

// Blocks up to this size are small: they are placed apart from the others, and a stream's cache has a list
// for every size.
inline constexpr Units kSmallUnits = static_cast<Units>(256 * kKiB / kUnit);

// A range of sizes; it contains all of the small ones or none.
struct Sizes {
  Units least = 0;
  Units most = ~Units{0};
  bool contain(Units units) const { return least <= units && units <= most; }
};
inline constexpr Sizes kAllSizes{};
inline constexpr Sizes kOnlySmall{0, kSmallUnits};
inline constexpr Sizes kBeyondSmall{kSmallUnits + 1};
inline constexpr Sizes kBeyondMiB{kMiB / kUnit + 1};

// ---- segments -------------------------------------------------------------------------------------------

// A band of sizes. Each band has its own addresses, so blocks of one band never fragment the addresses of
// another. Any free page can serve any band, so keeping them apart costs almost no memory.
using Band = std::uint8_t;
inline constexpr Band kSmall = 0;
inline constexpr Band kMiddle = 1;  // with pages only: these blocks would strand most of a page of 8 MiB
inline constexpr Band kLarge = 2;
inline constexpr Band kGrowing = 3;  // growable buffers: each has its own strip, with nothing else in it
inline constexpr int kBands = 4;
inline constexpr Units kMiddleUnits = static_cast<Units>(7 * kMiB / kUnit);
// Plain segments for large blocks are at least this long, so that several medium blocks share one.
inline constexpr std::uint64_t kPlainSegmentBytes = 20 * kMiB;
// In a heap of plain segments (PlainHeap), blocks up to this size are small.
inline constexpr Units kHeapSmallUnits = static_cast<Units>(kMiB / kUnit);

// A contiguous range of addresses of one stream and band: one plain allocation, or a strip of the space.
// Owner: AddressSpace. Guarded by the pool's mutex.
//   units == 0  ⇔  no such segment;  first and units are multiples of kSlotUnits
//   mappings and touched concern strips only (PageStock)
struct Segment {
  Address base = 0;  // address of unit `first`
  Units first = 0;   // blocks tile [first, first + units)
  Units units = 0;
  Units touched = 0;  // nothing was ever mapped from here on
  Index head = 0;     // its first and last block
  Index tail = 0;
  std::uint32_t mappings = 0;
  std::uint32_t in_use = 0;  // blocks that are not free
  // Band kGrowing only. Not 0: an open growable buffer has these addresses, and this is its number. Then
  //   blocks of the strip  ==  [in use, from `first` on]? [pending]* [free]?
  //   a free slot whose page was moved elsewhere was last used by work that has completed
  // so growing in place needs no wait: what follows the block in use is taken back from pending, or may be
  // unmapped. All blocks begin and end on slots.
  std::uint64_t growable = 0;
  Units promised = 0;     // pages mapped up to here are for it, unless memory runs out (Placer::prepare)
  Index list_before = 0;  // neighbours in the list of its stream's segments
  Index list_after = 0;
  StreamNumber stream = 0;
  Band band = 0;
  bool plain = false;
  Units end() const { return first + units; }
  Slot first_slot() const { return first / kSlotUnits; }
};

// ---- pages ----------------------------------------------------------------------------------------------

// One physical page. Owner: PageStock. Guarded by the pool's mutex.
//   holder == 0  ⇔  no block in use covers a byte of it, and it is not kept (PageStock)
//                ⇔  it is on its owner's list of free pages, or suspended, or a spare host page
// A suspended page keeps its place in every structure but is not available memory: it may be unmapped at some
// or all of its addresses, and may have been released to the driver (handle 0).
// A host page is in host memory. It takes the place of a device page under blocks that exist; no request is
// placed on it, and it has one mapping at most. One that is `lent` to a graph or heap, because nothing may
// move while a stream is captured, serves its owner in everything like a device page.
struct Page {
  PageHandle handle = 0;  // 0: no such page, or suspended
  Tick tick = 0;          // its last use in the order of `owner`, before the blocks that hold it now
  Index mappings = 0;     // head of the list of its mappings
  Index holder = 0;       // the mapping through which it is in use
  Index list_before = 0;  // neighbours in its owner's list of free pages
  Index list_after = 0;
  StreamNumber owner = 0;  // the stream whose order governs it
  std::uint8_t size = 0;   // index into kPageSlots
  bool suspended = false;
  bool host = false;
  bool moving = false;  // suspended while its contents move; freeing its blocks leaves it so
  bool parked = false;  // of a spilled page: it does not return by itself
  bool lent = false;    // a host page: to its owner, which is a graph or heap
  Address copies = 0;   // of a host page: see Backend::host_page_create
  bool unlent() const { return host && !lent; }
  bool free() const { return holder == 0 && !suspended && !unlent(); }
  bool spilled() const { return host && holder != 0; }
  // Where it is mapped, nothing can be placed.
  bool blocked() const { return suspended || (unlent() && holder != 0); }
  bool exists() const { return handle != 0 || suspended; }
  Slot slots() const { return kPageSlots[size]; }
  std::uint64_t bytes() const { return slots() * kSlotBytes; }
};

// One page at one address. Owner: PageStock. The addresses are in use only while the page's holder is this
// mapping.
struct Mapping {
  Index page = 0;  // 0: no such mapping
  Index next = 0;  // of the same page
  Index segment = 0;
  Slot slot = 0;       // the first of its page's slots()
  Tick tick = 0;       // last use through this mapping, in the order of the segment's stream
  bool usable = true;  // false: access was refused and so was the unmapping; to be unmapped when possible
  bool there = true;   // false: of a suspended page, and the driver has unmapped it
};

// ---- requests and places --------------------------------------------------------------------------------

struct PlainHeap;

// What is to be placed, for which stream.
struct Want {
  StreamNumber stream = 0;
  Band band = 0;
  Units units = 0;
  std::uint64_t align = kUnit;  // bytes
  Index strip = 0;              // not 0: at the first free address of this strip, of …
  std::uint64_t growable = 0;   // … this growable buffer, as long as it is open
  // Not null: in plain segments of this heap, also in a pool with pages.
  const PlainHeap* heap = nullptr;
  bool last_resort = false;  // a heap that does not split blocks may take one of any length
  Units padded() const { return units + static_cast<Units>(align / kUnit) - 1; }
  std::uint64_t bytes() const { return bytes_of(units); }
};
static_assert(2 * kMaxRequest / kUnit - 1 <= ~Units{0}, "the largest request of the largest alignment");

// Where in the addresses of a free block a request goes. block 0: nowhere.
struct Spot {
  Index block = 0;
  Units offset = 0;
  bool held = false;  // neighbours hold all pages there, so none needs to be looked at
};

// Consecutive slots that need pages. `room` more slots behind them could take the rest of a larger page.
struct Gap {
  Slot slot = 0;
  Slot slots = 0;
  Slot room = 0;
};

// What it takes to back a range of addresses.
struct Survey {
  std::vector<Index> own;   // mappings whose page is free
  std::vector<Index> lost;  // mappings to be unmapped: their page is elsewhere
  std::vector<Gap> gaps;
  bool suspended = false;  // part of the range is suspended, so nothing can be placed there
};

// The cheapest place for a request. A climb carries it from rung to rung; it is valid until something
// changes (PlaceSearch::cheapest).
struct FoundPlace {
  Spot spot;
  Survey plan;
  Slot lacking = 0;  // slots for which the stream has no free page
  Band band = 0;
  Tick passed = 0;
  std::uint64_t changes = 0;  // PlaceSearch::changes() when it was found; 0: not searched yet
  Status why = {};            // why there is none
};

}  // namespace vram
