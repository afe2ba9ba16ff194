#include "null_gpu/profile.hpp"

#include <cstdlib>
#include <sstream>

namespace vram::null_gpu {

namespace {

Profile read() {
  Profile profile;
  const char* text = std::getenv("VRAM_NULL_GPU");
  std::istringstream settings(text != nullptr ? text : "");
  for (std::string setting; std::getline(settings, setting, ';');) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos) continue;
    const std::string key = setting.substr(0, equals), value = setting.substr(equals + 1);
    const auto number = std::strtoull(value.c_str(), nullptr, 10);
    const struct {
      const char* key;
      int* field;
    } numbers[] = {
        {"devices", &profile.devices},     {"major", &profile.major},
        {"minor", &profile.minor},         {"multiprocessors", &profile.multiprocessors},
        {"l2_bytes", &profile.l2_bytes},   {"shared_bytes", &profile.shared_bytes},
        {"threads", &profile.threads},     {"blocks", &profile.blocks},
        {"clock_khz", &profile.clock_khz}, {"memory_clock_khz", &profile.memory_clock_khz},
        {"bus_bits", &profile.bus_bits},   {"driver", &profile.driver},
    };
    if (key == "name") profile.name = value;
    if (key == "memory") profile.memory = number;
    if (key == "overhead") profile.overhead = number;
    for (const auto& each : numbers)
      if (key == each.key) *each.field = static_cast<int>(number);
  }
  return profile;
}

}  // namespace

const Profile& Profile::get() {
  static const Profile profile = read();
  return profile;
}

}  // namespace vram::null_gpu
