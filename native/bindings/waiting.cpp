#include "waiting.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "python_types.hpp"
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

// The Python error that is set, with its traceback, a new reference; none is set afterwards.
PyObject* taken_error() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
}

int raise_kept(void* error) {
  PyObject* const value = static_cast<PyObject*>(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
  return -1;
}

// The main thread raises it as soon as it runs Python code; other threads report it.
void raise_later(PyObject* error, PyObject* function = nullptr) {
  if (gettid() != getpid()) {
    (void)raise_kept(error);
    PyErr_WriteUnraisable(function);
  } else if (Py_AddPendingCall(raise_kept, error) != 0) {
    Py_DECREF(error);  // the queue is full of others that will be raised
  }
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
  } else {
    raise_later(error);
  }
}

// pre: a Python error is set.
void Waiting::keep_error() {
  Py_XSETREF(raised_, taken_error());
  if (PyErr_GivenExceptionMatches(raised_, PyExc_KeyboardInterrupt) != 0) interrupted_before = true;
}

bool Waiting::any_interrupted() { return interrupted_before; }

void Waiting::interrupt(PyObject* function) {
  if (innermost != nullptr) return innermost->keep_error();
  raise_later(taken_error(), function);
}

void Waiting::interrupt_or_report(PyObject* function) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return interrupt(function);
  PyObject* const error = taken_error();
  static PyObject* known = nullptr;
  PyObject* const ask = python_function(known, "vram.core.signals", "raised_by_handler");
  PyObject* const answer = ask == nullptr ? nullptr : PyObject_CallOneArg(ask, error);
  const bool raised_by_handler = answer != nullptr && PyObject_IsTrue(answer) > 0;
  Py_XDECREF(answer);
  PyErr_Clear();  // at shutdown, modules may be gone
  (void)raise_kept(error);
  return raised_by_handler ? interrupt(function) : PyErr_WriteUnraisable(function);
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
