// How the host's waits for device work end early. A wait is refused (Code::deadlock) where it could never
// end, because it is made by work that it waits for; it is abandoned (Code::interrupted) where whoever waits
// was asked to stop, as by Ctrl-C. Either way the device's work goes on, and nothing it uses may be released.
#pragma once

#include <chrono>
#include <functional>

#include "base/types.hpp"

namespace vram {

// ---- interrupts -----------------------------------------------------------------------------------------

// True when the thread's wait is to be abandoned. Called on the waiting thread, with no lock held.
using Interrupt = bool (*)();

// While it exists, waits of this thread ask `ask`; null: they are not interrupted. Scopes nest.
class InterruptScope {
 public:
  explicit InterruptScope(Interrupt ask);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  const Interrupt before_;
};

// Whether waits of this thread have anybody to ask. If so, they ask at least once each kWaitSlice.
bool interruptible();
// Asks. What runs inside may wait itself, uninterrupted.
bool interrupted();

inline constexpr std::chrono::milliseconds kWaitSlice{20};

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
