// Copies of contents on streams of the pool's own. Defines CopyStreams and Copies.
#pragma once

#include <vector>

#include "backends/backend.hpp"
#include "base/waits.hpp"
#include "placement/room.hpp"

namespace vram {

// What copies need: made when first needed and kept. Guarded by the pool's turn.
struct CopyStreams {
  std::vector<StreamHandle> streams;
  std::vector<EventHandle> events;

  Status close(Backend& backend) {
    Status first;
    const auto note = [&first](Status status) {
      if (first.ok()) first = status;
    };
    for (StreamHandle stream : streams) note(backend.stream_destroy(stream));
    for (EventHandle event : events) note(backend.event_destroy(event));
    streams.clear();
    events.clear();
    return first;
  }
};

class Copies {
 public:
  // At most `events` of them have an event at a time.
  Copies(Backend& backend, CopyStreams& kept, std::size_t events)
      : backend_(backend), streams_(kept.streams), events_(kept.events) {
    vram::make_room(events_, events_.size() + events);
    vram::make_room(streams_, kStreams);
  }

  // post: queue() creates no stream.
  Status make_streams() {
    while (streams_.size() < kStreams) {
      StreamHandle made = 0;
      if (Status status = backend_.stream_create(&made); !status.ok()) return status;
      streams_.push_back(made);
    }
    return {};
  }
  // `event`, if given, marks the end of the copy.
  Status queue(Address to, Address from, std::uint64_t bytes, EventHandle* event = nullptr) {
    if (Status status = make_streams(); !status.ok()) return status;
    const StreamHandle stream = streams_[next_];
    next_ = (next_ + 1) % kStreams;
    used_ = true;
    if (Status status = backend_.copy(to, from, bytes, stream); !status.ok() || event == nullptr)
      return status;
    if (events_.empty())
      if (Status status = backend_.event_create(&events_.emplace_back()); !status.ok()) {
        events_.pop_back();
        return status;
      }
    *event = events_.back();
    events_.pop_back();
    return backend_.event_record(*event, stream);
  }
  void recycle(EventHandle event) { events_.push_back(event); }

  // Waits for all of them.
  Status wait() {
    Status status;
    for (StreamHandle stream : streams_)
      if (used_ && status.ok()) status = backend_.stream_synchronize(stream);
    return status;
  }

 private:
  // Copies alternate between these streams, so that one begins while another ends.
  static constexpr std::size_t kStreams = 2;

  // They wait for nothing but each other, so a wait for them ends soon. What they read and write may not be
  // touched before that.
  const InterruptScope quiet_{nullptr};
  Backend& backend_;
  std::vector<StreamHandle>& streams_;
  std::vector<EventHandle>& events_;
  std::size_t next_ = 0;
  bool used_ = false;
};

}  // namespace vram
