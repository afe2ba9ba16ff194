// Streams of a pool: finding the state for a handle, leaving, and waiting for their work. Defines
// StreamLives.
#pragma once

#include "pool/caches.hpp"
#include "pool/captures.hpp"

namespace vram {

// A stream as a call names it.
struct NamedStream {
  StreamHandle handle = 0;  // the canonical one
  bool foreign = false;
  StreamId id = 0;        // foreign
  CaptureId capture = 0;  // the capture that its work goes into now
};

class StreamLives : PoolPart {
 public:
  StreamLives(PoolState& state, EventLog& log, Zeroing& zeroing, Caches& caches, Pending& pending,
              Captures& captures)
      : PoolPart(state),
        log_(log),
        zeroing_(zeroing),
        caches_(caches),
        pending_(pending),
        captures_(captures) {}

  // ---- finding --------------------------------------------------------------------------------
  // Queries what a call needs to know of the stream that it names. This is the only time when another
  // library's stream is queried. Needs no lock.
  Status name(StreamHandle handle, NamedStream* out);
  // The state that serves a stream: its own, or that of the heap or graph that its work goes into. Null with
  // the reason in *why. May release the lock.
  StreamState* state_for(const NamedStream& named, std::unique_lock<std::mutex>& lock, Status* why);
  // The state whose order work that is queued on the stream now has: a heap's only if the work is captured.
  StreamState* user_for(const NamedStream& named, std::unique_lock<std::mutex>& lock, Status* why);
  // The same for a stream that is known to be lasting and not captured.
  StreamState* lasting(StreamHandle handle, Status* why) {
    StreamState* const known = streams_.find(handle);
    return known != nullptr ? known : add_lasting(handle, why);
  }

  // ---- leaving --------------------------------------------------------------------------------
  // See Pool::retire_stream.
  Status retire(StreamHandle handle);
  // Returns pending blocks whose uses have completed, and lets streams and graphs leave (Pending::complete).
  void complete(bool thorough = true);
  // See Pool::heap_trim.
  Status trim_heap(HeapId id, bool wait, std::unique_lock<std::mutex>& lock);
  // The same as complete, if a stream is leaving.
  void complete_leaving() {
    if (leaving_ != 0) complete();
  }
  // Whether there is something that complete() could do.
  std::uint64_t incomplete() const {
    return pending_.blocks_waiting() + leaving_ + captures_.graphs().size();
  }
  // While set, streams that are leaving keep their pages (Suspender).
  void keep_leaving(bool keep) { keep_ = keep; }

  // ---- host waits: the mutex is not held meanwhile ----------------------------------------------
  // For the oldest fence of the stream that a pending block needs.
  Status wait_for_pending(StreamState& stream, std::unique_lock<std::mutex>& lock);
  // For everything issued on the stream so far.
  Status wait_for_stream(StreamState& stream, std::unique_lock<std::mutex>& lock);
  Status wait_for_all(std::unique_lock<std::mutex>& lock);
  // For the whole device, so that foreign streams have completed what they did until now.
  Status wait_for_device(std::unique_lock<std::mutex>& lock);
  // For the work of the stream on which a heap's memory is used. capturing: it does not run.
  Status wait_for_heap(StreamState& heap, std::unique_lock<std::mutex>& lock);
  // For all work; nothing is cached or pending afterwards.
  Status wait_until_idle(std::unique_lock<std::mutex>& lock);

  std::uint64_t steps() const { return fences_.watched().steps() + threads_.steps(); }

 private:
  StreamState* add_lasting(StreamHandle handle, Status* why);
  StreamState* foreign(const NamedStream& named, std::unique_lock<std::mutex>& lock, Status* why);
  StreamState* own_state(const NamedStream& named, std::unique_lock<std::mutex>& lock, Status* why) {
    return named.foreign ? foreign(named, lock, why) : lasting(named.handle, why);
  }
  StreamState* add_graph(const NamedStream& named, CaptureId key, Over over, Status* why);
  StreamState* add_heap(const NamedStream& named, const Captures::Heap& heap, Status* why);
  void use_what_is_live(StreamState& graph);
  Status retire_state(StreamState& stream, std::unique_lock<std::mutex>& lock);
  void abandon(StreamState& stream);
  void begin_leaving(StreamState& stream, Tick last);
  void finish_leaving(StreamState& stream);
  Status release_plain(StreamState& stream);
  Status wait_for_leaving(StreamState& stream, std::unique_lock<std::mutex>& lock);
  void retire_ended_threads();
  void release_ended_graphs();
  bool needs_device_wait(StreamState& stream) const;

  EventLog& log_;
  Zeroing& zeroing_;
  Caches& caches_;
  Pending& pending_;
  Captures& captures_;
  StreamSet threads_;          // default streams of threads
  std::uint32_t leaving_ = 0;  // streams whose last fence has not completed
  std::uint32_t foreign_ = 0;  // states of foreign streams that are not retired
  bool keep_ = false;
};

}  // namespace vram
