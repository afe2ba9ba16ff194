// What the pool keeps for each stream: the cache of freed blocks in front of everything, what it
// counts, and the fences that tell which of its work has finished. Where blocks lie is the business of
// segments.hpp; who may take what and when is decided in pool.cpp.
//
// Order. A tick is a number of the stream's order: work issued before a fence is recorded belongs to
// ticks up to the fence's. A block freed now carries the stream's current tick; its last use has
// finished once a fence of that tick or later has passed. Fences are recorded when somebody asks.
//
// Other libraries' streams ("foreign"; see Backend::lasting) may be destroyed at any moment, and a driver
// crashes on a handle that is gone. They are there only during a call that names them: then a fence is
// recorded behind what has become free since the last one, and at no other time is anything asked of the
// handle. What such a stream did after its last fence has finished when the whole device was waited for.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "backends/backend.hpp"
#include "base/slab.hpp"
#include "journal/journal.hpp"
#include "placement/blocks.hpp"

namespace vram {

// Held for tens of nanoseconds and never across a call to the backend or to Python.
class SpinLock {
 public:
  void lock() {
    for (int spins = 0; held_.exchange(true, std::memory_order_acquire); ++spins)
      while (held_.load(std::memory_order_relaxed))
        if (++spins > kSpins) sched_yield();
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 64;
  std::atomic<bool> held_{false};
};

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
};

// Freed blocks kept whole, by exact size, last in first out. Guarded by the stream's lock.
class StreamCache {
 public:
  static constexpr Units kPlaces = 256;  // sizes above kSmallUnits share these; one size a place

  // The head of the list for a size, or null where a larger size has no place (yet).
  Index* find(Units units) {
    if (units <= kSmallUnits) return &small_[units];
    Place& place = place_of(units);
    return place.units == units ? &place.head : nullptr;
  }
  // The same, taking the place if it is empty; null where another size holds it.
  // The caller puts a block there.
  Index* claim(Units units) {
    if (units <= kSmallUnits) {
      small_used_[units / 64] |= std::uint64_t{1} << (units % 64);
      return &small_[units];
    }
    Place& place = place_of(units);
    if (place.head == 0) place.units = units;
    if (place.units != units) return nullptr;
    const auto at = static_cast<std::uint32_t>(&place - places_);
    places_used_[at / 64] |= std::uint64_t{1} << (at % 64);
    return &place.head;
  }
  // Appends every cached block of these sizes, in state moving, and forgets them.
  void drain(Blocks& blocks, const Sizes& sizes, std::vector<Index>& out);

  std::uint32_t count() const { return count_; }  // blocks held
  std::uint64_t bytes() const { return bytes_; }
  // Whether there are larger ones than kSmallUnits. Needs no lock; without it the answer may be a moment old.
  bool has_large() const { return large_count_.load(std::memory_order_relaxed) != 0; }
  bool has_small() const { return count_ != large_count_.load(std::memory_order_relaxed); }
  // A block was put on the list that claim() gave, or taken from the one that find() gave.
  void added(Units units) { count_one(units, 1); }
  void removed(Units units) { count_one(units, -1); }
  // What it held has become invalid.
  void forget();

 private:
  void count_one(Units units, int change) {
    count_ += static_cast<std::uint32_t>(change);
    bytes_ += static_cast<std::uint64_t>(change) * units * kUnit;
    if (units > kSmallUnits)
      large_count_.store(large_count_.load(std::memory_order_relaxed) + static_cast<std::uint32_t>(change),
                         std::memory_order_relaxed);
  }
  struct Place {
    Units units = 0;
    Index head = 0;
  };
  Place& place_of(Units units) { return places_[(units * 2654435761u) >> 24]; }
  static_assert(kPlaces == 256, "place_of takes the top 8 bits of the hash");

  std::uint32_t count_ = 0;
  std::atomic<std::uint32_t> large_count_{0};  // written under the lock only
  std::uint64_t bytes_ = 0;
  Index small_[kSmallUnits + 1] = {};
  Place places_[kPlaces];
  // The lists that a block was put on since the last drain.
  std::uint64_t small_used_[kSmallUnits / 64 + 1] = {};
  std::uint64_t places_used_[kPlaces / 64] = {};
};

// A recorded event: once it passes, everything up to `tick` on its stream has finished.
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
  bool awaited = false;  // its free was noted as pending, so its completion is noted, too
  bool zeroed = false;   // by zero_on_free
};

// Two lines apart: processors fetch lines in pairs.
struct alignas(128) StreamState {
  // Reasons for which a free into the cache takes the long way, by whether the block is beyond small.
  static constexpr std::uint8_t kLeaving = 1;   // it takes no more blocks
  static constexpr std::uint8_t kUnlisted = 2;  // the pool would not know of them (Pool::caching_)
  static constexpr std::uint8_t kStanding = 8;  // somebody looks at all streams at once (Pool::Standstill)
  static constexpr std::uint8_t kTight = 4;  // `live` is `ceiling`, and the pool relies on that (Pool::rise)

  // ---- guarded by `lock` ----------------------------------------------------------------------
  SpinLock lock;
  std::uint16_t number = 0;
  bool journaling = false;                                          // there is a journal or a tape
  std::uint8_t shut[2] = {kUnlisted | kTight, kUnlisted | kTight};  // why the cache takes no block: see below
  std::uint64_t live = 0;                                           // bytes of live blocks
  std::uint64_t ceiling = 0;  // `live` may rise to here without a look at the other streams (Pool::rise)
  Meter allocations[2];       // by kind
  Meter bytes[2];
  Meter requested[2];
  std::uint64_t hits = 0;         // served from the cache
  std::uint64_t slow_serial = 0;  // served by the later rungs
  StreamCache cache;
  std::unique_ptr<JournalTape> journal;
  std::unique_ptr<JournalTape> tape;

  // ---- guarded by the pool's mutex --------------------------------------------------------------
  StreamHandle handle = 0;
  bool foreign = false;
  StreamId id = 0;          // foreign: handle and id together are one stream
  std::uint32_t named = 0;  // foreign: calls under way that name it
  Tick owed = 0;            // the last tick that memory or a use waits for
  // Not 0: this is not the stream itself but a graph under capture on it, or captured. Nothing here runs; its
  // memory is the graph's until `*over` says that the graph is gone (Pool::let_graphs_go).
  CaptureId capture = 0;
  std::shared_ptr<std::atomic<bool>> over;
  bool retired = false;  // the stream is gone and its work has finished; live blocks may remain
  Tick last = 0;    // not 0: the stream is leaving, and this tick covers all its work (Pool::retire_stream)
  Tick tick = 1;    // the current one
  Tick passed = 0;  // everything up to here has finished
  std::uint64_t unfenced_bytes = 0;
  std::deque<Fence> fences;                      // not yet passed, in order
  std::multimap<Tick, PendingBlock> waiting;     // blocks whose next use is on this stream, by its tick
  std::unordered_map<std::uint16_t, Tick> seen;  // work of that stream up to that tick is ordered before ours

  void shut_for(std::uint8_t reason) {
    for (std::uint8_t& reasons : shut) reasons |= reason;
  }
  void open_for(std::uint8_t reason) {
    for (std::uint8_t& reasons : shut) reasons &= static_cast<std::uint8_t>(~reason);
  }
  // Whether its handle may be used.
  bool present() const { return !foreign || named != 0; }
  // Nothing can be queued on it, now or ever.
  bool gone() const { return retired || last != 0 || !present(); }
  // The tick that a fence or the host has covered, passed or not.
  Tick covered() const { return fences.empty() ? passed : std::max(passed, fences.back().tick); }
  // The tick of what happens now.
  Tick now() const { return last != 0 ? last : tick; }
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
// mutex, which may be let go in between.
class Presence {
 public:
  explicit Presence(StreamState& stream) : stream_(stream) { ++stream_.named; }
  ~Presence() { --stream_.named; }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  StreamState& stream_;
};

// The streams of a pool, by number (0 is the default stream) and by handle. Readers need no lock;
// writers hold the pool's mutex. States never move and live as long as the table. A handle leads to a lasting
// stream and to a foreign one, each if there is one.
class StreamTable {
 public:
  StreamTable();
  StreamState& operator[](std::uint16_t number) const {
    return *numbers_[number].load(std::memory_order_acquire);
  }
  StreamState* find(StreamHandle handle) const;
  StreamState* find_foreign(StreamHandle handle) const { return find(handle | kForeignBit); }
  // The state for a handle, made if need be; null when all numbers are in use.
  StreamState* add(StreamHandle handle) { return add(handle, nullptr); }
  // The same for a foreign stream. pre: none of that handle is known.
  StreamState* add_foreign(StreamHandle handle, StreamId id) { return add(handle | kForeignBit, &id); }
  // A state of its own that no handle leads to.
  StreamState* add_hidden(StreamHandle handle, bool foreign, StreamId id);
  // Forgets the handle: nothing new is allocated on the stream.
  void forget(StreamState& stream);
  // The number may be used again once `add` finds the state idle. pre: forgotten, all its work has finished.
  void retire(StreamState& stream);
  std::uint32_t size() const { return count_; }  // numbers in use, retired ones included

  static constexpr std::uint32_t kMaxStreams = (1 << 16) - 1;  // at a time

 private:
  static constexpr std::uint32_t kPlaces = 1 << 17;
  static constexpr std::size_t kRetiredTried = 8;
  struct Place {
    std::atomic<StreamHandle> handle;
    std::atomic<StreamState*> state;
  };
  // In the keys of foreign streams; no address has it, nor the handle of any backend.
  static constexpr StreamHandle kForeignBit = StreamHandle{1} << 62;
  static StreamHandle key_of(const StreamState& state) {
    return state.foreign ? state.handle | kForeignBit : state.handle;
  }
  std::uint32_t place_of(StreamHandle key) const;
  StreamState* add(StreamHandle key, const StreamId* id);
  StreamState* new_state(StreamHandle handle, bool foreign, StreamId id);
  void sweep();

  LazyArray<std::atomic<StreamState*>> numbers_;
  LazyArray<Place> places_;
  std::vector<std::unique_ptr<StreamState>> states_;
  std::deque<std::uint16_t> retired_;
  std::uint32_t count_ = 0;
  std::uint32_t occupied_ = 0;
};

// Events are created once and used again. An event that somebody waits for without the mutex is neither
// recorded again nor destroyed before the last of them has returned. Guarded by the pool's mutex.
class EventPool {
 public:
  explicit EventPool(Backend& backend) : backend_(backend) {}
  Status take(EventHandle* out);
  void give(EventHandle event);
  // Waits on the host for an event that was taken and may be given back meanwhile. The lock is not held while
  // it waits.
  Status wait(EventHandle event, std::unique_lock<std::mutex>& lock);
  // Those given back now or later; returns the first failure and carries on.
  Status destroy_all();

 private:
  struct Awaited {
    EventHandle event = 0;
    std::uint32_t waits = 0;
    bool given = false;
  };
  std::vector<Awaited>::iterator awaited(EventHandle event);

  Backend& backend_;
  std::vector<EventHandle> idle_;
  std::vector<Awaited> awaited_;  // one for each event that is waited for; few
  bool closed_ = false;           // destroy_all was called
};

// The fences of streams. Guarded by the pool's mutex.
class Fences {
 public:
  // A stream has at most this many fences that have not passed, however long its work takes: where one more
  // is needed, every other one is dropped, and what it stood for is told by the next. So recent fences are
  // exact and old ones far apart.
  static constexpr std::size_t kMostFences = 32;

  explicit Fences(Backend& backend) : backend_(backend), events_(backend) {}
  Status close() { return events_.destroy_all(); }

  // Records a fence behind everything issued on the stream so far; a leaving stream has its last one already.
  // Code::capturing: the stream is captured, so that its work cannot be marked. Code::absent: it may be gone.
  Status record(StreamState& stream);
  // Looks how far the stream has come; never waits.
  Status poll(StreamState& stream);
  // Whether everything up to `tick` has finished; records a fence if none covers it yet.
  bool finished(StreamState& stream, Tick tick);
  // Makes later work of `waiter` wait for everything on `stream` up to `tick`.
  Status order(StreamState& waiter, StreamState& stream, Tick tick);
  // The event to wait for so that `tick` has finished, and up to which tick it tells; 0 when it has already.
  Status event_for(StreamState& stream, Tick tick, EventHandle* out, Tick* covers = nullptr);
  // A call names the foreign stream: what waits for it gets a fence now, as later nothing can be asked of it.
  void cover(StreamState& stream);
  // Waits for such an event on the host; the lock is not held meanwhile.
  Status wait(EventHandle event, std::unique_lock<std::mutex>& lock) { return events_.wait(event, lock); }
  // Everything has finished (the stream was synchronised): drops its fences.
  void clear(StreamState& stream);
  // The same without an event: whatever is issued from now on comes after the tick that is returned, and
  // once the stream was synchronised, everything up to it has finished.
  Tick mark(StreamState& stream) { return stream.tick++; }
  void pass(StreamState& stream, Tick tick);
  // Streams that have fences, or blocks that wait for them, or that are leaving; others may be among them.
  StreamSet& watched() { return watched_; }
  const StreamSet& watched() const { return watched_; }

 private:
  void make_room(StreamState& stream);

  Backend& backend_;
  EventPool events_;
  StreamSet watched_;
};

}  // namespace vram
