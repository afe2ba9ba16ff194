// The pool: allocations climb one ladder of rungs from the stream's own cache up to the driver. Defines Pool,
// which joins the parts that state.hpp lists and has the fast paths.
//
// Threads. Every call may come from any thread. The fast paths, an allocation from the stream's cache and a
// free into it, take only that stream's lock; everything else takes the pool's mutex.
// Lock order: mutex → one stream's lock. Neither is held across a host wait or a callback.
#pragma once

#include "pool/checkpoints.hpp"
#include "pool/growables.hpp"
#include "pool/suspender.hpp"

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
    if (plain && size <= kMaxRequest && try_now(size, stream, tag, out)) return {};
    return allocate_slow(size, stream, align, tag, out, report);
  }
  // Only the first rung: true if the stream's cache served. Never blocks, and does not call the device.
  bool try_cached(std::uint64_t size, StreamHandle stream, std::uint32_t tag, Address* out);
  // The first two rungs, if the mutex is free: true if the stream's cache or its free blocks served. Never
  // blocks and does not call the device, so the caller may hold locks of its own, such as Python's.
  // pre: the stream is not captured.
  bool try_own(std::uint64_t size, StreamHandle stream, std::uint32_t tag, Address* out);
  // The same for a stream that may be captured: then only its cache serves. The default stream cannot be.
  bool try_now(std::uint64_t size, StreamHandle stream, std::uint32_t tag, Address* out) {
    if (stream == 0) return try_own(size, stream, tag, out);
    if (try_cached(size, stream, tag, out)) return true;
    return !state_.backend->capturing(stream) && try_own(size, stream, tag, out);
  }
  Status allocate_slow(std::uint64_t size, StreamHandle stream, std::uint64_t align, std::uint32_t tag,
                       Address* out, OutOfMemoryReport* report) override {
    return allocate_padded(size, size, stream, align, tag, out, report);
  }
  // A block with room for `room` bytes, of which `size` are requested.
  Status allocate_padded(std::uint64_t size, std::uint64_t room, StreamHandle stream, std::uint64_t align,
                         std::uint32_t tag, Address* out, OutOfMemoryReport* report);
  // In one pass; adjacent where one free block can hold them.
  Status allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle stream, std::uint32_t tag,
                        std::vector<Address>& out, OutOfMemoryReport* report) override;
  Status free(Address address) {
    if (try_free_cached(address)) return {};
    return free_slow(address);
  }
  bool try_free_cached(Address address);
  Status free_slow(Address address) override { return free_block(address, false); }
  Status drop(Address address) override { return free_block(address, true); }
  Status record_stream(Address address, StreamHandle stream) override;

  // ---- growable buffers (growables.cpp) --------------------------------------------------------------
  // Addresses for `max` bytes, rounded up to whole slots, that stay the buffer's until it is closed. They
  // have no memory yet. unsupported: the pool has no pages.
  Status growable_open(std::uint64_t max, StreamHandle stream, Address* out) {
    return growables_.open(max, stream, out);
  }
  // Gives memory to the first `bytes`, and to no more; what is there already stays as it is. Memory that is
  // released is reused when the work queued so far has completed; nothing waits for it. On failure the old
  // length stays. Afterwards at least `ahead` more bytes are prepared in the background.
  // pre: bytes is a multiple of kSlotBytes. In the journal this is a free and an allocation.
  Status growable_resize(Address address, std::uint64_t bytes, std::uint64_t ahead, std::uint32_t tag,
                         OutOfMemoryReport* report = nullptr) {
    const Status status = growables_.resize(address, bytes, ahead, tag, report);
    look_at_high_water();
    return status;
  }
  // Maps pages for `bytes` more and leaves them free; only the next page if there is not enough memory.
  // `number` is that of the buffer that must still be open there; 0: any.
  Status growable_prepare(Address address, std::uint64_t bytes, std::uint64_t number = 0) {
    return growables_.prepare(address, bytes, number);
  }
  Status growable_close(Address address) { return growables_.close(address); }
  Status growable_info(Address address, GrowableInfo* out) const { return growables_.info(address, out); }

  // ---- housekeeping ---------------------------------------------------------------------------------
  Status coalesce() override;
  Status trim(std::uint64_t keep, bool wait) override;
  // Releases unused memory beyond the release threshold, cached blocks included. With `wait`, also what
  // queued work still uses, and what cannot be released without waiting.
  Status release_unused(bool wait) override;
  Status set_limit(std::uint64_t bytes) override;
  Status add_peer(int device) override;
  Status change(const Setting& set) override;  // all but pages and journal
  PoolConfig config() const override;
  // Its memory goes to the default stream when its work has completed.
  Status retire_stream(StreamHandle stream) override { return lives_.retire(stream); }
  void on_out_of_memory(Callback callback) override;
  Status close() override;
  static constexpr const char* kTooManyStreams = StreamTable::kTooMany;
  bool closed() const override { return state_.closed(); }

  // ---- suspending (suspender.cpp) ----------------------------------------------------------------------
  using Wanted = Suspender::Wanted;  // which allocations, by their tags; an empty one means all
  // Releases the pages of live blocks to the device; the blocks keep their addresses. Waits on the host for
  // the streams that use them. With `keep`, their contents are copied to the store and come back; otherwise
  // they are undefined afterwards. A page that other blocks use, too, stays, and so does what is shared.
  // Without a store, a page with contents to be kept of blocks suspended earlier stays, too. Idle memory is
  // released. On failure nothing is suspended, unless released memory could not be allocated again; *short_of
  // says what the store lacked.
  Status suspend(const Wanted& wanted, bool keep, const std::shared_ptr<Allocator>& store,
                 std::uint64_t* given, OutOfMemoryReport* short_of) {
    return suspender_.suspend(wanted, keep, store, given, short_of);
  }
  // Allocates pages for them again and returns when their contents are back. On failure they stay suspended.
  Status resume(const Wanted& wanted, std::uint64_t* taken, OutOfMemoryReport* report) {
    return suspender_.resume(wanted, taken, report);
  }
  bool any_suspended() const override { return state_.suspended_blocks.load(std::memory_order_relaxed) != 0; }
  bool suspended(Address address) const override { return report_.suspended(address); }

  // ---- spilling to host memory (spiller.cpp, spill_tags.cpp) ------------------------------------
  // Returns pages from the host while enough device memory is free; bounded.
  Status bring_back(std::uint64_t most, std::uint64_t* returned, bool wait = false) {
    return spiller_.bring_back(most, returned, wait);
  }
  // Creates host pages until so many bytes are spare; bounded.
  Status create_ahead(std::uint64_t spare, std::uint64_t most, std::uint64_t* created) {
    return spiller_.create_ahead(spare, most, created);
  }
  // Host memory of the option `spill` for copies that others make.
  Status take_host_bytes(std::uint64_t bytes) { return spiller_.take_host_bytes(bytes); }
  void give_host_bytes(std::uint64_t bytes) { spiller_.give_host_bytes(bytes); }
  Status release_host_bytes() { return spiller_.release_host_bytes(); }
  // Moves the pages of the allocation that contains the address to the host, or back. A page stays if it
  // cannot move.
  Status spill(Address address, std::uint64_t* moved) { return spiller_.spill(address, moved); }
  Status prefetch(Address address, std::uint64_t* moved) { return spiller_.prefetch(address, moved); }
  // Bytes of that allocation that are on the host.
  Status spilled(Address address, std::uint64_t* bytes, std::uint64_t size = 0) const {
    return spiller_.spilled(address, bytes, size);
  }
  std::unordered_map<std::uint32_t, SpillOfLabel> spill_by_label() const { return spiller_.by_label(); }
  // What suspends allocations and leaves them usable; returns when it is done.
  Status park(const Wanted& wanted, std::uint64_t* moved) { return spiller_.park(wanted, moved); }
  Status unpark(const Wanted& wanted, std::uint64_t* moved) { return spiller_.unpark(wanted, moved); }
  void around_spill(std::function<void(std::uint64_t, std::uint64_t)> hook) {
    spiller_.around(std::move(hook));
  }
  void steer_spill(std::function<SpillWish(std::uint32_t)> wish) { spiller_.steer(std::move(wish)); }
  void steer_spill(std::unordered_map<Address, SpillWish> wishes) {
    spiller_.steer_allocations(std::move(wishes));
  }
  void set_spill_policy(SpillPolicy policy) { spiller_.set_policy(std::move(policy)); }

  // ---- sharing with other processes (shares.cpp) ---------------------------------------------------------
  // What is on the host returns first: other processes map device memory.
  Status share(Address address, SharedBlock* out);
  Status export_pages(Address block, std::uint64_t number, std::uint64_t first, std::size_t most,
                      std::vector<SharedPage>* pages) {
    return shares_.export_pages(block, number, first, most, pages);
  }

  // ---- heaps: memory kept apart, for graphs and for pools of the program ------------------------------
  // Creates a heap, or adds a use to it; the options apply if it is created.
  Status heap_open(HeapId id, const HeapOptions& options) { return captures_.open(id, options); }
  // -1: as it is. invalid: no such heap, or no_split without plain segments.
  Status heap_set(HeapId id, int use_on_oom, int no_split) { return captures_.set(id, use_on_oom, no_split); }
  // From begin to end, allocations on the streams that `serves` accepts come from memory that serves nothing
  // else until the heap was released as often as it was opened and begun. Creates a heap, or adds a use. Of
  // several heaps that accept a stream, the one begun last serves. `serves` is called in the allocating
  // thread with the pool's mutex held. On the slow paths a captured stream gets such a heap automatically; a
  // program whose capture could use cached blocks must begin one.
  Status heap_begin(HeapId id, std::function<bool(StreamHandle)> serves) {
    return captures_.begin(id, std::move(serves));
  }
  // Ends what this thread began last for the heap, or else what any thread did. Call it after the capture has
  // ended and before its graph is launched: what the graph got in host memory, because nothing may move while
  // a stream is captured, gets device memory now. May release the mutex and wait for the streams.
  Status heap_end(HeapId id);
  // Removes a use. When none is left, plain segments are released as soon as nothing in them is in use, and
  // other memory goes to the default stream.
  Status heap_release(HeapId id) { return captures_.release(id); }
  int heap_uses(HeapId id) const { return captures_.uses(id); }  // 0: no such heap
  // Releases the unused plain segments of a heap that is over. With `wait`, also those that queued work still
  // uses, and those that cannot be released without waiting.
  Status heap_trim(HeapId id, bool wait);
  // What is live in a heap.
  std::vector<BlockInfo> heap_live(HeapId id) const { return checkpoints_.live(id); }
  // Frees what is live in the heap, then allocates these blocks at their addresses; contents stay. Only
  // address, bytes, requested and tag of a block are used. invalid: impossible, and nothing has changed.
  // pre: the blocks were live at the same time since the heap was created.
  Status heap_restore(HeapId id, const std::vector<BlockInfo>& blocks) {
    return checkpoints_.restore(id, blocks);
  }

  // ---- looking ----------------------------------------------------------------------------------------
  PoolStats stats() const override { return report_.stats(); }
  void reset_peak() override { report_.reset_peaks(); }
  // The same for a framework that uses the pool and resets the peaks apart from the program.
  PoolStats stats_of_framework() const { return report_.stats(PeakReader::framework); }
  void reset_peak_of_framework() { report_.reset_peaks(PeakReader::framework); }
  // The same for who follows the steps of a program, in one call; with what warmup and reserve take.
  Usage usage(bool restart_peak) { return report_.usage(restart_peak); }
  std::vector<SegmentInfo> snapshot() const override { return report_.snapshot(); }
  // The same, but of addresses only the runs that have memory, with their blocks clipped to them. Every page
  // is in one of them, so their bytes add up to what is reserved.
  std::vector<SegmentInfo> backed_segments() const { return report_.backed_segments(); }
  // Calls back for every event from now on, with the pool's mutex held; empty: no more.
  void listen(std::function<void(const PoolEvent&)> listener) { log_.listen(std::move(listener)); }
  Status info(Address address, BlockInfo* out) const override { return report_.info(address, out); }
  // Of the live allocation that contains the address.
  Status find(Address address, BlockInfo* out) const { return report_.find(address, out); }
  std::uint64_t live_bytes() const override { return report_.live_bytes(); }
  // What was examined so far to find blocks, streams and memory of other streams, for tests of costs.
  std::uint64_t steps() const { return report_.steps(); }
  void journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const override {
    log_.copy_journal(out, dropped);
  }
  Status start_journal(std::uint32_t entries) override { return log_.start_journal(entries); }
  void start_recording(std::uint64_t most) override { log_.start_recording(most); }
  void mark(std::uint64_t number) override { log_.mark(number); }
  std::uint64_t take_recorded(std::vector<JournalEntry>& out) override { return log_.take_recorded(out); }
  bool check(std::string* why) const override { return report_.check(why); }
  Backend& backend() override { return *state_.backend; }

 private:
  // Nothing touches the memory from here on; undone if the pool stays open.
  class Shut {
   public:
    explicit Shut(Pool& pool) : pool_(pool) { pool_.state_.access.shut(); }
    ~Shut() {
      if (!pool_.closed()) pool_.state_.access.open();
    }
    Shut(const Shut&) = delete;
    Shut& operator=(const Shut&) = delete;

   private:
    Pool& pool_;
  };
  // The requests of a batch, by index, largest first.
  struct Batch {
    const std::vector<std::uint64_t>& sizes;
    std::vector<std::size_t> order;
    StreamHandle stream;
    std::uint32_t tag;
    std::vector<Address>& out;
    std::uint64_t size(std::size_t i) const { return sizes[order[i]]; }
  };

  bool serve_cached(StreamState& stream, std::uint64_t size, std::uint32_t tag, bool zero, Address* out);
  bool zeroed(Address address, std::uint64_t size, StreamHandle stream);
  Address make_new(Index block, const Climb& climb);
  bool is_unzeroed(Address address);
  bool try_foreign(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out);
  Status allocate_named(const NamedStream& named, std::uint64_t size, std::uint64_t room, std::uint64_t align,
                        std::uint32_t tag, Address* out, OutOfMemoryReport* report);
  Status serve_batch(Batch& batch, bool captured, OutOfMemoryReport* report);
  std::size_t run_from(const Batch& batch, std::size_t from, Units* units) const;
  bool allocate_run(Batch& batch, std::size_t from, std::size_t to, Units units);
  void look_at_high_water();
  void undo_allocation(Address address);
  Status zero_new(Address address, std::uint64_t bytes, StreamHandle stream);
  Status free_block(Address address, bool dropped);
  Index claim(Address address, bool* suspended);
  void free_claimed(Index block, bool suspended, bool busy = false);
  void end_streams();
  bool begin_access() const override { return state_.access.enter(); }
  void end_access() const override { state_.access.leave(); }
  Blocks& blocks() { return state_.placement.space().blocks(); }

  mutable PoolState state_;
  std::atomic<std::uint32_t> stream_cache_;  // a copy of the setting, read without a lock
  mutable EventLog log_;
  Accounts accounts_;
  Zeroing zeroing_;
  Pending pending_;
  Caches caches_;
  Captures captures_;
  StreamLives lives_;
  Shares shares_;
  Spiller spiller_;
  Ladder ladder_;
  Report report_;
  Checkpoints checkpoints_;
  Growables growables_;
  Suspender suspender_;
};

}  // namespace vram
