// The one way in which bindings call what may wait: without the GIL, and so that signals are noticed.
#pragma once

#include <Python.h>

#include <new>
#include <optional>
#include <type_traits>

#include "base/types.hpp"
#include "base/waits.hpp"

namespace vram {

// While it exists the thread does without the GIL, and waits of the core run the handlers of signals. Where
// one raises, the wait ends with Code::interrupted.
class Waiting {
 public:
  Waiting();
  ~Waiting() { finish({}); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  // Takes the GIL back. What was raised is the Python error where the call was interrupted; where it came to
  // an end all the same, it is raised by the main thread as soon as it runs Python code.
  void finish(const Status& status);
  // Keeps the current Python error for the innermost call of this thread that waits, which is interrupted by
  // it. False where there is none. pre: the GIL is held.
  static bool interrupt();
  // Whether any call of this process was.
  static bool any_interrupted();

 private:
  static bool asked();
  void keep_error();

  PyThreadState* state_;
  PyObject* raised_ = nullptr;  // strong
  Waiting* const outer_;
  std::optional<InterruptScope> scope_;
};

// What the call comes to; it returns a Status or nothing. Where it is Code::interrupted, the Python error is
// set.
template <typename Call>
Status waiting(Call call) {
  Waiting scope;
  Status status;
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
    } else {
      status = call();
    }
  } catch (const std::bad_alloc&) {
    status = {Code::failed, 0, "host memory"};
  }
  scope.finish(status);
  return status;
}

}  // namespace vram
