// Streams, events, captures and graphs of the null GPU. Nothing runs, so all queued work is complete at once;
// what is kept is which streams a capture has spread to, and which handles exist.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "null_gpu/abi.hpp"

namespace vram::null_gpu {

// post: a handle that no other object has. Handles are never reused.
Handle new_handle();

class Order {
 public:
  static Order& get();

  Handle stream_create(int priority);
  Result stream_destroy(Handle stream);
  int stream_priority(Handle stream);
  std::uint64_t stream_id(Handle stream);
  Result stream_wait(Handle stream, Handle event);
  // Waiting for a stream under capture, or asking about it, is an error, as on a device.
  Result stream_query(Handle stream);

  Handle event_create();
  Result event_destroy(Handle event);
  Result event_record(Handle event, Handle stream);
  Result event_query(Handle event);
  // The same for whoever waits for it: it is complete.
  Result event_synchronize(Handle event);

  // Collectives run on this stream. A thread of PyTorch asks ten times a second whether they are complete,
  // and what they use is kept until it has seen it. How soon that is depends on the GPU and on chance. It
  // decides whether DDP's first buckets are still there when it makes others, which is one copy of the
  // gradients. Here this thread, and no other, sees them complete late, so that a prediction is the larger of
  // the two.
  void collective(Handle stream);
  void collectives_end();  // the program waits for them

  Result capture_begin(Handle stream);
  Result capture_end(Handle stream, Handle* graph);
  // The number of the capture a stream takes part in, 0: none.
  std::uint64_t capture_of(Handle stream);
  Handle graph_of(std::uint64_t capture);
  // Work was queued on the stream: under capture it becomes a node of the graph.
  void queued(Handle stream);
  // The nodes that the next captured work of a stream would follow; valid until the next call that names it.
  const std::vector<Handle>& last_nodes(Handle stream);
  // The nodes that a node follows directly.
  std::vector<Handle> followed_by(Handle node);

 private:
  struct Stream {
    int priority = 0;
    std::uint64_t id = 0;
    std::uint64_t capture = 0;
    std::vector<Handle> last = {};  // nodes of the capture
    bool collectives = false;
  };
  using Clock = std::chrono::steady_clock;
  struct Event {
    std::uint64_t capture = 0;  // in which it was recorded
    std::vector<Handle> last = {};
    Clock::time_point after_collectives = {};  // when it was recorded on their stream
  };
  struct Capture {
    Handle origin = nullptr;
    Handle graph = nullptr;
  };
  Stream& stream(Handle handle);  // known from now on; the default streams have no creation

  std::mutex mutex_;
  std::unordered_map<Handle, Stream> streams_;
  std::unordered_map<Handle, Event> events_;
  std::unordered_map<std::uint64_t, Capture> captures_;
  std::unordered_map<Handle, std::vector<Handle>> nodes_;  // of captures under way: what they follow
  Clock::time_point collectives_ended_ = {};
  std::uint64_t last_capture_ = 0;
  std::uint64_t last_stream_ = 0;
};

}  // namespace vram::null_gpu
