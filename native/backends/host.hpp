// The host as a device: real memory and one worker thread per stream. Work is really asynchronous, it
// overlaps, and a missing synchronization really races. The pool decides about placement; the bindings run
// Python callables.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "backends/backend.hpp"
#include "backends/ledger.hpp"
#include "base/handles.hpp"

namespace vram {

class HostStream;

// Plain memory is anonymous. Pages are ranges of one sparse memory file, so that a page mapped at two
// addresses is the same memory. Nothing is committed before it is touched; `capacity` bounds what may be
// allocated.
//
// A point in a stream is the number of operations queued before it. Recording an event queues nothing, and an
// event has completed when the stream has completed that many operations. Only a timing event is an operation
// itself: it reads the clock.
//
// Host pages are pages of the same file that do not count as device memory: only where they are counted tells
// them apart. A gate is an operation during which the stream's thread waits.
//
// Fork: the child has no worker threads, so every call returns Code::closed there and destruction does
// nothing. Pages are shared with the parent, plain memory is a private copy.
class HostBackend : public Backend {
 public:
  // 0: the machine's physical memory. Otherwise rounded down to whole slots.
  explicit HostBackend(std::uint64_t capacity_bytes = 0);
  // Waits for all queued work of all streams first. pre: close() allows it.
  ~HostBackend() override;
  // Code::deadlock on the thread of a stream, where the destructor would wait for itself; see end() in
  // waits.hpp.
  Status close();
  HostBackend(const HostBackend&) = delete;
  HostBackend& operator=(const HostBackend&) = delete;

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
  Status host_page_create(std::uint64_t bytes, PageHandle* out, Address* copies) override;
  Status host_page_release(PageHandle page, std::uint64_t bytes, Address copies) override;
  Status gate_close(StreamHandle stream, GateHandle* out) override;
  // At one moment: whoever orders streams comes before or after it.
  Status gates_close(const std::vector<StreamHandle>& except,
                     const std::function<void(GateHandle)>& closed) override;
  // Code::deadlock on the thread of the stream.
  Status gate_wait(GateHandle gate, double seconds) override;
  void gate_open(GateHandle gate) override;
  std::vector<StreamHandle> held_streams() override;

  Status stream_create(StreamHandle* out) override;
  // Returns immediately; the stream's thread ends when its queue is empty.
  Status stream_destroy(StreamHandle stream) override;
  // All waits return Code::deadlock if a stream's work waits for work behind it.
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
  Status synchronize() override;  // destroyed streams included

  Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) override;
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) override;
  // An exception that leaves `work` is ignored.
  Status launch(StreamHandle stream, std::function<void()> work) override;

  bool check(std::string* why);

 private:
  struct Event {
    std::shared_ptr<HostStream> stream;  // null: never recorded
    std::uint64_t position = 0;
    bool timing = false;
    std::shared_ptr<std::atomic<std::int64_t>> moment;  // of the last record: nanoseconds, 0 until then
  };
  // Shared with the operation on the stream, which may outlive the handle.
  struct Gate;
  Status close_gate(const std::shared_ptr<HostStream>& stream, GateHandle* out);
  bool inherited() const;  // this process is the child of a fork
  std::shared_ptr<HostStream> stream_of(StreamHandle handle);
  std::vector<std::shared_ptr<HostStream>> all_streams();
  void reap();
  bool open_store();
  Status give_back(std::uint64_t offset, std::uint64_t bytes, const char* call);
  Status take_offset(std::uint64_t bytes, std::uint64_t* out);
  Status enqueue(StreamHandle stream, std::function<void()> work, const char* call);

  const std::uint64_t generation_;  // of the process that created this, see inherited()
  DeviceInfo info_;
  std::mutex mutex_;  // guards everything below; streams have their own
  Ledger ledger_;
  int store_ = -1;  // the memory file of all pages
  std::uint64_t store_bytes_ = 0;
  std::vector<std::uint64_t> free_offsets_[kPageSizes];
  std::size_t offsets_[kPageSizes] = {};  // of each size, free or not
  std::unordered_map<StreamHandle, std::shared_ptr<HostStream>> streams_;
  std::vector<std::shared_ptr<HostStream>> retired_;  // destroyed, their threads not yet joined
  StreamHandle next_stream_ = 1;
  HandleTable<Event> events_;
  HandleTable<std::shared_ptr<Gate>> gates_;
};

}  // namespace vram
