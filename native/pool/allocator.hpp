// The interface of every pool: our own (pool.hpp) and the driver's (driver_pool.hpp). Defines Allocator, what
// pools are configured with (PoolConfig) and what they report (PoolStats, OutOfMemoryReport, …). No
// behaviour.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "base/forks.hpp"
#include "journal/journal.hpp"
#include "order/stream_state.hpp"
#include "placement/blocks.hpp"

namespace vram {

// When memory freed on one stream may serve another stream that does not wait for it anyway:
enum class CrossStream : std::uint8_t {
  ready,  // when its last use has completed; by a stream wait only if the driver has no more
  wait,   // at once, by a stream wait, before the driver is called for more
  never,  // not at all
};

struct PoolConfig {
  std::uint64_t limit = 0;  // most bytes to reserve from the driver; 0: what the device has
  CrossStream cross_stream = CrossStream::ready;
  bool pages = true;                                    // where the device can
  bool best_fit = true;                                 // else good fit: the first block of a sufficient bin
  std::uint64_t segment_size = 0;                       // the fewest bytes to get from the driver at a time
  std::uint64_t max_page = 32 * kMiB;                   // the largest page to create: 2, 8 or 32 MiB
  std::uint32_t stream_cache = 4096;                    // blocks each stream may keep in its cache
  std::uint64_t release_threshold = ~std::uint64_t{0};  // unused memory beyond this is released
  std::uint32_t journal = 0;  // entries to keep for each stream, up to kMostJournaled
  bool zero_on_allocate = false;
  bool zero_on_free = false;
  std::uint64_t spill = 0;       // most bytes of host pages that pages may move to; 0: none
  double spill_patience = 10.0;  // seconds that a swap waits for the streams
  // Whether there is a release threshold.
  bool bounded() const { return release_threshold != ~std::uint64_t{0}; }
};

// What statistics tell apart: blocks up to 1 MiB and larger ones.
enum class Kind : std::uint8_t { small = 0, large = 1 };
constexpr Kind kind_of(Units units) { return units <= kMiB / kUnit ? Kind::small : Kind::large; }

enum class Rung : std::uint8_t {
  stream_cache,
  own_blocks,
  passed_pending,
  finished_elsewhere,
  free_pages,
  growth,
  stream_wait,
  flush,
  callbacks,
  host_wait,
  give_back,
  driver,  // the driver's own pool, at once (driver_pool.hpp)
  spill,
};
inline constexpr int kRungs = 13;
const char* name_of(Rung rung);

// Why a request failed. All in bytes, except `spill`.
struct OutOfMemoryReport {
  std::uint64_t requested = 0;
  std::uint64_t limit = 0;  // 0: none
  std::uint64_t device_total = 0;
  std::uint64_t device_free = 0;
  std::uint64_t reserved = 0;
  std::uint64_t live = 0;
  std::uint64_t pending = 0;
  std::uint64_t cached = 0;
  std::uint64_t free_pages = 0;      // whole pages this stream could use
  std::uint64_t free_elsewhere = 0;  // whole pages that other streams hold
  std::uint64_t stranded = 0;        // free inside pages that are partly in use
  std::uint64_t suspended = 0;       // pages released while blocks are suspended; not in `reserved`
  std::uint64_t spill_limit = 0;     // most bytes of host pages; 0: none
  std::uint64_t host = 0;            // host pages, spare ones included; not in `reserved`
  std::uint64_t spilled = 0;         // what is live on them; not in `live`
  std::uint64_t spill_left = 0;      // of spill_limit, what more of them may take
  std::uint64_t largest_free = 0;
  std::uint64_t align = 0;      // of the request, if it is larger than that of every block
  std::uint64_t addresses = 0;  // not 0: there is memory, but no place for it in so many bytes of addresses
  Status spill = {};            // why no memory could move to the host; ok if that was not tried
};

// What a pool has moved between device and host pages so far.
struct SpillCounts {
  std::uint64_t spills = 0;   // swaps to the host
  std::uint64_t returns = 0;  // … and back
  std::uint64_t spilled_bytes = 0;
  std::uint64_t returned_bytes = 0;
  std::uint64_t late = 0;         // swaps abandoned because a stream did not arrive in time
  std::uint64_t failures = 0;     // … because the device failed
  double seconds = 0;             // that streams were held
  std::uint64_t taken_bytes = 0;  // of the option, that others use or keep
};

// The part of allocations with one label in it.
struct SpillOfLabel {
  std::uint64_t bytes = 0;  // on host pages now
  std::uint64_t moved_out_bytes = 0;
  std::uint64_t moved_back_bytes = 0;
  double seconds = 0;  // of the time that streams were held, its share by bytes
};

struct StreamStats {
  StreamHandle handle = 0;
  std::uint64_t live = 0;
  std::uint64_t cached = 0;
  std::uint64_t free = 0;  // in free blocks
  std::uint64_t pending_blocks = 0;
  bool retired = false;
};

struct PoolStats {
  // By kind. With several streams peaks are upper bounds; those of bytes are at most peak_live.
  Meter allocations[2];
  Meter bytes[2];
  Meter requested[2];
  std::uint64_t live = 0;
  std::uint64_t peak_live = 0;  // exact, unless several threads allocate at once (Accounts)
  Meter reserved;
  Meter segments;  // pieces of driver memory: pages and plain segments
  Meter pending;
  std::uint64_t pending_blocks = 0;
  std::uint64_t peak_active = 0;
  std::uint64_t cached = 0;
  std::uint64_t cached_blocks = 0;
  std::uint64_t free_blocks = 0;
  std::uint64_t free_bytes = 0;  // physically free: reserved - (live + pending - suspended_live) - cached
  std::uint64_t free_page_bytes = 0;  // of these, in whole pages that any address can use
  Meter inactive[2];  // cached and free blocks; their bytes, without whole free pages. Counted when read
  std::uint64_t largest_free = 0;
  std::uint64_t hits = 0;
  std::uint64_t rungs[kRungs] = {};  // allocations served by each
  std::uint64_t retries = 0;         // allocations that went past `stream_wait`
  std::uint64_t out_of_memory = 0;
  std::uint64_t mappings = 0;
  std::uint64_t suspended = 0;         // pages released for suspended blocks; not in `reserved`
  std::uint64_t suspended_live = 0;    // of `live` and `pending`, what was on them
  std::uint64_t suspended_blocks = 0;  // among the live ones
  std::uint64_t kept = 0;              // contents of theirs in host memory
  std::uint64_t host = 0;              // host pages, spare ones included; not in `reserved`
  std::uint64_t spilled = 0;           // of these, pages under blocks
  std::uint64_t spilled_live = 0;      // of `live` and `pending`, what is on them
  std::uint64_t parked = 0;            // of `spilled`, pages that do not return by themselves
  SpillCounts spill;                   // what was moved so far
  bool paged = false;
  std::vector<StreamStats> streams;
};

// What is in use, and its peak; `spilled` of it are on host pages.
struct Usage {
  std::uint64_t live = 0;
  std::uint64_t peak_live = 0;
  std::uint64_t spilled = 0;
};

struct BlockInfo {
  Address address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t requested = 0;
  BlockState state = BlockState::free;
  StreamHandle stream = 0;
  std::uint32_t tag = 0;
  std::uint32_t serial = 0;
  bool used_elsewhere = false;  // its free waits for another stream
  HeapId heap{};                // {0, 0}: none
  std::uint64_t spilled = 0;    // bytes of it that are on host pages
};

struct SegmentInfo {
  Address address = 0;
  std::uint64_t bytes = 0;
  StreamHandle stream = 0;
  HeapId heap{};  // {0, 0}: none
  bool small = false;
  bool plain = false;
  std::vector<BlockInfo> blocks;
};

// What a listener is told (Pool::listen).
struct PoolEvent {
  enum class Kind : std::uint8_t {
    reserved,   // memory was reserved, or mapped at the address
    released,   // … or released, or unmapped there
    completed,  // a free that had to wait for other streams
  };
  Kind kind = Kind::reserved;
  bool plain = false;
  Address address = 0;
  std::uint64_t bytes = 0;
  StreamHandle stream = 0;
  HeapId heap{};
};

struct GrowableInfo {
  std::uint64_t bytes = 0;    // that have memory
  std::uint64_t pending = 0;  // released behind them, and not yet available to others
  std::uint64_t ready = 0;    // that follow and have free pages
  std::uint64_t max = 0;
};

// Calls back when the memory that a pool holds has risen above a mark: once, until it was at the mark or
// below when the pool looked again. Any thread may call it, without locks of the pool.
class HighWater {
 public:
  using Callback = std::function<void(std::uint64_t reserved)>;
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  void set(std::uint64_t mark, Callback callback) {
    auto kept = std::make_shared<const Callback>(std::move(callback));
    std::lock_guard lock(mutex_);
    mark_.store(mark, std::memory_order_relaxed);
    callback_.swap(kept);
    above_ = false;
  }
  bool any() const { return mark_.load(std::memory_order_relaxed) != kNone; }
  void look(std::uint64_t reserved) {
    std::shared_ptr<const Callback> callback;
    {
      std::lock_guard lock(mutex_);
      const bool above = reserved > mark_.load(std::memory_order_relaxed);
      if (above && !above_) callback = callback_;
      above_ = above;
    }
    if (callback != nullptr && *callback) (*callback)(reserved);
  }

 private:
  std::atomic<std::uint64_t> mark_{kNone};
  std::mutex mutex_;
  bool above_ = false;
  std::shared_ptr<const Callback> callback_;
};

// Every call may come from any thread. Sizes are in bytes.
class Allocator {
 public:
  virtual ~Allocator() = default;

  // Code that touches the pool's memory, or queues work on it, outside the pool's own calls holds one of
  // these: close() waits for it, and then for the queued work. Such code must not wait for close().
  class Access {
   public:
// The destructor takes the address out of the list, which gcc does not see.
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wdangling-pointer"
#endif
    explicit Access(const Allocator& pool)
        : pool_(pool), refused_(pool.closed() || !pool.begin_access()), before_(latest_) {
      latest_ = this;
      if (before_ != nullptr) before_->after_ = this;
    }
#pragma GCC diagnostic pop
    ~Access() {
      (after_ != nullptr ? after_->before_ : latest_) = before_;
      if (before_ != nullptr) before_->after_ = after_;
      if (!refused_) pool_.end_access();
    }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    bool refused() const { return refused_; }  // the pool is closed, or about to be
    // Whether this thread has one, so that close() would wait for its own caller.
    static bool ours(const Allocator& pool) {
      const Access* each = latest_;
      while (each != nullptr && (&each->pool_ != &pool || each->refused_)) each = each->before_;
      return each != nullptr;
    }

   private:
    static inline thread_local Access* latest_ = nullptr;  // of this thread
    const Allocator& pool_;
    const bool refused_;
    Access* before_;  // the list of this thread's
    Access* after_ = nullptr;
  };

  // ---- allocation ---------------------------------------------------------------------------------
  // align: a power of two, or 0 for kUnit. On out_of_memory, *report (if given) says why.
  virtual Status allocate_slow(std::uint64_t size, StreamHandle stream, std::uint64_t align,
                               std::uint32_t tag, Address* out, OutOfMemoryReport* report) = 0;
  // All or nothing.
  virtual Status allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle stream,
                                std::uint32_t tag, std::vector<Address>& out, OutOfMemoryReport* report) = 0;
  // invalid: not a live allocation of this pool (double free, foreign or interior pointer).
  virtual Status free_slow(Address address) = 0;
  // The same for callers that cannot try again: if the device fails, the free is completed later.
  virtual Status drop(Address address) = 0;
  // The block (or the one that contains the address) is used on another stream from now until it is freed.
  virtual Status record_stream(Address address, StreamHandle stream) = 0;

  // ---- housekeeping ---------------------------------------------------------------------------------
  // Empties the caches and merges free blocks.
  virtual Status coalesce() = 0;
  // Releases unused memory until at most `keep` bytes are reserved. Unless `wait` is set, memory stays that
  // queued work still uses or that cannot be released without waiting.
  virtual Status trim(std::uint64_t keep, bool wait) = 0;
  virtual Status release_unused(bool) { return {}; }  // the driver's pools keep their threshold themselves
  virtual Status set_limit(std::uint64_t bytes) = 0;
  // Lets another device of the same kind, by its number, use the memory of this pool, including what is
  // allocated later. On failure some of it may be usable there.
  virtual Status add_peer(int device) = 0;
  // Changes what can change while in use. `set` sets some options and may be called more than once, with a
  // lock of the pool held; the others stay, whatever other threads do.
  using Setting = std::function<void(PoolConfig&)>;
  virtual Status change(const Setting& set) = 0;
  Status configure(const PoolConfig& config) {
    return change([&config](PoolConfig& all) { all = config; });
  }
  virtual PoolConfig config() const = 0;
  // The stream is about to be destroyed.
  virtual Status retire_stream(StreamHandle stream) = 0;
  // Called with the request's size when everything else has failed; true: try again. Its own allocations
  // from this pool do not call it again.
  using Callback = std::function<bool(std::uint64_t, StreamHandle)>;
  virtual void on_out_of_memory(Callback callback) = 0;
  // Called in the allocating thread after an allocation that made the reserved memory rise above `mark`.
  // HighWater::kNone: no more.
  void on_high_water(std::uint64_t mark, HighWater::Callback callback) {
    high_water_.set(mark, std::move(callback));
  }
  // Waits for all work and releases all memory. Live allocations become invalid. Later calls: Code::closed.
  // deadlock: this thread has an Access, or is work that close() would wait for; the pool stays open.
  virtual Status close() = 0;
  virtual bool closed() const = 0;
  // Made before a fork of this process: its locks and its memory are the parent's, so every call is refused
  // or does nothing, without taking a lock.
  bool inherited() const { return made_in_ != process_generation(); }

  // ---- looking --------------------------------------------------------------------------------------
  virtual PoolStats stats() const = 0;
  virtual void reset_peak() = 0;
  virtual std::vector<SegmentInfo> snapshot() const = 0;
  virtual Status info(Address address, BlockInfo* out) const = 0;  // of a live allocation, by its address
  virtual std::uint64_t live_bytes() const = 0;
  virtual bool any_suspended() const { return false; }     // never waits
  virtual bool suspended(Address) const { return false; }  // the allocation that contains the address
  virtual void journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const = 0;
  virtual Status start_journal(std::uint32_t entries) = 0;  // 0 stops; invalid: more than kMostJournaled
  // From now on every event is kept until it is taken, up to `most` events; 0 stops and forgets. What is
  // live, pending and reserved at that moment comes first, as if it had just been allocated.
  virtual void start_recording(std::uint64_t most) = 0;
  virtual void mark(std::uint64_t number) = 0;  // in a recording, between the events before and after
  // Appends the events since the last call, in order; returns how many were dropped for lack of room. One
  // thread at a time.
  virtual std::uint64_t take_recorded(std::vector<JournalEntry>& out) = 0;
  virtual bool check(std::string* why) const = 0;
  virtual Backend& backend() = 0;
  virtual bool host_accessible() { return backend().info().host_accessible; }

 protected:
  HighWater high_water_;
  // False if this thread is inside a callback of this pool already.
  bool call_back(const Callback& callback, std::uint64_t size, StreamHandle stream) const;

 private:
  const std::uint32_t made_in_ = process_generation();
  virtual bool begin_access() const = 0;
  virtual void end_access() const = 0;
};

}  // namespace vram
