// How the host's waits for device work end early. A wait is refused (Code::deadlock) if it could never end,
// because the waiting work is part of what it waits for. It is abandoned (Code::interrupted) if the caller
// was asked to stop, for example by Ctrl-C. In both cases the device's work continues, and nothing it uses
// may be released.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>

#include "base/types.hpp"

namespace vram {

// ---- interrupts -----------------------------------------------------------------------------------------

// True if the thread's wait must be abandoned. Called on the waiting thread, with no lock held.
using Interrupt = bool (*)();

// While it exists, waits of this thread call `ask`; null: they are not interrupted. Scopes nest. Unless
// `at_any_time` is set, nothing outside the call ends a wait: only callbacks of the call itself may.
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

// Whether a wait of this thread may end at any time. If so, it checks at least once every kWaitSlice.
bool interruptible();
// Checks. Code that runs inside may wait itself, without interruption.
bool interrupted();

inline constexpr std::chrono::milliseconds kWaitSlice{20};

// Waits by polling, for calls that cannot be interrupted while they wait, such as a driver's: until ask()
// returns anything but Code::not_ready, or until it is interrupted (Code::interrupted). It polls without a
// pause for one millisecond, as fast as a driver that spins, and then with pauses of a thirtieth of the
// elapsed time.
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

// ---- closing objects that wait --------------------------------------------------------------------------

// Starts a thread that leaves signals to the program's own threads. Not joinable: the process can have no
// more.
std::thread start_quietly(std::function<void()> work);
// Runs the work on a separate thread. If none can be started, it never runs.
void run_elsewhere(std::function<void()> work);

// Closes an object whose close() waits for device work and stays open if the wait is refused. Another thread
// then waits and closes it: memory is not released while work uses it.
template <class Object>
void end(Object* object) {
  if (object->close().unwaited()) {
    run_elsewhere([object] { delete object; });
  } else {
    delete object;
  }
}

// Locks the mutex if that succeeds within the time. By asking: ThreadSanitizer of older compilers does not
// see what std::timed_mutex does.
inline bool lock_within(std::mutex& mutex, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kPause{50};
  const std::chrono::duration<double> most(seconds);
  for (const Clock::time_point begun = Clock::now(); !mutex.try_lock();) {
    if (Clock::now() - begun >= most) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

}  // namespace vram
