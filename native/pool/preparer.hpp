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

class Ahead {
 public:
  struct Job {
    Address address = 0;       // of the buffer
    std::uint64_t number = 0;  // and which one of those that ever began there
    std::uint64_t bytes = 0;   // to have ready behind it
  };

  explicit Ahead(Pool& pool) : pool_(pool) {}
  ~Ahead();  // ends the thread; pre: the pool's mutex is not held
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

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
