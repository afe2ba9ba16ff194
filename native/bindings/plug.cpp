// Configuration of the plug (plug.hpp) from Python: which pool serves which device, the addresses of the
// functions, and the text of a failed allocation.
#include "plug/plug.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>

#include "bindings.hpp"
#include "into_python.hpp"
#include "plug/engine.h"
#include "plug/pinned.hpp"
#include "plug/pluggable.hpp"
#include "python_types.hpp"
#include "stacks.hpp"
#include "waiting.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

PyObject* plugged[Plug::kDevices] = {};  // the Python objects of the pools, for error messages

void tell_program(nb::python_error& error, const char* doing) {
  const nb::str what(doing);
  error.restore();
  Waiting::interrupt_or_report(what.ptr());
}

// vram.core.pool formats the report. Called from any thread, with or without the GIL, also at shutdown.
std::string explain(int device, std::uint64_t size, StreamHandle stream, const OutOfMemoryReport& report) {
  const std::string plain =
      "out of memory: " + std::to_string(size) + " bytes requested from cuda:" + std::to_string(device) +
      ", which has " + std::to_string(report.device_free) + " bytes free; the pool holds " +
      std::to_string(report.reserved) + ", of which " + std::to_string(report.live) + " is allocated";
  if (!nb::is_alive()) return plain;
  const IntoPython python;
  try {
    const nb::object words = nb::module_::import_("vram.core.pool").attr("_out_of_memory");
    const nb::object facts = nb::steal(report_dict(report));
    return nb::cast<std::string>(nb::str(words(nb::handle(plugged[device]), size, stream, facts)));
  } catch (nb::python_error& error) {
    tell_program(error, "formatting an out-of-memory error");
    return plain;
  }
}

PyObject* maker = nullptr;    // called with a device that has no pool yet
PyObject* adopter = nullptr;  // called with a device where a stream is used for the first time

// Called from any thread; exceptions of the function are reported, because no caller could handle them.
void tell(PyObject*& function, int device, const char* what) {
  if (!nb::is_alive()) return;
  const IntoPython python;
  if (function == nullptr) return;  // removed in the meantime
  const nb::object kept = nb::borrow(function);
  try {
    kept(device);
  } catch (nb::python_error& error) {
    tell_program(error, what);
  }
}
void make(int device) { tell(maker, device, "creating a pool"); }
void adopt(int device) { tell(adopter, device, "adopting streams"); }

// PyTorch records streams on its own as well, from any thread. The watcher cannot refuse.
void recorded(int device, Address block, StreamHandle stream) {
  if (!nb::is_alive()) return;
  const IntoPython python;
  if (watcher == nullptr || plugged[device] == nullptr) return;  // removed in the meantime
  const nb::object kept = nb::borrow(watcher);
  if (!tell_watcher("on_plug_record_stream", "OKK", plugged[device], static_cast<unsigned long long>(block),
                    static_cast<unsigned long long>(stream)))
    Waiting::interrupt_or_report(kept.ptr());
}

void set_maker(nb::handle function) {
  Py_XSETREF(maker, function.is_none() ? nullptr : Py_NewRef(function.ptr()));
  Plug::set_make(maker != nullptr ? make : nullptr);
}

void set_adopter(nb::handle function) {
  Py_XSETREF(adopter, function.is_none() ? nullptr : Py_NewRef(function.ptr()));
  Plug::set_adopt(adopter != nullptr ? adopt : nullptr);
}

PyObject* pinned_maker = nullptr;  // called with a device when pinned memory is used for the first time
void make_pinned(int device) { tell(pinned_maker, device, "creating a pool of pinned memory"); }

void set_pinned_maker(nb::handle function) {
  Py_XSETREF(pinned_maker, function.is_none() ? nullptr : Py_NewRef(function.ptr()));
  PinnedPlug::set_make(pinned_maker != nullptr ? make_pinned : nullptr);
}

void set_pinned_pool(nb::handle object) {
  const std::shared_ptr<Pool> pool = object.is_none() ? nullptr : own_pool(object.ptr());
  if (pool == nullptr && !object.is_none()) throw nb::type_error("the pool must be a vram.PinnedPool");
  PinnedPlug::set_pool(pool);
}

// The tag of the calling thread, and its stack if the pool records stacks.
std::uint32_t label(int device) {
  if (!nb::is_alive()) return 0;
  const IntoPython python;
  auto* pool = device >= 0 && device < Plug::kDevices ? reinterpret_cast<PyPool*>(plugged[device]) : nullptr;
  if (pool == nullptr) return 0;
  const long known = current_tag(pool, nullptr);
  if (known < 0) PyErr_Clear();
  const std::uint32_t tag = known < 0 ? 0 : static_cast<std::uint32_t>(known);
  return pool->stacks ? label_here(tag) : tag;
}

void set_pool(int device, nb::handle object) {
  if (device < 0 || device >= Plug::kDevices) throw nb::value_error("the device does not exist");
  if (object.is_none()) {
    Plug::set_pool(device, nullptr);
    Py_CLEAR(plugged[device]);
    follow_labels();
    return;
  }
  const std::shared_ptr<Pool> pool = own_pool(object.ptr());
  if (pool == nullptr) throw nb::type_error("the pool must be a vram.Pool");
  Plug::set_pool(device, pool);
  Plug::set_explain(explain);
  Py_XSETREF(plugged[device], Py_NewRef(object.ptr()));
  follow_labels();
}

template <typename Pointed>
std::uint64_t address(Pointed* function) {
  return reinterpret_cast<std::uint64_t>(function);
}

nb::typed<nb::dict, std::string, int> functions() {
  nb::typed<nb::dict, std::string, int> result;
  result["allocate"] = address(vram_plug_allocate);
  result["free"] = address(vram_plug_free);
  result["record_stream"] = address(vram_plug_record_stream);
  result["empty_cache"] = address(vram_plug_empty_cache);
  result["memory_fraction"] = address(vram_plug_memory_fraction);
  result["base"] = address(vram_plug_base);
  result["heap_begin"] = address(vram_plug_heap_begin);
  result["heap_end"] = address(vram_plug_heap_end);
  result["heap_release"] = address(vram_plug_heap_release);
  return result;
}

}  // namespace

void follow_records() { Plug::set_recorded(watcher != nullptr ? recorded : nullptr); }

void follow_labels() {
  const bool wanted = std::any_of(std::begin(plugged), std::end(plugged), [](PyObject* pool) {
    return pool != nullptr && (tags_in_use() || reinterpret_cast<PyPool*>(pool)->stacks);
  });
  Plug::set_label(wanted ? label : nullptr);
}

void bind_plug(nb::module_& module) {
  using namespace nb::literals;
  module.def("plug_set_pool", &set_pool, "device"_a, "pool"_a.none(),
             "Set the pool that serves other libraries on a CUDA device, or None.");
  module.def(
      "plug_pool",
      [](int device) -> nb::object {
        const bool known = device >= 0 && device < Plug::kDevices && plugged[device] != nullptr;
        return known ? nb::borrow(plugged[device]) : nb::none();
      },
      "device"_a, nb::sig("def plug_pool(device: int) -> object | None"),
      "Return the pool that serves PyTorch on a CUDA device, or None.");
  module.def("plug_set_maker", &set_maker, "function"_a.none(),
             "Set the `function(device)` that sets the pool of a CUDA device on first use, or None.");
  module.def("plug_set_adopter", &set_adopter, "function"_a.none(),
             "Set the `function(device)` that is called before the first use of a stream on a CUDA "
             "device, or None.");
  module.def(
      "plug_engine", [] { return address(vram_engine()); },
      "Return the address of the table of functions that plug/engine.h describes.");
  module.def("plug_set_pinned_pool", &set_pinned_pool, "pool"_a.none(),
             "Set the pool of pinned memory that serves other libraries, or None.");
  module.def("plug_set_pinned_maker", &set_pinned_maker, "function"_a.none(),
             "Set the `function(device)` that sets the pool of pinned memory on first use, or None.");
  module.def("plug_functions", &functions,
             "Return the addresses of the functions that other libraries call.");
  module.def(
      "plug_set_throw",
      [](std::uint64_t function) { set_throw_out_of_memory(reinterpret_cast<ThrowOutOfMemory>(function)); },
      "function"_a,
      "Set the address of void(const char*) that throws the other library's out-of-memory error; 0: none.");
}

}  // namespace vram
