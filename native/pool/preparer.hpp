// A thread that prepares the next pages of growable buffers before they are needed. Defines Preparer, which
// only keeps the queue; Growables::prepare does the work for each buffer.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/types.hpp"

namespace vram {

class Growables;

class Preparer {
 public:
  struct Job {
    Address address = 0;       // of the buffer
    std::uint64_t number = 0;  // and which one of those that ever began there
    std::uint64_t bytes = 0;   // to have ready behind it
  };

  explicit Preparer(Growables& growables) : growables_(growables) {}
  ~Preparer();  // ends the thread; pre: the pool's mutex is not held
  Preparer(const Preparer&) = delete;
  Preparer& operator=(const Preparer&) = delete;

  // Returns at once. Where no thread can be started, nothing is made ready.
  void ask(const Job& job);

 private:
  void run();

  Growables& growables_;
  std::mutex mutex_;  // below the pool's
  std::condition_variable changed_;
  std::deque<Job> queue_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace vram
