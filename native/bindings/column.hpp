// Python columns (arrays, NumPy arrays, bytes) as plain memory, without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace vram {

// A column as a contiguous read-only view of `Element`s.
template <typename Element>
class Column {
 public:
  Column(nanobind::handle object, const char* name) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nanobind::python_error();
    if (view_.itemsize == sizeof(Element)) return;
    PyBuffer_Release(&view_);
    throw nanobind::value_error((std::string("column ") + name + " has elements of the wrong size").c_str());
  }
  ~Column() { PyBuffer_Release(&view_); }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;
  const Element* data() const { return static_cast<const Element*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(Element); }

 private:
  Py_buffer view_;
};

}  // namespace vram
