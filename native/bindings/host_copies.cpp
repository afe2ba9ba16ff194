// Parallel copies of host memory, immediate or in the order of a device's stream. Neither needs the GIL.
#include "base/host_copies.hpp"

#include <nanobind/stl/shared_ptr.h>

#include "bindings.hpp"
#include "errors.hpp"
#include "waiting.hpp"

namespace nb = nanobind;

namespace vram {

void bind_host_copies(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<HostCopies>(module, "HostCopies", "Copies host memory with several threads.")
      .def(nb::new_([](unsigned threads) { return std::make_shared<HostCopies>(threads); }), "threads"_a = 0)
      .def_prop_ro("threads", &HostCopies::threads, "Number of threads used by one copy.")
      .def("copy", &HostCopies::copy, "to"_a, "source"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Copy now; return when the copy has completed.")
      .def(
          "queue",
          [](HostCopies& self, Backend& backend, StreamHandle stream, Address to, Address from,
             std::uint64_t bytes) {
            // Not a Python reference: the stream's thread must be able to drop it without the GIL.
            const std::shared_ptr<HostCopies> copies = self.shared_from_this();
            require_ok(
                waiting([&] { return backend.launch(stream, [=] { copies->copy(to, from, bytes); }); }),
                "queue a copy of host memory");
          },
          "backend"_a, "stream"_a, "to"_a, "source"_a, "bytes"_a,
          "Copy in stream order; the memory must stay valid until then.");
}

}  // namespace vram
