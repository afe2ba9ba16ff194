// Streams, events, captures and graphs of the null GPU. Nothing runs, so all queued work is complete at once;
// what is kept is which streams a capture has spread to, and which handles exist.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

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

  Result capture_begin(Handle stream);
  Result capture_end(Handle stream, Handle* graph);
  // The number of the capture a stream takes part in, 0: none.
  std::uint64_t capture_of(Handle stream);
  Handle graph_of(std::uint64_t capture);

 private:
  struct Stream {
    int priority = 0;
    std::uint64_t id = 0;
    std::uint64_t capture = 0;
  };
  struct Event {
    std::uint64_t capture = 0;  // in which it was recorded
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
  std::uint64_t last_capture_ = 0;
  std::uint64_t last_stream_ = 0;
};

}  // namespace vram::null_gpu
