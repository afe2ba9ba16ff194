// Allocations with one common lifetime: taken by moving a cursor, given back all at once. The memory comes
// from any pool (allocator.hpp) in chunks, which stay: an iteration like one before it asks the pool for
// nothing, and what is live never moves. Placement is the cursor's, order is that of one stream.
//
// Lifetimes nest. The outermost lasts until reset(); mark() begins one inside the present one, rewind() ends
// it and all that began in it.
//
// Order. The memory belongs to one stream, as that of a pool's allocation does: what is handed out again
// after a reset may be used there at once, by work queued after the call. Other streams that use it are told
// by record_stream, once for each lifetime of the arena; a rewind or reset then makes the stream wait for
// them, never the host. Memory that the host writes by itself has no such order: chunks that queued work
// still uses at a reset rest until it has finished, and other chunks serve meanwhile.
//
// Threads. An arena belongs to one thread, at first to the one that made it. Calls from another are refused
// until that one has called adopt(); handing over is the program's to order. From any thread come
// record_stream, retire_stream, stats and lifetime flags; end() and close(), once no other call is under way.
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
  bool growable = true;     // else `size` is all there is
  std::uint64_t align = 0;  // of allocations that ask for none; 0: kHostAlign or kDeviceAlign
  StreamHandle stream = 0;  // whose order the memory follows
  std::uint32_t tag = 0;    // of the chunks, in the pool's account
  bool poison = false;      // what a rewind or reset gives back is overwritten with kPoison, in stream order
};

// All in bytes but for the counts. Of one moment only where the arena's own thread asks.
struct ArenaStats {
  std::uint64_t used = 0;        // in live allocations and the padding between them
  std::uint64_t high_water = 0;  // the most that was used at a time: what one chunk would have to hold
  std::uint64_t capacity = 0;    // held from the pool: chunks in use, spare and resting
  std::uint64_t resting = 0;     // of the capacity, in chunks that queued work still used at a reset
  std::uint64_t chunks = 0;
  std::uint64_t depth = 0;        // marks that are open
  std::uint64_t allocations = 0;  // served since the arena was made
  std::uint64_t allocated = 0;    // bytes of these, as asked for
  std::uint64_t requests = 0;     // chunks asked of the pool
  std::uint64_t resets = 0;
  std::uint64_t host_waits = 0;  // the host waited for resting chunks, because there was no other memory
};

class Arena {
 public:
  static constexpr std::uint64_t kHostAlign = 64;     // a cache line
  static constexpr std::uint64_t kDeviceAlign = 256;  // what a driver's own allocations promise
  // Chunks begin on such a boundary, so that up to this alignment offsets, and with them high_water, do not
  // depend on where a chunk lies.
  static constexpr std::uint64_t kChunkAlign = 4096;
  static constexpr std::uint64_t kMaxAlign = kSlotBytes;
  static constexpr std::uint64_t kLeastChunk = kSlotBytes;
  static constexpr std::uint8_t kPoison = 0xFF;     // no number in the types of floats
  static constexpr std::uint64_t kGrowthShare = 8;  // a chunk is at least this part of what is there

  // invalid (or out_of_memory) with these calls:
  static constexpr const char* kOtherThread = "arena of another thread";
  static constexpr const char* kOpenMarks = "reset while marks are open";
  static constexpr const char* kMarkOver = "rewind to a mark that is over";
  static constexpr const char* kBadAlign = "arena alignment";
  static constexpr const char* kFull = "arena of a fixed size";

  // A point in the arena. 0 as id: none.
  struct Mark {
    std::uint64_t id = 0;
    std::uint32_t depth = 0;
  };
  // True once the lifetime has ended; may be read from any thread and outlives the arena.
  using Over = std::shared_ptr<const std::atomic<bool>>;

  // pre: options.size > 0 unless growable. On out_of_memory, *report (if given) says why.
  static Status open(std::shared_ptr<Allocator> pool, const ArenaOptions& options,
                     std::unique_ptr<Arena>* out, OutOfMemoryReport* report = nullptr);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // ---- allocation -----------------------------------------------------------------------------------
  // align: a power of two up to kMaxAlign, or 0 for the arena's own. Size 0 occupies a byte, so that live
  // allocations differ in address. A failure leaves everything as it was; on out_of_memory *report says why,
  // all zeros but for `requested` and `limit` where a fixed arena is full (kFull).
  Status allocate(std::uint64_t size, std::uint64_t align, Address* out,
                  OutOfMemoryReport* report = nullptr) {
    if (try_allocate(size, align, out)) return {};
    return allocate_slow(size, align, out, report);
  }
  // Only by moving the cursor: never blocks, calls nothing. False: ask allocate.
  bool try_allocate(std::uint64_t size, std::uint64_t align, Address* out) {
    if (!ours() || pool_->closed()) return false;
    if (align == 0) align = options_.align;
    return (align & (align - 1)) == 0 && align <= kMaxAlign && place(size, align, out);
  }

  // ---- lifetimes --------------------------------------------------------------------------------------
  Status mark(Mark* out);
  Status rewind(const Mark& mark);
  // Everything begins anew, in O(1). zero: what the arena hands out reads as zero until the next reset, in
  // the order of the stream (and of the host, where that writes by itself); ends of marks do not zero.
  Status reset(bool zero = false);
  bool open_at(const Mark& mark) const;  // whether rewind would take it
  Over over();                           // of what is allocated now

  // ---- streams ----------------------------------------------------------------------------------------
  // Work on the stream uses memory of the arena, from now until the next reset. Any thread.
  Status record_stream(StreamHandle stream);
  // The stream is about to be destroyed. What it uses stays ordered; the arena's own gives way to the
  // default.
  Status retire_stream(StreamHandle stream);
  StreamHandle stream() const { return stream_.load(std::memory_order_relaxed); }

  // ---- housekeeping -----------------------------------------------------------------------------------
  void adopt() { owner_.store(this_thread(), std::memory_order_relaxed); }
  bool ours() const { return owner_.load(std::memory_order_relaxed) == this_thread(); }
  // Gives chunks that hold nothing live back to the pool. The next growth is by one chunk that suffices for
  // what was ever used, so that trim after a reset makes many chunks one.
  Status trim();
  // All lifetimes are over and later calls answer Code::closed, but the memory stays until close: for those
  // who may still look at it.
  void end();
  // Gives everything back to the pool, which reuses it as order allows.
  Status close();
  bool closed() const { return ended_ || pool_->closed(); }

  // ---- looking ----------------------------------------------------------------------------------------
  ArenaStats stats() const;
  void reset_peak();  // high_water starts anew from what is used
  Allocator& pool() const { return *pool_; }
  const ArenaOptions& options() const { return options_; }
  bool host_accessible() const { return host_; }
  // The chunk that holds the address, of whatever is or was handed out; false: none.
  bool chunk_of(Address address, Address* base, std::uint64_t* bytes) const;
  // Chunks lie apart and are live in the pool, marks ascend, the cursor lies in the last chunk in use,
  // used <= high_water, and the accounts add up.
  bool check(std::string* why) const;

 private:
  struct Chunk {
    Address base = 0;
    std::uint64_t bytes = 0;
    std::uint64_t dirty = 0;  // from base on, so many bytes may not be zero
  };
  struct Position {
    std::size_t chunks = 0;  // in use; the cursor lies in the last of them
    Address cursor = 0;
    std::uint64_t used = 0;
  };
  struct Frame {  // one lifetime, and where it began
    std::uint64_t id = 0;
    Position from;
    std::shared_ptr<std::atomic<bool>> over;  // made when asked for
  };
  struct Use {
    StreamHandle stream = 0;
    EventHandle event = 0;  // the last of the stream's work, once that is gone; 0: it is there
    bool foreign = false;   // another library's, which may be gone: only waiting for the device tells
  };
  struct Rest {  // chunks that are reused once the events have passed
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
  void soil();  // notes how far the chunk at the cursor was used
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
  const bool host_;  // the host writes here, outside of any stream's order
  std::atomic<StreamHandle> stream_;
  std::atomic<std::uint64_t> owner_;

  Address cursor_ = 0;  // of the last chunk in use; equal to end_ where there is none
  Address end_ = 0;
  std::vector<Chunk> chunks_;  // in use, in order; behind them the spare ones
  std::size_t in_use_ = 0;     // chunks
  std::vector<Frame> frames_;  // [0] lasts until reset
  std::vector<Rest> rests_;    // oldest first
  std::uint64_t next_id_ = 1;
  bool zeroing_ = false;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> closed_ = false;  // and the memory is given back

  std::mutex close_mutex_;         // one close at a time
  mutable std::mutex uses_mutex_;  // guards what follows; backend calls are made under it
  std::vector<Use> uses_;
  std::vector<EventHandle> events_;  // not in use

  Gauge used_, high_water_, capacity_, resting_, chunk_count_, depth_, allocations_, allocated_, requests_,
      resets_, host_waits_;
};

}  // namespace vram
