// cuDNN of the null GPU. Plans are made by the real library, in its mode without a device: it is given the
// properties of the device of the profile instead of a handle, so that heuristics and workspaces are its own.
// Executing a plan does nothing. Functions that compute and return nothing do nothing (unknown.cpp).
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "null_gpu/abi.hpp"
#include "null_gpu/dnn_plans.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/profile.hpp"

using namespace vram::null_gpu;

namespace {

constexpr int kOk = 0;
constexpr int kUnsupported = 3000;

// Kinds of descriptors, attributes and types of attributes.
constexpr int kEngine = 2, kHeuristics = 4, kPlan = 5, kDeviceProperties = 38;
constexpr int kEngineDevice = 1307, kHeuristicsDevice = 204, kPlanDevice = 407, kDeviceText = 2702;
constexpr int kHeuristicsResults = 202, kPlanWorkspace = 402, kPlanText = 405;
constexpr int kTypeHandle = 0, kTypeDescriptor = 15, kTypeChar = 24;

// A function of the library that PyTorch has loaded.
template <typename Function>
Function real(const char* name) {
  static void* const library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(dlsym(library, name));
}
using Create = int (*)(int, Descriptor*);
using Set = int (*)(Descriptor, int, int, std::int64_t, const void*);
using Finalize = int (*)(Descriptor);
using Get = int (*)(Descriptor, int, int, std::int64_t, std::int64_t*, void*);

std::string device_text() {
  const Profile& profile = Profile::get();
  char text[1024];
  std::snprintf(
      text, sizeof(text),
      R"({"cudaDeviceId":0,"deviceVer":%d,"driverVer":%d,"maxGridSize":[2147483647,65535,65535],)"
      R"("maxBlockSize":[1024,1024,64],"regsPerBlock":65536,"multiProcessorCount":%d,"warpSize":32,)"
      R"("maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":%d,"reservedSharedMemoryPerBlock":1024,)"
      R"("maxRegistersPerSM":65536,"maxCtasPerSM":%d,"maxThreadsPerBlock":1024,"maxThreadsPerSM":%d,)"
      R"("pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":%d,"memClockRateKHz":%d,)"
      R"("l2CacheSize":%d,"deviceName":"%s","totalGlobalMem":%llu})",
      profile.major * 100 + profile.minor * 10, profile.driver, profile.multiprocessors,
      profile.shared_bytes - 1024, profile.blocks, profile.threads, profile.clock_khz,
      profile.memory_clock_khz, profile.l2_bytes, profile.name.c_str(),
      static_cast<unsigned long long>(profile.memory));
  return text;
}

// The device's properties as a descriptor of the real library; null where it does not take them.
Descriptor device() {
  static const Descriptor made = [] {
    static const auto create = real<Create>("cudnnBackendCreateDescriptor");
    static const auto set = real<Set>("cudnnBackendSetAttribute");
    static const auto finalize = real<Finalize>("cudnnBackendFinalize");
    Descriptor descriptor = nullptr;
    const std::string text = device_text();
    const bool ok = create(kDeviceProperties, &descriptor) == kOk &&
                    set(descriptor, kDeviceText, kTypeChar, static_cast<std::int64_t>(text.size() + 1),
                        text.c_str()) == kOk &&
                    finalize(descriptor) == kOk;
    if (!ok)
      std::fputs("vram: cuDNN does not take the properties of the null GPU; convolutions fail\n", stderr);
    return ok ? descriptor : nullptr;
  }();
  return made;
}

int set_device(Descriptor descriptor, int attribute) {
  static const auto set = real<Set>("cudnnBackendSetAttribute");
  Descriptor properties = device();
  return set(descriptor, attribute, kTypeDescriptor, 1, &properties);
}

// A number that a plan's text, in JSON, gives for a knob.
std::optional<int> knob(const std::string& text, const char* name) {
  const std::string key = std::string("\"CUDNN_KNOB_TYPE_") + name + "\":";
  const std::size_t found = text.find(key);
  if (found == std::string::npos) return std::nullopt;
  return std::atoi(text.c_str() + found + key.size());
}

// How a plan cuts its work; none: it has no such choice, and needs the same without a device.
std::optional<Tiling> tiling_of(Descriptor plan) {
  static const auto get = real<Get>("cudnnBackendGetAttribute");
  std::int64_t bytes = 0;
  if (get(plan, kPlanText, kTypeChar, 0, &bytes, nullptr) != kOk || bytes < 1) return std::nullopt;
  std::string text(static_cast<std::size_t>(bytes), '\0');
  if (get(plan, kPlanText, kTypeChar, bytes, &bytes, text.data()) != kOk) return std::nullopt;
  const auto tile = knob(text, "TILE_SIZE"), whole = knob(text, "WORKSPACE");
  const auto rows = knob(text, "TILE_CGA_M"), columns = knob(text, "TILE_CGA_N");
  if (!tile || !whole || !rows || !columns) return std::nullopt;
  return Tiling{*tile, *rows, *columns, *whole == 0};
}

}  // namespace

VRAM_NULL_API int cudnnCreate(Handle* out) {
  *out = new_handle();
  return kOk;
}
VRAM_NULL_API int cudnnGetStream(Handle, Handle* out) {
  *out = nullptr;
  return kOk;
}
VRAM_NULL_API int cudnnBackendCreateDescriptor(int kind, Descriptor* out) {
  static const auto create = real<Create>("cudnnBackendCreateDescriptor");
  const int status = create(kind, out);
  if (status == kOk) Plans::get().created(*out, kind);
  return status;
}
VRAM_NULL_API int cudnnBackendDestroyDescriptor(Descriptor descriptor) {
  static const auto destroy = real<Finalize>("cudnnBackendDestroyDescriptor");
  Plans::get().destroyed(descriptor);
  return destroy(descriptor);
}
VRAM_NULL_API int cudnnBackendSetAttribute(Descriptor descriptor, int attribute, int type, std::int64_t count,
                                           const void* values) {
  static const auto set = real<Set>("cudnnBackendSetAttribute");
  if (type != kTypeHandle) {
    const int status = set(descriptor, attribute, type, count, values);
    if (status == kOk) Plans::get().was_set(descriptor, attribute, count, values);
    return status;
  }
  return Plans::get().kind_of(descriptor) == kPlan ? set_device(descriptor, kPlanDevice) : kOk;
}
VRAM_NULL_API int cudnnBackendFinalize(Descriptor descriptor) {
  static const auto finalize = real<Finalize>("cudnnBackendFinalize");
  const int kind = Plans::get().kind_of(descriptor);
  if (kind == kHeuristics) (void)set_device(descriptor, kHeuristicsDevice);
  if (kind == kEngine) (void)set_device(descriptor, kEngineDevice);
  return finalize(descriptor);
}
VRAM_NULL_API int cudnnBackendGetAttribute(Descriptor descriptor, int attribute, int type,
                                           std::int64_t wanted, std::int64_t* count, void* values) {
  static const auto get = real<Get>("cudnnBackendGetAttribute");
  if (type == kTypeHandle) return kUnsupported;
  const int status = get(descriptor, attribute, type, wanted, count, values);
  if (status != kOk || values == nullptr || wanted < 1) return status;
  if (attribute == kHeuristicsResults) {
    Plans::get().found(descriptor, std::min(wanted, *count), static_cast<Descriptor*>(values));
  } else if (attribute == kPlanWorkspace) {
    auto& bytes = *static_cast<std::int64_t*>(values);
    if (const auto plan = Plans::get().convolution_of(descriptor))
      bytes = static_cast<std::int64_t>(convolution_workspace(
          plan->convolution, tiling_of(descriptor), plan->first, static_cast<std::uint64_t>(bytes)));
  }
  return status;
}
VRAM_NULL_API int cudnnBackendExecute(Handle, Descriptor, Descriptor) { return kOk; }

// Versions and texts come from the real library.
VRAM_NULL_API std::size_t cudnnGetVersion() {
  static const auto get = real<std::size_t (*)()>("cudnnGetVersion");
  return get();
}
VRAM_NULL_API std::size_t cudnnGetCudartVersion() {
  static const auto get = real<std::size_t (*)()>("cudnnGetCudartVersion");
  return get();
}
VRAM_NULL_API int cudnnGetProperty(int kind, int* value) {
  static const auto get = real<int (*)(int, int*)>("cudnnGetProperty");
  return get(kind, value);
}
VRAM_NULL_API const char* cudnnGetErrorString(int status) {
  static const auto get = real<const char* (*)(int)>("cudnnGetErrorString");
  return get(status);
}
VRAM_NULL_API void cudnnGetLastErrorString(char* text, std::size_t bytes) {
  static const auto get = real<void (*)(char*, std::size_t)>("cudnnGetLastErrorString");
  get(text, bytes);
}
