// The extension module vram._native: only puts its parts together.
#include "bindings.hpp"

namespace vram {

// Replaced by the definitions in pool.cpp and replay.cpp where these are built.
__attribute__((weak)) void bind_pool(nanobind::module_&) {}
__attribute__((weak)) void bind_replay(nanobind::module_&) {}

}  // namespace vram

NB_MODULE(_native, module) {
  module.doc() = "The native core of vram. Private: use the classes of the vram package.";
  vram::bind_devices(module);
  vram::bind_pool(module);
  vram::bind_replay(module);
}
