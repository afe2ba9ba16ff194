// Holds the streams of a device while pages change under their addresses. Defines Gates.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "backends/backend.hpp"
#include "base/waits.hpp"

namespace vram {

// Closed on every lasting stream, because a program may order uses of a block on other streams itself,
// without telling the pool. Opens when it is destroyed. Made, closed and opened with no lock of a pool held,
// except its turn.
class Gates {
 public:
  // `except`: streams that do the work meanwhile.
  Gates(Backend& backend, const std::vector<StreamHandle>& except) : backend_(backend), except_(except) {}
  ~Gates() { open(); }
  Gates(const Gates&) = delete;
  Gates& operator=(const Gates&) = delete;

  // Closes the gates and waits until all streams have arrived, at most so long in all. not_ready: a stream
  // has not arrived in time. On failure the gates are open again.
  //
  // While gates are closed one after the other, another thread may make a stream wait for work behind a gate
  // that is closed already, before its own gate: it then never arrives. Nothing tells this from a stream that
  // is busy. So the gates are opened after a short time and closed again, each time for twice as long.
  Status close(double seconds) {
    constexpr double kFirstWait = 0.02;
    if (!lock_within(backend_.gates_turn(), seconds)) return {Code::not_ready, 0, "gate_close"};
    turn_ = std::unique_lock(backend_.gates_turn(), std::adopt_lock);
    Status status{Code::not_ready, 0, "gate_wait"};
    for (double wait = kFirstWait; status.code == Code::not_ready && seconds > 0; wait *= 2) {
      let_go();
      wait = std::min(wait, seconds);
      seconds -= wait;
      status = try_close(wait);
    }
    if (!status.ok()) open();
    return status;
  }
  void open() {
    let_go();
    if (turn_.owns_lock()) turn_.unlock();
  }

 private:
  using Clock = std::chrono::steady_clock;

  Status try_close(double seconds) {
    const auto span = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    const Clock::time_point end = Clock::now() + span;
    Status status = backend_.gates_close(except_, &closed_);
    for (std::size_t i = 0; i < closed_.size() && status.ok(); ++i) {
      const std::chrono::duration<double> left = end - Clock::now();
      status = backend_.gate_wait(closed_[i], std::max(0.0, left.count()));
    }
    return status;
  }
  void let_go() {
    for (const GateHandle gate : closed_) backend_.gate_open(gate);
    closed_.clear();
  }

  Backend& backend_;
  const std::vector<StreamHandle>& except_;
  std::vector<GateHandle> closed_;
  std::unique_lock<std::mutex> turn_;
};

}  // namespace vram
