// Memory of another owner that is pinned for a while: the native part of vram.pin. It keeps the memory's
// buffer exported, so that the owner cannot resize or free it meanwhile. Pinned pools are in devices.cpp.
#include "backends/pinned.hpp"

#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "errors.hpp"
#include "python_types.hpp"
#include "waiting.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

class PinCore {
 public:
  PinCore(Backend& device, nb::handle memory) : device_(backend_of(device)), lock_(page_lock_of(*device_)) {
    if (PyObject_GetBuffer(memory.ptr(), &view_, PyBUF_ANY_CONTIGUOUS) != 0) throw nb::python_error();
    open_ = true;
  }
  PinCore(const PinCore&) = delete;
  PinCore& operator=(const PinCore&) = delete;
  // If the wait for the device fails, the memory stays exported forever: a leak is better than freeing memory
  // under a running copy.
  ~PinCore() { (void)close(); }

  Status lock() {
    Status status;
    if (lock_ != nullptr && size() != 0) {
      const nb::gil_scoped_release released;
      status = lock_->lock(address(), size(), view_.readonly == 0);
    }
    used_ = status.ok() && size() != 0;
    locked_ = used_ && lock_ != nullptr;
    return status;
  }

  Status close() {
    if (!open_) return {};
    open_ = false;  // first: another thread may get the GIL in between
    const Status status = unlock();
    // In the child of a fork there is nothing to wait for and nothing to unpin.
    open_ = !status.ok() && status.code != Code::closed;
    if (!open_) PyBuffer_Release(&view_);
    return open_ ? status : Status{};
  }

  Address address() const { return reinterpret_cast<Address>(view_.buf); }
  std::uint64_t size() const { return static_cast<std::uint64_t>(view_.len); }
  bool writable() const { return view_.readonly == 0; }
  bool locked() const { return locked_; }
  bool closed() const { return !open_; }
  PyObject* memory() const { return view_.obj; }
  const Backend* order() const { return device_->order(); }

 private:
  Status unlock() {
    if (!used_) return {};
    return waiting([this] {
      Status status = device_->synchronize();
      if (!status.ok() || !locked_) return status;
      status = lock_->unlock(address());
      locked_ = !status.ok();
      return status;
    });
  }

  std::shared_ptr<Backend> device_;
  std::unique_ptr<PageLock> lock_;  // null: the device cannot pin memory
  Py_buffer view_ = {};
  bool open_ = false;    // the view is exported
  bool used_ = false;    // there is memory, and copies of it may be queued
  bool locked_ = false;  // the driver has pinned it
};

}  // namespace

bool pinned_span(PyObject* object, PinnedSpan* out) {
  PinCore* pin = nullptr;
  if (!nb::try_cast<PinCore*>(nb::handle(object), pin, false) || pin == nullptr) return false;
  *out = {pin->closed() ? nullptr : pin->memory(), pin->order(), pin->address(), pin->size(),
          pin->writable()};
  return true;
}

void bind_pin(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PinCore>(module, "PinCore", "The native part of vram.pin.")
      .def(nb::init<Backend&, nb::handle>(), "device"_a, "memory"_a)
      .def("lock", [](PinCore& pin) { require_ok(pin.lock(), "pin the memory"); })
      .def(
          "unlock", [](PinCore& pin) { require_ok(pin.close(), "unpin the memory"); },
          "Wait for everything queued on the device, then release the memory.")
      .def_prop_ro("ptr", &PinCore::address, "Address of the first byte.")
      .def_prop_ro("size", &PinCore::size, "Size in bytes.")
      .def_prop_ro("writable", &PinCore::writable, "Whether copies may write to it.")
      .def_prop_ro("pinned", &PinCore::locked, "Whether it is pinned for a GPU now.")
      .def_prop_ro("closed", &PinCore::closed, "Whether close() was called.");
}

}  // namespace vram
