// The vocabulary of the core: every structure with its owner, units and invariants.
// It holds no behaviour beyond trivial arithmetic; blocks.hpp, pages.hpp, streams.hpp and pool.hpp
// build on it. The words are those of docs/internals/architecture.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace vram {

using Address = std::uint64_t;       // a device address; 0 is "none"
using StreamHandle = std::uint64_t;  // the backend's own handle; 0 is the device's default stream
using StreamId = std::uint64_t;      // tells streams apart that had the same handle one after the other
using EventHandle = std::uint64_t;
using PageHandle = std::uint64_t;
using CaptureId = std::uint64_t;                         // a graph under capture; 0 is "none"
using HeapId = std::pair<std::uint64_t, std::uint64_t>;  // chosen by whoever begins the heap
using Index = std::uint32_t;                             // an index into one of the pool's slabs; 0 is "none"
using Units = std::uint32_t;                             // a count of kUnit bytes
using Tick = std::uint64_t;  // a point in one stream's order, as counted by the pool (streams.hpp)

inline constexpr std::uint64_t kKiB = 1024;
inline constexpr std::uint64_t kMiB = 1024 * kKiB;
inline constexpr std::uint64_t kGiB = 1024 * kMiB;

// Sizes are counted in units, addresses in units from the start of the pool's space. Every block
// starts on a unit, so 512 bytes is the least alignment.
inline constexpr std::uint64_t kUnit = 512;
// A slot is the granule of pages: a page covers 1, 4 or 16 slots and may be mapped at any slot.
inline constexpr std::uint64_t kSlotBytes = 2 * kMiB;
inline constexpr Units kSlotUnits = kSlotBytes / kUnit;
inline constexpr std::uint32_t kPageSlots[] = {1, 4, 16};  // 2, 8 and 32 MiB
inline constexpr int kPageSizes = 3;
// Offsets are 32-bit counts of units, so one space spans at most 2 TiB of addresses.
inline constexpr std::uint64_t kMaxSpaceBytes = (std::uint64_t{1} << 32) * kUnit;
// The largest request that can be placed; larger ones are refused before any arithmetic on them.
inline constexpr std::uint64_t kMaxRequest = kMaxSpaceBytes / 2;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
// Size 0 occupies one unit, so that every live allocation has an address of its own.
constexpr Units units_of(std::uint64_t bytes) {
  return bytes == 0 ? 1 : static_cast<Units>((bytes + kUnit - 1) / kUnit);
}

enum class Code : std::uint8_t {
  ok,
  not_ready,      // an event has not passed yet; not an error
  out_of_memory,  // the device (or the pool's limit) has no room
  invalid,        // a bad argument: unknown handle, foreign pointer, misaligned range
  unsupported,    // the backend lacks the capability
  failed,         // the driver failed; `native` says how
  closed,         // the pool or device was closed, or belongs to the parent of a fork
  capturing,      // the stream's work goes into a graph, so it cannot be asked or waited for
  suspended,      // the allocation's memory was given back (Pool::suspend)
  absent,         // another library's stream that no call names now: it may be gone
  deadlock,       // the wait would never end: what it waits for stands behind the work that waits (waits.hpp)
  interrupted,    // whoever waits was asked to stop (waits.hpp)
};

// What a call came to. `call` names the backend call that failed and is a string literal.
struct [[nodiscard]] Status {
  Code code = Code::ok;
  std::int32_t native = 0;
  const char* call = "";
  bool ok() const { return code == Code::ok; }
  // A wait that this thread cannot make now. The work goes on, so nothing it uses may be released.
  bool unwaited() const { return code == Code::deadlock || code == Code::interrupted; }
};

}  // namespace vram
