// Host memory that a device can copy to and from directly: mapped in large pieces, faulted in by several
// threads, and pinned as a whole if the device has a driver. Streams, events and work are those of the
// device, so copies to and from it are stream-ordered. The pool decides when it is reused.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "backends/backend.hpp"
#include "backends/ledger.hpp"

namespace vram {

// How host memory is pinned for a device. Each call may wait for running work on the device.
class PageLock {
 public:
  virtual ~PageLock() = default;
  // pre: nothing in the range is pinned. If it fails, nothing is pinned.
  virtual Status lock(Address address, std::uint64_t bytes, bool writable) = 0;
  // pre: the address was pinned and no stream uses the range anymore.
  virtual Status unlock(Address address) = 0;
};

// Null for devices without a driver (host, model). pre: the device outlives it.
std::unique_ptr<PageLock> page_lock_of(Backend& device);

// Fork: as with the device's own memory, calls in the child return Code::closed, and destruction there leaves
// everything to the parent. The child inherits a private copy that it can still read.
class PinnedBackend : public Backend {
 public:
  // threads: the maximum that fault in one piece; 0: chosen automatically.
  explicit PinnedBackend(std::shared_ptr<Backend> device, unsigned threads = 0);
  // With the caller's own lock, or none.
  PinnedBackend(std::shared_ptr<Backend> device, std::unique_ptr<PageLock> lock, unsigned threads);
  ~PinnedBackend() override;
  PinnedBackend(const PinnedBackend&) = delete;
  PinnedBackend& operator=(const PinnedBackend&) = delete;

  const DeviceInfo& info() const override { return info_; }
  bool pinned() const { return lock_ != nullptr; }
  // Microseconds that reserve and release took so far.
  std::uint64_t reserve_us() const { return reserve_us_.load(std::memory_order_relaxed); }
  std::uint64_t release_us() const { return release_us_.load(std::memory_order_relaxed); }
  // The machine's memory, or the container's if that is less.
  Status memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) override;

  // Returns out_of_memory instead of using the last of the machine's memory, for which the system kills
  // processes.
  Status reserve(std::uint64_t bytes, Address* out) override;
  Status release(Address address, std::uint64_t bytes) override;

  Status space_reserve(std::uint64_t, Address*) override { return no_pages("space_reserve"); }
  Status space_release(Address, std::uint64_t) override { return no_pages("space_release"); }
  Status page_create(std::uint64_t, PageHandle*) override { return no_pages("page_create"); }
  Status page_release(PageHandle, std::uint64_t) override { return no_pages("page_release"); }
  Status map(Address, std::uint64_t, PageHandle) override { return no_pages("map"); }
  Status set_access(Address, std::uint64_t) override { return no_pages("set_access"); }
  Status unmap(Address, std::uint64_t) override { return no_pages("unmap"); }

  Status stream_create(StreamHandle* out) override { return device_->stream_create(out); }
  Status stream_destroy(StreamHandle stream) override { return device_->stream_destroy(stream); }
  Status stream_synchronize(StreamHandle stream) override { return device_->stream_synchronize(stream); }
  Status stream_query(StreamHandle stream) override { return device_->stream_query(stream); }
  Status stream_wait(StreamHandle stream, EventHandle event) override {
    return device_->stream_wait(stream, event);
  }
  Status event_create(EventHandle* out) override { return device_->event_create(out); }
  Status event_destroy(EventHandle event) override { return device_->event_destroy(event); }
  Status event_record(EventHandle event, StreamHandle stream) override {
    return device_->event_record(event, stream);
  }
  Status event_query(EventHandle event) override { return device_->event_query(event); }
  Status event_synchronize(EventHandle event) override { return device_->event_synchronize(event); }
  Status timing_event_create(EventHandle* out) override { return device_->timing_event_create(out); }
  Status elapsed_ms(EventHandle from, EventHandle to, double* out) override {
    return device_->elapsed_ms(from, to, out);
  }
  Status synchronize() override { return device_->synchronize(); }

  const Backend* order() const override { return device_->order(); }
  StreamHandle canonical(StreamHandle stream) const override { return device_->canonical(stream); }
  bool lasting(StreamHandle stream) const override { return device_->lasting(stream); }
  Status stream_adopt(StreamHandle stream) override { return device_->stream_adopt(stream); }
  Status stream_disown(StreamHandle stream) override { return device_->stream_disown(stream); }
  Status stream_id(StreamHandle stream, StreamId* out) override { return device_->stream_id(stream, out); }
  bool ended(StreamHandle stream) const override { return device_->ended(stream); }
  Status capture_of(StreamHandle stream, CaptureId* out) override { return device_->capture_of(stream, out); }
  bool capturing(StreamHandle stream) override { return device_->capturing(stream); }
  Status capture_keep(StreamHandle stream, std::function<void()> gone) override {
    return device_->capture_keep(stream, std::move(gone));
  }

  Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) override {
    return device_->copy(to, from, bytes, stream);
  }
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) override {
    return device_->fill(to, value, bytes, stream);
  }
  Status launch(StreamHandle stream, std::function<void()> work) override {
    return device_->launch(stream, std::move(work));
  }

 private:
  static Status no_pages(const char* call) { return {Code::unsupported, 0, call}; }
  bool inherited() const;  // this process is the child of a fork

  std::shared_ptr<Backend> device_;
  std::unique_ptr<PageLock> lock_;  // null: the device cannot pin memory
  const unsigned threads_;
  const int process_;  // the process that created this
  DeviceInfo info_;
  std::mutex mutex_;  // guards ledger_
  std::atomic<std::uint64_t> reserve_us_{0};
  std::atomic<std::uint64_t> release_us_{0};
  Ledger ledger_;
};

}  // namespace vram
