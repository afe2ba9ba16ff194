// What the parts of a pool share: the device, the configuration, blocks and pages (Placer), streams and their
// fences. Defines PoolState, and PoolPart, the base of the parts. Each part has one responsibility and its
// own header; parts call only parts below them:
//
//   Pool         the public calls, the fast paths, batches, closing
//   Suspender    suspend and resume            Growables    growable buffers
//   Checkpoints  what is live in a heap, and restoring it
//   Shares       allocations that other processes may map
//   Report       statistics, snapshots, the reasons of an out-of-memory error, check()
//   Ladder       the rungs that an allocation climbs
//   Spiller      pages whose contents move to host memory and back
//   StreamLives  streams that come and leave; waits for their work
//   Captures     heaps and graphs whose memory is kept apart
//   Caches       the stream caches as the pool sees them
//   Pending      freed blocks that streams may still use
//   Zeroing      zero_on_allocate and zero_on_free
//   Accounts     live bytes and their peaks
//   EventLog     the journal and the recording
#pragma once

#include <mutex>

#include "order/fences.hpp"
#include "order/stream_table.hpp"
#include "placement/placer.hpp"
#include "pool/access.hpp"
#include "pool/allocator.hpp"
#include "pool/contents.hpp"
#include "pool/copies.hpp"
#include "pool/turn.hpp"

namespace vram {

// A request examines at most this many streams, pages or segments of others without success before it
// continues without them, so that its cost does not grow with the number of streams. Before a request fails,
// all are examined.
inline constexpr std::uint32_t kMostAsked = 64;

// How blocks are placed on such a device.
PlacementOptions placement_options(const Backend& backend, const PoolConfig& config);

// Guarded by `mutex`, unless stated otherwise.
struct PoolState {
  PoolState(std::shared_ptr<Backend> device, const PoolConfig& configured);

  std::shared_ptr<Backend> backend;
  const std::uint32_t made_in;            // the fork generation in which the pool was made
  std::atomic<std::uint32_t> generation;  // the same; another value: closed
  // The same while caches may serve allocations; 0 while a heap is open, which may have to serve them.
  std::atomic<std::uint32_t> cache_generation;
  TurnMutex turn;  // taken before the mutex
  // Shut: the pool is about to close, so nobody queues work on its memory any more.
  AccessGate access;
  CopyStreams copy_streams;
  std::mutex mutex;
  PoolConfig config;
  Allocator::Callback callback;  // when memory runs out; may be empty
  Placer placement;
  Fences fences;
  StreamTable streams;
  Contents contents;                               // of suspended blocks
  std::atomic<std::uint64_t> suspended_blocks{0};  // read without a lock
  const Finished finished;                         // fences.finished by number; graphs and heaps keep theirs
  std::uint64_t walks = 0;                         // calls of verify

  bool closed() const { return generation.load(std::memory_order_relaxed) != process_generation(); }
  bool inherited() const { return made_in != process_generation(); }
  // Takes the mutex for a call of that name, unless the pool is closed. This is queried before, because in
  // the child of a fork the lock is the parent's, and after, because another thread may have closed the pool
  // meanwhile.
  Status enter(const char* call, std::unique_lock<std::mutex>* lock) {
    if (!closed()) *lock = std::unique_lock(mutex);
    return closed() ? Status{Code::closed, 0, call} : Status{};
  }
  // The same for calls that also work on a closed pool. False in the child of a fork, without the mutex.
  bool look(std::unique_lock<std::mutex>* lock);
  StreamState& owner_of(const Block& block) const { return streams[block.owned_by()]; }
  // Bytes that the pool may still reserve.
  std::uint64_t budget() const {
    const std::uint64_t limit = config.limit != 0 ? config.limit : ~std::uint64_t{0};
    return limit > placement.reserved_bytes() ? limit - placement.reserved_bytes() : 0;
  }
  // What is reserved beyond a limit that was lowered.
  std::uint64_t beyond_limit() const {
    const std::uint64_t reserved = placement.reserved_bytes();
    return config.limit != 0 ? reserved - std::min(config.limit, reserved) : 0;
  }
  // In builds with checks: verifies every structure at the end of a slow path; in a large pool not every
  // time, because a check looks at every block. Called with the mutex held.
  void verify() {
#ifdef VRAM_CHECKS
    check_placement();
#endif
  }

 private:
  void check_placement();
};

// Names for what the parts use most.
class PoolPart {
 protected:
  explicit PoolPart(PoolState& state)
      : state_(state),
        backend_(state.backend.get()),
        config_(state.config),
        placement_(state.placement),
        fences_(state.fences),
        streams_(state.streams),
        finished_(state.finished) {}
  PoolPart(const PoolPart&) = delete;
  PoolPart& operator=(const PoolPart&) = delete;
  ~PoolPart() = default;

  bool closed() const { return state_.closed(); }
  Status enter(const char* call, std::unique_lock<std::mutex>* lock) const {
    return state_.enter(call, lock);
  }
  bool look(std::unique_lock<std::mutex>* lock) const { return state_.look(lock); }
  void verify() const { state_.verify(); }
  AddressSpace& space() const { return placement_.space(); }
  PageStock& stock() const { return placement_.stock(); }
  Blocks& blocks() const { return placement_.space().blocks(); }
  StreamState& owner_of(const Block& block) const { return state_.owner_of(block); }
  // visit(block, units): the blocks on a held page, with how much of each is there.
  template <typename Visit>
  void each_block_on(const Page& page, Visit visit) const {
    const Units from = std::uint64_t{stock().mappings()[page.holder].slot} * kSlotUnits;
    const Units to = from + page.slots() * kSlotUnits;
    for (Index b = space().block_at(from); b != 0 && blocks()[b].offset < to; b = blocks()[b].after)
      visit(b, std::min(blocks()[b].end(), to) - std::max(blocks()[b].offset, from));
  }
  // The stream to which the block returns.
  StreamState& home_of(const Block& block) const { return streams_[space().segment(block).stream]; }

  PoolState& state_;
  Backend* const backend_;
  PoolConfig& config_;
  Placer& placement_;
  Fences& fences_;
  StreamTable& streams_;
  const Finished& finished_;
};

}  // namespace vram
