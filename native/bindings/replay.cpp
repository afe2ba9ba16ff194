// Replay for Python: columns in, one dict out. The loop itself is native/replay.cpp.
#include "replay.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "python_types.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

// A column as a contiguous read-only view of `Element`s.
template <typename Element>
class Column {
 public:
  Column(nb::handle object, const char* name) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    if (view_.itemsize == sizeof(Element)) return;
    PyBuffer_Release(&view_);
    throw nb::value_error((std::string("column ") + name + " has elements of the wrong size").c_str());
  }
  ~Column() { PyBuffer_Release(&view_); }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;
  const Element* data() const { return static_cast<const Element*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(Element); }

 private:
  Py_buffer view_;
};

nb::dict replay_columns(nb::handle op, nb::handle id, nb::handle size, nb::handle stream, nb::handle time_us,
                        nb::handle completed_us, std::uint32_t streams, std::uint64_t capacity, nb::dict conf,
                        double lag_us) {
  const Column<std::uint8_t> ops(op, "op");
  const Column<std::uint32_t> ids(id, "id");
  const Column<std::uint64_t> sizes(size, "size");
  const Column<std::uint32_t> stream_numbers(stream, "stream");
  const Column<std::int64_t> times(time_us, "time_us");
  const Column<std::int64_t> completed(completed_us, "completed_us");
  ReplayProgram program;
  program.events = ops.size();
  program.streams = streams;
  for (std::size_t length : {ids.size(), sizes.size(), stream_numbers.size(), times.size(), completed.size()})
    if (length != program.events) throw nb::value_error("columns differ in length");
  for (std::size_t i = 0; i < program.events; ++i) {
    program.allocations = std::max(program.allocations, ids.data()[i] + 1);
    if (ids.data()[i] >= program.events || stream_numbers.data()[i] >= streams)
      throw nb::value_error("an id or stream is out of range");
  }
  program.op = ops.data();
  program.id = ids.data();
  program.size = sizes.data();
  program.stream = stream_numbers.data();
  program.time_us = times.data();
  program.completed_us = completed.data();
  PoolConfig config;
  if (!config_from(conf.ptr(), &config)) throw nb::python_error();
  ReplayResult result;
  {
    const nb::gil_scoped_release release;
    result = replay(program, config, capacity, lag_us);
  }
  nb::dict dict;
  dict["peak_allocated"] = result.peak_allocated;
  dict["peak_reserved"] = result.peak_reserved;
  dict["driver_calls"] = result.driver_calls;
  dict["memory_calls"] = result.memory_calls;
  dict["last_memory_call"] = result.last_memory_call;
  dict["driver_us"] = result.driver_us;
  dict["seconds"] = result.seconds;
  dict["oom"] = nb::none();
  if (result.failure) {
    nb::dict failure;
    failure["event"] = result.failure->event;
    failure["size"] = result.failure->size;
    failure["allocated"] = result.failure->allocated;
    failure["reserved"] = result.failure->reserved;
    dict["oom"] = failure;
  }
  return dict;
}

}  // namespace

void bind_replay(nb::module_& module) {
  module.def("replay", replay_columns, nb::arg("op"), nb::arg("id"), nb::arg("size"), nb::arg("stream"),
             nb::arg("time_us"), nb::arg("completed_us"), nb::arg("streams"), nb::arg("capacity"),
             nb::arg("conf"), nb::arg("lag_us"),
             "Run a recorded program through the real pool on a model device.");
}

}  // namespace vram
