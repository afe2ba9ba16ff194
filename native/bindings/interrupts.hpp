// Lets Ctrl-C, and whoever else has a reason, end a long computation that runs without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>

namespace vram {

// Called now and then by the computation, in the thread that began it and without the GIL. Looks for signals
// every kPeriod, and throws what their handlers raise; so it does with `ask`, a Python function, where one is
// given.
class Interrupts {
 public:
  explicit Interrupts(nanobind::handle ask = {}) : ask_(ask) {}

  void operator()() {
    const Clock::time_point now = Clock::now();
    if (now < due_) return;
    due_ = now + kPeriod;
    const nanobind::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    if (ask_.is_valid() && !ask_.is_none()) ask_();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPeriod{50};
  nanobind::handle ask_;  // borrowed from the caller, who waits
  Clock::time_point due_ = {};
};

}  // namespace vram
