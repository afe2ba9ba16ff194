// The texts of errors from the core, and the exception for each.
#include "errors.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cctype>
#include <cstring>
#include <string>

#include "backends/cuda_driver.hpp"
#include "driver_pool/driver_pool.hpp"
#include "pool/pool.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

constexpr const char* kCodeNames[] = {"ok",          "not_ready", "out_of_memory", "invalid",
                                      "unsupported", "failed",    "closed",        "capturing",
                                      "suspended",   "absent",    "deadlock",      "interrupted"};

bool is_free(const Status& status) {
  return status.code == Code::invalid && std::strcmp(status.call, "free") == 0;
}

const char* exception_name(const Status& status) {
  if (status.code == Code::out_of_memory) return "OutOfMemory";
  if (status.code == Code::suspended) return "Suspended";
  return is_free(status) ? "InvalidFree" : "DeviceError";
}

// Explains what happened and what to do next.
const char* advice(const Status& status) {
  if (is_free(status)) {
    return "the pointer is not a live allocation of this pool: it was already freed, points inside an "
           "allocation, or belongs to another pool. Free each allocated pointer exactly once.";
  }
  switch (status.code) {
    case Code::out_of_memory:
      if (std::strcmp(status.call, Spiller::kBudget) == 0)
        return "the option spill does not allow so much host memory. "
               "Set a larger spill, or free memory that takes a part of it (Pool.spilled).";
      if (std::strcmp(status.call, Spiller::kHostPage) == 0)
        return "the host has no memory left for it. Free host memory, or reduce the option spill.";
      if (std::strcmp(status.call, Spiller::kLimit) == 0)
        return "the limit of the pool does not allow so much device memory. What it allows has moved. "
               "Raise the limit, or free memory of the pool.";
      return "the device has no memory left for it. Free memory here or in other processes on the device, or "
             "request less.";
    case Code::invalid:
      if (std::strcmp(status.call, "suspend") == 0 || std::strcmp(status.call, "resume") == 0 ||
          std::strcmp(status.call, "close") == 0)
        return "the same thread is suspending or resuming this pool, and called it again from a callback of "
               "the store. Such a callback may only free memory.";
      return "a handle, address or size is not valid on this device. It may already have been closed, or "
             "belong to another device.";
    case Code::unsupported:
      if (std::strcmp(status.call, DriverPool::kImported) == 0)
        return "the pool was imported from another process, and only that process can allocate from it. "
               "Use import_buffer() for the allocations that it exports.";
      if (std::strcmp(status.call, "suspend") == 0)
        return "its memory consists of plain segments, which cannot be released under live buffers. Use a "
               "vram.Pool with pages=True on a device that supports pages (Device.pages).";
      if (std::strcmp(status.call, "spill") == 0 || std::strcmp(status.call, "prefetch") == 0)
        return "it needs a pool with pages and the option spill, on a device that can map host memory.";
      if (std::strcmp(status.call, Pool::kTooManyStreams) == 0)
        return "the pool supports 65535 streams at a time and has reached this number. Close unused streams, "
               "or use fewer streams.";
      return "the device does not support this. Device.pages tells whether it has pages.";
    case Code::closed:
      if (std::strcmp(status.call, "store") == 0)
        return "the pool that stored their contents was closed, and the contents are lost. They can "
               "only be freed. Close a store after resume().";
      return "the device is closed, the interpreter is exiting, or the device was inherited through fork. "
             "After a fork, open the device again in the child.";
    case Code::capturing:
      return "the stream is being captured into a graph, so its work can be neither waited for nor queried. "
             "Do this before the capture begins or after it has ended.";
    case Code::suspended:
      return "its memory is suspended: it was released to the device and cannot be read or written. Call "
             "resume() to restore it at the same address.";
    case Code::absent:
      return "it needs a lasting stream: the default stream, a vram.Stream, or a stream of PyTorch or CuPy. "
             "Other streams may be destroyed at any moment.";
    case Code::deadlock:
      return "the call came from work on a stream and would wait for later work on that stream, which cannot "
             "start before the call returns. Make the call from another thread, or launch less work behind "
             "it.";
    case Code::not_ready:
      return "work on a stream did not complete in time, so no memory was moved. Call it again after that "
             "work "
             "has completed.";
    case Code::interrupted:
      return "the wait was interrupted. The work continues and nothing has changed; call it again.";
    default:
      return "the driver call failed. The native error code gives the reason; the device may need a reset.";
  }
}

// The number, with the driver's own name for it if the call is one of the driver's.
std::string native_text(const Status& status) {
  const bool cuda = std::strncmp(status.call, "cu", 2) == 0 && std::isupper(status.call[2]) != 0;
  return cuda ? cuda_error_text(status.native) : std::to_string(status.native);
}

}  // namespace

const char* code_name(Code code) { return kCodeNames[static_cast<int>(code)]; }

bool code_from_name(const char* name, Code* out) {
  for (int code = 0; code < static_cast<int>(std::size(kCodeNames)); ++code) {
    if (std::strcmp(name, kCodeNames[code]) != 0) continue;
    *out = static_cast<Code>(code);
    return true;
  }
  return false;
}

void raise_status(const Status& status, const char* what) {
  if (status.code == Code::interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
  std::string message = std::string("vram failed to ") + what + ": " + advice(status);
  message += std::string(" [call ") + status.call + ", code " + code_name(status.code);
  message += status.native != 0 ? ", native " + native_text(status) + "]" : "]";
  const nb::object type = nb::module_::import_("vram.errors").attr(exception_name(status));
  const nb::object error = type(message, nb::arg("call") = status.call,
                                nb::arg("code") = code_name(status.code), nb::arg("native") = status.native);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

}  // namespace vram
