// The default streams of threads, which all have the same handle: assigns a number to each thread, and tracks
// which threads have ended. The backend defines what such a stream is.
#pragma once

#include <mutex>
#include <unordered_set>

#include "base/types.hpp"

namespace vram {

class ThreadStreams {
 public:
  // The number of the calling thread. No other thread has, had or will have the same.
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
  // Never destroyed: threads may end until the process ends.
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
