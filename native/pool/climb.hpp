// One request on its way up the ladder. Defines Climb and the sets of rungs that may serve a request; the
// rungs themselves are in ladder.cpp.
#pragma once

#include <mutex>
#include <optional>

#include "order/stream_state.hpp"
#include "pool/allocator.hpp"

namespace vram {

// A set of rungs, one bit for each.
using Rungs = std::uint16_t;
constexpr Rungs only(Rung rung) { return static_cast<Rungs>(1u << static_cast<int>(rung)); }
inline constexpr Rungs kAllRungs = ~Rungs{0};
inline constexpr Rungs kWithoutDevice = only(Rung::stream_cache) | only(Rung::own_blocks);
inline constexpr Rungs kBeforeFlush = only(Rung::flush) - 1;

// One request on its way up the ladder, with what earlier rungs found.
struct Climb {
  Climb(std::uint64_t bytes, const Want& wanted, std::uint32_t tagged, StreamState* on,
        std::unique_lock<std::mutex>* held, Rungs allowed = kAllRungs)
      : size(bytes), want(wanted), tag(tagged), stream(on), lock(held), rungs(allowed) {}

  std::uint64_t size;  // bytes
  Want want;
  std::uint32_t tag;
  StreamState* stream;
  std::unique_lock<std::mutex>* lock;  // of the pool's mutex; a rung that waits releases it
  Rungs rungs;                         // those that may serve it
  bool thorough = false;               // query all streams for free memory, however many there are
  std::optional<FoundPlace> found;     // see place()
  Status error = {};                   // a failure other than "out of memory" ends the climb
  Status spill = {};                   // why no memory could move to the host for it
  bool no_addresses = false;           // the last rung found memory, but no addresses for it
  bool may_call_device() const { return rungs != kWithoutDevice; }
  // The cheapest place for it, valid until something changes. Most requests are served before they need one.
  FoundPlace& place() { return found.has_value() ? *found : found.emplace(); }
};

}  // namespace vram
