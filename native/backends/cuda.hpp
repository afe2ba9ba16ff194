// A CUDA device that implements the backend contract with the driver API, loaded at run time
// (cuda_driver.hpp). It uses the primary context, next to every other library of the process, and restores
// the calling thread's current context. Beyond the contract: graphs, kernels, and hardware properties.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "backends/backend.hpp"
#include "backends/cuda_driver.hpp"
#include "backends/driver_pool_backend.hpp"

namespace vram {

class CudaBackend : public Backend, public DriverPoolBackend {
 public:
  // The number of devices; 0 with a reason if the driver is missing or fails.
  static int device_count(std::string* why);
  // Throws std::runtime_error that names the missing part or the failed call.
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
  Status add_peer(int device) override;
  bool can_access(const Backend& other) const override;
  Status open_plain(Backend& other) override;
  bool waits_for(const Backend& other) const override;
  Status stream_wait_peer(StreamHandle stream, const Backend& other, EventHandle event) override;
  // The driver needs no access to pages that are not opened to this device: it copies through both contexts.
  Status copy_peer(Address to, Address from, std::uint64_t bytes, const Backend& other, bool from_other,
                   StreamHandle stream) override;
  Status unmap(Address address, std::uint64_t bytes) override;

  Status host_page_create(std::uint64_t bytes, PageHandle* out, Address* copies) override;
  Status host_page_release(PageHandle page, std::uint64_t bytes, Address copies) override;
  Status gate_close(StreamHandle stream, GateHandle* out) override;
  Status gate_wait(GateHandle gate, double seconds) override;
  void gate_open(GateHandle gate) override;
  // Not all lasting streams:
  //   - A gate on the default stream holds all blocking streams, and those of threads: they and the default
  //     stream wait for each other. A gate of their own would keep the default stream from arriving.
  //   - PyTorch creates dozens of streams and the device runs at most 128 kernels at a time, so an adopted
  //     stream is held if a pool uses it or if it has work.
  std::vector<StreamHandle> held_streams() override;

  Status page_export(PageHandle page, int* fd) override;
  Status page_import(int fd, std::uint64_t bytes, PageHandle* out) override;
  Status plain_export(Address address, PlainName* out) override;
  Status plain_open(const PlainName& name, Address* out) override;
  Status plain_close(Address address) override;

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
  Status timing_event_create(EventHandle* out) override;
  Status elapsed_ms(EventHandle from, EventHandle to, double* out) override;
  Status synchronize() override;

  // 1 is another name of the default stream. 2, the default stream of the calling thread, gets a number for
  // each thread. Such a stream and the default stream wait for each other, so its fences are recorded on the
  // default stream, which any thread can use.
  StreamHandle canonical(StreamHandle stream) const override;
  bool lasting(StreamHandle stream) const override;
  Status stream_adopt(StreamHandle stream) override;
  void stream_used(StreamHandle stream) override;
  Status stream_disown(StreamHandle stream) override;
  Status stream_id(StreamHandle stream, StreamId* out) override;
  bool ended(StreamHandle stream) const override;
  Status capture_of(StreamHandle stream, CaptureId* out) override;
  Status capture_position(StreamHandle stream, CaptureId* capture, std::vector<GraphNode>* out) override;
  Status capture_followed(GraphNode node, std::vector<GraphNode>* out) override;
  // The default stream cannot be captured; querying another one takes about 25 ns.
  bool capturing(StreamHandle stream) override;
  Status capture_keep(StreamHandle stream, std::function<void()> gone) override;

  Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) override;
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) override;
  Status launch(StreamHandle stream, std::function<void()> work) override;

  // ---- the driver's own pools (cuda_pools.cpp) ----------------------------------------------------
  DriverPoolBackend* driver_pools() override;
  Status pool_create(const DriverPoolProperties& properties, DriverPoolHandle* out) override;
  Status pool_default(DriverPoolHandle* out) override;
  Status pool_destroy(DriverPoolHandle pool) override;
  Status pool_allocate(DriverPoolHandle pool, std::uint64_t bytes, StreamHandle stream,
                       Address* out) override;
  Status pool_free(Address address, StreamHandle stream) override;
  Status pool_trim(DriverPoolHandle pool, std::uint64_t keep) override;
  Status pool_get(DriverPoolHandle pool, DriverPoolAttribute attribute, std::uint64_t* out) override;
  Status pool_set(DriverPoolHandle pool, DriverPoolAttribute attribute, std::uint64_t value) override;
  Status pool_open(DriverPoolHandle pool, int device) override;
  Status pool_export(DriverPoolHandle pool, int* fd) override;
  Status pool_import(int fd, DriverPoolHandle* out) override;
  Status pool_export_pointer(Address address, SharedPointer* out) override;
  Status pool_import_pointer(DriverPoolHandle pool, const SharedPointer& pointer, Address* out) override;
  bool pool_host_accessible(DriverPoolKind kind) const override { return kind != DriverPoolKind::device; }

  // ---- beyond the contract ----------------------------------------------------------------------
  // Another library resets the primary context: nothing of it can be used from now on.
  void abandon();
  Status capture_begin(StreamHandle stream);
  // The captured graph, ready to run; 0 if the capture failed.
  Status capture_end(StreamHandle stream, std::uint64_t* executable);
  Status graph_launch(std::uint64_t executable, StreamHandle stream);
  Status graph_destroy(std::uint64_t executable);

  // `image` is PTX text or a cubin, ending in 0.
  Status module_load(const char* image, std::uint64_t* out);
  Status module_unload(std::uint64_t module);
  Status module_function(std::uint64_t module, const char* name, std::uint64_t* out);
  struct Shape {
    unsigned grid[3] = {1, 1, 1};
    unsigned block[3] = {1, 1, 1};
    unsigned shared_bytes = 0;
  };
  // Each parameter is a pointer to its value.
  Status launch_kernel(std::uint64_t function, const Shape& shape, void** parameters, StreamHandle stream);
  // Whether all of this host memory is pinned, by any library: copies of it do not block the host.
  bool host_pinned(Address address, std::uint64_t bytes) const;

  std::string hardware() const;  // "NVIDIA H200"
  int driver_version() const;    // 13000 for CUDA 13.0
  int attribute(int number) const;
  int device() const { return device_; }  // CUdevice
  const CudaDriver& driver() const { return driver_; }

  // Runs a driver call in this device's context and names it in the Status. It does not affect captures of
  // other libraries (cuThreadExchangeStreamCaptureMode).
  template <typename Call>
  Status in_context(const char* name, Call call) const {
    if (inherited()) return {Code::closed, 0, name};
    void* current = nullptr;
    const bool there = driver_.context_current(&current) == kCuSuccess && current == context_;
    if (!there)
      if (const CuResult result = driver_.context_push(context_); result != kCuSuccess)
        return status_of(result, "cuCtxPushCurrent");
    const CuResult result = call();
    if (!there) (void)driver_.context_pop(&current);
    return status_of(result, name);
  }
  template <typename Call>
  Status unseen_by_captures(const char* name, Call call) const {
    return in_context(name, [&] {
      int mode = kCuCaptureRelaxed;
      (void)driver_.capture_mode(&mode);
      const CuResult result = call();
      (void)driver_.capture_mode(&mode);
      return result;
    });
  }

 private:
  // Two words of pinned memory for each gate, by its number: the kernel of the gate writes `arrived` and
  // waits for `opened`. Values only grow, so the words serve the next gate while a kernel still reads them.
  struct GateWords {
    std::uint32_t arrived;
    std::uint32_t opened;
  };
  // This thread runs a launched function. The driver allows no call there, and a wait might never end:
  // functions of other streams may need the same thread.
  static thread_local bool in_launched_;

  Status begin_gates();
  void end_gates();

  Status pool_grant(void* pool);
  bool inherited() const;  // after a fork, or abandoned: the driver must not be called
  std::string probe_pages();
  Status try_page();
  Status event_made(unsigned flags, EventHandle* out);
  bool knows(EventHandle event) const;
  bool breaks_capture(void* stream) const;
  template <typename Query, typename Block>
  Status wait(const char* name, Query query, Block block) const;
  Status wait_for_lasting();

  const CudaDriver& driver_;
  int device_ = 0;  // CUdevice
  static constexpr int kMostPeers = 63;
  int peers_[kMostPeers] = {};  // devices that may use its pages
  std::atomic<int> peer_count_ = 0;
  void* context_ = nullptr;  // the primary context, retained
  int process_ = 0;          // the one that opened it
  std::atomic<bool> abandoned_ = false;
  bool rdma_ = false;                 // pages can be made accessible to network cards
  bool exports_ = false;              // pages can be shared with other processes
  mutable std::mutex handles_mutex_;  // guards the members below
  std::unordered_set<StreamHandle> streams_;
  std::unordered_map<StreamHandle, bool> adopted_;  // true: a pool uses it
  std::unordered_set<EventHandle> events_;
  std::uint64_t gate_kernel_ = 0;  // a function; loaded with the first gate
  std::uint64_t gate_module_ = 0;
  GateWords* gate_words_ = nullptr;  // allocated with the first gate
  std::uint32_t last_gate_ = 0;      // value
  // A launch may wait for a call of another thread that waits for the gates, so opening takes no other lock.
  std::mutex gate_numbers_mutex_;
  std::deque<std::uint32_t> gate_numbers_;  // that are free
  DeviceInfo info_;
};

// The stream for work of this thread, and the stream for events and queries about the work of others.
void* for_work(StreamHandle stream);
void* for_order(StreamHandle stream);

}  // namespace vram
