// ArenaCore: the native part of vram.Arena. Its allocations are Buffers (buffer.cpp) that are parts of the
// arena; vram.lifetimes.arena has the texts of its errors.
#include "arena/arena.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <utility>

#include "base/waits.hpp"
#include "bindings.hpp"
#include "errors.hpp"
#include "into_python.hpp"
#include "python_types.hpp"
#include "stacks.hpp"
#include "waiting.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

unsigned long long wide(std::uint64_t value) { return value; }

// Runs work that may call the device or wait without the GIL. Keeps the arena alive meanwhile.
template <typename Work>
Status held(const std::shared_ptr<Arena>& arena, Work work) {
  return waiting([&work, keep = arena]() mutable {
    const Status status = work(*keep);
    keep.reset();  // here, because releasing the last reference may wait for the device
    return status;
  });
}

// Raises the error for an arena's own refusals, and other failures as usual.
[[noreturn]] void raise_refusal(nb::handle self, const Status& status, const char* what) {
  for (const char* own :
       {Arena::kOtherThread, Arena::kOpenMarks, Arena::kMarkOver, Arena::kBadAlign, Arena::kInCallback}) {
    if (std::strcmp(status.call, own) != 0) continue;
    const nb::object error = nb::module_::import_("vram.lifetimes.arena").attr("_refused")(self, own, what);
    PyErr_SetObject(error.type().ptr(), error.ptr());
    throw nb::python_error();
  }
  raise_status(status, what);
}

// pre: an ArenaCore.
ArenaCore& core_of(nb::handle self) {
  if (!nb::inst_ready(self)) raise_status({Code::closed, 0, "arena"}, "use an arena that was not created");
  return *nb::inst_ptr<ArenaCore>(self);
}

void require(nb::handle self, const Status& status, const char* what) {
  if (!status.ok()) raise_refusal(self, status, what);
}

// ---- creating and closing --------------------------------------------------------------------------------

void open(ArenaCore* self, nb::handle pool, std::uint64_t size, bool growable, std::uint64_t align,
          nb::object stream, nb::object tag_object, bool checked) {
  auto* py_pool = reinterpret_cast<PyPool*>(pool.ptr());
  const std::shared_ptr<Allocator> allocator = allocator_of(pool.ptr());
  if (allocator == nullptr) throw nb::type_error("an arena needs a pool");
  ArenaOptions options;
  options.size = size;
  options.growable = growable;
  options.align = align;
  options.poison = checked;
  if (!stream_from(stream.ptr(), py_pool, &options.stream)) throw nb::python_error();
  const long tag = current_tag(py_pool, tag_object.ptr());
  if (tag < 0) throw nb::python_error();
  options.tag =
      py_pool->stacks ? label_here(static_cast<std::uint32_t>(tag)) : static_cast<std::uint32_t>(tag);
  std::unique_ptr<Arena> arena;
  OutOfMemoryReport report;
  const Status status = waiting([&] { return Arena::open(allocator, options, &arena, &report); });
  if (status.code == Code::out_of_memory) {
    raise_out_of_memory(py_pool, size, options.stream, report);
    throw nb::python_error();
  }
  if (!status.ok()) raise_status(status, "create the arena");
  const bool named = stream.is_none() || PyLong_CheckExact(stream.ptr());
  new (self) ArenaCore{reinterpret_cast<PyPool*>(Py_NewRef(pool.ptr())),
                       named ? nullptr : stream.release().ptr(),
                       {arena.release(), end<Arena>},
                       0,
                       checked,
                       {}};
}

// Drops the arena without the GIL, because that may wait for the device.
void let_go(std::shared_ptr<Arena> arena) {
  if (arena == nullptr) return;
  const Waiting scope;
  arena.reset();
}

// The id of an arena for the race checker, and whether its stream waits for the recorded streams at a free.
// If it does not, the memory rests until they complete.
unsigned long long id_of(const ArenaCore& core) { return reinterpret_cast<std::uintptr_t>(&core); }
PyObject* waits(const ArenaCore& core) { return core.arena->host_accessible() ? Py_False : Py_True; }

// Tells the watcher that allocations from this depth on are released.
void tell_freed(ArenaCore& core, std::uint64_t depth) {
  while (!core.watched.empty() && core.watched.back().first >= depth) {
    const Address address = core.watched.back().second;
    core.watched.pop_back();
    if (watcher != nullptr && !tell_watcher("on_free", "OK", core.pool, wide(address)))
      throw nb::python_error();
  }
}

// ... and that the arena has waited for the recorded streams; `over` means that it forgets them.
void tell_settled(ArenaCore& core, bool over) {
  if (watcher != nullptr && !tell_watcher("on_settled", "OKKO", core.pool, id_of(core),
                                          wide(core.arena->stream()), over ? Py_True : Py_False))
    throw nb::python_error();
}

// Reports everything as released; no caller is left who could get a race.
void tell_dropped(ArenaCore& core) {
  if (watcher == nullptr || core.watched.empty()) return;
  const IntoPython python;
  bool told = true;
  for (const auto& [depth, address] : core.watched)
    told = told && tell_watcher("on_drop", "OK", core.pool, wide(address));
  core.watched.clear();
  told =
      told && tell_watcher("on_settled", "OKKO", core.pool, id_of(core), wide(core.arena->stream()), Py_True);
  if (!told) Waiting::interrupt_or_report(reinterpret_cast<PyObject*>(core.pool));
}

// ---- callbacks -------------------------------------------------------------------------------------------

// Calls the function that was registered last. The arena decides when; it does not hold Python's objects,
// because the garbage collector must see them.
void run_last(void* argument) {
  const IntoPython python;
  auto& core = *static_cast<ArenaCore*>(argument);
  if (core.callbacks.empty()) return;  // cleared by the garbage collector
  const nb::object function = nb::steal(core.callbacks.back());
  core.callbacks.pop_back();
  if (PyObject* result = PyObject_CallNoArgs(function.ptr()); result != nullptr) {
    Py_DECREF(result);
    return;
  }
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  if (core.raised == nullptr) core.raised = PyList_New(0);
  if (core.raised == nullptr || PyList_Append(core.raised, value) != 0) PyErr_WriteUnraisable(function.ptr());
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
}

void drop_callbacks(ArenaCore& core) {
  if (core.arena != nullptr) core.arena->forget_callbacks();
  for (PyObject* function : std::exchange(core.callbacks, {})) Py_DECREF(function);
  Py_CLEAR(core.raised);
}

void on_reset(nb::handle self, nb::object function) {
  if (PyCallable_Check(function.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "on_reset takes a callable, not %s", type_name(function.ptr()).c_str());
    throw nb::python_error();
  }
  ArenaCore& core = core_of(self);
  require(self, core.arena->on_reset(run_last, &core), "register a function for the reset of the arena");
  core.callbacks.push_back(function.release().ptr());
}

// Runs the callbacks of the lifetimes from this depth on and then the work, which ends the lifetimes. Raises
// what callbacks have raised only afterwards.
template <typename Work>
void after_callbacks(nb::handle self, std::size_t depth, Work work) {
  ArenaCore& core = core_of(self);
  core.arena->call_back(depth);
  const nb::object raised = nb::steal(std::exchange(core.raised, nullptr));
  try {
    work(core);
  } catch (nb::python_error& error) {
    if (!raised.is_valid() || PyList_Append(raised.ptr(), error.value().ptr()) != 0) throw;
  }
  if (!raised.is_valid()) return;
  const nb::object error = nb::module_::import_("vram.lifetimes.arena").attr("_raised")(self, raised);
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

Status give_back(ArenaCore& core) {
  if (core.views != 0) return {};
  return held(core.arena, [](Arena& arena) { return arena.close(); });
}

void close(nb::handle self) {
  ArenaCore& core = core_of(self);
  if (!core.arena->closed() && !core.arena->ours())
    raise_refusal(self, {Code::invalid, 0, Arena::kOtherThread}, "close the arena");
  if (core.arena->in_callback())
    raise_refusal(self, {Code::invalid, 0, Arena::kInCallback}, "close the arena");
  if (core.arena->pool().inherited()) drop_callbacks(core);  // what they would release is the parent's
  after_callbacks(self, 0, [self](ArenaCore& core) {
    const bool held = core.views != 0;  // then the memory stays until the last view is dropped
    if (!held) tell_freed(core, 0);
    core.arena->end();
    require(self, give_back(core), "close the arena");
    if (!held) tell_settled(core, true);
  });
}

// ---- allocation ------------------------------------------------------------------------------------------

Address take(nb::handle self, ArenaCore& core, std::uint64_t size, std::uint64_t align) {
  Address address = 0;
  if (core.arena->try_allocate(size, align, &address)) return address;
  OutOfMemoryReport report;
  const Status status =
      held(core.arena, [&](Arena& arena) { return arena.allocate(size, align, &address, &report); });
  if (status.ok()) return address;
  if (status.code != Code::out_of_memory) raise_refusal(self, status, "allocate from the arena");
  if (std::strcmp(status.call, Arena::kFull) == 0) {
    const nb::object error = nb::module_::import_("vram.lifetimes.arena").attr("_full")(self, size);
    PyErr_SetObject(error.type().ptr(), error.ptr());
  } else {
    raise_out_of_memory(core.pool, size, core.arena->stream(), report);
  }
  throw nb::python_error();
}

nb::object make_piece(nb::handle self, std::uint64_t size, std::uint64_t align, nb::handle shape,
                      nb::handle typestr, std::uint8_t code, std::uint8_t bits) {
  ArenaCore& core = core_of(self);
  const Address address = take(self, core, size, align);
  const StreamHandle stream = core.arena->stream();
  const std::uint32_t label = core.checked ? label_here(0) : 0;
  PyObject* given =
      stream == core.arena->options().stream ? core.stream_object : nullptr;  // otherwise it was destroyed
  PyObject* made = make_buffer(core.pool, address, size, stream, given, label);
  if (made == nullptr) throw nb::python_error();
  auto* buffer = reinterpret_cast<PyBuffer*>(made);
  buffer->piece = new ArenaPiece{Py_NewRef(self.ptr()),
                                 &core,
                                 core.arena->over(),
                                 shape.is_valid() ? Py_NewRef(shape.ptr()) : nullptr,
                                 typestr.is_valid() ? Py_NewRef(typestr.ptr()) : nullptr,
                                 code,
                                 bits,
                                 core.arena->host_accessible()};
  if (buffer->piece->held) {
    ++core.views;
    ++core.pool->views;
  }
  if (watcher != nullptr) [[unlikely]] {
    core.watched.emplace_back(core.arena->stats().depth, address);
    if (!tell_watcher("on_piece", "OKKKKO", core.pool, wide(address), wide(size), wide(stream), id_of(core),
                      waits(core))) {
      Py_DECREF(made);
      throw nb::python_error();
    }
  }
  return nb::steal(made);
}

// False with an error set if it is neither None nor an alignment.
bool align_from(PyObject* object, std::uint64_t* out) {
  *out = 0;
  if (object == nullptr || object == Py_None) return true;
  const bool whole = !PyBool_Check(object) && whole_from(object, "align", Arena::kMaxAlign, out);
  if (whole && *out != 0 && (*out & (*out - 1)) == 0) return true;
  PyErr_Clear();
  static PyObject* words = nullptr;
  PyObject* function = python_function(words, "vram.lifetimes.arena", "_checked_align");
  if (function != nullptr) Py_XDECREF(PyObject_CallOneArg(function, object));  // raises
  return false;
}

// These two are written against Python's C interface, because a call through a general binding layer costs as
// much as the rest of the call.
PyObject* allocate(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count != 1 || named > 1 ||
      (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "align") != 0)) {
    PyErr_SetString(PyExc_TypeError, "allocate(size, *, align=None) takes a size and an optional alignment");
    return nullptr;
  }
  std::uint64_t size = 0;
  std::uint64_t align = 0;
  if (!size_from(arguments[0], &size) || !align_from(named == 1 ? arguments[1] : nullptr, &align))
    return nullptr;
  return guarded([&] { return make_piece(self, size, align, {}, {}, 1, 8); });
}

// A new tuple of integers of at least 0, and their product, saturated on overflow. Null with an error set if
// it is not a shape.
PyObject* shape_from(PyObject* object, std::uint64_t* product) {
  static PyObject* words = nullptr;
  PyObject* shape = nullptr;
  if (PyTuple_CheckExact(object)) {
    shape = Py_NewRef(object);
  } else if (PyLong_CheckExact(object)) {
    shape = PyTuple_Pack(1, object);
  }
  for (bool asked = false;; asked = true) {
    *product = 1;
    bool good = shape != nullptr;
    for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(shape); ++i) {
      PyObject* each = PyTuple_GET_ITEM(shape, i);
      const long long length = PyLong_Check(each) && !PyBool_Check(each) ? PyLong_AsLongLong(each) : -1;
      good = length >= 0 && !PyErr_Occurred();
      if (good && __builtin_mul_overflow(*product, static_cast<std::uint64_t>(length), product))
        *product = kMaxRequest + 1;
    }
    if (good || asked) {
      if (!good) Py_CLEAR(shape);
      return shape;
    }
    PyErr_Clear();
    Py_XDECREF(shape);
    PyObject* function = python_function(words, "vram.lifetimes.elements",
                                         "checked_shape");  // raises, or returns a plain shape
    shape = function == nullptr ? nullptr : PyObject_CallOneArg(function, object);
    if (shape == nullptr) return nullptr;
  }
}

// take_array(shape, item, typestr, code)
PyObject* take_array(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4 || !PyUnicode_Check(arguments[2])) {
    PyErr_SetString(PyExc_TypeError, "take_array(shape, item, typestr, code)");
    return nullptr;
  }
  constexpr std::uint64_t kMostBits = std::numeric_limits<std::uint8_t>::max();
  std::uint64_t item = 0;
  std::uint64_t code = 0;
  if (!whole_from(arguments[1], "item", kMostBits / 8, &item) ||
      !whole_from(arguments[3], "code", kMostBits, &code))
    return nullptr;
  std::uint64_t size = 0;
  const nb::object shape = nb::steal(shape_from(arguments[0], &size));
  if (!shape.is_valid()) return nullptr;
  if (__builtin_mul_overflow(size, item, &size)) size = ~std::uint64_t{0};
  return guarded([&] {
    return make_piece(self, size, 0, shape, arguments[2], static_cast<std::uint8_t>(code),
                      static_cast<std::uint8_t>(8 * item));
  });
}

// ---- lifetimes -------------------------------------------------------------------------------------------

nb::tuple mark(nb::handle self) {
  Arena::Mark mark;
  require(self, core_of(self).arena->mark(&mark), "begin a scope");
  return nb::make_tuple(mark.id, mark.depth);
}

void rewind(nb::handle self, std::uint64_t id, std::uint32_t depth) {
  require(self, core_of(self).arena->may_rewind({id, depth}), "end the scope");
  after_callbacks(self, depth, [&](ArenaCore& core) {
    tell_freed(core, depth);
    require(self, held(core.arena, [&](Arena& arena) { return arena.rewind({id, depth}); }), "end the scope");
    tell_settled(core, false);
  });
}

void reset(nb::handle self, bool zero) {
  require(self, core_of(self).arena->may_reset(), "reset the arena");
  after_callbacks(self, 0, [&](ArenaCore& core) {
    tell_freed(core, 0);
    require(self, held(core.arena, [&](Arena& arena) { return arena.reset(zero); }), "reset the arena");
    tell_settled(core, true);
  });
}

// ---- streams ---------------------------------------------------------------------------------------------

void record_stream(nb::handle self, nb::handle stream_object) {
  ArenaCore& core = core_of(self);
  StreamHandle stream = 0;
  if (!stream_from(stream_object.ptr(), core.pool, &stream)) throw nb::python_error();
  if (watcher != nullptr &&
      !tell_watcher("on_arena_stream", "OKKO", core.pool, id_of(core), wide(stream), waits(core)))
    throw nb::python_error();
  require(self, core.arena->record_stream(stream), "record the use on another stream");
}

// Like a pool's stream_listener: it holds no reference, and does not use the arena's Python object.
nb::object stream_listener(nb::handle self) {
  std::weak_ptr<Arena> listening = core_of(self).arena;
  return nb::cpp_function(
      [listening](std::optional<StreamHandle> handle) {
        std::shared_ptr<Arena> arena = listening.lock();
        if (!handle.has_value() || arena == nullptr) {
          const bool there = arena != nullptr;
          let_go(std::move(arena));
          return there;
        }
        const Status status = held(arena, [&](Arena& it) { return it.retire_stream(*handle); });
        let_go(std::move(arena));
        if (!status.ok() && status.code != Code::closed) raise_status(status, "retire the stream");
        return true;
      },
      nb::arg("handle").none());
}

// ---- queries ---------------------------------------------------------------------------------------------

nb::dict stats(nb::handle self) {
  const ArenaStats stats = core_of(self).arena->stats();
  nb::dict out;
  out["used"] = stats.used;
  out["high_water"] = stats.high_water;
  out["capacity"] = stats.capacity;
  out["resting"] = stats.resting;
  out["chunks"] = stats.chunks;
  out["depth"] = stats.depth;
  out["allocations"] = stats.allocations;
  out["allocated"] = stats.allocated;
  out["requests"] = stats.requests;
  out["resets"] = stats.resets;
  out["host_waits"] = stats.host_waits;
  return out;
}

std::optional<std::string> check(nb::handle self) {
  std::string why;
  if (core_of(self).arena->check(&why)) return {};
  return why;
}

// ---- the type --------------------------------------------------------------------------------------------

// A pool may refer to its arenas, for example through a callback that trims them.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const auto* core = nb::inst_ptr<ArenaCore>(self);
  Py_VISIT(core->pool);
  Py_VISIT(core->stream_object);
  for (PyObject* function : core->callbacks) Py_VISIT(function);
  Py_VISIT(core->raised);
  return 0;
}

// The callbacks of an arena usually refer to what uses its arrays. vram.Arena has called them before.
int clear(PyObject* self) {
  if (nb::inst_ready(self)) drop_callbacks(*nb::inst_ptr<ArenaCore>(self));
  return 0;
}

PyMethodDef methods[] = {
    {"allocate", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(allocate)),
     METH_FASTCALL | METH_KEYWORDS,
     "allocate(size, *, align=None)\n--\n\nAllocate `size` bytes as a Buffer, on any device."},
    {"take_array", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(take_array)), METH_FASTCALL,
     "take_array(shape, item, typestr, code, /)\n--\n\nAllocate a Buffer with a shape and a type."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};

}  // namespace

// Its references are dropped after the arena, which the stream orders.
ArenaCore::~ArenaCore() {
  tell_dropped(*this);
  drop_callbacks(*this);  // other threads may hold the arena for a moment longer
  let_go(std::move(arena));
  Py_XDECREF(stream_object);
  Py_XDECREF(reinterpret_cast<PyObject*>(pool));
}

// Runs where an object is dropped, so an error may be set: it calls no function of Python's, and if the wait
// is interrupted, that is raised later. An arena that has not ended keeps its memory and its callbacks.
void drop_arena_view(ArenaCore* core) {
  if (--core->views != 0 || !core->arena->ended()) return;
  tell_dropped(*core);
  const Waiting scope;
  (void)core->arena->close();
}

void bind_arena(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<ArenaCore>(module, "ArenaCore", nb::type_slots(slots), "The native part of vram.Arena.")
      .def("__init__", open, "pool"_a, "size"_a, "growable"_a, "align"_a, "stream"_a.none(), "tag"_a.none(),
           "checked"_a)
      .def("mark", mark, "Begin a nested lifetime and return its id.")
      .def("rewind", rewind, "id"_a, "depth"_a, "End a lifetime and those nested in it.")
      .def("reset_memory", reset, "zero"_a, "Release everything.")
      .def("call_at_end", on_reset, "function"_a.none(),
           "Call a function without arguments when the lifetime ends.")
      .def(
          "is_open",
          [](nb::handle self, std::uint64_t id, std::uint32_t depth) {
            return core_of(self).arena->open_at({id, depth});
          },
          "id"_a, "depth"_a, "Whether a lifetime that mark() began has not ended.")
      .def("record_stream", record_stream, "stream"_a.none(),
           "Record that work on a stream uses the arena's memory, from now until the next reset, which then "
           "waits for it in stream order.")
      .def("stream_listener", stream_listener,
           "The function that streams call with their handle before they are destroyed; None only queries.")
      .def(
          "adopt", [](nb::handle self) { core_of(self).arena->adopt(); },
          "Make the calling thread the owner of the arena. No other thread may be using it.")
      .def(
          "trim",
          [](nb::handle self) {
            require(self, held(core_of(self).arena, [](Arena& arena) { return arena.trim(); }),
                    "trim the arena");
          },
          "Return chunks without live allocations to the pool. The next growth is one chunk for the maximum "
          "ever used.")
      .def("end", close, "End all lifetimes, and return the memory when the last view is dropped.")
      .def("raw_stats", stats, "Return all counters.")
      .def(
          "reset_peak", [](nb::handle self) { core_of(self).arena->reset_peak(); },
          "Restart the high-water mark from the current use.")
      .def("check", check, "Verify every invariant; return None or what is wrong.")
      .def_prop_ro(
          "closed", [](nb::handle self) { return core_of(self).arena->closed(); },
          "Whether it or its pool was closed, or it belongs to the parent of a fork.")
      .def_prop_ro(
          "callbacks", [](nb::handle self) { return core_of(self).callbacks.size(); },
          "Number of registered functions that have not been called yet.")
      .def_prop_ro(
          "pool", [](nb::handle self) { return nb::borrow(reinterpret_cast<PyObject*>(core_of(self).pool)); },
          "The pool that provides its memory.")
      .def_prop_ro(
          "host_accessible", [](nb::handle self) { return core_of(self).arena->host_accessible(); },
          "Whether its memory is host memory, so that its arrays are NumPy arrays.")
      .def_prop_ro(
          "checked", [](nb::handle self) { return core_of(self).checked; },
          "Whether uses after the end of a scope are detected.")
      .def_prop_ro(
          "stream", [](nb::handle self) { return core_of(self).arena->stream(); },
          "Handle of the stream that orders the memory.");
}

}  // namespace vram
