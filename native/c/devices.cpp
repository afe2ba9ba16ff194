// The device, stream, work and pin functions of vram.h.
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "backends/cuda.hpp"
#include "backends/host.hpp"
#include "backends/model.hpp"
#include "state.hpp"

namespace vram::c {

constinit Registry<DeviceHandle, vram_device, 1> devices;

Device::Device(std::shared_ptr<Backend> made)
    : backend(std::move(made)), lock(page_lock_of(*backend)), process_(getpid()) {}

Device::~Device() {
  if (pins.empty() || inherited() || !synchronize().ok()) return;
  for (const auto& [address, bytes] : pins)
    if (lock != nullptr) (void)lock->unlock(address);
}

bool Device::inherited() const { return process_ != getpid(); }

namespace {

template <class Object>
void remember(std::vector<std::weak_ptr<Object>>& list, const std::shared_ptr<Object>& object) {
  std::erase_if(list, [](const auto& each) { return each.expired(); });
  list.push_back(object);
}

// Returns the first failure; closed objects are skipped.
template <class Object>
void tell(const std::vector<std::weak_ptr<Object>>& list, StreamHandle stream, Status* first) {
  for (const auto& each : list) {
    const std::shared_ptr<Object> object = each.lock();
    if (object == nullptr || object->closed()) continue;
    const Status status = object->retire_stream(stream);
    if (first->ok() && status.code != Code::closed) *first = status;
  }
}

}  // namespace

void Device::add(const std::shared_ptr<Allocator>& pool) {
  const std::lock_guard guard(mutex);
  remember(pools_, pool);
}

void Device::add(const std::shared_ptr<Arena>& arena) {
  const std::lock_guard guard(mutex);
  remember(arenas_, arena);
}

Status Device::retire(StreamHandle stream) {
  std::unique_lock guard(mutex);
  const auto arenas_told = arenas_;
  const auto pools_told = pools_;
  guard.unlock();
  Status first;
  tell(arenas_told, stream, &first);
  tell(pools_told, stream, &first);
  return first;
}

Status Device::synchronize() {
  if (auto* cuda = dynamic_cast<CudaBackend*>(backend.get())) return cuda->synchronize();
  if (auto* host = dynamic_cast<HostBackend*>(backend.get())) return host->synchronize();
  if (auto* model = dynamic_cast<ModelBackend*>(backend.get())) return model->synchronize();
  return {Code::unsupported, 0, "synchronize"};
}

void Device::release_unused(bool everything) {
  std::unique_lock guard(mutex);
  const auto told = pools_;
  guard.unlock();
  for (const auto& each : told)
    if (const std::shared_ptr<Allocator> pool = each.lock(); pool != nullptr && !pool->closed())
      (void)pool->release_unused(everything);
}

vram_device* adopt(std::shared_ptr<Backend> backend) {
  return devices.add(std::make_unique<DeviceHandle>(std::make_shared<Device>(std::move(backend))));
}

namespace {

// The open host and GPU devices, by name. Models are not shared.
struct Shared {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Device>> open;
};
Shared& shared() {
  static Shared* const leaked = new Shared();
  return *leaked;
}

// Parses "16GiB" or "1024" as bytes; 0 if it is not a size.
std::uint64_t size_of(const char* text) {
  static constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
  if (*text < '0' || *text > '9') return 0;
  char* end = nullptr;
  std::uint64_t bytes = std::strtoull(text, &end, 10);
  for (int power = 0; power < 5; ++power)
    if (std::strcmp(end, kUnits[power]) == 0 && bytes <= (~std::uint64_t{0} >> (10 * power)))
      return bytes << (10 * power);
  return 0;
}

// The number after "cuda:", 0 for "cuda" alone, -1 for any other name.
int cuda_index(const std::string& name) {
  if (name == "cuda") return 0;
  if (name.rfind("cuda:", 0) != 0 || name.size() > 8 ||
      name.find_first_not_of("0123456789", 5) != std::string::npos || name.size() == 5)
    return -1;
  return std::atoi(name.c_str() + 5);
}

vram_status open(const std::string& name, const char* call, std::shared_ptr<Device>* out) {
  if (name.rfind("model:", 0) == 0) {
    const std::uint64_t capacity = size_of(name.c_str() + 6);
    if (capacity < kSlotBytes)
      return fail(VRAM_BAD_ARGUMENT, call, "\"%s\" needs a capacity of at least 2MiB, as in \"model:16GiB\"",
                  name.c_str());
    *out = std::make_shared<Device>(std::make_shared<ModelBackend>(capacity));
    return VRAM_OK;
  }
  const int index = cuda_index(name);
  if (index < 0 && name != "host")
    return fail(VRAM_BAD_ARGUMENT, call,
                "\"%s\" is not a device name; valid names are \"host\", \"cuda:0\" and \"model:16GiB\"",
                name.c_str());
  const std::string full = index < 0 ? name : "cuda:" + std::to_string(index);
  const std::lock_guard guard(shared().mutex);
  std::weak_ptr<Device>& known = shared().open[full];
  *out = known.lock();
  if (*out != nullptr && !(*out)->inherited()) return VRAM_OK;
  if (*out != nullptr && index >= 0)
    return fail(VRAM_CLOSED, call, "a CUDA device cannot be used after a fork");
  if (index >= 0) {
    std::string why;
    const int count = CudaBackend::device_count(&why);
    if (index >= count)
      return fail(VRAM_UNSUPPORTED, call, "device %s does not exist: %s", full.c_str(),
                  why.empty() ? ("number of CUDA devices: " + std::to_string(count)).c_str() : why.c_str());
    *out = std::make_shared<Device>(std::make_shared<CudaBackend>(index));
  } else {
    *out = std::make_shared<Device>(std::shared_ptr<HostBackend>(new HostBackend(), end<HostBackend>));
  }
  known = *out;
  return VRAM_OK;
}

std::string default_name() {
  std::string why;
  return CudaBackend::device_count(&why) > 0 ? "cuda:0" : "host";
}

template <class Body>
vram_status with_device(vram_device* handle, const char* call, Body body) noexcept {
  return with(devices, handle, "device", call, [&](DeviceHandle& found) { return body(*found.device); });
}

}  // namespace

}  // namespace vram::c

using namespace vram;
using namespace vram::c;

extern "C" {

vram_status vram_device_open(const char* name, vram_device** out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return guarded(__func__, [&, call = __func__] {
    std::shared_ptr<Device> device;
    const vram_status status = open(name == nullptr ? default_name() : name, call, &device);
    if (status == VRAM_OK) *out = devices.add(std::make_unique<DeviceHandle>(std::move(device)));
    return status;
  });
}

vram_status vram_device_close(vram_device* device) {
  return guarded(__func__, [&, call = __func__] {
    return devices.take(device) == nullptr ? bad_handle(call, "device") : VRAM_OK;
  });
}

vram_status vram_device_get_info(vram_device* handle, vram_device_info* out) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    vram_device_info full = VRAM_DEVICE_INFO_INIT;
    const DeviceInfo& info = device.backend->info();
    std::strncpy(full.name, info.name.c_str(), sizeof full.name - 1);
    const Status status = device.backend->memory_info(&full.free_bytes, &full.total_bytes);
    if (!status.ok()) return fail(status, call);
    full.host_accessible = info.host_accessible;
    full.page_locks = device.lock != nullptr;
    return give(full, out, call);
  });
}

vram_status vram_device_synchronize(vram_device* handle) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    const Status status = device.synchronize();
    if (status.ok()) device.release_unused(true);
    return result(status, call);
  });
}

// ---- streams and work -----------------------------------------------------------------------------------

vram_status vram_stream_create(vram_device* handle, vram_stream* out) {
  if (out == nullptr) return null_pointer(__func__, "out");
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    StreamHandle made = 0;
    if (const Status status = device.backend->stream_create(&made); !status.ok()) return fail(status, call);
    try {
      const std::lock_guard guard(device.mutex);
      device.streams.insert(made);
    } catch (...) {
      (void)device.backend->stream_destroy(made);
      throw;
    }
    *out = reinterpret_cast<vram_stream>(made);
    return VRAM_OK;
  });
}

vram_status vram_stream_destroy(vram_device* handle, vram_stream stream) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    std::unique_lock guard(device.mutex);
    auto taken = device.streams.extract(handle_of(stream));  // only one of several callers gets it
    guard.unlock();
    if (taken.empty())
      return fail(VRAM_BAD_ARGUMENT, call,
                  "stream %p was not created by vram_stream_create, or was already destroyed", stream);
    Status status = device.retire(handle_of(stream));
    if (status.ok()) status = device.backend->stream_destroy(handle_of(stream));
    if (status.ok()) return VRAM_OK;
    guard.lock();
    device.streams.insert(std::move(taken));
    return fail(status, call);
  });
}

vram_status vram_stream_retire(vram_device* handle, vram_stream stream) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    return result(device.retire(handle_of(stream)), call);
  });
}

vram_status vram_stream_synchronize(vram_device* handle, vram_stream stream) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    const Status status = device.backend->stream_synchronize(handle_of(stream));
    if (status.ok()) device.release_unused(false);
    return result(status, call);
  });
}

vram_status vram_stream_wait(vram_device* handle, vram_stream stream, vram_stream other) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    EventHandle event = 0;
    if (const Status status = device.backend->event_create(&event); !status.ok()) return fail(status, call);
    Status status = device.backend->event_record(event, handle_of(other));
    if (status.ok()) status = device.backend->stream_wait(handle_of(stream), event);
    (void)device.backend->event_destroy(event);
    return result(status, call);
  });
}

vram_status vram_copy(vram_device* handle, void* to, const void* from, size_t bytes, vram_stream stream) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    if (bytes == 0) return VRAM_OK;
    if (to == nullptr) return null_pointer(call, "to");
    if (from == nullptr) return null_pointer(call, "from");
    Backend& backend = *device.backend;
    const auto copy = [&] {
      return backend.copy(address_of(to), address_of(from), bytes, handle_of(stream));
    };
    return result(backend.beside_swaps(copy), call);
  });
}

vram_status vram_fill(vram_device* handle, void* to, unsigned char value, size_t bytes, vram_stream stream) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    if (bytes == 0) return VRAM_OK;
    if (to == nullptr) return null_pointer(call, "to");
    Backend& backend = *device.backend;
    const auto fill = [&] { return backend.fill(address_of(to), value, bytes, handle_of(stream)); };
    return result(backend.beside_swaps(fill), call);
  });
}

vram_status vram_launch(vram_device* handle, void (*work)(void*), void* argument, vram_stream stream) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    if (work == nullptr) return null_pointer(call, "work");
    return result(device.backend->launch(handle_of(stream), [work, argument] { work(argument); }), call);
  });
}

// ---- existing host memory ---------------------------------------------------------------------------------

vram_status vram_pin(vram_device* handle, void* address, size_t bytes) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    if (address == nullptr) return null_pointer(call, "address");
    const Address begin = address_of(address);
    if (bytes == 0 || begin + bytes < begin)
      return fail(VRAM_BAD_ARGUMENT, call, "%zu bytes at %p cannot be pinned", bytes, address);
    std::unique_lock guard(device.mutex);
    const auto after = device.pins.upper_bound(begin);
    const bool before_overlaps =
        after != device.pins.begin() && std::prev(after)->first + std::prev(after)->second > begin;
    if (before_overlaps || (after != device.pins.end() && after->first < begin + bytes))
      return fail(VRAM_BAD_ARGUMENT, call, "the %zu bytes at %p are already pinned, completely or in part",
                  bytes, address);
    device.pins.emplace(begin, bytes);
    guard.unlock();  // pinning may wait for the device
    if (device.lock == nullptr) return VRAM_OK;
    const Status status = device.lock->lock(begin, bytes, true);
    if (status.ok()) return VRAM_OK;
    guard.lock();
    device.pins.erase(begin);
    return fail(status, call);
  });
}

vram_status vram_unpin(vram_device* handle, void* address) {
  return with_device(handle, __func__, [&, call = __func__](Device& device) {
    std::unique_lock guard(device.mutex);
    auto taken = device.pins.extract(address_of(address));  // only one of several callers gets it
    guard.unlock();
    if (taken.empty()) return fail(VRAM_BAD_POINTER, call, "%p is not the start of pinned memory", address);
    Status status = device.synchronize();
    if (status.ok() && device.lock != nullptr) status = device.lock->unlock(address_of(address));
    if (status.ok()) return VRAM_OK;
    guard.lock();
    device.pins.insert(std::move(taken));
    return fail(status, call);
  });
}

}  // extern "C"
