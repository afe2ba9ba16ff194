// Events that tell how far a stream has come. Defines Fences, and EventPool, which reuses events.
#pragma once

#include <mutex>
#include <vector>

#include "backends/backend.hpp"
#include "order/stream_state.hpp"

namespace vram {

// Events are created once and reused. An event that a thread waits for without the mutex is neither recorded
// again nor destroyed before the last such wait has returned. Guarded by the pool's mutex.
class EventPool {
 public:
  explicit EventPool(Backend& backend) : backend_(backend) {}
  Status take(EventHandle* out);
  void put(EventHandle event);
  // Waits on the host for an event that was taken and may be put back meanwhile. The lock is not held during
  // the wait.
  Status wait(EventHandle event, std::unique_lock<std::mutex>& lock);
  // Those put back now or later; returns the first failure and continues.
  Status destroy_all();

 private:
  struct Awaited {
    EventHandle event = 0;
    std::uint32_t waits = 0;
    bool put_back = false;
  };
  std::vector<Awaited>::iterator awaited(EventHandle event);

  Backend& backend_;
  std::vector<EventHandle> idle_;
  std::size_t created_ = 0;       // events so far
  std::vector<Awaited> awaited_;  // one for each event that is waited for; few
  bool closed_ = false;           // destroy_all was called
};

// The fences of streams. Guarded by the pool's mutex.
class Fences {
 public:
  // A stream has at most this many fences that have not completed, however long its work takes: if one more
  // is needed, every other one is dropped, and the next one stands for it. So recent fences are exact and old
  // ones are far apart.
  static constexpr std::size_t kMostFences = 32;

  explicit Fences(Backend& backend) : backend_(backend), events_(backend) {}
  Status close() { return events_.destroy_all(); }

  // Records a fence behind everything issued on the stream so far; a leaving stream has its last one.
  // Code::capturing: the stream is captured, so its work cannot be marked. Code::absent: it may be gone.
  Status record(StreamState& stream);
  // The same where a later query can do it instead.
  void try_record(StreamState& stream) noexcept;
  // Queries how far the stream has come; never waits.
  Status poll(StreamState& stream);
  // Whether everything up to `tick` has completed; records a fence if none covers it yet.
  bool finished(StreamState& stream, Tick tick);
  // Makes later work of `waiter` wait for everything on `stream` up to `tick`.
  Status order(StreamState& waiter, StreamState& stream, Tick tick);
  // The event to wait for until `tick` has completed, and the tick that it covers; 0 if it has completed.
  Status event_for(StreamState& stream, Tick tick, EventHandle* out, Tick* covers = nullptr);
  // A call names the foreign stream: its uses get a fence now, because later it cannot be queried.
  void cover(StreamState& stream) {
    if (!stream.foreign || stream.owed <= stream.covered()) return;
    (void)poll(stream);
    (void)record(stream);
  }
  // Waits for such an event on the host; the lock is not held meanwhile.
  Status wait(EventHandle event, std::unique_lock<std::mutex>& lock) { return events_.wait(event, lock); }
  // Everything has completed (the stream was synchronized): drops its fences.
  void clear(StreamState& stream);
  // The same without an event: what is issued from now on comes after the tick that is returned, and when the
  // stream was synchronized, everything up to it has completed.
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
