// Lets Ctrl-C, or a function of the caller, end a long computation that runs without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>

namespace vram {

// Called periodically by the computation, in the thread that started it and without the GIL. Every kPeriod,
// it runs the handlers of pending signals and `ask`, an optional Python function, and throws what they raise.
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
  nanobind::handle ask_;  // borrowed from the caller, which waits
  Clock::time_point due_ = {};
};

}  // namespace vram
