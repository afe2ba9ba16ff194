// Allocations that share one lifetime: allocating moves a cursor, and everything is released at once. The
// memory comes from any pool (allocator.hpp) in chunks, which the arena keeps: an iteration like an earlier
// one makes no request to the pool, and live allocations never move.
//
// Lifetimes nest. The outermost lasts until reset(). mark() begins a nested lifetime; rewind() ends it and
// all lifetimes inside it.
//
// Order. The memory belongs to one stream, like an allocation of a pool: what is allocated again after a
// reset may be used there immediately, by work queued after the call. Other streams that use the memory are
// recorded with record_stream, once for each lifetime of the arena; a rewind or reset then makes the arena's
// stream wait for them, never the host. Memory that the host writes itself has no such order: chunks that
// queued work still uses at a reset rest until it has completed, and other chunks are used in the meantime.
//
// Callbacks. on_reset registers a function for the end of the current lifetime, for example to release what
// other libraries keep about its memory. It is called once, on the host, before the memory is reused: last
// registered, first called. While it runs, it may use the memory, call record_stream and query the arena.
// Calls that change the arena are refused.
//
// Threads. An arena belongs to one thread, initially to its creator. Calls from another thread are refused
// until that thread has called adopt(); the program must order the handover. Any thread may call
// record_stream, retire_stream, stats and lifetime flags; and end() and close(), if no other call is running.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pool/allocator.hpp"

namespace vram {

struct ArenaOptions {
  std::uint64_t size = 0;   // bytes to hold from the start; 0: none before the first allocation
  bool growable = true;     // otherwise `size` is the maximum
  std::uint64_t align = 0;  // default alignment; 0: kHostAlign or kDeviceAlign
  StreamHandle stream = 0;  // that orders the memory
  std::uint32_t tag = 0;    // of the chunks, in the pool's statistics
  bool poison = false;      // overwrite memory released by a rewind or reset with kPoison, in stream order
};

// All in bytes except the counts. Consistent only if the arena's own thread calls it.
struct ArenaStats {
  std::uint64_t used = 0;        // in live allocations and the padding between them
  std::uint64_t high_water = 0;  // maximum of `used`: the size that one chunk would need
  std::uint64_t capacity = 0;    // held from the pool: chunks in use, spare and resting
  std::uint64_t resting = 0;     // of the capacity, in chunks that queued work still used at a reset
  std::uint64_t chunks = 0;
  std::uint64_t depth = 0;        // open marks
  std::uint64_t allocations = 0;  // since the arena was created
  std::uint64_t allocated = 0;    // their requested bytes
  std::uint64_t requests = 0;     // chunks requested from the pool
  std::uint64_t resets = 0;
  std::uint64_t host_waits = 0;  // how often the host waited for resting chunks
};

class Arena {
 public:
  static constexpr std::uint64_t kHostAlign = 64;     // a cache line
  static constexpr std::uint64_t kDeviceAlign = 256;  // the alignment of driver allocations
  // Chunks begin at such a boundary, so that offsets and high_water do not depend on the address of a chunk,
  // for alignments up to this one.
  static constexpr std::uint64_t kChunkAlign = 4096;
  static constexpr std::uint64_t kMaxAlign = kSlotBytes;
  static constexpr std::uint64_t kLeastChunk = kSlotBytes;
  static constexpr std::uint8_t kPoison = 0xFF;     // NaN in floating-point types
  static constexpr std::uint64_t kGrowthShare = 8;  // a chunk is at least this fraction of the capacity

  // invalid (or out_of_memory) with these calls:
  static constexpr const char* kOtherThread = "arena of another thread";
  static constexpr const char* kOpenMarks = "reset while marks are open";
  static constexpr const char* kMarkOver = "rewind to a mark that is over";
  static constexpr const char* kBadAlign = "arena alignment";
  static constexpr const char* kFull = "arena of a fixed size";
  static constexpr const char* kInCallback = "arena within its callback";

  // A point in the arena. 0 as id: none.
  struct Mark {
    std::uint64_t id = 0;
    std::uint32_t depth = 0;
  };
  // True once the lifetime has ended; any thread may read it, and it may outlive the arena.
  using Over = std::shared_ptr<const std::atomic<bool>>;

  // pre: options.size > 0 unless growable. On out_of_memory, *report (if given) says why.
  static Status open(std::shared_ptr<Allocator> pool, const ArenaOptions& options,
                     std::unique_ptr<Arena>* out, OutOfMemoryReport* report = nullptr);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // ---- allocation -----------------------------------------------------------------------------------
  // align: a power of two up to kMaxAlign, or 0 for the arena's default. Size 0 occupies one byte, so that
  // live allocations have different addresses. A failure changes nothing; on out_of_memory *report says why.
  // If a fixed arena is full (kFull), only its `requested` and `limit` are set.
  Status allocate(std::uint64_t size, std::uint64_t align, Address* out,
                  OutOfMemoryReport* report = nullptr) {
    if (try_allocate(size, align, out)) return {};
    return allocate_slow(size, align, out, report);
  }
  // Only moves the cursor: never blocks, calls nothing. False: use allocate.
  bool try_allocate(std::uint64_t size, std::uint64_t align, Address* out) {
    if (!ours() || pool_->closed()) return false;
    if (align == 0) align = options_.align;
    return (align & (align - 1)) == 0 && align <= kMaxAlign && place(size, align, out);
  }

  // ---- lifetimes --------------------------------------------------------------------------------------
  Status mark(Mark* out);
  Status rewind(const Mark& mark);
  // Releases everything, in O(1). zero: memory allocated until the next reset reads as zero, in the order of
  // the stream (and of the host, if it writes itself); ends of marks do not zero.
  Status reset(bool zero = false);
  bool open_at(const Mark& mark) const;  // whether the mark has not ended
  // Calls the function at the end of the current lifetime: at the rewind that ends it, at reset, or at end.
  // The function must not throw.
  Status on_reset(void (*function)(void*), void* argument);
  // Whether rewind and reset would be refused. pre: as for these calls.
  Status may_rewind(const Mark& mark) const;
  Status may_reset() const;
  // Calls the functions of the lifetimes from this depth on. rewind, reset and end do this first; a caller
  // that has work between the functions and the end calls it itself. pre: the end would not be refused.
  void call_back(std::size_t depth = 0);
  bool in_callback() const { return in_callback_; }
  void forget_callbacks() { callbacks_.clear(); }
  Over over();  // flag of what is allocated now

  // ---- streams ----------------------------------------------------------------------------------------
  // Records that work on the stream uses memory of the arena, from now until the next reset. Any thread.
  Status record_stream(StreamHandle stream);
  // The stream will be destroyed. Its uses stay ordered; if it is the arena's own stream, the default stream
  // replaces it.
  Status retire_stream(StreamHandle stream);
  StreamHandle stream() const { return stream_.load(std::memory_order_relaxed); }

  // ---- housekeeping -----------------------------------------------------------------------------------
  void adopt() { owner_.store(this_thread(), std::memory_order_relaxed); }
  bool ours() const { return owner_.load(std::memory_order_relaxed) == this_thread(); }
  // Returns chunks without live allocations to the pool. The next growth is one chunk that is large enough
  // for the maximum ever used, so that a trim after a reset combines many chunks into one.
  Status trim();
  // Ends all lifetimes, after calling their functions; later calls return Code::closed. The memory stays
  // until close, for those who may still read it.
  void end();
  // Returns everything to the pool, which reuses it in stream order.
  Status close();
  bool closed() const { return ended_ || pool_->closed(); }
  bool ended() const { return ended_; }  // closed, not only its pool

  // ---- queries ----------------------------------------------------------------------------------------
  ArenaStats stats() const;
  void reset_peak();  // restarts high_water from `used`
  Allocator& pool() const { return *pool_; }
  const ArenaOptions& options() const { return options_; }
  bool host_accessible() const { return host_; }
  // Finds the chunk that contains the address of a current or former allocation; false: none.
  bool chunk_of(Address address, Address* base, std::uint64_t* bytes) const;
  // Verifies: chunks do not overlap and are live in the pool, marks ascend, the cursor is in the last chunk
  // in use, used <= high_water, and the counters are consistent.
  bool check(std::string* why) const;

 private:
  struct Chunk {
    Address base = 0;
    std::uint64_t bytes = 0;
    std::uint64_t dirty = 0;  // number of bytes from base that may not be zero
  };
  struct Position {
    std::size_t chunks = 0;  // in use; the cursor is in the last of them
    Address cursor = 0;
    std::uint64_t used = 0;
  };
  struct Frame {  // one lifetime, and where it began
    std::uint64_t id = 0;
    Position from;
    std::shared_ptr<std::atomic<bool>> over;  // created on demand
  };
  struct Callback {
    void (*function)(void*);
    void* argument;
    std::size_t depth;  // of the lifetime at whose end it is called
  };
  struct Use {
    StreamHandle stream = 0;
    EventHandle event = 0;  // behind the last work of a destroyed stream; 0: the stream exists
    bool foreign = false;   // may have been destroyed: only a wait for the device helps
  };
  struct Rest {  // chunks that are reused once the events have completed
    std::vector<Chunk> chunks;
    std::vector<EventHandle> events;
  };
  // Written by one thread, read by any.
  class Gauge {
   public:
    std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }
    void set(std::uint64_t value) { value_.store(value, std::memory_order_relaxed); }
    void add(std::uint64_t value) { set(get() + value); }

   private:
    std::atomic<std::uint64_t> value_{0};
  };

  Arena(std::shared_ptr<Allocator> pool, const ArenaOptions& options);
  static std::uint64_t this_thread();

  bool place(std::uint64_t size, std::uint64_t align, Address* out) {
    const std::uint64_t bytes = size + (size == 0);
    const Address at = (cursor_ + align - 1) & ~(align - 1);
    if (at > end_ || bytes > end_ - at) return false;
    cursor_ = at + bytes;
    used_.set(((used_.get() + align - 1) & ~(align - 1)) + bytes);
    if (used_.get() > high_water_.get()) high_water_.set(used_.get());
    allocations_.add(1);
    allocated_.add(size);
    *out = at;
    return true;
  }
  Status allocate_slow(std::uint64_t size, std::uint64_t align, Address* out, OutOfMemoryReport* report);
  Status enter_spare(std::uint64_t bytes, std::uint64_t align, bool* entered);
  Status enter(std::size_t chunk);
  Status grow(std::uint64_t bytes, std::uint64_t align, OutOfMemoryReport* report);
  Status request(std::uint64_t bytes, std::uint64_t align, OutOfMemoryReport* report);
  static bool fits(const Chunk& chunk, std::uint64_t bytes, std::uint64_t align);

  void go_to(const Position& position);
  void soil();  // records how far the chunk at the cursor was used
  Status clear(Chunk& chunk);
  Status overwrite(const Position& from);
  Status set_bytes(Address from, std::uint8_t value, std::uint64_t bytes);
  void end_frames(std::size_t keep);
  void begin_frame();

  Status refusal() const;
  Status settle(bool* busy);
  Status wait_for_foreign();
  Status wait_in_order();
  Status ask(bool* busy);
  Status rest();
  Status mark_end(StreamHandle stream, EventHandle* out);
  void forget_uses();
  void collect_rested();
  Status wait_for_oldest();
  void wake(std::size_t rest);
  Status give_back_from(std::size_t chunk);

  const std::shared_ptr<Allocator> pool_;
  Backend& backend_;
  ArenaOptions options_;
  const bool host_;  // the host writes here, outside of stream order
  std::atomic<StreamHandle> stream_;
  std::atomic<std::uint64_t> owner_;

  Address cursor_ = 0;  // in the last chunk in use; equal to end_ if there is none
  Address end_ = 0;
  std::vector<Chunk> chunks_;        // chunks in use, in order, followed by spare ones
  std::size_t in_use_ = 0;           // chunks
  std::vector<Frame> frames_;        // [0] lasts until reset
  std::vector<Rest> rests_;          // oldest first
  std::vector<Callback> callbacks_;  // of the outermost lifetime first
  std::atomic<bool> in_callback_ = false;
  std::uint64_t next_id_ = 1;
  bool zeroing_ = false;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> closed_ = false;  // and the memory was returned

  std::mutex close_mutex_;         // one close at a time
  mutable std::mutex uses_mutex_;  // guards the members below; held during backend calls
  std::vector<Use> uses_;
  std::vector<EventHandle> events_;  // not in use

  Gauge used_, high_water_, capacity_, resting_, chunk_count_, depth_, allocations_, allocated_, requests_,
      resets_, host_waits_;
};

}  // namespace vram
