// A thread that makes the next pages of growable buffers ready before they are asked for. What it does for
// each of them is Pool::growable_prepare; this only keeps the queue.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/types.hpp"

namespace vram {

class Pool;

class Preparer {
 public:
  struct Job {
    Address address = 0;       // of the buffer
    std::uint64_t number = 0;  // and which one of those that ever began there
    std::uint64_t bytes = 0;   // to have ready behind it
  };

  explicit Preparer(Pool& pool) : pool_(pool) {}
  ~Preparer();  // ends the thread; pre: the pool's mutex is not held
  Preparer(const Preparer&) = delete;
  Preparer& operator=(const Preparer&) = delete;

  // Returns at once. Where no thread can be started, nothing is made ready.
  void ask(const Job& job);

 private:
  bool start();
  void run();

  Pool& pool_;
  std::mutex mutex_;  // below the pool's
  std::condition_variable changed_;
  std::deque<Job> queue_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace vram
