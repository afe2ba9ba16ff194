// The one way in which the core calls Python functions.
#pragma once

#include <Python.h>

namespace vram {

// While it exists, the thread holds the GIL, and an error that it is raising is set aside: the core may be at
// work for an object that is dropped while an error is raised, and no function may be called with one set.
class IntoPython {
 public:
  IntoPython() : gil_(PyGILState_Ensure()) { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~IntoPython() {
    PyErr_Restore(type_, value_, traceback_);
    PyGILState_Release(gil_);
  }
  IntoPython(const IntoPython&) = delete;
  IntoPython& operator=(const IntoPython&) = delete;

 private:
  PyGILState_STATE gil_;
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
};

}  // namespace vram
