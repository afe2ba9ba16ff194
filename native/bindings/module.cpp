// The extension module vram._native: only combines its parts.
#include "bindings.hpp"
#include "stable_abi.hpp"

NB_MODULE(_native, module) {
  if (const char* name = vram::missing_function(); name != nullptr)
    throw nanobind::import_error((std::string("this Python lacks ") + name + ", which vram needs").c_str());
  // Devices live until the process ends, so nanobind must not report them as leaks.
  nanobind::set_leak_warnings(false);
  module.doc() = "The native core of vram. Private: use the classes of the vram package.";
  vram::bind_devices(module);
  vram::bind_host_copies(module);
  vram::bind_pin(module);
  vram::bind_plug(module);
  vram::bind_stacks(module);
  vram::bind_pool(module);
  vram::bind_driver_pool(module);
  vram::bind_arena(module);
  vram::bind_recording(module);
  vram::bind_replay(module);
  vram::bind_planner(module);
  vram::bind_bench(module);
}
