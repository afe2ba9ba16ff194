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
#include <thread>
#include <unordered_map>

#include "placement/placer.hpp"
#include "pool/access.hpp"
#include "pool/allocator.hpp"
#include "pool/climb.hpp"
#include "pool/contents.hpp"
#include "pool/preparer.hpp"

namespace vram {

class Pool final : public Allocator {
 public:
  Pool(std::shared_ptr<Backend> backend, const PoolConfig& config);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // ---- allocation ---------------------------------------------------------------------------------
  Status allocate(std::uint64_t size, StreamHandle stream, std::uint64_t align, std::uint32_t tag,
                  Address* out, OutOfMemoryReport* report = nullptr) {
    const bool plain = align <= kUnit && (align & (align - 1)) == 0;
    if (plain && size <= kMaxRequest && try_cached(size, stream, tag, out)) return {};
    return allocate_slow(size, stream, align, tag, out, report);
  }
  // Only the first rung: true if the stream's cache served. Never blocks, calls nothing.
  bool try_cached(std::uint64_t size, StreamHandle stream, std::uint32_t tag, Address* out);
  // After that, the second rung, if the pool is not busy: true if free blocks of the stream served. Never
  // blocks and calls nothing either.
  bool try_own(std::uint64_t size, StreamHandle stream, std::uint32_t tag, Address* out);
  Status allocate_slow(std::uint64_t size, StreamHandle stream, std::uint64_t align, std::uint32_t tag,
                       Address* out, OutOfMemoryReport* report) override;
  // In one pass; adjacent where one free block can hold them.
  Status allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle stream, std::uint32_t tag,
                        std::vector<Address>& out, OutOfMemoryReport* report) override;
  Status free(Address address) {
    if (try_free_cached(address)) return {};
    return free_slow(address);
  }
  bool try_free_cached(Address address);
  Status free_slow(Address address) override { return take_from_program(address, false); }
  Status drop(Address address) override { return take_from_program(address, true); }
  Status record_stream(Address address, StreamHandle stream) override;

  // ---- growable buffers (growable.cpp) ---------------------------------------------------------------
  // Addresses for `max` bytes, rounded up to whole slots, that stay the buffer's until it is closed. They
  // have no memory yet. unsupported: the pool has no pages.
  Status growable_open(std::uint64_t max, StreamHandle stream, Address* out);
  // Gives the first `bytes` memory, and no more than that; what is there already stays as it is. Memory that
  // goes is reused when the work queued so far has finished; nobody waits for it. On failure the old length
  // is in force. Afterwards at least `ahead` bytes more are made ready in the background.
  // pre: bytes is a multiple of kSlotBytes. In the journal this is a free and an allocation.
  Status growable_resize(Address address, std::uint64_t bytes, std::uint64_t ahead, std::uint32_t tag,
                         OutOfMemoryReport* report = nullptr);
  // Has pages mapped for `bytes` more, and leaves them free; those of the next page alone where there is not
  // so much to be had. `number` is of one that must still be open there; 0: whichever is.
  Status growable_prepare(Address address, std::uint64_t bytes, std::uint64_t number = 0);
  Status growable_close(Address address);
  Status growable_info(Address address, GrowableInfo* out) const;

  // ---- housekeeping ---------------------------------------------------------------------------------
  Status coalesce() override;
  Status trim(std::uint64_t keep, bool wait) override;
  Status set_limit(std::uint64_t bytes) override;
  Status configure(const PoolConfig& config) override;  // all but pages and journal
  PoolConfig config() const override;
  // Its memory goes to the default stream once its work has finished.
  Status retire_stream(StreamHandle stream) override;
  void on_out_of_memory(Callback callback) override;
  Status close() override;
  static constexpr const char* kTooManyStreams = "streams";
  bool closed() const override { return generation_.load(std::memory_order_relaxed) != fork_generation(); }

  // ---- suspending (suspend.cpp) ------------------------------------------------------------------------
  // Which allocations, by their tags; an empty one means all.
  using Wanted = std::function<bool(std::uint32_t)>;
  // Gives the pages of live blocks back to the device; their addresses stay theirs. Waits on the host for the
  // streams that use them. If they are to be kept, their contents are copied to the store and come back; else
  // they are undefined afterwards. A page that other blocks use as well stays; without a store one stays,
  // too, that holds what was to be kept of blocks suspended before. Idle memory is given back. On failure
  // nothing is suspended, unless what had gone could not be had again; *short_of says what the store lacked.
  Status suspend(const Wanted& wanted, bool keep, const std::shared_ptr<Allocator>& store,
                 std::uint64_t* given, OutOfMemoryReport* short_of);
  // Backs them again and returns when their contents are there. On failure they stay suspended.
  Status resume(const Wanted& wanted, std::uint64_t* taken, OutOfMemoryReport* report);
  bool any_suspended() const override { return suspended_blocks_.load(std::memory_order_relaxed) != 0; }
  bool suspended(Address address) const override;

  // ---- heaps: memory apart, for graphs ---------------------------------------------------------------
  // From begin to end, allocations on the streams that `serves` names come from memory that nobody else is
  // given until the heap was released as often as it was begun. Without being told, a captured stream gets
  // such a heap by itself on the slow paths; who captures what was allocated before and cached begins one.
  Status heap_begin(HeapId id, std::function<bool(StreamHandle)> serves);
  Status heap_end(HeapId id);
  Status heap_release(HeapId id);

  // ---- looking ----------------------------------------------------------------------------------------
  PoolStats stats() const override;
  void reset_peak() override;
  std::vector<SegmentInfo> snapshot() const override;
  Status info(Address address, BlockInfo* out) const override;
  Status find(Address address, BlockInfo* out) const;  // of the live allocation that holds the address
  std::uint64_t live_bytes() const override;
  // What was looked at so far to find blocks, streams and memory of other streams, for tests of what calls
  // cost.
  std::uint64_t steps() const;
  void journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const override;
  Status start_journal(std::uint32_t entries) override;
  void start_recording(std::uint64_t most) override;
  void mark(std::uint64_t number) override;
  std::uint64_t take_recorded(std::vector<JournalEntry>& out) override;
  bool check(std::string* why) const override;
  Backend& backend() override { return *backend_; }

 private:
  // Streams, pages or segments of others that are asked in vain before a call goes on without them, so that
  // it costs no more the more streams there are. Before a request would be out of memory all are asked.
  static constexpr std::uint32_t kMostAsked = 64;
  using Serve = Index (Pool::*)(Climb&);
  struct Step {
    Rung rung;
    Serve serve;
  };

  // A stream as a call names it.
  struct Named {
    StreamHandle handle = 0;  // the canonical one
    bool foreign = false;
    StreamId id = 0;        // foreign
    CaptureId capture = 0;  // what its work goes into now
  };
  bool serve_cached(StreamState& stream, std::uint64_t size, StreamHandle handle, std::uint32_t tag,
                    Address* out);
  bool try_foreign(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out);
  StreamState* stream_of(StreamHandle handle, Status* why);
  StreamState* foreign_of(const Named& named, std::unique_lock<std::mutex>& lock, Status* why);
  StreamState* journaled(StreamState* stream, Status* why);
  Status name(StreamHandle handle, Named* out);
  static constexpr CaptureId kHeapBit = CaptureId{1} << 63;  // tells heaps from captures of the device
  struct Heap {
    HeapId id;
    CaptureId key = 0;  // of the states that stand for it
    int begun = 0;      // and not released
    bool open = false;
    std::function<bool(StreamHandle)> serves;
    std::shared_ptr<std::atomic<bool>> over;
  };
  const Heap* heap_for(StreamHandle handle) const;
  StreamState* stream_for(const Named& named, std::unique_lock<std::mutex>& lock, Status* why);
  StreamState* hidden(const Named& named, CaptureId key, std::shared_ptr<std::atomic<bool>> over,
                      Status* why);
  void let_graphs_go();

  Index climb(Climb& climb);
  Index search_again(Climb& climb);
  Index try_rungs(Climb& climb, Rungs rungs, Rung* served);
  Index serve_stream_cache(Climb& climb);
  Index serve_own_blocks(Climb& climb);
  Index serve_passed_pending(Climb& climb);
  Index serve_finished_elsewhere(Climb& climb);
  Index serve_free_pages(Climb& climb);
  Index serve_growth(Climb& climb);
  Index serve_stream_wait(Climb& climb);
  Index serve_flush(Climb& climb);
  Index serve_callbacks(Climb& climb);
  Index serve_host_wait(Climb& climb);
  Index serve_give_back(Climb& climb);
  Index serve_other_bands(Climb& climb);
  Index back(Climb& climb, std::uint64_t create_bytes);
  void gather_pages(Climb& climb, bool by_waiting);
  Index take_segment(Climb& climb);
  Index lend(Climb& climb, bool by_waiting);
  bool ordered(StreamState& taker, StreamState& owner, Tick tick, bool by_waiting);
  void arrange_ladder();

  // Takes the mutex for a call of that name, unless the pool is closed. That is asked before, as in the child
  // of a fork the lock is the parent's, and after, as others may have closed the pool meanwhile.
  Status enter(const char* call, std::unique_lock<std::mutex>* lock) const;
  // The same for calls that also look at a closed pool. False in the child of a fork, without the mutex.
  bool look(std::unique_lock<std::mutex>* lock) const;
  bool drain(StreamState& stream, const Sizes& sizes = kAllSizes, bool ask = true);
  void drain_all();
  void send_home(bool ask);
  void set_zeroing(const PoolConfig& config);
  Status zero(Address address, bool* busy);
  Status zero_new(Address address, std::uint64_t bytes, StreamHandle stream);
  Status fill_zeros(Address address, std::uint64_t bytes, StreamHandle stream);
  void give_home(Index block, bool ask);
  void make_pending(Index block);
  void wait_in_queue(PendingBlock&& pending);
  void requeue(PendingBlock&& pending);
  void queue_at(StreamState& stream, Tick tick, PendingBlock&& pending);
  // Gives home every pending block whose uses have finished, and lets streams leave; asks each stream once
  // and never waits. Not thorough: stops when it has asked kMostAsked streams in vain; the next one goes on
  // from there.
  void complete_passed(bool thorough = true);
  void let_leave(StreamState& stream);
  void leave(StreamState& stream, Tick last);
  Status retire(StreamState& stream, std::unique_lock<std::mutex>& lock);
  void abandon(StreamState& stream);
  void retire_ended();
  bool away(StreamState& stream) const;
  bool capture_under_way() const;
  Status wait_for_device(std::unique_lock<std::mutex>& lock);
  Status wait_for(StreamState& stream, std::unique_lock<std::mutex>& lock);
  Status wait_for_all(std::unique_lock<std::mutex>& lock);
  Status wait_for_stream(StreamState& stream, std::unique_lock<std::mutex>& lock);
  Status settle(std::unique_lock<std::mutex>& lock);
  void keep_idle_limit();
  std::uint64_t budget() const;

  bool carve(const std::vector<std::uint64_t>& sizes, const std::vector<std::size_t>& order, std::size_t from,
             std::size_t to, Units units, StreamHandle stream, std::uint32_t tag, std::vector<Address>& out);
  Address hand_out(Index block, const Climb& climb);
  void take_live(Index block, StreamState& owner, Action action);
  Index block_in_use(Index strip) const;
  Index pending_behind(Index strip) const;
  Status grow(Index strip, Units units, std::uint32_t tag, std::unique_lock<std::mutex>& lock,
              OutOfMemoryReport* report);
  void attach(Index strip, Index piece, std::uint32_t tag);
  Status retake(Index strip, Units units, std::uint32_t tag, bool* taken);
  void shrink(Index strip, Units units);
  void give_up(Index block);
  Status take_from_program(Address address, bool dropped);
  Index claim_for_free(Address address, bool* suspended);
  void let_go(Index block, bool suspended, bool busy = false);
  void let_go_suspended(Index block);
  void take_back(Address address);
  void rise(StreamState& stream, std::uint64_t bytes);
  void loosen(StreamState& stream);
  void open_cache(Address address);
  void close_cache(StreamState& stream);
  void note_reserved(StreamState& stream);
  void note(StreamState& stream, Action action, Address address, std::uint64_t bytes, std::uint32_t tag,
            std::uint32_t serial);
  JournalEntry entry(const StreamState& stream, Action action, Address address, std::uint64_t bytes,
                     std::uint32_t tag, std::uint32_t serial);
  void record_what_is_there();
  Status fail(const Climb& climb, OutOfMemoryReport* report);
  OutOfMemoryReport explain(std::uint64_t size, const StreamState& stream) const;
  BlockInfo describe(const Block& block) const;
  void verify() const;

  class Standstill;
  struct Saved;
  class Copies;
  // One suspend, resume or close at a time. Not ours(): this thread has the turn already, in a callback of
  // the store, and would wait for itself.
  class Turn {
   public:
    explicit Turn(Pool& pool) : pool_(pool), ours_(pool.whose_turn_.load() != std::this_thread::get_id()) {
      if (!ours_) return;
      pool_.turn_.lock();
      pool_.whose_turn_ = std::this_thread::get_id();
    }
    ~Turn() {
      if (!ours_) return;
      pool_.whose_turn_ = std::thread::id();
      pool_.turn_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    bool ours() const { return ours_; }

   private:
    Pool& pool_;
    bool ours_;
  };
  // Nobody touches the memory from here on; undone where the pool stays open.
  class Shut {
   public:
    explicit Shut(Pool& pool) : pool_(pool) { pool_.access_.shut(); }
    ~Shut() {
      if (!pool_.closed()) pool_.access_.open();
    }
    Shut(const Shut&) = delete;
    Shut& operator=(const Shut&) = delete;

   private:
    Pool& pool_;
  };
  bool begin_access() const override { return access_.enter(); }
  void end_access() const override { access_.leave(); }
  void end_streams();

  std::vector<Index> mark_suspended(const Wanted& wanted, bool keep);
  Status wait_for_suspended(bool all, std::unique_lock<std::mutex>& lock);
  Status give_idle_back();
  std::vector<Index> pages_to_give(bool all, bool keep) const;
  std::vector<Saved> contents_to_save(const std::vector<Index>& pages) const;
  Status give_pages(const std::vector<Index>& pages, const std::shared_ptr<Allocator>& store,
                    std::unique_lock<std::mutex>& lock, OutOfMemoryReport* short_of);
  std::vector<Index> pages_to_bring(const std::vector<Index>& blocks, bool all) const;
  std::vector<Saved> contents_to_bring(const std::vector<Index>& blocks) const;
  Status bring(const std::vector<Index>& blocks, bool all, std::unique_lock<std::mutex>& lock,
               OutOfMemoryReport* report);
  Status bring_page(Index page, std::unique_lock<std::mutex>& lock);
  void end_operation();
  void forget_contents(const Block& block);
  Status fill_resident(const Block& block, StreamHandle stream);
  std::uint64_t suspended_live() const;

  std::shared_ptr<Backend> backend_;
  std::atomic<std::uint32_t> generation_;  // the fork generation it was made in; another value: closed
  // The same while caches may serve allocations; 0 while a heap is open, which may have to serve them.
  std::atomic<std::uint32_t> cache_generation_;
  mutable AccessGate access_;
  mutable std::mutex mutex_;
  PoolConfig config_;
  Placer placement_;
  Fences fences_;
  const Finished finished_;  // fences_.finished by number
  StreamTable streams_;
  std::vector<Step> ladder_;
  std::vector<Index> drained_;         // scratch of drain()
  std::uint32_t leaving_ = 0;          // streams whose last fence has not passed
  std::vector<std::uint16_t> graphs_;  // states that stand for graphs and heaps
  std::uint32_t foreign_ = 0;          // states of foreign streams that are not retired
  std::vector<Heap> heaps_;            // those not yet released
  CaptureId next_heap_ = kHeapBit;
  std::unordered_map<Index, std::vector<std::uint16_t>> uses_;  // record_stream
  Callback callback_;
  std::atomic<std::uint64_t> sequence_{0};
  std::shared_ptr<Recording> recording_;  // null: none
  // Fast-path copies of settings, read without a lock.
  std::atomic<std::uint32_t> stream_cache_;
  std::atomic<bool> zero_on_allocate_;
  std::atomic<bool> zero_on_free_;
  std::atomic<bool> slow_frees_;  // zeroing has a say in them (set_zeroing)
  // Guarded by the mutex.
  const void* last_riser_ = nullptr;  // the thread that made a ceiling rise last
  std::uint32_t rises_in_a_row_ = 0;  // by it
  bool ceilings_apart_ = false;       // they may add up to more than the peak
  std::uint64_t ceilings_ = 0;        // their sum
  StreamSet loose_;                   // streams that are not tight: StreamState::kTight
  StreamSet caching_[2];              // streams whose cache may have small blocks, or others
  StreamSet threads_;                 // default streams of threads
  std::uint16_t lend_from_ = 0;       // where lend, gather_pages and complete_passed stopped asking
  std::uint16_t gather_from_ = 0;
  std::uint16_t complete_from_ = 0;
  std::uint64_t peak_live_ = 0;
  std::uint64_t peak_active_ = 0;
  Meter reserved_;
  Meter segment_count_;
  Meter pending_;
  std::uint64_t pending_blocks_ = 0;
  std::uint64_t pending_steps_ = 0;     // pending blocks looked at so far
  std::vector<PendingBlock> unzeroed_;  // pending, because the device failed to zero them
  bool operating_ = false;              // a suspend or resume is under way: what it works on stays as it is
  std::vector<Index> late_;             // blocks freed meanwhile, in state moving
  Contents contents_;                   // of suspended blocks
  std::atomic<std::uint64_t> suspended_blocks_{0};
  std::mutex turn_;  // see Turn; taken before the mutex
  std::atomic<std::thread::id> whose_turn_{};
  std::vector<StreamHandle> copy_streams_;  // these two guarded by turn_
  std::vector<EventHandle> copy_events_;
  std::uint64_t rungs_[kRungs] = {};
  std::uint64_t retries_ = 0;
  std::uint64_t out_of_memory_ = 0;
  std::uint64_t growables_ = 0;         // opened so far
  std::unique_ptr<Preparer> preparer_;  // null until somebody asks for it
  mutable std::uint64_t walks_ = 0;     // of verify
};

}  // namespace vram
