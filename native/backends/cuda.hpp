// A CUDA device behind the backend contract, through the driver API found at run time (libcuda.so.1): no
// toolkit to build, no failure to import where there is no driver. It works in the primary context, beside
// every other library of the process, and leaves the calling thread's current context as it found it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.hpp"

namespace vram {

struct CudaDriver;  // the table of functions, in cuda.cpp

class CudaBackend : public Backend {
 public:
  // How many devices there are; 0 with a reason where the driver is missing or refuses.
  static int device_count(std::string* why);
  // Throws std::runtime_error that says what was looked for or which call failed.
  explicit CudaBackend(int index);
  ~CudaBackend() override;

  const DeviceInfo& info() const override { return info_; }
  Status memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) override;

  Status reserve(std::uint64_t bytes, Address* out) override;
  Status release(Address address, std::uint64_t bytes) override;

  Status space_reserve(std::uint64_t bytes, Address* out) override;
  Status space_release(Address address, std::uint64_t bytes) override;
  Status page_create(std::uint64_t bytes, PageHandle* out) override;
  Status page_release(PageHandle page, std::uint64_t bytes) override;
  Status map(Address address, std::uint64_t bytes, PageHandle page) override;
  Status set_access(Address address, std::uint64_t bytes) override;
  Status unmap(Address address, std::uint64_t bytes) override;

  Status stream_create(StreamHandle* out) override;
  Status stream_destroy(StreamHandle stream) override;
  Status stream_synchronize(StreamHandle stream) override;
  Status stream_query(StreamHandle stream) override;
  Status stream_wait(StreamHandle stream, EventHandle event) override;
  Status event_create(EventHandle* out) override;
  Status event_destroy(EventHandle event) override;
  Status event_record(EventHandle event, StreamHandle stream) override;
  Status event_query(EventHandle event) override;
  Status event_synchronize(EventHandle event) override;

  Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) override;
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) override;
  Status launch(StreamHandle stream, std::function<void()> work) override;

 private:
  // Runs a driver call in this device's context and names it in the Status.
  template <typename Call>
  Status in_context(const char* name, Call call) const;
  bool inherited() const;  // through fork: the driver must not be called

  const CudaDriver& driver_;
  int device_ = 0;           // CUdevice
  void* context_ = nullptr;  // the primary context, retained
  int process_ = 0;          // the one that opened it
  bool rdma_ = false;        // pages can be made reachable for network cards
  DeviceInfo info_;
};

}  // namespace vram
