// Backends as Python objects: the individual calls of the contract, Python functions as work on streams, and
// the controls of the model. The public classes in vram.core are built on this.
#include <cxxabi.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "backends/cuda.hpp"
#include "backends/host.hpp"
#include "backends/model.hpp"
#include "backends/pinned.hpp"
#include "backends/transfers.hpp"
#include "bindings.hpp"
#include "errors.hpp"
#include "into_python.hpp"
#include "stable_abi.hpp"
#include "waiting.hpp"

namespace nb = nanobind;

namespace vram {

// ---- Python at the end of the process ---------------------------------------------------------------

namespace {

// Maximum number of functions that can be launched after the interpreter started to exit: enough for work
// that launches more work to complete, and a bound for work that never ends.
constexpr std::int64_t kLaunchesAtExit = 1000;
std::atomic<std::int64_t> launches_left{std::numeric_limits<std::int64_t>::max()};
std::atomic<bool> python_up{true};    // other threads may take the GIL
std::atomic<int> calls_under_way{0};  // Python functions that stream threads will still run
std::atomic<int> forked{0};           // number of forks between the first process and this one

// Whether this thread may use Python objects now (taking the GIL if needed).
bool may_touch_python() { return python_up || (nb::is_alive() && has_gil()); }

// The wait at exit for launched functions. A function that never returns would block the exit, so after a
// while it prints what it waits for, and Ctrl-C ends the wait. A program that was already interrupted waits
// for at most kHurried.
class LastWait {
 public:
  explicit LastWait(bool hurried) : hurried_(hurried) {}
  // False: abandoned.
  bool operator()() {
    while (calls_under_way > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const Clock::time_point now = Clock::now();
      if (now >= tell_ && !std::exchange(told_, true)) tell();
      if (hurried_ && now - began_ >= kHurried) return false;
      if (now < due_) continue;
      if (interrupted()) return false;
      due_ = now + kWaitSlice;
    }
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kPatience{2};
  static constexpr std::chrono::seconds kHurried{10};

  void tell() const {
    std::fprintf(
        stderr,
        "vram: waiting for %d launched function(s) to return before the program ends%s. Press Ctrl-C "
        "to end it without them.\n",
        static_cast<int>(calls_under_way), hurried_ ? ", for up to 10 seconds after an interrupt" : "");
  }

  const bool hurried_;
  const Clock::time_point began_ = Clock::now();
  const Clock::time_point tell_ = began_ + kPatience;
  Clock::time_point due_ = began_ + kWaitSlice;
  bool told_ = false;
};

// Whether Ctrl-C has ended the program or an earlier wait of this module.
bool was_interrupted() {
  PyObject* const last = PySys_GetObject("last_type");  // borrowed
  return Waiting::any_interrupted() ||
         (last != nullptr && PyErr_GivenExceptionMatches(last, PyExc_KeyboardInterrupt) != 0);
}

// An owned Python object that native threads may drop. After Python has ended it is leaked.
class PythonReference {
 public:
  PythonReference() = default;
  explicit PythonReference(nb::object object) : object_(object.release()) {}
  PythonReference(PythonReference&& other) noexcept : object_(std::exchange(other.object_, nb::handle())) {}
  PythonReference& operator=(PythonReference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PythonReference() {
    if (!object_ || !may_touch_python()) return;
    const nb::gil_scoped_acquire gil;
    object_.dec_ref();
  }
  nb::handle get() const { return object_; }
  nb::object take() { return nb::steal(std::exchange(object_, nb::handle())); }

 private:
  nb::handle object_;
};

// ---- Python functions as work -----------------------------------------------------------------------

void report(PythonReference error) {
  const nb::object value = error.take();
  PyErr_SetObject(value.type().ptr(), value.ptr());
  PyErr_WriteUnraisable(nullptr);
}

// The first error raised by a stream's functions that was not reported yet. It is kept while it can be
// queried: while the stream is open, and by events recorded on it. Then it is reported.
struct StreamError {
  PythonReference error;  // guarded by the lock of the Launches
  ~StreamError() {
    if (!error.get() || !may_touch_python()) return;
    const IntoPython python;
    report(std::move(error));
  }
};

// The functions launched on one backend that have not started, and the errors of others. The lock is never
// held while Python code runs or the GIL is taken.
class Launches {
 public:
  Launches() = default;
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;
  // In the child of a fork it belongs to the parent: a thread that does not exist there may hold the lock.
  bool inherited() const { return process_ != forked; }
  std::uint64_t add(nb::object function) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(++last_call_, PythonReference(std::move(function)));
    return last_call_;
  }
  // Empty if it was already taken.
  PythonReference take(std::uint64_t call) {
    PythonReference function;
    const std::lock_guard lock(mutex_);
    const auto found = waiting_.find(call);
    if (found == waiting_.end()) return function;
    function = std::move(found->second);
    waiting_.erase(found);
    return function;
  }
  // At exit: functions that will not run release their references, including cycles through the queue.
  void forget_waiting() {
    std::unordered_map<std::uint64_t, PythonReference> waiting;  // dropped after the lock
    const std::lock_guard lock(mutex_);
    waiting.swap(waiting_);
  }
  // Where errors of a stream are stored.
  std::shared_ptr<StreamError> of(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<StreamError>& found = streams_[stream];
    if (found == nullptr) found = std::make_shared<StreamError>();
    return found;
  }
  // The first error is kept until it is queried; later ones are reported immediately.
  void store(StreamError& place, nb::python_error& error) {
    {
      const std::lock_guard lock(mutex_);
      if (!place.error.get()) {
        place.error = PythonReference(nb::borrow(error.value()));
        return;
      }
    }
    error.restore();
    PyErr_WriteUnraisable(nullptr);
  }
  void raise(const std::shared_ptr<StreamError>& place) {
    PythonReference error;
    if (place != nullptr) {
      const std::lock_guard lock(mutex_);
      error = std::move(place->error);
    }
    if (!error.get()) return;
    const nb::object value = error.take();
    PyErr_SetObject(value.type().ptr(), value.ptr());
    throw nb::python_error();
  }
  void raise_of_stream(StreamHandle stream) { raise(found(streams_, stream)); }
  void raise_of_event(EventHandle event) { raise(found(events_, event)); }
  // After a wait for the whole device: raises the error of the first stream that has one; others keep theirs.
  void raise_any() {
    for (const auto& place : all()) raise(place);
  }
  // Reports errors that were never queried, when nobody can query them anymore.
  void report_all() {
    for (const auto& place : all()) {
      PythonReference error;
      {
        const std::lock_guard lock(mutex_);
        error = std::move(place->error);
      }
      if (error.get()) report(std::move(error));
    }
  }
  void recorded(EventHandle event, StreamHandle stream) {
    const std::shared_ptr<StreamError> place = found(streams_, stream);
    if (place == nullptr) return event_gone(event);
    std::shared_ptr<StreamError> before;  // dropped after the lock
    const std::lock_guard lock(mutex_);
    before = std::exchange(events_[event], place);
  }
  void stream_gone(StreamHandle stream) { forget(streams_, stream); }
  void event_gone(EventHandle event) { forget(events_, event); }

 private:
  using Places = std::map<std::uint64_t, std::shared_ptr<StreamError>>;

  std::shared_ptr<StreamError> found(const Places& places, std::uint64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto place = places.find(handle);
    return place == places.end() ? nullptr : place->second;
  }
  void forget(Places& places, std::uint64_t handle) {
    std::shared_ptr<StreamError> gone;  // dropped after the lock
    const std::lock_guard lock(mutex_);
    const auto place = places.find(handle);
    if (place == places.end()) return;
    gone = std::move(place->second);
    places.erase(place);
  }
  std::vector<std::shared_ptr<StreamError>> all() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<StreamError>> places;
    for (const Places* each : {&streams_, &events_})
      for (const auto& [handle, place] : *each) places.push_back(place);
    return places;
  }

  const int process_ = forked;
  std::mutex mutex_;
  std::uint64_t last_call_ = 0;
  std::unordered_map<std::uint64_t, PythonReference> waiting_;
  Places streams_;  // open streams on which a function was launched
  Places events_;   // for each event, that of the stream it was last recorded on
};

// One launched function. It releases its Python references before the work counts as completed.
class PythonCall {
 public:
  PythonCall(nb::object function, std::shared_ptr<Launches> launches, StreamHandle stream, bool counted)
      : launches_(std::move(launches)),
        call_(launches_->add(std::move(function))),
        errors_(launches_->of(stream)),
        counted_(counted) {
    if (counted_) ++calls_under_way;
  }
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;
  ~PythonCall() {
    {
      const PythonReference never_run = launches_->take(call_);
    }
    if (!counted_) return;
    --calls_under_way;
    calls_under_way.notify_all();
  }
  void run() {
    if (!may_touch_python()) return;
    const IntoPython python;
    const nb::object function = launches_->take(call_).take();
    if (!function) return;
    try {
      function();
    } catch (nb::python_error& error) {
      launches_->store(*errors_, error);
    } catch (const abi::__forced_unwind&) {
      // The exit did not wait for this thread, and Python ends it by unwinding without the GIL, through
      // frames that hold Python objects. It waits for the end of the process instead, as in Python 3.14.
      for (;;) pause();
    }
  }

 private:
  std::shared_ptr<Launches> launches_;
  std::uint64_t call_;
  std::shared_ptr<StreamError> errors_;
  bool counted_;  // a thread of the backend runs it, so the exit waits for it
};

// ---- backends as held by Python -----------------------------------------------------------------------

// The Python side of a bound backend.
struct Bound {
  virtual ~Bound() = default;
  std::shared_ptr<Launches> launches = std::make_shared<Launches>();
  std::weak_ptr<Backend> self;
  Relays relays;          // from this device to others
  bool threaded = false;  // it runs launched functions on its own threads
};

template <class Base>
class BoundBackend final : public Base, public Bound {
 public:
  using Base::Base;
};

Bound& bound(Backend& backend) { return dynamic_cast<Bound&>(backend); }

std::vector<std::weak_ptr<Launches>>& all_launches() {
  static std::vector<std::weak_ptr<Launches>> all;
  return all;
}

// Destruction may wait for launched functions, which need the GIL.
template <class Base>
void destroy(BoundBackend<Base>* backend) {
  if (backend->launches->inherited()) return;  // a thread of the parent may have been using it
  const auto gone = [backend] {
    backend->relays.clear();  // they use the backend
    if constexpr (std::is_same_v<Base, HostBackend>) {
      end(backend);
    } else {
      delete backend;
    }
  };
  if (python_up && has_gil()) {
    const Waiting scope;
    gone();
  } else {
    gone();
  }
}

template <class Base, class... Arguments>
std::shared_ptr<Base> make_bound(bool threaded, Arguments... arguments) {
  const std::shared_ptr<BoundBackend<Base>> made(new BoundBackend<Base>(arguments...), destroy<Base>);
  made->self = std::weak_ptr<Backend>(made);
  made->threaded = threaded;
  std::erase_if(all_launches(), [](const auto& launches) { return launches.expired(); });
  all_launches().push_back(made->launches);
  return made;
}

// ---- the calls --------------------------------------------------------------------------------------

// Runs a call without the GIL; a failure becomes an exception.
template <class Call>
void without_gil(const char* what, Call call) {
  require_ok(waiting(call), what);
}

bool ready(const Status& status, const char* what) {
  if (status.code == Code::not_ready) return false;
  require_ok(status, what);
  return true;
}

void launch(Backend& backend, StreamHandle stream, nb::object function) {
  if (--launches_left < 0) raise_status({Code::closed, 0, "launch"}, "launch a function");
  if (!PyCallable_Check(function.ptr())) throw nb::type_error("launch needs a callable");
  Bound& side = bound(backend);
  if (side.launches->inherited()) raise_status({Code::closed, 0, "launch"}, "launch a function");
  auto call = std::make_shared<PythonCall>(std::move(function), side.launches, stream, side.threaded);
  without_gil("launch a function",
              [&] { return backend.launch(stream, [call = std::move(call)] { call->run(); }); });
}

void stream_synchronize(Backend& backend, StreamHandle stream) {
  without_gil("synchronize a stream", [&] { return backend.stream_synchronize(stream); });
  bound(backend).launches->raise_of_stream(stream);
}

void stream_destroy(Backend& backend, StreamHandle stream) {
  without_gil("destroy a stream", [&] { return backend.stream_destroy(stream); });
  bound(backend).launches->stream_gone(stream);
}

void event_record(Backend& backend, EventHandle event, StreamHandle stream) {
  require_ok(backend.event_record(event, stream), "record an event");
  bound(backend).launches->recorded(event, stream);
}

void event_destroy(Backend& backend, EventHandle event) {
  require_ok(backend.event_destroy(event), "destroy an event");
  bound(backend).launches->event_gone(event);
}

void event_synchronize(Backend& backend, EventHandle event) {
  without_gil("synchronize an event", [&] { return backend.event_synchronize(event); });
  bound(backend).launches->raise_of_event(event);
}

void bind_memory(nb::class_<Backend>& type) {
  using namespace nb::literals;
  type.def("memory_info",
           [](Backend& backend) {
             std::uint64_t free_bytes = 0, total_bytes = 0;
             require_ok(backend.memory_info(&free_bytes, &total_bytes), "query the free memory");
             return std::pair(free_bytes, total_bytes);
           })
      .def(
          "reserve",
          [](Backend& backend, std::uint64_t bytes) {
            Address address = 0;
            without_gil("reserve memory", [&] { return backend.reserve(bytes, &address); });
            return address;
          },
          "bytes"_a)
      .def(
          "release",
          [](Backend& backend, Address address, std::uint64_t bytes) {
            without_gil("release memory", [&] { return backend.release(address, bytes); });
          },
          "address"_a, "bytes"_a)
      .def(
          "space_reserve",
          [](Backend& backend, std::uint64_t bytes) {
            Address address = 0;
            without_gil("reserve addresses", [&] { return backend.space_reserve(bytes, &address); });
            return address;
          },
          "bytes"_a)
      .def(
          "space_release",
          [](Backend& backend, Address address, std::uint64_t bytes) {
            without_gil("release addresses", [&] { return backend.space_release(address, bytes); });
          },
          "address"_a, "bytes"_a)
      .def(
          "page_create",
          [](Backend& backend, std::uint64_t bytes) {
            PageHandle page = 0;
            without_gil("create a page", [&] { return backend.page_create(bytes, &page); });
            return page;
          },
          "bytes"_a)
      .def(
          "page_release",
          [](Backend& backend, PageHandle page, std::uint64_t bytes) {
            without_gil("release a page", [&] { return backend.page_release(page, bytes); });
          },
          "page"_a, "bytes"_a)
      .def(
          "map",
          [](Backend& backend, Address address, std::uint64_t bytes, PageHandle page) {
            without_gil("map a page", [&] { return backend.map(address, bytes, page); });
          },
          "address"_a, "bytes"_a, "page"_a)
      .def(
          "set_access",
          [](Backend& backend, Address address, std::uint64_t bytes) {
            without_gil("grant access to pages", [&] { return backend.set_access(address, bytes); });
          },
          "address"_a, "bytes"_a)
      .def(
          "can_access",
          [](const Backend& backend, const Backend& other) { return backend.can_access(other); }, "other"_a,
          "Whether work here can use the other device's memory.")
      .def(
          "open_plain",
          [](Backend& backend, Backend& other) {
            without_gil("open the other device's memory", [&] { return backend.open_plain(other); });
          },
          "other"_a, "Let work here use all plain memory of the other device.")
      .def(
          "unmap",
          [](Backend& backend, Address address, std::uint64_t bytes) {
            without_gil("unmap a page", [&] { return backend.unmap(address, bytes); });
          },
          "address"_a, "bytes"_a);
}

void bind_order(nb::class_<Backend>& type) {
  using namespace nb::literals;
  type.def("stream_create",
           [](Backend& backend) {
             StreamHandle stream = 0;
             require_ok(backend.stream_create(&stream), "create a stream");
             return stream;
           })
      .def("stream_destroy", &stream_destroy, "stream"_a)
      .def("lasting", &Backend::lasting, "stream"_a,
           "Whether the stream exists until the pools are told that it will be destroyed.")
      .def(
          "stream_adopt",
          [](Backend& backend, StreamHandle stream) {
            require_ok(backend.stream_adopt(stream), "adopt a stream");
          },
          "stream"_a, "Make the stream lasting: the caller tells the pools before it is destroyed.")
      .def(
          "stream_disown",
          [](Backend& backend, StreamHandle stream) {
            require_ok(backend.stream_disown(stream), "disown a stream");
          },
          "stream"_a, "Make the stream foreign again.")
      .def("stream_synchronize", &stream_synchronize, "stream"_a)
      .def(
          "stream_query",
          [](Backend& backend, StreamHandle stream) {
            return ready(backend.stream_query(stream), "query a stream");
          },
          "stream"_a)
      .def(
          "stream_wait",
          [](Backend& backend, StreamHandle stream, EventHandle event) {
            require_ok(backend.stream_wait(stream, event), "make a stream wait for an event");
          },
          "stream"_a, "event"_a)
      .def("event_create",
           [](Backend& backend) {
             EventHandle event = 0;
             require_ok(backend.event_create(&event), "create an event");
             return event;
           })
      .def("event_destroy", &event_destroy, "event"_a)
      .def("event_record", &event_record, "event"_a, "stream"_a)
      .def(
          "event_query",
          [](Backend& backend, EventHandle event) {
            return ready(backend.event_query(event), "query an event");
          },
          "event"_a)
      .def("event_synchronize", &event_synchronize, "event"_a)
      .def(
          "waits_for", [](const Backend& backend, const Backend& other) { return backend.waits_for(other); },
          "other"_a, "Whether streams here can wait for events of the other device.")
      .def(
          "stream_wait_peer",
          [](Backend& backend, StreamHandle stream, const Backend& other, EventHandle event) {
            require_ok(backend.stream_wait_peer(stream, other, event),
                       "make a stream wait for an event of another device");
          },
          "stream"_a, "other"_a, "event"_a)
      .def("timing_event_create",
           [](Backend& backend) {
             EventHandle event = 0;
             require_ok(backend.timing_event_create(&event), "create a timing event");
             return event;
           })
      .def(
          "elapsed_ms",
          [](Backend& backend, EventHandle from, EventHandle to) {
            double elapsed = 0;
            require_ok(backend.elapsed_ms(from, to, &elapsed), "measure the time between events");
            return elapsed;
          },
          "start"_a, "end"_a, "Milliseconds between two completed timing events.");
}

void bind_work(nb::class_<Backend>& type) {
  using namespace nb::literals;
  type.def(
          "copy",
          [](Backend& backend, Address to, Address from, std::uint64_t bytes, StreamHandle stream) {
            without_gil("copy memory", [&] { return backend.copy(to, from, bytes, stream); });
          },
          "to"_a, "source"_a, "bytes"_a, "stream"_a)
      .def(
          "copy_now",
          [](Backend& backend, Address to, Address from, std::uint64_t bytes, StreamHandle stream) {
            without_gil("copy memory", [&] { return copy_now(backend, to, from, bytes, stream); });
          },
          "to"_a, "source"_a, "bytes"_a, "stream"_a,
          "Copy in stream order and wait for it. The memory is not used after the call returns or raises.")
      .def(
          "fill",
          [](Backend& backend, Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) {
            without_gil("fill memory", [&] { return backend.fill(to, value, bytes, stream); });
          },
          "to"_a, "value"_a, "bytes"_a, "stream"_a)
      .def(
          "copy_across",
          [](Backend& backend, Address to, StreamHandle stream, Backend& other, Address source,
             StreamHandle other_stream, std::uint64_t bytes) {
            if (host_waits(backend, other)) {
              without_gil("wait for a stream", [&] { return other.stream_synchronize(other_stream); });
              without_gil("wait for a stream", [&] { return backend.stream_synchronize(stream); });
            }
            without_gil("copy between devices", [&] {
              return copy_across(backend, to, stream, other, source, other_stream, true, bytes);
            });
          },
          "to"_a, "stream"_a, "other"_a, "source"_a, "other_stream"_a, "bytes"_a,
          "Copy from another device, ordered on a stream of each.")
      .def("launch", &launch, "stream"_a, "function"_a,
           "Run function() in stream order. The next synchronize raises its exceptions.");
}

void bind_backend(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Backend> type(module, "Backend", "The contract of a device; see native/backends/backend.hpp.");
  type.def_prop_ro("name", [](const Backend& backend) { return backend.info().name; })
      .def_prop_ro("total_bytes", [](const Backend& backend) { return backend.info().total_bytes; })
      .def_prop_ro("pages", [](const Backend& backend) { return backend.info().pages; })
      .def_prop_ro("host_pages", [](const Backend& backend) { return backend.info().host_pages; })
      .def_prop_ro("no_pages", [](const Backend& backend) { return backend.info().no_pages; })
      .def_prop_ro("host_accessible", [](const Backend& backend) { return backend.info().host_accessible; })
      .def(
          "canonical", [](const Backend& backend, StreamHandle stream) { return backend.canonical(stream); },
          "stream"_a, "The canonical handle of a stream that has several.")
      .def(
          "capture_of",
          [](Backend& backend, StreamHandle stream) {
            CaptureId id = 0;
            require_ok(backend.capture_of(stream, &id), "query whether a stream is captured");
            return id;
          },
          "stream"_a, "The id of the capture of this stream; 0 for none.");
  bind_memory(type);
  bind_order(type);
  bind_work(type);
}

template <class Type>
std::optional<std::string> check(Type& backend) {
  std::string why;
  return backend.check(&why) ? std::nullopt : std::optional(why);
}

void bind_host(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<HostBackend, Backend>(module, "HostBackend", "Real memory, and one thread for each stream.")
      .def(nb::new_([](std::uint64_t capacity) { return make_bound<HostBackend>(true, capacity); }),
           "capacity"_a = 0)
      .def("synchronize",
           [](HostBackend& host) {
             without_gil("synchronize the device", [&] { return host.synchronize(); });
             bound(host).launches->raise_any();
           })
      .def("check", &check<HostBackend>, "Verify its internal data; return what is wrong, or None.");
}

// What is launched through it runs on the device's streams, which raise the errors.
std::shared_ptr<PinnedBackend> make_pinned(Backend& device, unsigned threads) {
  auto made = make_bound<PinnedBackend>(bound(device).threaded, backend_of(device), threads);
  bound(*made).launches = bound(device).launches;
  return made;
}

void bind_pinned(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PinnedBackend, Backend>(module, "PinnedBackend",
                                     "Host memory in the order of a device's streams, pinned for a GPU.")
      .def(nb::new_(&make_pinned), "device"_a, "threads"_a = 0)
      .def_prop_ro("pinned", &PinnedBackend::pinned, "Whether the memory is pinned.");
}

// ---- the model's controls -----------------------------------------------------------------------------

// Models with a number have their own addresses, above those of the host, so that they can be linked.
std::shared_ptr<ModelBackend> make_model(std::uint64_t capacity, bool pages, double lag_us, bool manual,
                                         bool release_waits, int number, double host_gb_per_s,
                                         int copy_engines) {
  ModelOptions options;
  options.pages = pages;
  options.lag_us = lag_us;
  options.schedule = manual ? Schedule::manual : Schedule::lag;
  options.release_waits = release_waits;
  options.host_gb_per_s = host_gb_per_s;
  options.copy_engines = copy_engines;
  constexpr Address kAboveHost = Address{1} << 47;
  if (number >= 0) options.base = kAboveHost * (1 + static_cast<Address>(number) % 0xfff0);
  auto made = make_bound<ModelBackend>(false, capacity, options);
  if (number >= 0) made->set_number(number);
  return made;
}

Status status_named(const std::string& code, std::int32_t native) {
  Status status{Code::failed, native, ""};
  if (code_from_name(code.c_str(), &status.code)) return status;
  throw nb::value_error(("unknown code " + code + "; try failed, out_of_memory or not_ready").c_str());
}

nb::typed<nb::dict, std::string, int> counts(ModelBackend& model) {
  const ModelCounts now = model.counts();
  nb::typed<nb::dict, std::string, int> result;
  result["plain_ranges"] = now.plain_ranges;
  result["plain_bytes"] = now.plain_bytes;
  result["spaces"] = now.spaces;
  result["pages"] = now.pages;
  result["page_bytes"] = now.page_bytes;
  result["mappings"] = now.mappings;
  result["events"] = now.events;
  result["streams"] = now.streams;
  result["queued"] = now.queued;
  result["pools"] = now.pools;
  return result;
}

void bind_schedule(nb::class_<ModelBackend, Backend>& type) {
  using namespace nb::literals;
  using release_gil = nb::call_guard<nb::gil_scoped_release>;  // launched functions take the GIL themselves
  type.def("now", &ModelBackend::now, "Microseconds of the virtual clock.")
      .def("advance", &ModelBackend::advance, "us"_a, release_gil())
      .def("set_time", &ModelBackend::set_time, "us"_a, release_gil())
      .def("set_lag", &ModelBackend::set_lag, "us"_a)
      .def(
          "set_manual",
          [](ModelBackend& model, bool manual) {
            require_ok(model.set_schedule(manual ? Schedule::manual : Schedule::lag),
                       "change the schedule while work is unfinished");
          },
          "manual"_a)
      .def("step", &ModelBackend::step, "stream"_a, release_gil())
      .def("run_all", &ModelBackend::run_all, release_gil())
      .def(
          "work",
          [](ModelBackend& model, StreamHandle stream, std::uint64_t id, Address address,
             std::uint64_t bytes) { require_ok(model.work(stream, id, address, bytes), "queue work"); },
          "stream"_a, "id"_a, "address"_a = 0, "bytes"_a = 0)
      .def("executed", &ModelBackend::executed)
      .def("clear_executed", &ModelBackend::clear_executed);
}

void bind_failures_and_counts(nb::class_<ModelBackend, Backend>& type) {
  using namespace nb::literals;
  type.def(
          "fail",
          [](ModelBackend& model, const std::string& call, std::uint64_t nth, const std::string& code,
             std::int32_t native) {
            if (model.fail(call, nth, status_named(code, native))) return;
            throw nb::value_error(("a backend has no call " + call).c_str());
          },
          "call"_a, "nth"_a = 1, "code"_a = "failed", "native"_a = 0)
      .def(
          "fail_any",
          [](ModelBackend& model, std::uint64_t nth, const std::string& code, std::int32_t native) {
            model.fail_any(nth, status_named(code, native));
          },
          "nth"_a = 1, "code"_a = "failed", "native"_a = 0)
      .def("clear_failures", &ModelBackend::clear_failures)
      .def(
          "calls", [](ModelBackend& model, const std::string& call) { return model.calls(call); }, "call"_a)
      .def("total_calls", &ModelBackend::total_calls)
      .def("driver_calls", &ModelBackend::driver_calls)
      .def("memory_calls", &ModelBackend::memory_calls)
      .def("driver_us", &ModelBackend::driver_us)
      .def("memory_us", &ModelBackend::memory_us)
      .def("host_waits", &ModelBackend::host_waits)
      .def("host_wait_us", &ModelBackend::host_wait_us)
      .def("busy_releases", &ModelBackend::busy_releases, "Number of calls of release while work was queued.")
      .def("counts", &counts, "Number of existing objects, by name.")
      .def("check", &check<ModelBackend>, "Verify its internal data; return what is wrong, or None.");
}

// Capture, for devices that support it.
template <class Type>
void bind_graphs(nb::class_<Type, Backend>& type) {
  using namespace nb::literals;
  type.def(
          "capture_begin",
          [](Type& device, StreamHandle stream) {
            require_ok(device.capture_begin(stream), "begin a capture");
          },
          "stream"_a)
      .def(
          "capture_end",
          [](Type& device, StreamHandle stream) {
            std::uint64_t graph = 0;
            without_gil("end the capture", [&] { return device.capture_end(stream, &graph); });
            return graph;
          },
          "stream"_a, "Return the graph, ready to run.")
      .def(
          "graph_launch",
          [](Type& device, std::uint64_t graph, StreamHandle stream) {
            without_gil("launch a graph", [&] { return device.graph_launch(graph, stream); });
          },
          "graph"_a, "stream"_a)
      .def(
          "graph_destroy",
          [](Type& device, std::uint64_t graph) {
            without_gil("destroy a graph", [&] { return device.graph_destroy(graph); });
          },
          "graph"_a);
}

void bind_model(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<ModelBackend, Backend> type(module, "ModelBackend",
                                         "Addresses only, with a virtual clock and failures on demand.");
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Refused& refused) {
      try {
        raise_status(refused.status, "control the model of a device");
      } catch (nb::python_error& error) {
        error.restore();
      }
    }
  });
  type.def(nb::new_(&make_model), "capacity"_a, "pages"_a = true, "lag_us"_a = 5000.0, "manual"_a = false,
           "release_waits"_a = false, "number"_a = -1, "host_gb_per_s"_a = 0.0, "copy_engines"_a = 3)
      .def("synchronize", [](ModelBackend& model) {
        without_gil("synchronize the device", [&] { return model.synchronize(); });
        bound(model).launches->raise_any();
      });
  bind_schedule(type);
  bind_failures_and_counts(type);
  bind_graphs(type);
  type.def(
          "link",
          [](ModelBackend& model, ModelBackend& other, double gb_per_s, bool access) {
            require_ok(model.link(other, gb_per_s, access), "link two models of devices");
          },
          "other"_a, "gb_per_s"_a, "access"_a,
          "Link two numbered models, in both directions: one clock, and copies at this speed.")
      .def_prop_ro("copy_engines", &ModelBackend::copy_engines)
      .def("opened", &ModelBackend::opened, "address"_a, "bytes"_a, "number"_a,
           "Whether work on the model with this number can use this memory.");
  type.def("refused_in_capture", &ModelBackend::refused_in_capture,
           "Number of calls that were made although a capture forbids them.")
      .def(
          "foreign_create",
          [](ModelBackend& model) {
            StreamHandle stream = 0;
            require_ok(model.foreign_create(&stream), "create a stream");
            return stream;
          },
          "Create a stream like another library; its handle may be that of a destroyed stream.")
      .def(
          "foreign_destroy",
          [](ModelBackend& model, StreamHandle stream) {
            require_ok(model.foreign_destroy(stream), "destroy a stream");
          },
          "stream"_a, "Destroy such a stream. A later use of its handle ends the process.");
}

// For the exit, while Python still runs: running functions complete, and so do those that they launch, within
// bounds. Later launches are refused, and stream threads no longer use Python. An interrupt ends the wait.
void stop_launches() {
  launches_left = kLaunchesAtExit;
  LastWait wait(was_interrupted());
  (void)waiting([&wait]() -> Status {
    const bool first = wait();
    launches_left = 0;
    return {first && wait() ? Code::ok : Code::interrupted, 0, "exit"};
  });
  PyErr_Clear();  // the interrupt has ended the wait
  if (const int left = calls_under_way; left > 0)
    std::fprintf(stderr, "vram: the program ends before %d launched function(s) returned.\n", left);
  const auto known = all_launches();
  for (const auto& launches : known) {
    const auto alive = launches.lock();
    if (!alive || alive->inherited()) continue;
    alive->report_all();
    alive->forget_waiting();
  }
  python_up = false;
}

// ---- beyond the contract: CUDA -----------------------------------------------------------------------

// Takes the parameters of a kernel as raw bytes, one bytes object each.
void launch_kernel(CudaBackend& cuda, std::uint64_t function, const std::vector<unsigned>& grid,
                   const std::vector<unsigned>& block, const std::vector<nb::bytes>& parameters,
                   StreamHandle stream, unsigned shared_bytes) {
  CudaBackend::Shape shape;
  if (grid.size() > 3 || block.size() > 3)
    throw nb::value_error("a grid and a block have at most 3 dimensions");
  std::copy(grid.begin(), grid.end(), shape.grid);
  std::copy(block.begin(), block.end(), shape.block);
  shape.shared_bytes = shared_bytes;
  std::vector<void*> values;
  for (const nb::bytes& each : parameters) values.push_back(const_cast<char*>(each.c_str()));
  without_gil("launch a kernel", [&] { return cuda.launch_kernel(function, shape, values.data(), stream); });
}

// Calls a method that returns its result through the last argument.
template <auto Method, class Result, class... Arguments>
Result result_of(CudaBackend& cuda, const char* what, Arguments... arguments) {
  Result result{};
  without_gil(what, [&] { return (cuda.*Method)(arguments..., &result); });
  return result;
}

void bind_cuda_work(nb::class_<CudaBackend, Backend>& type) {
  using namespace nb::literals;
  type.def(
          "module_load",
          [](CudaBackend& cuda, const std::string& image) {
            return result_of<&CudaBackend::module_load, std::uint64_t>(cuda, "load a kernel module",
                                                                       image.c_str());
          },
          "image"_a, "Load PTX text, compiled by the driver.")
      .def(
          "module_unload",
          [](CudaBackend& cuda, std::uint64_t module) {
            without_gil("unload a kernel module", [&] { return cuda.module_unload(module); });
          },
          "module"_a)
      .def(
          "module_function",
          [](CudaBackend& cuda, std::uint64_t module, const std::string& name) {
            return result_of<&CudaBackend::module_function, std::uint64_t>(cuda, "find a kernel", module,
                                                                           name.c_str());
          },
          "module"_a, "name"_a)
      .def("launch_kernel", &launch_kernel, "function"_a, "grid"_a, "block"_a, "parameters"_a, "stream"_a = 0,
           "shared_bytes"_a = 0, "Launch a kernel. Each parameter is a bytes object with its value.")
      .def("host_pinned", &CudaBackend::host_pinned, "address"_a, "bytes"_a,
           "Whether all of this host memory is pinned.");
}

void bind_cuda(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<CudaBackend, Backend> type(module, "CudaBackend",
                                        "A CUDA device; the driver is loaded at run time.");
  type.def(nb::new_([](int index) { return make_bound<CudaBackend>(true, index); }), "index"_a)
      .def("synchronize",
           [](CudaBackend& cuda) {
             without_gil("synchronize the device", [&] { return cuda.synchronize(); });
             bound(cuda).launches->raise_any();
           })
      .def("abandon", &CudaBackend::abandon,
           "Another library resets the device: refuse every call from now on instead of passing it to the "
           "driver.")
      .def_prop_ro("hardware", &CudaBackend::hardware)
      .def_prop_ro("driver_version", &CudaBackend::driver_version)
      .def("attribute", &CudaBackend::attribute, "number"_a,
           "Return a device attribute by its number; 0 if unknown.");
  bind_cuda_work(type);
  bind_graphs(type);
  module.def(
      "cuda_devices",
      [] {
        std::string why;
        const int count = CudaBackend::device_count(&why);
        return std::pair(count, why);
      },
      "Return the number of CUDA devices, and why there are none.");
}

}  // namespace

Status copy_now(Backend& backend, Address to, Address from, std::uint64_t bytes, StreamHandle stream) {
  if (const Status status = backend.stream_synchronize(stream); !status.ok()) return status;
  if (backend.info().host_accessible) {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return {};
  }
  const InterruptScope quiet(nullptr);
  const Status status = backend.copy(to, from, bytes, stream);
  return status.ok() ? backend.stream_synchronize(stream) : status;
}

bool host_waits(const Backend& here, const Backend& there) {
  return !here.waits_for(there) || !there.waits_for(here);
}

Status copy_across(Backend& here, Address address, StreamHandle stream, Backend& there, Address other,
                   StreamHandle other_stream, bool from_there, std::uint64_t bytes) {
  std::shared_ptr<Relay> relay;
  if (!copies_directly(here, there)) {
    Backend& from = from_there ? there : here;
    relay = bound(from).relays.to(from, backend_of(from_there ? here : there));
  }
  return copy_between({here, address, here.canonical(stream)}, {there, other, there.canonical(other_stream)},
                      from_there, bytes, relay.get());
}

std::shared_ptr<Backend> backend_of(Backend& backend) { return bound(backend).self.lock(); }

void bind_devices(nb::module_& module) {
  bind_backend(module);
  bind_cuda(module);
  bind_host(module);
  bind_model(module);
  bind_pinned(module);
  module.def("stop_launches", &stop_launches, "Called once at exit; see vram/core/device.py.");
  // The threads that would run them do not exist in the child of a fork.
  pthread_atfork(nullptr, nullptr, [] {
    calls_under_way = 0;
    ++forked;
  });
}

}  // namespace vram
