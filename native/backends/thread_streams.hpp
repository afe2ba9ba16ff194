// The default streams of threads, which all have one handle: a number for each thread instead, and which of
// them have ended. What such a stream is, is the backend's business.
#pragma once

#include <mutex>
#include <unordered_set>

#include "base/types.hpp"

namespace vram {

class ThreadStreams {
 public:
  // Of the calling thread. No other thread has, had or gets the same.
  static StreamHandle mine() {
    thread_local const Thread thread;
    return thread.stream;
  }
  static bool is_one(StreamHandle stream) { return (stream & kBit) != 0; }
  static bool ended(StreamHandle stream) {
    if (!is_one(stream)) return false;
    Running& all = running();
    const std::lock_guard lock(all.mutex);
    return !all.streams.contains(stream);
  }

 private:
  static constexpr StreamHandle kBit = StreamHandle{1} << 63;
  struct Running {
    std::mutex mutex;
    std::unordered_set<StreamHandle> streams;
    StreamHandle last = kBit;
  };
  // Never destroyed: threads end until the very end of the process.
  static Running& running() {
    static Running* const leaked = new Running();
    return *leaked;
  }
  struct Thread {
    Thread() {
      const std::lock_guard lock(running().mutex);
      stream = ++running().last;
      running().streams.insert(stream);
    }
    ~Thread() {
      const std::lock_guard lock(running().mutex);
      running().streams.erase(stream);
    }
    StreamHandle stream = 0;
  };
};

}  // namespace vram
