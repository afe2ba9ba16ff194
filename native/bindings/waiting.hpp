// The one way in which bindings make calls that may wait: without the GIL, with signals handled.
#pragma once

#include <Python.h>

#include <new>
#include <optional>
#include <type_traits>

#include "base/types.hpp"
#include "base/waits.hpp"

namespace vram {

// While it exists, the thread does not hold the GIL, and waits of the core run signal handlers. If one
// raises, the wait ends with Code::interrupted.
class Waiting {
 public:
  Waiting();
  ~Waiting() { finish({}); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  // Takes the GIL back. If the call was interrupted, the Python error is set to what was raised. If it
  // completed anyway, the main thread raises it as soon as it runs Python code, and other threads report it.
  void finish(const Status& status);
  // For functions that the core calls in the middle of a call. Keeps the current Python error for the
  // innermost waiting call of this thread, which is interrupted by it; without one, the main thread raises it
  // as soon as it runs Python code. In other threads it is reported, with the function. pre: the GIL is held.
  static void interrupt(PyObject* function);
  // The same for functions whose errors are reported, but for those that end the program, such as Ctrl-C, and
  // those that handlers of signals raise.
  static void interrupt_or_report(PyObject* function);
  // Whether any call of this process was interrupted.
  static bool any_interrupted();

 private:
  static bool asked();
  void keep_error();

  PyThreadState* state_;
  PyObject* raised_ = nullptr;  // strong
  Waiting* const outer_;
  std::optional<InterruptScope> scope_;
};

// Runs the call, which returns a Status or nothing, and returns its Status. If it is Code::interrupted, the
// Python error is set.
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
