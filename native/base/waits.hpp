// How the host's waits for device work end early. A wait is refused (Code::deadlock) where it could never
// end, because it is made by work that it waits for; it is abandoned (Code::interrupted) where whoever waits
// was asked to stop, as by Ctrl-C. Either way the device's work goes on, and nothing it uses may be released.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "base/types.hpp"

namespace vram {

// ---- interrupts -----------------------------------------------------------------------------------------

// True when the thread's wait is to be abandoned. Called on the waiting thread, with no lock held.
using Interrupt = bool (*)();

// While it exists, waits of this thread ask `ask`; null: they are not interrupted. Scopes nest. Unless
// `at_any_time` is set, nothing outside the call ends a wait: only what the call itself calls back may.
class InterruptScope {
 public:
  explicit InterruptScope(Interrupt ask, bool at_any_time = true);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  const Interrupt before_;
  const bool waits_before_;
};

// Whether a wait of this thread may be ended at any time. If so, it asks at least once each kWaitSlice.
bool interruptible();
// Asks. What runs inside may wait itself, uninterrupted.
bool interrupted();

inline constexpr std::chrono::milliseconds kWaitSlice{20};

// Waits by asking, for what cannot be interrupted while it waits by itself, such as a driver: until ask()
// answers anything but Code::not_ready, or Code::interrupted. Asks without a pause for a millisecond, as fast
// as a driver that spins; later with pauses of a thirtieth of the time that has passed.
template <typename Ask>
Status wait_by_asking(Ask ask) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kEager{1};
  constexpr Clock::duration kLongestPause = kWaitSlice / 10;
  const Clock::time_point began = Clock::now();
  Clock::time_point due = began + kWaitSlice;
  for (;;) {
    const Status status = ask();
    if (status.code != Code::not_ready) return status;
    const Clock::time_point now = Clock::now();
    if (now >= due) {
      if (interrupted()) return {Code::interrupted, 0, status.call};
      due = Clock::now() + kWaitSlice;
    }
    if (now - began > kEager)
      std::this_thread::sleep_for(std::min<Clock::duration>((now - began) / 30, kLongestPause));
  }
}

// ---- ending what waits ----------------------------------------------------------------------------------

// Runs it on a thread that is nobody's. Where none can be started it is never run.
void run_elsewhere(std::function<void()> work);

// Ends an object whose close() waits for device work and leaves it open where that is refused. Then another
// thread waits and ends it: memory is not released while work uses it.
template <class Object>
void end(Object* object) {
  if (object->close().unwaited()) {
    run_elsewhere([object] { delete object; });
  } else {
    delete object;
  }
}

}  // namespace vram
