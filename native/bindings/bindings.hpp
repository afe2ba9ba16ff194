// What the binding files share: the parts of the module, and how a native object keeps the backend that
// Python passed alive. Each bind_ function is in the file of its name.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <memory>

#include "backends/backend.hpp"

namespace vram {

void bind_arena(nanobind::module_& module);
void bind_bench(nanobind::module_& module);
void bind_devices(nanobind::module_& module);
void bind_host_copies(nanobind::module_& module);
void bind_pin(nanobind::module_& module);
void bind_planner(nanobind::module_& module);
void bind_plug(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_driver_pool(nanobind::module_& module);
void bind_recording(nanobind::module_& module);
void bind_replay(nanobind::module_& module);
void bind_stacks(nanobind::module_& module);

// Returns the C++ owner of a Python backend object. It keeps the backend alive without a reference to Python,
// and may be dropped on any thread, with or without the GIL.
std::shared_ptr<Backend> backend_of(Backend& backend);

// Copies memory that need not outlive the call. It waits for the stream first: if that fails or is
// interrupted, nothing was queued that would use the memory later. Then only the copy itself must be waited
// for.
Status copy_now(Backend& backend, Address to, Address from, std::uint64_t bytes, StreamHandle stream);

// A copy between memory of two devices; see backends/transfers.hpp. The copy is ordered on both streams; the
// one of `here` exists. If the streams of the devices cannot wait for each other, the host must have waited
// for both (host_waits), and waits for the copy.
bool host_waits(const Backend& here, const Backend& there);
Status copy_across(Backend& here, Address address, StreamHandle stream, Backend& there, Address other,
                   StreamHandle other_stream, bool from_there, std::uint64_t bytes);

// Runs a function that may throw, as nanobind's objects do, with C calling conventions: returns its result,
// or null with the exception set as a Python error.
template <typename Make>
PyObject* guarded(Make make) {
  try {
    return make().release().ptr();
  } catch (nanobind::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace vram
