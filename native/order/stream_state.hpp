// What the pool keeps for each stream: its cache, what it counts, and the fences that tell which of its work
// has completed. Defines StreamState, PendingBlock, Fence, Meter and Presence.
//
// Order. A tick is a point in the stream's order: work issued before a fence is recorded belongs to ticks up
// to the fence's. A block freed now carries the stream's current tick; its last use has completed when a
// fence of that tick or later has. Fences are recorded when they are needed.
//
// Other libraries' streams ("foreign"; see Backend::lasting) may be destroyed at any moment, and a driver
// crashes on a handle that no longer exists. They are known to exist only during a call that names them: then
// a fence is recorded behind what was freed since the last one, and at no other time is the handle used. What
// such a stream did after its last fence has completed when the pool has waited for the whole device.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "journal/journal.hpp"
#include "order/stream_cache.hpp"
#include "placement/options.hpp"

namespace vram {

// A quantity with its peak and its total; freed = total - current.
struct Meter {
  std::uint64_t current = 0;
  std::uint64_t peak = 0;
  std::uint64_t total = 0;
  void add(std::uint64_t n) {
    current += n;
    total += n;
    if (current > peak) peak = current;
  }
  void subtract(std::uint64_t n) { current -= n; }
  // It is `n` now; it rises or falls by the difference.
  void follow(std::uint64_t n) { n > current ? add(n - current) : subtract(current - n); }
};

// Allocations, and their bytes as taken and as requested.
struct Counts {
  std::uint64_t allocations = 0;
  std::uint64_t bytes = 0;
  std::uint64_t requested = 0;
};

// A recorded event: when it completes, everything up to `tick` on its stream has completed.
struct Fence {
  Tick tick = 0;
  EventHandle event = 0;
};

struct Use {
  std::uint16_t stream = 0;
  Tick tick = 0;
};

// A freed block that other streams may still use; it waits in the queue of one of them.
struct PendingBlock {
  Index block = 0;
  Tick tick = 0;  // of its owner, when it was freed
  std::vector<Use> uses;
  bool awaited = false;               // its free was noted as pending, so its completion is noted, too
  bool zeroed = false;                // by zero_on_free
  CaptureId capture = 0;              // not 0: all its uses are in this capture,
  std::vector<GraphNode> nodes = {};  // up to these nodes of its graph
};

// What the pool keeps for one stream. Owner: StreamTable. Aligned to two cache lines, because processors
// fetch lines in pairs.
//   fences are in order of their ticks, all after `passed`;  live <= ceiling, unless a Standstill exists
//   life != active  ⇒  last != 0, and no work is queued after tick `last`
struct alignas(128) StreamState {
  // Reasons why a free takes the slow path.
  static constexpr std::uint8_t kLeaving = 1;   // the stream is leaving, so its cache takes no more blocks
  static constexpr std::uint8_t kUnlisted = 2;  // the pool would not know of the block (Caches)
  static constexpr std::uint8_t kTight = 4;     // live == ceiling, and the pool relies on it (Accounts)
  static constexpr std::uint8_t kStanding = 8;  // a thread examines all streams at once (Standstill)
  static constexpr std::uint8_t kBounded = 16;  // a release threshold counts the block (Caches)

  // A state is made for a stream, leaves when the stream is about to be destroyed or may be gone, and is
  // retired when its work has completed. A retired state that is idle is used again for another stream.
  enum class Life : std::uint8_t {
    active,
    leaving,  // nothing is queued on the stream any more; some work may not have completed
    retired,  // all work has completed and free memory has gone to the default stream; live blocks may remain
  };

  // ---- guarded by `lock` ----------------------------------------------------------------------
  // What the free of a small block changes comes first, in one cache line with the counts of the cache: a
  // thread that frees the blocks of another takes this line from it, and the list of the block's size.
  SpinLock lock;
  std::uint16_t number = 0;
  bool journaling = false;                                          // there is a journal or a tape
  std::uint8_t shut[2] = {kUnlisted | kTight, kUnlisted | kTight};  // by whether the block is beyond small
  std::uint64_t live = 0;                                           // bytes of live blocks
  std::uint64_t ceiling = 0;  // `live` may rise to here without a look at the other streams (Accounts)
  Counts small;               // what is live of kind small …
  StreamCache cache;
  Counts large;  // … and large
  Counts peak[2];
  Counts total[2];
  std::uint64_t hits = 0;         // served from the cache
  std::uint64_t slow_serial = 0;  // served by the later rungs
  std::unique_ptr<JournalTape> journal;
  std::unique_ptr<JournalTape> tape;

  // ---- guarded by the pool's mutex --------------------------------------------------------------
  StreamHandle handle = 0;
  bool foreign = false;
  StreamId id = 0;          // foreign: handle and id together are one stream
  std::uint32_t named = 0;  // foreign: calls in progress that name it
  Tick owed = 0;            // the last tick that memory or a use waits for
  // Not 0: this is not the stream itself but a graph that is or was captured on it, or a heap. No work runs
  // on it; its memory is the graph's until `*over` says that the graph is gone (StreamLives).
  CaptureId capture = 0;
  std::shared_ptr<std::atomic<bool>> over;
  HeapId heap{};                     // the heap, also after it is over, until its memory has gone
  std::shared_ptr<PlainHeap> plain;  // not null: a heap of plain segments
  Life life = Life::active;
  Tick last = 0;    // unless active: this tick covers all its work
  Tick tick = 1;    // the current one
  Tick passed = 0;  // everything up to here has completed
  std::uint64_t unfenced_bytes = 0;
  std::deque<Fence> fences;                      // not yet completed, in order
  std::multimap<Tick, PendingBlock> waiting;     // blocks whose next use is on this stream, by its tick
  std::unordered_map<std::uint16_t, Tick> seen;  // work of that stream up to that tick is ordered before ours

  // What is live of a kind (pool/allocator.hpp).
  Counts& now(int kind) { return kind == 0 ? small : large; }
  void count_in(int kind, std::uint64_t taken, std::uint64_t requested) {
    Counts& live_now = now(kind);
    Counts& most = peak[kind];
    Counts& all = total[kind];
    most.allocations = std::max(most.allocations, ++live_now.allocations);
    most.bytes = std::max(most.bytes, live_now.bytes += taken);
    most.requested = std::max(most.requested, live_now.requested += requested);
    ++all.allocations;
    all.bytes += taken;
    all.requested += requested;
  }
  void count_out(int kind, std::uint64_t taken, std::uint64_t requested) {
    Counts& live_now = now(kind);
    --live_now.allocations;
    live_now.bytes -= taken;
    live_now.requested -= requested;
  }
  Meter meter(int kind, std::uint64_t Counts::* what) {
    return {now(kind).*what, peak[kind].*what, total[kind].*what};
  }
  void shut_for(std::uint8_t reason) {
    for (std::uint8_t& reasons : shut) reasons |= reason;
  }
  void open_for(std::uint8_t reason) {
    for (std::uint8_t& reasons : shut) reasons &= static_cast<std::uint8_t>(~reason);
  }
  // Whether its handle may be used.
  bool present() const { return !foreign || named != 0; }
  // Nothing can be queued on it any more, as far as the pool knows.
  bool gone() const { return ended() || !present(); }
  bool leaving() const { return life == Life::leaving; }
  bool retired() const { return life == Life::retired; }
  bool ended() const { return life != Life::active; }
  bool same_stream(const StreamState& other) const {
    return handle == other.handle && foreign == other.foreign && id == other.id;
  }
  // Its memory serves nothing else. That of plain segments goes back to where it came from.
  bool apart() const { return capture != 0 || plain != nullptr; }
  // The tick that a fence or the host has covered, completed or not.
  Tick covered() const { return fences.empty() ? passed : std::max(passed, fences.back().tick); }
  // The tick of what happens now.
  Tick now() const { return ended() ? last : tick; }
  // The same, for something that will wait for it.
  Tick owe() {
    owed = now();
    return owed;
  }
  Tick seen_of(std::uint16_t other) const {
    const auto found = seen.find(other);
    return found != seen.end() ? found->second : 0;
  }
  void saw(std::uint16_t other, Tick tick_seen) {
    Tick& known = seen[other];
    known = std::max(known, tick_seen);
  }
};

// A call that names a stream: as long as this lives, the stream is there. Made and ended under the pool's
// mutex, which may be released in between.
class Presence {
 public:
  explicit Presence(StreamState& stream) : stream_(stream) { ++stream_.named; }
  ~Presence() { --stream_.named; }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  StreamState& stream_;
};

}  // namespace vram
