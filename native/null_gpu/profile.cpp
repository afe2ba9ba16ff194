#include "null_gpu/profile.hpp"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace vram::null_gpu {

namespace {

constexpr int kBadSetting = 2;  // the exit status
constexpr std::uint64_t kMostNumber = 0x7fffffff;

// Nothing that runs on a GPU that nobody asked for would mean anything.
[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "vram: VRAM_NULL_GPU %s; let vram run --null-gpu or vram predict set it\n",
               why.c_str());
  std::_Exit(kBadSetting);
}

// A whole number below 2^63, or not.
bool read_number(const std::string& text, std::uint64_t* out) {
  *out = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '9' || *out > (~std::uint64_t{0} >> 1) / 10) return false;
    *out = 10 * *out + static_cast<std::uint64_t>(digit - '0');
  }
  return !text.empty() && *out <= ~std::uint64_t{0} >> 1;
}

void set(Profile& profile, const std::string& key, const std::string& value) {
  const struct {
    const char* key;
    std::uint64_t* field;
  } sizes[] = {{"memory", &profile.memory}, {"overhead", &profile.overhead}};
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
  if (key == "name") {
    profile.name = value;
    return;
  }
  std::uint64_t number = 0;
  const bool valid = read_number(value, &number);
  for (const auto& each : sizes)
    if (key == each.key) return valid ? void(*each.field = number) : refuse("has " + key + "=" + value);
  for (const auto& each : numbers)
    if (key == each.key)
      return valid && number <= kMostNumber ? void(*each.field = static_cast<int>(number))
                                            : refuse("has " + key + "=" + value);
  refuse("has no setting " + key);
}

Profile read() {
  Profile profile;
  const char* text = std::getenv("VRAM_NULL_GPU");
  if (text == nullptr) refuse("is not set");
  std::istringstream settings(text);
  for (std::string setting; std::getline(settings, setting, ';');) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos) refuse("has " + setting + ", which is not KEY=VALUE");
    set(profile, setting.substr(0, equals), setting.substr(equals + 1));
  }
  if (profile.memory == 0) refuse("has no memory=BYTES");
  if (profile.devices == 0 || profile.devices > kMostDevices) refuse("has too few or too many devices");
  return profile;
}

}  // namespace

const Profile& Profile::get() {
  static const Profile profile = read();
  return profile;
}

}  // namespace vram::null_gpu
