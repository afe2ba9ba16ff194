// Operations that move the contents of pages, and close(), run one at a time. Defines TurnMutex and Turn.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "base/waits.hpp"

namespace vram {

// Taken before the pool's mutex and held to the end of the operation, including waits and copies.
class TurnMutex {
 public:
  friend class Turn;

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> whose_{};
  std::atomic<int> waiting_ = 0;  // threads that want the turn
};

// Not ours(): this thread has the turn already, in a callback of such an operation, and would wait for
// itself; or, if late(), the operation in progress has not ended within the given time.
class Turn {
 public:
  explicit Turn(TurnMutex& turn) : turn_(turn), ours_(turn.whose_.load() != std::this_thread::get_id()) {
    if (!ours_) return;
    step_back();
    ++turn_.waiting_;
    turn_.mutex_.lock();
    --turn_.waiting_;
    turn_.whose_ = std::this_thread::get_id();
  }
  // For a request: the operation in progress may wait for a stream whose work makes this request.
  Turn(TurnMutex& turn, double seconds)
      : turn_(turn), ours_(turn.whose_.load() != std::this_thread::get_id()) {
    if (!ours_) return;
    ++turn_.waiting_;
    ours_ = lock_within(turn_.mutex_, seconds);
    late_ = !ours_;
    --turn_.waiting_;
    if (ours_) turn_.whose_ = std::this_thread::get_id();
  }
  ~Turn() {
    if (!ours_) return;
    turn_.whose_ = std::thread::id();
    turn_.mutex_.unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  bool ours() const { return ours_; }
  bool late() const { return late_; }

 private:
  // Without a pause for those that wait, a thread that takes one turn after the other would keep them out:
  // requests ask again and again until their time is over, and others are woken too late.
  void step_back() const {
    constexpr int kMostPauses = 20;
    constexpr std::chrono::microseconds kPause{50};
    for (int i = 0; i < kMostPauses && turn_.waiting_ > 0; ++i) std::this_thread::sleep_for(kPause);
  }

  TurnMutex& turn_;
  bool ours_;
  bool late_ = false;
};

}  // namespace vram
