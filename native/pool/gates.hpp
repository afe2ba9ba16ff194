// Holds the streams of a device while pages change under their addresses. Defines Gates.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "backends/backend.hpp"
#include "base/waits.hpp"

namespace vram {

// Opens gates if a call takes too long. Defined apart from Gates so that its thread ends before they do.
class Opener {
 public:
  explicit Opener(std::function<void()> open) : open_(std::move(open)) {}
  ~Opener();
  Opener(const Opener&) = delete;
  Opener& operator=(const Opener&) = delete;

  // Opens them after so long. False: the process can have no further thread.
  bool arm(double seconds);
  // False: they were opened.
  bool disarm();

 private:
  using Clock = std::chrono::steady_clock;
  void run();

  const std::function<void()> open_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point due_;
  bool armed_ = false;
  bool fired_ = false;
  bool ending_ = false;
  std::thread thread_;
};

// Closed on every lasting stream, because a program may order uses of a block on other streams itself,
// without telling the pool. Opens when it is destroyed. Made, closed and opened with no lock of a pool held,
// except its turn.
class Gates {
 public:
  // `except`: streams that do the work meanwhile. `seconds`: how long all calls of close() may take together.
  Gates(Backend& backend, const std::vector<StreamHandle>& except, double seconds)
      : backend_(backend), except_(except), left_(seconds) {}
  ~Gates() { open(); }
  Gates(const Gates&) = delete;
  Gates& operator=(const Gates&) = delete;

  // Closes the gates and waits until all streams have arrived. not_ready: a stream has not arrived in time.
  // On failure the gates are open again.
  //
  // While gates are closed one after the other, another thread may make a stream wait for work behind a gate
  // that is closed already, before its own gate: it then never arrives. Nothing tells this from a stream that
  // is busy. So the gates are opened after a short time and closed again, each time for twice as long.
  Status close();
  // Makes a call that queues work while the gates are closed. not_ready: they are open now.
  //
  // On CUDA such a call waits while another thread is in a call that waits for the device, such as cuMemFree,
  // which waits for the gates. Calls for pages do not.
  Status queue(const std::function<Status()>& call);
  void open() {
    let_go();
    if (turn_.owns_lock()) turn_.unlock();
  }

 private:
  using Clock = std::chrono::steady_clock;

  Status try_close(double seconds);
  void add(GateHandle gate);
  void let_go();

  Backend& backend_;
  const std::vector<StreamHandle>& except_;
  double left_;
  std::unique_lock<std::mutex> turn_;
  std::mutex mutex_;
  std::vector<GateHandle> closed_;  // under the mutex
  bool letting_go_ = false;         // under the mutex: gates that are closed late are opened at once
  Opener opener_{[this] { let_go(); }};
};

}  // namespace vram
