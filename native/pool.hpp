// The pool: allocations walk one ladder of rungs from the stream's own cache down to the driver, frees
// walk back up as far as order allows. It joins placement (segments.hpp) with order (streams.hpp).
//
// Threads. Every call may come from any thread. The fast paths, an allocation from the stream's cache
// and a free into it, take only that stream's lock; everything else takes the pool's mutex.
// Lock order: mutex → one stream's lock. Neither is held across a host wait or a callback.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>

#include "segments.hpp"
#include "streams.hpp"

namespace vram {

// When memory freed on one stream may serve another that does not wait for it on its own:
enum class CrossStream : std::uint8_t {
  ready,  // once its last use has finished; a stream-wait only when the driver has no more
  wait,   // at once, by a stream-wait, before asking the driver for more
  never,  // not at all
};

struct PoolConfig {
  std::uint64_t limit = 0;  // most bytes to hold from the driver; 0: what the device has
  CrossStream cross_stream = CrossStream::ready;
  bool pages = true;                             // where the device can
  bool best_fit = true;                          // else good fit: the first block of a sufficient bin
  std::uint64_t segment_size = 0;                // the least bytes to get from the driver at a time
  std::uint64_t max_page = 32 * kMiB;            // the largest page to create: 2, 8 or 32 MiB
  std::uint32_t stream_cache = 4096;             // blocks each stream may keep in its cache
  std::uint64_t idle_limit = ~std::uint64_t{0};  // free pages beyond this go back to the driver
  std::uint32_t journal = 0;                     // entries to keep for each stream; 0: off
  bool zero_on_allocate = false;
  bool zero_on_free = false;
};

// What statistics tell apart: blocks up to 1 MiB and larger ones.
enum class Kind : std::uint8_t { small = 0, large = 1 };
constexpr Kind kind_of(Units units) { return units <= StreamCache::kSmallUnits ? Kind::small : Kind::large; }

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
};
inline constexpr int kRungs = 11;
const char* name_of(Rung rung);

// Why a request could not be served. All in bytes.
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
  std::uint64_t largest_free = 0;
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
  Meter allocations[2];  // by kind; peaks are sums over streams and so an upper bound with several
  Meter bytes[2];
  Meter requested[2];
  std::uint64_t live = 0;
  std::uint64_t peak_live = 0;  // exact
  Meter reserved;
  Meter segments;  // pieces of driver memory: pages and plain segments
  Meter pending;
  std::uint64_t pending_blocks = 0;
  std::uint64_t peak_active = 0;
  std::uint64_t cached = 0;
  std::uint64_t cached_blocks = 0;
  std::uint64_t free_blocks = 0;
  std::uint64_t free_bytes = 0;       // physically free: reserved - live - pending - cached
  std::uint64_t free_page_bytes = 0;  // of these, in whole pages that any address can use
  std::uint64_t largest_free = 0;
  std::uint64_t hits = 0;
  std::uint64_t rungs[kRungs] = {};  // allocations served by each
  std::uint64_t retries = 0;         // allocations that went past `stream_wait`
  std::uint64_t out_of_memory = 0;
  std::uint64_t mappings = 0;
  bool paged = false;
  std::vector<StreamStats> streams;
};

struct BlockInfo {
  Address address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t requested = 0;
  BlockState state = BlockState::free;
  StreamHandle stream = 0;
  std::uint32_t tag = 0;
  std::uint32_t serial = 0;
};

struct SegmentInfo {
  Address address = 0;
  std::uint64_t bytes = 0;
  StreamHandle stream = 0;
  bool small = false;
  bool plain = false;
  std::vector<BlockInfo> blocks;
};

class Pool {
 public:
  Pool(std::shared_ptr<Backend> backend, const PoolConfig& config);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // ---- allocation ---------------------------------------------------------------------------------
  // align: a power of two or 0 for kUnit. On out_of_memory, *report (if given) says why.
  Status allocate(std::uint64_t size, StreamHandle stream, std::uint64_t align, std::uint32_t tag,
                  Address* out, OutOfMemoryReport* report = nullptr) {
    const bool plain = align <= kUnit && (align & (align - 1)) == 0;
    if (plain && size <= kMaxRequest && try_cached(size, stream, tag, out)) return {};
    return allocate_slow(size, stream, align, tag, out, report);
  }
  // Only the first rung: true if the stream's cache served. Never blocks, calls nothing.
  bool try_cached(std::uint64_t size, StreamHandle stream, std::uint32_t tag, Address* out);
  Status allocate_slow(std::uint64_t size, StreamHandle stream, std::uint64_t align, std::uint32_t tag,
                       Address* out, OutOfMemoryReport* report);
  // All or nothing, in one pass; adjacent where one free block can hold them.
  Status allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle stream, std::uint32_t tag,
                        std::vector<Address>& out, OutOfMemoryReport* report);
  // invalid: not a live allocation of this pool (double free, foreign or interior pointer).
  Status free(Address address) {
    if (try_free_cached(address)) return {};
    return free_slow(address);
  }
  bool try_free_cached(Address address);
  Status free_slow(Address address);
  // The block (an address inside it will do) is used on another stream from now until it is freed.
  Status record_stream(Address address, StreamHandle stream);
  // Makes `count` blocks of `size` ready in the stream's cache.
  Status warmup(std::uint64_t size, std::uint32_t count, StreamHandle stream, OutOfMemoryReport* report);

  // ---- housekeeping ---------------------------------------------------------------------------------
  // Empties the stream caches and merges what is free.
  Status coalesce();
  // Gives unused memory back until at most `keep` bytes are reserved; what is still in use by queued work
  // stays, unless wait is set.
  Status trim(std::uint64_t keep, bool wait);
  Status set_limit(std::uint64_t bytes);
  Status configure(const PoolConfig& config);  // what can change while in use: all but pages and journal
  PoolConfig config() const;
  // The stream is about to be destroyed: its memory goes to the default stream once its work has finished.
  Status retire_stream(StreamHandle stream);
  // Called with the request's size when everything else failed; true: try again.
  void on_out_of_memory(std::function<bool(std::uint64_t, StreamHandle)> callback);
  // Waits for all work, returns all memory. Live allocations become invalid. Later calls: Code::closed.
  Status close();
  bool closed() const { return generation_.load(std::memory_order_relaxed) != fork_generation(); }

  // ---- looking ----------------------------------------------------------------------------------------
  PoolStats stats() const;
  void reset_peak();
  std::vector<SegmentInfo> snapshot() const;
  Status info(Address address, BlockInfo* out) const;  // of a live allocation, by its first address
  std::uint64_t live_bytes() const;
  void journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const;
  void start_journal(std::uint32_t entries);  // 0 stops
  bool check(std::string* why) const;
  Backend& backend() { return *backend_; }
  const std::shared_ptr<Backend>& shared_backend() const { return backend_; }

 private:
  struct Request {
    std::uint64_t size;
    Want want;
    std::uint32_t tag;
    StreamState* stream;
    std::unique_lock<std::mutex>* lock;
    Status error;  // a driver failure that is not "out of memory" ends the climb
  };
  using Serve = Index (Pool::*)(Request&);
  struct Step {
    Rung rung;
    Serve serve;
  };

  static std::uint32_t fork_generation();

  StreamState& stream_of(StreamHandle handle);

  Index climb(Request& request);
  Index search(Request& request);
  Index serve_own_blocks(Request& request);
  Index serve_passed_pending(Request& request);
  Index serve_finished_elsewhere(Request& request);
  Index serve_free_pages(Request& request);
  Index serve_growth(Request& request);
  Index serve_stream_wait(Request& request);
  Index serve_flush(Request& request);
  Index serve_callbacks(Request& request);
  Index serve_host_wait(Request& request);
  Index serve_give_back(Request& request);
  Index back(Request& request, std::uint64_t create_bytes);
  void gather_pages(Request& request, bool by_waiting);
  Index take_segment(Request& request);
  Index lend(Request& request, bool by_waiting);
  bool ordered(StreamState& taker, StreamState& owner, Tick tick, bool by_waiting);
  void arrange_ladder();

  bool drain(StreamState& stream, bool small, bool large);
  Status zero(Address address);
  void give_home(Index block);
  void make_pending(Index block);
  void wait_in_queue(PendingBlock&& pending);
  void requeue(PendingBlock&& pending);
  void complete_passed();
  void let_leave();
  Status wait_for(StreamState& stream, std::unique_lock<std::mutex>& lock);
  Status wait_for_all(std::unique_lock<std::mutex>& lock);
  Status wait_for_stream(StreamState& stream, std::unique_lock<std::mutex>& lock);
  Status settle(std::unique_lock<std::mutex>& lock);
  void keep_idle_limit();
  std::uint64_t budget() const;

  bool carve(const std::vector<std::uint64_t>& sizes, const std::vector<std::size_t>& order, std::size_t from,
             std::size_t to, Units units, StreamHandle stream, std::uint32_t tag, std::vector<Address>& out);
  Address hand_out(Index block, Request& request);
  Index claim_for_free(Address address);
  Index take_cached(StreamState& stream, Units units);
  void take_back(Address address);
  void add_live(StreamState& stream, std::uint64_t bytes);
  void note_reserved();
  void note(StreamState& stream, Action action, Address address, std::uint64_t bytes, std::uint32_t tag,
            std::uint32_t serial);
  OutOfMemoryReport explain(const Request& request) const;
  BlockInfo describe(const Block& block) const;
  void verify() const;

  std::shared_ptr<Backend> backend_;
  std::atomic<std::uint32_t> generation_;  // the fork generation it was made in; another value: closed
  mutable std::mutex mutex_;
  PoolConfig config_;
  Segments segments_;
  Fences fences_;
  const Finished finished_;  // fences_.finished by number
  StreamTable streams_;
  std::vector<Step> ladder_;
  std::vector<Index> drained_;                                  // scratch of drain()
  std::vector<std::uint16_t> leaving_;                          // streams whose last fence has not passed
  std::unordered_map<Index, std::vector<std::uint16_t>> uses_;  // record_stream
  std::function<bool(std::uint64_t, StreamHandle)> callback_;
  std::atomic<std::uint64_t> sequence_{0};
  // Fast-path copies of settings, read without a lock.
  std::atomic<std::uint32_t> stream_cache_;
  std::atomic<bool> zero_on_allocate_;
  std::atomic<bool> zero_on_free_;
  // Guarded by the mutex.
  std::uint64_t peak_live_ = 0;
  std::uint64_t peak_active_ = 0;
  Meter reserved_;
  Meter segment_count_;
  Meter pending_;
  std::uint64_t pending_blocks_ = 0;
  std::uint64_t rungs_[kRungs] = {};
  std::uint64_t retries_ = 0;
  std::uint64_t out_of_memory_ = 0;
  mutable std::uint64_t walks_ = 0;  // of verify
};

}  // namespace vram
