// Python's C interface as this module uses it, with and without the limited API (wheels for Python 3.12 and
// later). The limited API has functions in place of macros, and no access to the fields of types and code
// objects.
#pragma once

#include <Python.h>

#ifdef Py_LIMITED_API
#include <dlfcn.h>
#endif

#include <string>

#ifdef Py_LIMITED_API
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_GET_ITEM PyList_GetItem
#define PyList_SET_ITEM PyList_SetItem
#define PyBytes_GET_SIZE PyBytes_Size
#define PyBytes_AS_STRING PyBytes_AsString
#define Py_SETREF(place, value) vram::set_reference(&(place), value)
#define Py_XSETREF(place, value) vram::set_reference(&(place), value)
#define PyObject_CallOneArg(function, argument) PyObject_CallFunctionObjArgs(function, argument, nullptr)
#endif

namespace vram {

#ifdef Py_LIMITED_API
// Public functions of Python that the stable ABI does not contain, looked up by name. Their signatures have
// not changed since Python 3.11. A Python without one of them refuses to import the module (`complete`).
struct Beyond {
  template <typename Function>
  static Function* find(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  }
  int (*context_var_get)(PyObject*, PyObject*,
                         PyObject**) = find<int(PyObject*, PyObject*, PyObject**)>("PyContextVar_Get");
  PyFrameObject* (*frame_get_back)(PyFrameObject*) = find<PyFrameObject*(PyFrameObject*)>("PyFrame_GetBack");
  int (*frame_get_lasti)(PyFrameObject*) = find<int(PyFrameObject*)>("PyFrame_GetLasti");
  int (*code_addr2line)(PyCodeObject*, int) = find<int(PyCodeObject*, int)>("PyCode_Addr2Line");
  int (*gil_state_check)() = find<int()>("PyGILState_Check");
  int (*is_finalizing)() = find<int()>("Py_IsFinalizing");
  int (*is_finalizing_312)() = find<int()>("_Py_IsFinalizing");

  // The first name that is missing, or null.
  const char* missing() const {
    return context_var_get == nullptr                                 ? "PyContextVar_Get"
           : frame_get_back == nullptr                                ? "PyFrame_GetBack"
           : frame_get_lasti == nullptr                               ? "PyFrame_GetLasti"
           : code_addr2line == nullptr                                ? "PyCode_Addr2Line"
           : gil_state_check == nullptr                               ? "PyGILState_Check"
           : is_finalizing == nullptr && is_finalizing_312 == nullptr ? "Py_IsFinalizing"
                                                                      : nullptr;
  }
};
inline const Beyond beyond;

inline int context_var_get(PyObject* variable, PyObject* fallback, PyObject** value) {
  return beyond.context_var_get(variable, fallback, value);
}
inline PyFrameObject* frame_get_back(PyFrameObject* frame) { return beyond.frame_get_back(frame); }
inline int frame_get_lasti(PyFrameObject* frame) { return beyond.frame_get_lasti(frame); }
inline int code_addr2line(PyCodeObject* code, int at) { return beyond.code_addr2line(code, at); }
inline bool has_gil() { return beyond.gil_state_check() == 1; }
inline bool is_finalizing() {
  return (beyond.is_finalizing != nullptr ? beyond.is_finalizing() : beyond.is_finalizing_312()) != 0;
}
inline const char* missing_function() { return beyond.missing(); }
#else
inline int context_var_get(PyObject* variable, PyObject* fallback, PyObject** value) {
  return PyContextVar_Get(variable, fallback, value);
}
inline PyFrameObject* frame_get_back(PyFrameObject* frame) { return PyFrame_GetBack(frame); }
inline int frame_get_lasti(PyFrameObject* frame) { return PyFrame_GetLasti(frame); }
inline int code_addr2line(PyCodeObject* code, int at) { return PyCode_Addr2Line(code, at); }
inline bool has_gil() { return PyGILState_Check() == 1; }
inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}
inline const char* missing_function() { return nullptr; }
#endif

// Puts a value, whose reference it takes, in place of another.
template <typename Kept>
void set_reference(Kept** place, Kept* value) {
  Kept* const before = *place;
  *place = value;
  Py_XDECREF(reinterpret_cast<PyObject*>(before));
}

// UTF-8 of a string, kept by the string; null with an error set.
inline const char* utf8_of(PyObject* text) { return PyUnicode_AsUTF8AndSize(text, nullptr); }

// The name of an object's type, for messages.
inline std::string type_name(PyObject* object) {
  PyObject* name = PyType_GetName(Py_TYPE(object));
  const char* text = name == nullptr ? nullptr : utf8_of(name);
  std::string result = text == nullptr ? "object" : text;
  if (text == nullptr) PyErr_Clear();
  Py_XDECREF(name);
  return result;
}

// What `tp_alloc` and `tp_free` of a type do.
inline PyObject* allocate_object(PyTypeObject* type) {
  return reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}
inline void free_object(PyTypeObject* type, PyObject* object) {
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
}

}  // namespace vram
