// A device with addresses only: a given capacity, a virtual clock, a schedule that the test chooses, failures
// on demand, and a count of what the driver would have cost. Tests and replay use it; it holds no memory and
// starts no thread.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "backends/backend.hpp"
#include "backends/driver_pool_backend.hpp"
#include "backends/ledger.hpp"
#include "base/forks.hpp"
#include "base/handles.hpp"

namespace vram {

inline constexpr Address kModelBase = 0x1000'0000'0000;
inline constexpr std::uint64_t kModelPlainRoom = 32 * 1024 * kGiB;  // first plain memory, then spaces
inline constexpr std::uint64_t kModelRoom = 3 * kModelPlainRoom;

// How work on streams is executed.
enum class Schedule : std::uint8_t {
  // What is queued at time t completes at t + lag, and not before what its stream waits for. Time moves with
  // advance, set_time and the host's waits; launched functions then run.
  lag,
  // Nothing happens until step() or run_all() executes it, one operation at a time: work, event marks and
  // waits. The host's waits step all streams in turn until they are satisfied, and return Code::failed if
  // nothing can move.
  manual,
};

// The cost of each call in microseconds, as measured on an H200. The costs of 8 MiB pages are halfway (in
// doublings) between those of 2 and 32 MiB.
//
//   call             2 MiB   8 MiB   32 MiB   per
//   page_create       11.0   10.2      9.4    page
//   map                1.6    1.3      1.0    page
//   set_access        29.0   27.75    26.5    page in the range
//   unmap             20.0   19.5     19.0    page
//   page_release      11.0   15.0     19.0    page
//
//   reserve + release   86 (2 MiB), 156 (64 MiB), 429 (512 MiB), 3100 (4 GiB), linear between and
//                       beyond; 60 % is charged to reserve, 40 % to release
//   space_reserve       29;  space_release the same, by assumption
//   event_create .27, event_destroy .20, event_record .45, event_query and stream_query .33,
//   stream_wait .43
//   host_page_create 780 (2 MiB), 2190, 7820, 28380 (128 MiB); set_access of a host page 188 (2 MiB) to 1113
//   pool_allocate and pool_free .65 each; 3850 for each 32 MiB that a driver pool grows by
//   Everything else was not measured: it is counted and costs nothing. The time the host waits in
//   synchronize calls is host_wait_us, not a cost of the driver.
struct ModelOptions {
  bool pages = true;
  Schedule schedule = Schedule::lag;
  double lag_us = 5000.0;
  bool release_waits = false;  // release() waits for everything queued, like a driver
  Address base = kModelBase;   // of all its addresses, which stay below base + kModelRoom
  // Above 0, work takes time: copies between device and host memory bytes / host_gb_per_s on a copy engine,
  // other work the lag after the previous work of its stream, marks none. For this to tell device memory from
  // host memory, the addresses must lie above those of the host.
  double host_gb_per_s = 0;
  int copy_engines = 3;  // one for copies to the device, one from it, one between devices; fewer share
  bool host_pages = true;
  std::uint64_t host_bytes = ~std::uint64_t{0};  // most of host pages
  // Follows what work writes: see stamp() and faults().
  bool stamps = false;
};

class ModelBackend;

// Models that stand for the GPUs of one machine: they share a clock and know each other by their addresses.
struct ModelGroup {
  std::atomic<double> now_us{0};
  // Guards the members of all groups; taken before the lock of a model.
  static std::mutex& mutex() {
    static constinit PerProcess<std::mutex> mutexes;
    return mutexes.get();
  }
  std::map<Address, ModelBackend*> members;
};

// What exists now; after a test has cleaned up, only streams == 1 (the default stream) remains.
struct ModelCounts {
  std::uint64_t plain_ranges = 0;
  std::uint64_t plain_bytes = 0;
  std::uint64_t spaces = 0;
  std::uint64_t pages = 0;
  std::uint64_t page_bytes = 0;
  std::uint64_t mappings = 0;
  std::uint64_t events = 0;
  std::uint64_t streams = 0;
  std::uint64_t queued = 0;      // operations not yet executed
  std::uint64_t pools = 0;       // driver pools, without the default one
  std::uint64_t host_pages = 0;  // among the pages
  std::uint64_t host_bytes = 0;
  std::uint64_t gates = 0;  // that are closed
};

// Thrown by calls beyond the contract that report no Status, if they are refused.
struct Refused {
  Status status;
};

// Addresses depend only on the calls, so equal runs have equal addresses. Beyond the contract's
// preconditions, it refuses to release or unmap what queued work still uses.
//
// Fork: in the child every call returns Code::closed, or throws Refused.
class ModelBackend : public Backend, public DriverPoolBackend {
 public:
  explicit ModelBackend(std::uint64_t capacity_bytes, ModelOptions options = {});
  ~ModelBackend() override;
  ModelBackend(const ModelBackend&) = delete;
  ModelBackend& operator=(const ModelBackend&) = delete;

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
  Status unmap(Address address, std::uint64_t bytes) override;

  // ---- host pages and gates (model_spill.cpp) -------------------------------------------------------
  // Work behind a gate at which its stream has arrived uses no memory yet, so that memory can be unmapped. A
  // thread that waits for work behind a gate of another thread waits until that is open.
  Status host_page_create(std::uint64_t bytes, PageHandle* out, Address* copies) override;
  Status host_page_release(PageHandle page, std::uint64_t bytes, Address copies) override;
  Status gate_close(StreamHandle stream, GateHandle* out) override;
  Status gate_wait(GateHandle gate, double seconds) override;
  void gate_open(GateHandle gate) override;
  std::vector<StreamHandle> held_streams() override;
  enum class Location : std::uint8_t { none, device, host };
  Location location(Address address);
  // With ModelOptions::stamps. It has no contents, but every slot of a page has a stamp: the history of the
  // ids of the work that used it. A copy of whole slots copies it, and a fill with v makes it stamped(0, v).
  std::uint64_t stamp(Address address);
  static std::uint64_t stamped(std::uint64_t before, std::uint64_t id) { return before * 0x100000001b3 + id; }
  // Executed work that used memory which was not mapped, or not usable, at that moment.
  std::uint64_t faults();

  // ---- memory shared between processes ------------------------------------------------------------
  // Any model of any process can import what one has exported. As it has no contents, the test asks which
  // page an address shows: the number of the page in the process that made it; 0: none. A name of plain
  // memory is its address there, and opening it reserves nothing.
  Status page_export(PageHandle page, int* fd) override;
  Status page_import(int fd, std::uint64_t bytes, PageHandle* out) override;
  Status plain_export(Address address, PlainName* out) override;
  Status plain_open(const PlainName& name, Address* out) override;
  Status plain_close(Address address) override;
  PageHandle page_shown(Address address);

  Status stream_create(StreamHandle* out) override;
  // Queued work is still executed; only the handle becomes invalid.
  Status stream_destroy(StreamHandle stream) override;
  Status stream_synchronize(StreamHandle stream) override;
  Status stream_query(StreamHandle stream) override;
  Status stream_wait(StreamHandle stream, EventHandle event) override;
  Status event_create(EventHandle* out) override;
  Status event_destroy(EventHandle event) override;
  Status event_record(EventHandle event, StreamHandle stream) override;
  Status event_query(EventHandle event) override;
  Status event_synchronize(EventHandle event) override;
  // By the virtual clock; with the manual schedule, work takes no time.
  Status timing_event_create(EventHandle* out) override;
  Status elapsed_ms(EventHandle from, EventHandle to, double* out) override;
  Status synchronize() override;  // failed if something is left that cannot move

  Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) override;
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) override;
  Status launch(StreamHandle stream, std::function<void()> work) override;

  // ---- other devices (model_peers.cpp) ------------------------------------------------------------
  // Models that are not linked cannot access each other, and their streams cannot wait for each other. Work
  // on linked models that uses memory of another one is refused with Code::invalid unless that memory is
  // opened to it; copy_peer is not.
  bool can_access(const Backend& other) const override;
  Status open_plain(Backend& other) override;
  bool waits_for(const Backend& other) const override;
  Status stream_wait_peer(StreamHandle stream, const Backend& other, EventHandle event) override;
  Status copy_peer(Address to, Address from, std::uint64_t bytes, const Backend& other, bool from_other,
                   StreamHandle stream) override;
  // Links two models, in both directions: one clock, copies at that speed (0: the lag, as other work), and
  // access if it is allowed. Code::invalid: one of them has the manual schedule or unfinished work, their
  // addresses overlap, or both are linked with different models.
  Status link(ModelBackend& other, double gb_per_s, bool access);
  void set_number(int number);  // the one that add_peer of other models takes
  // Whether work on the model with that number can use this memory of this model.
  bool opened(Address address, std::uint64_t bytes, int device);
  int copy_engines() const { return copy_engines_; }

  // ---- driver pools (model_pools.cpp) -------------------------------------------------------------
  // They reserve memory 32 MiB at a time. Freed memory can be reused by its stream immediately and by others
  // when that stream has reached the free; until then the pool fails at its maximum size, like the driver.
  // Free memory beyond the release threshold is released when the host waits. Pages do not move, and
  // reuse_follow_event_dependencies and reuse_allow_internal_dependencies have no effect. Memory allocated on
  // a captured stream belongs to the graph and is released with it; no other memory can be freed there. Only
  // the same model can import exported descriptors.
  DriverPoolBackend* driver_pools() override { return this; }
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
  bool pool_host_accessible(DriverPoolKind) const override { return false; }

  // ---- work and its schedule --------------------------------------------------------------------
  // Queues work with this `id`; if bytes > 0, it uses that range, which must be usable, until it is executed.
  // Not a call of the contract: it is neither counted nor made to fail.
  Status work(StreamHandle stream, std::uint64_t id, Address address = 0, std::uint64_t bytes = 0);
  // The ids of executed work, in order. copy, fill and launch take ids from kFirstOwnId upwards.
  static constexpr std::uint64_t kFirstOwnId = std::uint64_t{1} << 32;
  std::vector<std::uint64_t> executed();
  void clear_executed();
  // Code::invalid while anything is unfinished.
  Status set_schedule(Schedule schedule);
  // Manual only: executes the stream's first operation. False if there is none or it is a wait for something
  // that has not happened. Also steps the remaining work of a destroyed stream.
  bool step(StreamHandle stream);
  // Steps streams in turn until nothing moves (manual), or moves the clock past everything queued (lag). True
  // if nothing is left.
  bool run_all();

  // ---- streams of other libraries -----------------------------------------------------------------
  // A stream that is not lasting. Its handle is the last released one, as is common with drivers. Any use of
  // a released handle ends the process, as a driver may.
  Status foreign_create(StreamHandle* out);
  Status foreign_destroy(StreamHandle stream);  // queued work still runs
  bool lasting(StreamHandle stream) const override;
  Status stream_adopt(StreamHandle stream) override;
  Status stream_disown(StreamHandle stream) override;
  Status stream_id(StreamHandle stream, StreamId* out) override;

  // ---- graphs ------------------------------------------------------------------------------------
  // While a stream is captured, its work goes into the graph; querying it, waiting for it or recording events
  // on it is refused with Code::capturing and counted. What a live graph uses cannot be released. It can be
  // unmapped once the capture has ended, and must be mapped again before a launch, which is refused
  // otherwise.
  Status capture_of(StreamHandle stream, CaptureId* out) override;
  bool capturing(StreamHandle stream) override;
  Status capture_keep(StreamHandle stream, std::function<void()> gone) override;
  Status capture_begin(StreamHandle stream);
  Status capture_end(StreamHandle stream, std::uint64_t* graph);
  Status graph_launch(std::uint64_t graph, StreamHandle stream);  // queues everything captured, in order
  Status graph_destroy(std::uint64_t graph);                      // launched work still runs
  std::uint64_t refused_in_capture();

  // ---- the clock, in microseconds; it never moves backwards --------------------------------------
  double now();
  void advance(double us);
  void set_time(double us);
  void set_lag(double us);

  // ---- failures ---------------------------------------------------------------------------------
  // The nth call (1 is the next) of that method fails once with this status and changes nothing. False if the
  // contract has no such method.
  bool fail(std::string_view call, std::uint64_t nth, Status status);
  void fail_any(std::uint64_t nth, Status status);
  void clear_failures();  // forgets failures that have not happened

  // ---- counters -----------------------------------------------------------------------------------
  std::uint64_t calls(std::string_view call);
  std::uint64_t total_calls();
  std::uint64_t driver_calls() { return total_calls(); }
  // reserve, release, space_*, page_*, map, set_access and unmap.
  std::uint64_t memory_calls();
  double driver_us();
  double memory_us();
  // How long swaps held the streams: what the driver cost while gates were closed, and the copies between
  // device and host pages.
  double held_us();
  double host_page_us();       // what creating host pages cost
  std::uint64_t host_waits();  // synchronize calls that had to wait
  double host_wait_us();
  // Number of calls of release while work was queued, regardless of its owner.
  std::uint64_t busy_releases();

  ModelCounts counts();
  bool check(std::string* why);

 private:
  // In the order of kCallNames. The memory calls are those up to `unmap`.
  enum Call : std::uint8_t {
    kReserve,
    kRelease,
    kSpaceReserve,
    kSpaceRelease,
    kPageCreate,
    kPageRelease,
    kMap,
    kSetAccess,
    kUnmap,
    kHostPageCreate,
    kHostPageRelease,
    kGateClose,
    kGateWait,
    kPageExport,
    kPageImport,
    kPlainExport,
    kPlainOpen,
    kPlainClose,
    kMemoryInfo,
    kStreamCreate,
    kStreamDestroy,
    kStreamSynchronize,
    kStreamQuery,
    kStreamWait,
    kEventCreate,
    kEventDestroy,
    kEventRecord,
    kEventQuery,
    kEventSynchronize,
    kTimingEventCreate,
    kElapsedMs,
    kCopy,
    kAddPeer,
    kOpenPlain,
    kStreamWaitPeer,
    kCopyPeer,
    kFill,
    kLaunch,
    kPoolCreate,
    kPoolDefault,
    kPoolDestroy,
    kPoolAllocate,
    kPoolFree,
    kPoolTrim,
    kPoolGet,
    kPoolSet,
    kPoolOpen,
    kPoolExport,
    kPoolImport,
    kPoolExportPointer,
    kPoolImportPointer,
    kCalls,
  };
  static const char* const kCallNames[kCalls];
  static int call_of(std::string_view name);

  struct Failure {
    int call;  // kCalls: any
    std::uint64_t at;
    Status status;
  };
  struct Touch {
    Address address = 0;
    std::uint64_t bytes = 0;
  };
  struct Operation {
    enum class Kind : std::uint8_t { work, mark, wait, gate } kind = Kind::work;
    bool copies = false;      // from the second range to the first
    bool fills = false;       // overwrites the first range …
    std::uint8_t filled = 0;  // … with this
    std::uint64_t id = 0;     // of a gate: its handle
    std::function<void()> function;
    Touch touches[2];
    StreamHandle other = 0;  // wait: until `other` has completed `position` operations
    std::uint64_t position = 0;
    double finish = 0;           // lag: when it completes
    double duration = 0;         // lag: of a copy that occupies an engine; 0: the lag
    int engine = 0;              // which one
    std::uint64_t sequence = 0;  // lag: order among those that complete together
  };
  // Other members refer to a stream by its place in `streams_`; at() finds it by its handle. With the lag
  // schedule, marks and waits only move `tail`; operations then holds only work.
  struct Stream {
    bool alive = true;
    double tail = 0;                  // lag: when everything queued so far completes
    std::uint64_t queued = 0;         // operations queued in total
    std::uint64_t done = 0;           // operations executed in total
    std::list<Operation> operations;  // queued - done of them, less the one being executed
  };
  struct Graph {
    StreamHandle stream = 0;  // under capture; kNoStream afterwards
    std::vector<Operation> operations;
    std::vector<std::function<void()>> gone;
    std::uint64_t running = 0;  // launches not yet executed
    bool destroyed = false;
  };
  static constexpr StreamHandle kNoStream = ~StreamHandle{0};
  struct Event {
    StreamHandle stream = 0;
    std::uint64_t position = 0;  // manual: completed when the stream has executed that many
    double passes = 0;           // lag: the time at which it completes
    bool timing = false;
    bool recorded = false;
  };
  struct Gate {
    StreamHandle stream = 0;
    std::uint64_t position = 0;  // operations of the stream up to and with the gate
    double arrival = 0;          // lag: the earliest time
    std::thread::id closer;
  };
  // Addresses from one range, by size class, so that reuse bounds how far they spread.
  struct Addresses {
    Address next = 0;
    Address end = 0;
    std::array<std::vector<Address>, 64> free;
    Address take(std::uint64_t bytes);
    void give(Address address, std::uint64_t bytes) noexcept;
  };
  // A part of what a driver pool has reserved: allocated, or free since a point of a stream's order.
  struct Piece {
    std::uint64_t bytes = 0;
    bool used = false;
    std::uint32_t imports = 0;  // used: how often it was imported and not yet freed there
    StreamHandle freed_on = 0;
    std::uint64_t position = 0;  // manual: the free is reached when the stream has executed that many
    double moment = 0;           // lag: when it is reached
    bool for_all = false;        // the host has seen it reached
  };
  // Pieces tile the granules. used = Σ bytes of used pieces; reserved = Σ bytes of granules.
  struct ModelPool {
    ModelPool() = default;
    explicit ModelPool(const DriverPoolProperties& wanted) : properties(wanted), attributes{1, 1, 1} {}
    DriverPoolProperties properties;
    DriverPoolHandle exporter = 0;  // of an imported pool
    std::map<Address, std::uint64_t> granules;
    std::map<Address, Piece> pieces;
    std::set<std::pair<std::uint64_t, Address>> free;  // bytes and address of each piece that is not used
    std::array<std::uint64_t, kDriverPoolAttributes> attributes{};  // by number - 1
    std::set<int> opened;                                           // to models with these numbers
    std::uint64_t& operator[](DriverPoolAttribute attribute) {
      return attributes[static_cast<std::size_t>(attribute) - 1];
    }
  };
  using PieceAt = std::map<Address, Piece>::iterator;
  using Lock = std::unique_lock<std::mutex>;

  bool reached(const Piece& piece) const;
  bool mergeable(const Piece& left, const Piece& right) const;
  void merge_pieces(ModelPool& pool);
  PieceAt fitting_piece(ModelPool& pool, std::uint64_t bytes, StreamHandle stream);
  PieceAt grow_pool(ModelPool& pool, std::uint64_t bytes);
  Status allocate_in_graph(Graph& graph, std::uint64_t bytes, Address* out);
  void shrink_pool(ModelPool& pool, std::uint64_t keep);
  void host_has_waited();
  ModelPool* owner_of(Address address, PieceAt* piece);
  bool check_pools(std::string* why) const;

  bool arrived(const Gate& gate) const;
  bool await_gates(Lock& lock);
  void hold_for_copy(const Operation& operation);
  std::uint64_t* cell(Address address);
  void leave_stamps(const Operation& operation);
  bool is_for_copies(Address address) const {
    return address - base_ < kModelPlainRoom && address - base_ >= kCopiesAt;
  }

  Graph* capture_on(StreamHandle stream);
  bool refuse_captured(StreamHandle stream, Call call, Status* status);
  void drop_graph(std::uint64_t id, Lock& lock);
  bool inherited() const;  // this process is the child of a fork
  Lock hold() const;       // throws Refused there
  bool begin(Call call, Lock* lock, Status* status);
  // The same for a call on a stream, which becomes its place.
  bool begin_on(StreamHandle* stream, Call call, Lock* lock, Status* status);
  void charge(Call call, double us);
  StreamHandle at(StreamHandle handle) const;
  Stream* stream_of(StreamHandle place);
  bool passed(const Event& event) const;
  bool busy(Address address, std::uint64_t bytes, bool graphs = true) const;
  void enqueue(StreamHandle stream, Operation operation);
  Status enqueue_work(Call call, StreamHandle stream, Operation operation);
  bool ready(const Operation& operation) const;
  void execute(Stream& stream, Lock& lock);
  bool may_execute(Lock& lock);
  Code stuck() const;
  bool step_locked(StreamHandle handle, Lock& lock);
  bool step_round(Lock& lock);
  Stream* first_ready();
  double next_completion() const;
  void settle(Lock& lock);
  void settle_group(Lock& lock);
  bool settle_one();  // false if there is nothing that this thread may execute
  bool finish_all(Lock& lock);
  void move_clock(double us, Lock& lock);
  bool run_until(const std::function<bool()>& reached, Lock& lock);
  Status wait_for(Call call, StreamHandle stream, std::uint64_t position, double moment, Lock& lock);

  const std::uint64_t generation_;  // of the process that created this, see inherited()
  DeviceInfo info_;
  mutable std::mutex mutex_;  // guards everything below; never held while a launched function runs
  Ledger ledger_;
  std::unordered_map<Address, std::uint32_t> opened_;  // other processes' plain memory: how often
  Addresses plain_addresses_;
  Addresses space_addresses_;

  // Host pages: addresses for copies, in the last quarter of those for plain memory.
  static constexpr std::uint64_t kCopiesAt = kModelPlainRoom / 4 * 3;
  Addresses copies_addresses_;
  std::map<Address, PageHandle> copies_;
  const bool stamps_;
  std::unordered_map<PageHandle, std::vector<std::uint64_t>> cells_;  // by slot of the page
  std::uint64_t faults_ = 0;
  HandleTable<Gate> gates_;  // that are closed
  std::condition_variable opened_one_;

  HandleTable<ModelPool> pools_;
  std::unordered_map<Address, std::uint64_t> graph_memory_;  // allocated on captured streams, by address
  DriverPoolHandle default_pool_ = 0;

  Schedule schedule_;
  double lag_us_;
  // Never reused. The place of a stream from stream_create is its handle.
  std::vector<std::unique_ptr<Stream>> streams_;
  static constexpr StreamHandle kFirstForeign = 0x5500'0000'0000;
  static constexpr StreamHandle kForeignStep = 0x340;
  std::unordered_map<StreamHandle, StreamHandle> foreign_;  // places of existing foreign streams, by handle
  std::vector<StreamHandle> foreign_gone_;                  // handles that were released
  std::unordered_set<StreamHandle> adopted_;
  std::uint64_t streams_alive_ = 1;
  HandleTable<Event> events_;
  std::uint64_t queued_ = 0;                         // operations in all streams
  std::unordered_map<std::uint64_t, Graph> graphs_;  // live ones and those under capture
  std::uint64_t last_graph_ = 0;
  std::uint64_t refused_in_capture_ = 0;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t next_own_id_ = kFirstOwnId;
  std::vector<std::uint64_t> executed_;
  bool executing_ = false;  // one launched function at a time, in the order of the schedule
  std::thread::id executor_;
  std::condition_variable executed_one_;

  std::array<std::uint64_t, kCalls> calls_{};
  std::uint64_t total_calls_ = 0;
  std::uint64_t memory_calls_ = 0;
  double driver_us_ = 0;
  double memory_us_ = 0;
  double held_us_ = 0;
  double host_page_us_ = 0;
  std::uint64_t host_waits_ = 0;
  double host_wait_us_ = 0;
  std::uint64_t busy_releases_ = 0;
  std::vector<Failure> failures_;

  // ---- other models (model_peers.cpp) ----
  struct Link {
    double gb_per_s = 0;
    bool access = false;
  };
  std::optional<Link> link_to(const Backend& other) const;  // takes the lock
  bool mine(Address address) const { return address - base_ < kModelRoom; }
  bool timed() const { return host_gb_per_s_ > 0; }
  // Whether every range that is memory of another model of the group is opened to this one. Takes locks.
  bool may_reach(const Touch* touches, std::size_t count) const;
  void set_engine(Operation& operation, Address to, Address from, std::uint64_t bytes) const;
  double now_us() const { return group_->now_us.load(std::memory_order_relaxed); }

  const Address base_;
  const double host_gb_per_s_;
  const int copy_engines_;
  std::shared_ptr<ModelGroup> group_ = std::make_shared<ModelGroup>();  // shared by linked models
  // Keeps the model while another one executes its work.
  struct Life {
    std::recursive_mutex mutex;
    ModelBackend* model = nullptr;  // null: destroyed
  };
  const std::shared_ptr<Life> life_ = std::make_shared<Life>();
  std::atomic<bool> linked_ = false;
  std::unordered_map<Address, Link> links_;  // by the base of the other model
  int number_ = 0;
  std::set<int> peers_;                                      // models that set_access includes
  std::unordered_map<Address, std::set<int>> opened_pages_;  // by slot
  std::set<int> opened_plain_;                               // models that called open_plain
  std::array<double, 3> engines_{};                          // lag: when each has completed its copies
};

}  // namespace vram
