// What tests of pools on a model device share: options of the device, and a pool with calls that are short to
// write. Tests that must know who uses which byte have a `Watched` pool instead (oracle.hpp).
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "backends/host.hpp"
#include "backends/model.hpp"
#include "pool/pool.hpp"

namespace vram::testing {

// Work is executed only when the test steps the device.
inline ModelOptions manual() {
  ModelOptions options;
  options.schedule = Schedule::manual;
  return options;
}
// Work is executed `lag_us` after it was queued, on the device's virtual clock.
inline ModelOptions lagging(double lag_us = 100) {
  ModelOptions options;
  options.lag_us = lag_us;
  return options;
}

inline PoolConfig plain() {
  PoolConfig config;
  config.pages = false;
  return config;
}
// Runs a promise on both kinds of memory, pages and plain segments.
template <class Promise>
void both_kinds(Promise promise) {
  promise(PoolConfig{});
  promise(plain());
}

// Real memory that the pool may not touch at once, as on a GPU: what it zeroes is queued on a stream.
class FarHost : public HostBackend {
 public:
  explicit FarHost(std::uint64_t capacity) : HostBackend(capacity), far_(HostBackend::info()) {
    far_.host_accessible = false;
  }
  const DeviceInfo& info() const override { return far_; }

 private:
  DeviceInfo far_;
};

// A pool on a model device. Streams 0, 1 and 2 exist.
struct World {
  explicit World(std::uint64_t capacity = kGiB, const PoolConfig& config = {},
                 const ModelOptions& options = {})
      : device(std::make_shared<ModelBackend>(capacity, options)),
        pool(std::make_shared<Pool>(device, config)) {
    for (int i = 0; i < 2; ++i) (void)stream();
  }
  StreamHandle stream() const {
    StreamHandle handle = 0;
    (void)device->stream_create(&handle);
    return handle;
  }
  // A stream that another library makes, and its end.
  StreamHandle foreign() const {
    StreamHandle handle = 0;
    (void)device->foreign_create(&handle);
    return handle;
  }
  bool gone(StreamHandle stream) const { return device->foreign_destroy(stream).ok(); }
  // 0 where it fails.
  Address get(std::uint64_t size, StreamHandle on = 0, std::uint64_t align = 0) const {
    Address address = 0;
    return pool->allocate(size, on, align, 0, &address).ok() ? address : 0;
  }
  bool good() const {
    std::string why;
    const bool holds = pool->check(&why) && device->check(&why);
    if (!holds) std::printf("     check: %s\n", why.c_str());
    return holds;
  }
  PoolStats stats() const { return pool->stats(); }
  std::uint64_t reserved() const { return stats().reserved.current; }
  std::uint64_t served(Rung rung) const { return stats().rungs[static_cast<int>(rung)]; }

  std::shared_ptr<ModelBackend> device;
  std::shared_ptr<Pool> pool;
};

}  // namespace vram::testing
