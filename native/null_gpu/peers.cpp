// Access of null GPUs to each other's memory. Any device can access any other; a program must ask for it
// once.
#include <mutex>
#include <set>
#include <utility>

#include "null_gpu/abi.hpp"
#include "null_gpu/errors.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/values.hpp"

using namespace vram::null_gpu;

namespace {

struct Enabled {
  std::mutex mutex;
  std::set<std::pair<int, int>> pairs;  // the device that accesses, and the one that is accessed
};
Enabled& enabled() {
  static auto* const made = new Enabled;  // used until the process has ended
  return *made;
}

Result enable(int device, int peer) {
  if (memory_of(peer) == nullptr) return kInvalidDevice;
  if (peer == device) return kPeerUnsupported;
  const std::lock_guard lock(enabled().mutex);
  return enabled().pairs.emplace(device, peer).second ? kSuccess : kPeerEnabled;
}

Result disable(int device, int peer) {
  if (memory_of(peer) == nullptr) return kInvalidDevice;
  const std::lock_guard lock(enabled().mutex);
  return enabled().pairs.erase({device, peer}) != 0 ? kSuccess : kPeerNotEnabled;
}

}  // namespace

VRAM_NULL_API Result cuDeviceCanAccessPeer(int* out, int device, int peer) {
  if (memory_of(device) == nullptr || memory_of(peer) == nullptr) return kInvalidDevice;
  *out = device != peer ? 1 : 0;
  return kSuccess;
}

VRAM_NULL_API Result cuCtxEnablePeerAccess(Handle peer, unsigned) {
  return enable(chosen_device(), device_of_context(peer));
}
VRAM_NULL_API Result cuMemcpyPeerAsync(DevicePointer to, Handle to_context, DevicePointer from,
                                       Handle from_context, std::size_t bytes, Handle stream) {
  if (memory_of(device_of_context(to_context)) == nullptr ||
      memory_of(device_of_context(from_context)) == nullptr)
    return kInvalidDevice;
  Order::get().queued(stream);
  copied(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return kSuccess;
}

VRAM_NULL_API Result cudaDeviceCanAccessPeer(int* out, int device, int peer) {
  return returned(cuDeviceCanAccessPeer(out, device, peer));
}
VRAM_NULL_API Result cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return returned(enable(chosen_device(), peer));
}
VRAM_NULL_API Result cudaDeviceDisablePeerAccess(int peer) {
  return returned(disable(chosen_device(), peer));
}
VRAM_NULL_API Result cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                         std::size_t bytes, Handle) {
  if (memory_of(to_device) == nullptr || memory_of(from_device) == nullptr) return returned(kInvalidDevice);
  copied(to, from, bytes);
  return kSuccess;
}
VRAM_NULL_API Result cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device,
                                    std::size_t bytes) {
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, nullptr);
}
