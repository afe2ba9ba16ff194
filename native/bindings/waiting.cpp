#include "waiting.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "stable_abi.hpp"

namespace vram {

namespace {

thread_local Waiting* innermost = nullptr;
std::atomic<bool> interrupted_before{false};

// When a daemon thread returns to Python during shutdown, Python ends it by unwinding its stack, through
// frames that must not be unwound and without the GIL. The thread waits for the end of the process instead,
// as in Python 3.14.
void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
}

int raise_kept(void* error) {
  PyObject* const value = static_cast<PyObject*>(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
  return -1;
}

}  // namespace

Waiting::Waiting() : state_(PyEval_SaveThread()), outer_(std::exchange(innermost, this)) {
  scope_.emplace(&Waiting::asked, gettid() == getpid());  // only the main thread runs signal handlers
}

void Waiting::finish(const Status& status) {
  if (state_ == nullptr) return;
  scope_.reset();
  innermost = outer_;
  take_gil(std::exchange(state_, nullptr));
  PyObject* const error = std::exchange(raised_, nullptr);
  if (error == nullptr) return;
  if (status.code == Code::interrupted) {
    (void)raise_kept(error);
  } else if (Py_AddPendingCall(raise_kept, error) != 0) {
    Py_DECREF(error);  // the queue is full of others that will be raised
  }
}

// pre: a Python error is set.
void Waiting::keep_error() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  Py_XSETREF(raised_, value);
  if (PyErr_GivenExceptionMatches(raised_, PyExc_KeyboardInterrupt) != 0) interrupted_before = true;
}

bool Waiting::any_interrupted() { return interrupted_before; }

bool Waiting::interrupt() {
  if (innermost == nullptr) return false;
  innermost->keep_error();
  return true;
}

// Only the main thread runs handlers; others need not take the GIL to find out.
bool Waiting::asked() {
  Waiting& call = *innermost;
  if (call.raised_ != nullptr) return true;
  if (gettid() != getpid()) return false;
  PyEval_RestoreThread(call.state_);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  innermost = nullptr;  // calls of the handler are not part of this wait
  const bool raised = PyErr_CheckSignals() != 0;
  innermost = &call;
  if (raised) call.keep_error();
  PyErr_Restore(type, value, traceback);
  call.state_ = PyEval_SaveThread();
  return raised;
}

}  // namespace vram
