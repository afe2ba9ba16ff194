// The driver's own pool with the interface of vram's pool: it tracks what is held, on which stream and with
// which tag, enforces the limit and orders frees, and adds synchronize-and-retry, which the driver lacks. The
// driver decides where memory is and when it is reused (driver_pool_backend.hpp).
//
// Order. A free is passed to the driver in the order of the allocation's stream. If other streams use the
// memory as well, or its stream was destroyed, the free is queued on a private stream that waits for all of
// them; neither they nor the host wait.
//
// Captures. An allocation on a captured stream becomes a node of the graph, and so does its free there. Other
// memory that is freed while one of its streams is captured is kept until that graph is destroyed.
//
// Threads. One mutex guards the data; it is not held across calls to the driver that allocate or free, host
// waits or callbacks. An address is removed before the driver gets it back, so another thread to which the
// driver gives it can register it immediately.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/driver_pool_backend.hpp"
#include "order/fences.hpp"
#include "pool/allocator.hpp"

namespace vram {

class DriverPool final : public Allocator {
 public:
  // Where the pool comes from: a new one, the device's default pool, or one exported by another process.
  enum class Origin : std::uint8_t { created, shared_default, imported };
  struct Source {
    Origin origin = Origin::created;
    DriverPoolProperties properties;  // created
    int fd = -1;                      // imported; the caller keeps it
  };
  // unsupported with these calls: the device has no driver pools; the pool belongs to another process.
  static constexpr const char* kNoDriverPools = "driver_pools";
  static constexpr const char* kImported = "allocate from an imported pool";
  static Status open(std::shared_ptr<Backend> backend, const Source& source, const PoolConfig& config,
                     std::shared_ptr<DriverPool>* out);
  ~DriverPool() override;
  DriverPool(const DriverPool&) = delete;
  DriverPool& operator=(const DriverPool&) = delete;

  // ---- allocation ---------------------------------------------------------------------------------
  Status allocate_slow(std::uint64_t size, StreamHandle stream, std::uint64_t align, std::uint32_t tag,
                       Address* out, OutOfMemoryReport* report) override;
  Status allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle stream, std::uint32_t tag,
                        std::vector<Address>& out, OutOfMemoryReport* report) override;
  Status free_slow(Address address) override;
  Status drop(Address address) override;
  Status record_stream(Address address, StreamHandle stream) override;

  // ---- housekeeping ---------------------------------------------------------------------------------
  Status coalesce() override;  // the driver merges by itself; frees what destroyed captures kept
  Status trim(std::uint64_t keep, bool wait) override;
  Status set_limit(std::uint64_t bytes) override;  // applies to what is live here
  Status add_peer(int device) override;
  Status change(const Setting& set) override;  // limit and zeroing
  PoolConfig config() const override;
  Status retire_stream(StreamHandle stream) override;
  void on_out_of_memory(Callback callback) override;
  Status close() override;
  bool closed() const override { return generation_.load(std::memory_order_relaxed) != process_generation(); }

  // ---- queries ----------------------------------------------------------------------------------------
  PoolStats stats() const override;
  void reset_peak() override;
  std::vector<SegmentInfo> snapshot() const override;  // a segment is a run of adjacent allocations
  Status info(Address address, BlockInfo* out) const override;
  std::uint64_t live_bytes() const override;
  void journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const override;
  Status start_journal(std::uint32_t entries) override;
  void start_recording(std::uint64_t most) override;
  void mark(std::uint64_t number) override;
  std::uint64_t take_recorded(std::vector<JournalEntry>& out) override;
  bool check(std::string* why) const override;
  Backend& backend() override { return *backend_; }
  bool host_accessible() override { return driver_->pool_host_accessible(source_.properties.kind); }

  // ---- only for driver pools --------------------------------------------------------------------------
  Status attribute(DriverPoolAttribute attribute, std::uint64_t* out) const;
  Status set_attribute(DriverPoolAttribute attribute, std::uint64_t value);
  const Source& source() const { return source_; }
  Status export_pool(int* fd);
  // *offset: where the allocation begins in the driver's allocation at the pointer.
  Status export_pointer(Address address, SharedPointer* out, std::uint64_t* offset);
  // Registers the exporter's allocation here, until it is freed here.
  Status import_pointer(const SharedPointer& pointer, std::uint64_t offset, std::uint64_t size,
                        StreamHandle stream, std::uint32_t tag, Address* out);

 private:
  struct Block {
    Address base = 0;         // the driver's address; smaller than the address if alignment needed padding
    std::uint64_t bytes = 0;  // rounded up to kUnit, without padding
    std::uint64_t requested = 0;
    std::uint64_t taken = 0;  // from the driver: bytes and padding; 0: imported
    StreamHandle stream = 0;
    CaptureId capture = 0;  // allocated by a node of this graph
    std::uint32_t tag = 0;
    std::uint32_t serial = 0;
    bool gone = false;               // its stream was retired; the freeing stream is ordered after it
    bool behind = false;             // the same for a stream that used it
    std::vector<StreamHandle> uses;  // on other streams
  };
  struct StreamAccount {
    std::uint64_t live = 0;
    std::uint64_t freed = 0;  // bytes freed in its order since the last host wait
    bool retired = false;
    std::unique_ptr<JournalTape> journal;
  };
  struct Request {
    std::uint64_t size;
    std::uint64_t bytes;
    std::uint64_t taken;
    std::uint64_t align;
    StreamHandle stream;
    std::uint32_t tag;
    CaptureId capture;
    Address out;
    Status error;  // a failure other than "out of memory" ends the climb
  };
  using Lock = std::unique_lock<std::mutex>;
  using Serve = bool (DriverPool::*)(Request&);
  struct Step {
    Rung rung;
    Serve serve;
  };
  static const Step kLadder[];
  // Freed blocks that wait for the end of a graph. It may outlive the pool, because graphs can.
  struct Kept {
    std::mutex mutex;
    std::map<Address, Block> waiting;
    std::map<Address, Block> ready;
    std::atomic<bool> any_ready{false};
  };
  // A call to the driver is running; close() waits for such calls before it destroys the pool.
  bool begin_access() const override;
  void end_access() const override;

  DriverPool(std::shared_ptr<Backend> backend, DriverPoolBackend* driver, const Source& source,
             const PoolConfig& config);

  Status open_for(const char* call, Lock* lock) const;
  bool look(Lock* lock) const;
  bool climb(Request& request);
  bool serve_driver(Request& request);
  bool serve_host_wait(Request& request);
  bool serve_callbacks(Request& request);
  bool serve_give_back(Request& request);
  bool fits_limit(const Request& request) const;
  Address enter(const Request& request, Address base);
  Status capture_of(StreamHandle stream, CaptureId* out) const;
  Status known_stream(StreamHandle stream, CaptureId* capture);

  Status zero_new(Address address, std::uint64_t bytes, StreamHandle stream);
  void take_back(Address address);
  Status remove(Address address, Block* out);
  void put_back(Address address, Block&& block);
  Status give(Address address, Block& block);
  Status give_in_capture(Address address, Block& block);
  Status give_behind(Address address, Block& block);
  Status give_on(Address address, Block& block, StreamHandle stream);
  Status captured_stream(const Block& block, StreamHandle* stream, CaptureId* capture) const;
  Status keep_for_capture(Address address, Block& block, StreamHandle captured);
  void keep_for_later(Address address, Block&& block);
  void free_kept();
  Status freeing_stream(StreamHandle* out);
  Status wait_behind(StreamHandle waiter, StreamHandle stream);
  Status synchronize(StreamHandle stream);
  std::vector<StreamHandle> streams_with_frees() const;
  Status wait_for_streams();
  void forget_stream(StreamHandle stream);
  void drop_books(StreamHandle stream);
  Status return_everything();

  void count_in(const Block& block, bool again);
  void count_out(const Block& block);
  StreamAccount& account_of(StreamHandle stream);
  void note(StreamHandle stream, Action action, Address address, std::uint64_t bytes, std::uint32_t tag,
            std::uint32_t serial);
  void record(StreamHandle stream, Action action, Address address, std::uint64_t bytes, std::uint32_t tag,
              std::uint32_t serial) const;
  void look_at_driver() const;
  OutOfMemoryReport explain(const Request& request) const;
  static BlockInfo describe(Address address, const Block& block, BlockState state);

  std::shared_ptr<Backend> backend_;
  DriverPoolBackend* driver_;  // the same object as backend_
  const Source source_;
  DriverPoolHandle handle_ = 0;
  std::atomic<std::uint32_t> generation_;  // the fork generation of its creation; another value: closed
  mutable std::mutex mutex_;               // guards everything below
  mutable std::condition_variable calls_ended_;
  mutable std::uint32_t calls_ = 0;  // running calls to the driver
  PoolConfig config_;
  std::map<Address, Block> live_;
  std::map<StreamHandle, StreamAccount> streams_;
  EventPool events_;
  StreamHandle freeing_ = 0;  // the private stream; 0: not created yet
  std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
  Callback callback_;
  std::uint64_t live_bytes_ = 0;
  std::uint64_t promised_ = 0;  // bytes requested from the driver, not yet registered
  std::uint64_t peak_live_ = 0;
  mutable std::uint64_t sequence_ = 0;
  std::uint32_t serial_ = 0;
  Meter allocations_[2];  // by kind
  Meter bytes_[2];
  Meter requested_[2];
  std::unique_ptr<JournalTape> old_journal_;  // of streams that are gone
  std::uint64_t old_dropped_ = 0;
  std::shared_ptr<Recording> recording_;  // null: none
  std::unique_ptr<JournalTape> tape_;     // of all streams
  // What the driver reported last.
  mutable Meter reserved_;
  mutable std::uint64_t used_ = 0;
  std::uint64_t high_at_reset_ = 0;  // of reserved; a higher value is a new peak
  std::uint64_t rungs_[kRungs] = {};
  std::uint64_t retries_ = 0;
  std::uint64_t out_of_memory_ = 0;
};

}  // namespace vram
