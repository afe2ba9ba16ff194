// The virtual device: ledger.cpp validates the memory calls; this file assigns addresses, moves the clock,
// executes streams, fails on demand and counts.
#include "backends/model.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>

#include "backends/driver_costs.hpp"
#include "base/forks.hpp"

namespace vram {

// ---- other prices (the table is in model.hpp) -----------------------------------------------------------

namespace {

constexpr Status kOk{};
constexpr std::uint64_t kSpaceRoom = kModelRoom - kModelPlainRoom;

constexpr double kSpaceUs = 29.0;
constexpr double kEventCreateUs = 0.27;
constexpr double kEventDestroyUs = 0.20;
constexpr double kEventRecordUs = 0.45;
constexpr double kQueryUs = 0.33;
constexpr double kStreamWaitUs = 0.43;

bool overlap(Address a, std::uint64_t a_bytes, Address b, std::uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

const char* const ModelBackend::kCallNames[kCalls] = {"reserve",
                                                      "release",
                                                      "space_reserve",
                                                      "space_release",
                                                      "page_create",
                                                      "page_release",
                                                      "map",
                                                      "set_access",
                                                      "unmap",
                                                      "host_page_create",
                                                      "host_page_release",
                                                      "gate_close",
                                                      "gate_wait",
                                                      "page_export",
                                                      "page_import",
                                                      "plain_export",
                                                      "plain_open",
                                                      "plain_close",
                                                      "memory_info",
                                                      "stream_create",
                                                      "stream_destroy",
                                                      "stream_synchronize",
                                                      "stream_query",
                                                      "stream_wait",
                                                      "event_create",
                                                      "event_destroy",
                                                      "event_record",
                                                      "event_query",
                                                      "event_synchronize",
                                                      "timing_event_create",
                                                      "elapsed_ms",
                                                      "copy",
                                                      "add_peer",
                                                      "open_plain",
                                                      "stream_wait_peer",
                                                      "copy_peer",
                                                      "fill",
                                                      "launch",
                                                      "pool_create",
                                                      "pool_default",
                                                      "pool_destroy",
                                                      "pool_allocate",
                                                      "pool_free",
                                                      "pool_trim",
                                                      "pool_get",
                                                      "pool_set",
                                                      "pool_open",
                                                      "pool_export",
                                                      "pool_import",
                                                      "pool_export_pointer",
                                                      "pool_import_pointer"};

int ModelBackend::call_of(std::string_view name) {
  for (int call = 0; call < kCalls; ++call) {
    if (name == kCallNames[call]) return call;
  }
  return -1;
}

ModelBackend::ModelBackend(std::uint64_t capacity_bytes, ModelOptions options)
    : generation_(process_generation()),
      ledger_(capacity_bytes / kSlotBytes * kSlotBytes, kSlotBytes, options.host_bytes),
      stamps_(options.stamps),
      schedule_(options.schedule),
      lag_us_(options.lag_us),
      base_(round_up(options.base, kSlotBytes)),
      host_gb_per_s_(options.host_gb_per_s),
      copy_engines_(std::clamp(options.copy_engines, 1, 3)) {
  life_->model = this;
  info_.name = "model:0";
  info_.total_bytes = ledger_.capacity();
  info_.pages = options.pages;
  info_.release_waits = options.release_waits;
  info_.captures = true;
  info_.host_pages = options.pages && options.host_pages;
  plain_addresses_.next = base_;
  plain_addresses_.end = plain_addresses_.next + kCopiesAt;
  copies_addresses_.next = plain_addresses_.end;
  copies_addresses_.end = base_ + kModelPlainRoom;
  space_addresses_.next = copies_addresses_.end;
  space_addresses_.end = space_addresses_.next + kSpaceRoom;
  streams_.push_back(std::make_unique<Stream>());
}

// ---- counting and failing -------------------------------------------------------------------------

ModelBackend::~ModelBackend() {
  {
    const std::lock_guard members(ModelGroup::mutex());
    group_->members.erase(base_);
  }
  const std::lock_guard last(life_->mutex);
  life_->model = nullptr;
}

bool ModelBackend::inherited() const { return generation_ != process_generation(); }

ModelBackend::Lock ModelBackend::hold() const {
  if (inherited()) throw Refused{{Code::closed, 0, "model"}};
  return Lock(mutex_);
}

// Takes the lock and counts the call. False if the call must fail, with *status set.
bool ModelBackend::begin(Call call, Lock* lock, Status* status) {
  if (inherited()) {
    *status = {Code::closed, 0, kCallNames[call]};
    return false;
  }
  *lock = Lock(mutex_);
  ++calls_[call];
  ++total_calls_;
  memory_calls_ += call <= kUnmap ? 1 : 0;
  if (failures_.empty()) [[likely]]
    return true;
  for (auto failure = failures_.begin(); failure != failures_.end(); ++failure) {
    const std::uint64_t count = failure->call == kCalls ? total_calls_ : calls_[call];
    if ((failure->call != kCalls && failure->call != call) || failure->at != count) continue;
    *status = {failure->status.code, failure->status.native, kCallNames[call]};
    failures_.erase(failure);
    return false;
  }
  return true;
}

bool ModelBackend::begin_on(StreamHandle* stream, Call call, Lock* lock, Status* status) {
  if (!begin(call, lock, status)) return false;
  *stream = at(*stream);
  return true;
}

void ModelBackend::charge(Call call, double us) {
  driver_us_ += us;
  if (call <= kUnmap) memory_us_ += us;
  if (gates_.size() > 0) held_us_ += us;
  if (call == kHostPageCreate) host_page_us_ += us;
}

bool ModelBackend::fail(std::string_view name, std::uint64_t nth, Status status) {
  const Lock lock = hold();
  const int call = call_of(name);
  if (call < 0) return false;
  failures_.push_back({call, calls_[call] + nth, status});
  return true;
}

void ModelBackend::fail_any(std::uint64_t nth, Status status) {
  const Lock lock = hold();
  failures_.push_back({kCalls, total_calls_ + nth, status});
}

void ModelBackend::clear_failures() {
  const Lock lock = hold();
  failures_.clear();
}

std::uint64_t ModelBackend::calls(std::string_view name) {
  const Lock lock = hold();
  const int call = call_of(name);
  return call < 0 ? 0 : calls_[call];
}

std::uint64_t ModelBackend::total_calls() {
  const Lock lock = hold();
  return total_calls_;
}

std::uint64_t ModelBackend::memory_calls() {
  const Lock lock = hold();
  return memory_calls_;
}

double ModelBackend::driver_us() {
  const Lock lock = hold();
  return driver_us_;
}

double ModelBackend::memory_us() {
  const Lock lock = hold();
  return memory_us_;
}

std::uint64_t ModelBackend::host_waits() {
  const Lock lock = hold();
  return host_waits_;
}

std::uint64_t ModelBackend::busy_releases() {
  const Lock lock = hold();
  return busy_releases_;
}

double ModelBackend::host_wait_us() {
  const Lock lock = hold();
  return host_wait_us_;
}

// ---- memory ---------------------------------------------------------------------------------------

// Ranges are assigned in powers of two, so each class spans at most twice the capacity, and a long sequence
// of reserve and release stays inside the address range. 0: the range is full.
Address ModelBackend::Addresses::take(std::uint64_t bytes) {
  const std::uint64_t span = std::bit_ceil(bytes);
  std::vector<Address>& reusable = free[std::countr_zero(span)];
  if (!reusable.empty()) {
    const Address address = reusable.back();
    reusable.pop_back();
    return address;
  }
  if (span > end - next) return 0;
  next += span;
  return next - span;
}

// If the host has no memory to note them, they are not used again.
void ModelBackend::Addresses::give(Address address, std::uint64_t bytes) noexcept {
  try {
    free[std::countr_zero(std::bit_ceil(bytes))].push_back(address);
  } catch (const std::bad_alloc&) {
  }
}

// Whether queued work, or a graph that may be launched again, uses the range.
// `graphs`: also if a captured graph that is not running uses it.
bool ModelBackend::busy(Address address, std::uint64_t bytes, bool graphs) const {
  for (const auto& [id, graph] : graphs_)
    for (const Operation& operation : graph.operations)
      for (const Touch& touch : operation.touches)
        if ((graphs || graph.stream != kNoStream) && touch.bytes > 0 &&
            overlap(address, bytes, touch.address, touch.bytes))
          return true;
  if (queued_ == 0) return false;
  for (const auto& stream : streams_) {
    for (const Operation& operation : stream->operations) {
      const bool held = operation.kind == Operation::Kind::gate && gates_.find(operation.id) != nullptr;
      if (held && &operation == &stream->operations.front()) break;  // arrived: what follows waits
      for (const Touch& touch : operation.touches) {
        if (touch.bytes > 0 && overlap(address, bytes, touch.address, touch.bytes)) return true;
      }
    }
  }
  return false;
}

Status ModelBackend::memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) {
  Lock lock;
  Status status;
  if (!begin(kMemoryInfo, &lock, &status)) return status;
  *total_bytes = ledger_.capacity();
  *free_bytes = ledger_.capacity() - ledger_.used_bytes();
  return kOk;
}

Status ModelBackend::reserve(std::uint64_t bytes, Address* out) {
  Lock lock;
  Status status;
  if (!begin(kReserve, &lock, &status)) return status;
  charge(kReserve, prices::kReserveShare * prices::plain(bytes));
  if (const Code code = ledger_.may_reserve(bytes); code != Code::ok) return {code, 0, "reserve"};
  const Address address = plain_addresses_.take(bytes);
  if (address == 0) return {Code::out_of_memory, 0, "reserve"};
  ledger_.reserve(address, bytes);
  *out = address;
  return kOk;
}

Status ModelBackend::release(Address address, std::uint64_t bytes) {
  Lock lock;
  Status status;
  if (!begin(kRelease, &lock, &status)) return status;
  charge(kRelease, (1.0 - prices::kReserveShare) * prices::plain(bytes));
  if (const Code code = ledger_.may_release(address, bytes); code != Code::ok) return {code, 0, "release"};
  if (busy(address, bytes)) return {Code::invalid, 0, "release"};
  busy_releases_ += queued_ > 0 ? 1 : 0;
  if (info_.release_waits && !finish_all(lock)) return {Code::failed, 0, "release"};
  ledger_.release(address);
  plain_addresses_.give(address, bytes);
  return kOk;
}

Status ModelBackend::space_reserve(std::uint64_t bytes, Address* out) {
  Lock lock;
  Status status;
  if (!begin(kSpaceReserve, &lock, &status)) return status;
  if (!info_.pages) return {Code::unsupported, 0, "space_reserve"};
  charge(kSpaceReserve, kSpaceUs);
  if (const Code code = ledger_.may_space_reserve(bytes); code != Code::ok) return {code, 0, "space_reserve"};
  const Address address = bytes > kSpaceRoom ? 0 : space_addresses_.take(bytes);
  if (address == 0) return {Code::out_of_memory, 0, "space_reserve"};
  ledger_.space_reserve(address, bytes);
  *out = address;
  return kOk;
}

Status ModelBackend::space_release(Address address, std::uint64_t bytes) {
  Lock lock;
  Status status;
  if (!begin(kSpaceRelease, &lock, &status)) return status;
  charge(kSpaceRelease, kSpaceUs);
  const Code code = ledger_.may_space_release(address, bytes);
  if (code != Code::ok) return {code, 0, "space_release"};
  ledger_.space_release(address);
  space_addresses_.give(address, bytes);
  return kOk;
}

Status ModelBackend::page_create(std::uint64_t bytes, PageHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kPageCreate, &lock, &status)) return status;
  if (!info_.pages) return {Code::unsupported, 0, "page_create"};
  charge(kPageCreate, prices::page(bytes).create);
  if (const Code code = ledger_.may_page_create(bytes); code != Code::ok) return {code, 0, "page_create"};
  *out = ledger_.page_create(bytes);
  return kOk;
}

Status ModelBackend::page_release(PageHandle page, std::uint64_t bytes) {
  Lock lock;
  Status status;
  if (!begin(kPageRelease, &lock, &status)) return status;
  charge(kPageRelease, prices::page(bytes).release);
  const Code code = ledger_.may_page_release(page, bytes);
  if (code != Code::ok) return {code, 0, "page_release"};
  ledger_.page_release(page);
  cells_.erase(page);
  return kOk;
}

Status ModelBackend::map(Address address, std::uint64_t bytes, PageHandle page) {
  Lock lock;
  Status status;
  if (!begin(kMap, &lock, &status)) return status;
  charge(kMap, prices::page(bytes).map);
  if (const Code code = ledger_.may_map(address, bytes, page); code != Code::ok) return {code, 0, "map"};
  ledger_.map(address, bytes, page);
  return kOk;
}

Status ModelBackend::set_access(Address address, std::uint64_t bytes) {
  Lock lock;
  Status status;
  if (!begin(kSetAccess, &lock, &status)) return status;
  const Code code = ledger_.may_set_access(address, bytes);
  if (code != Code::ok) return {code, 0, "set_access"};
  ledger_.each_mapping(address, bytes, [this](const Ledger::Page& page) {
    charge(kSetAccess,
           page.host ? prices::host_page(page.bytes).set_access : prices::page(page.bytes).set_access);
  });
  ledger_.set_access(address, bytes);
  for (Address at = address; !peers_.empty() && at < address + bytes; at += kSlotBytes)
    opened_pages_[at] = peers_;
  return kOk;
}

Status ModelBackend::unmap(Address address, std::uint64_t bytes) {
  Lock lock;
  Status status;
  if (!begin(kUnmap, &lock, &status)) return status;
  charge(kUnmap, prices::page(bytes).unmap);
  if (const Code code = ledger_.may_unmap(address, bytes); code != Code::ok) return {code, 0, "unmap"};
  if (busy(address, bytes, false)) return {Code::invalid, 0, "unmap"};
  ledger_.unmap(address, bytes);
  for (Address at = address; !opened_pages_.empty() && at < address + bytes; at += kSlotBytes)
    opened_pages_.erase(at);
  return kOk;
}

// ---- streams and events ---------------------------------------------------------------------------

// The place of a stream; a place that no stream has if the handle is unknown.
StreamHandle ModelBackend::at(StreamHandle handle) const {
  if (handle < kFirstForeign || handle == kNoStream) return handle;
  const auto found = foreign_.find(handle);
  if (found != foreign_.end()) return found->second;
  if (std::find(foreign_gone_.begin(), foreign_gone_.end(), handle) == foreign_gone_.end()) return kNoStream;
  std::fprintf(stderr, "vram: the model device was called with stream %#llx, which was destroyed\n",
               static_cast<unsigned long long>(handle));
  std::abort();
}

ModelBackend::Stream* ModelBackend::stream_of(StreamHandle place) {
  return place < streams_.size() && streams_[place]->alive ? streams_[place].get() : nullptr;
}

bool ModelBackend::passed(const Event& event) const {
  if (schedule_ == Schedule::lag && event.passes > now_us()) return false;
  return streams_[event.stream]->done >= event.position;
}

Status ModelBackend::stream_create(StreamHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kStreamCreate, &lock, &status)) return status;
  *out = streams_.size();
  streams_.push_back(std::make_unique<Stream>());
  ++streams_alive_;
  return kOk;
}

Status ModelBackend::stream_destroy(StreamHandle handle) {
  Lock lock;
  Status status;
  if (!begin(kStreamDestroy, &lock, &status)) return status;
  Stream* stream = stream_of(handle);
  if (!stream || handle == 0) return {Code::invalid, 0, "stream_destroy"};
  stream->alive = false;
  --streams_alive_;
  return kOk;
}

Status ModelBackend::foreign_create(StreamHandle* out) {
  if (inherited()) return {Code::closed, 0, "foreign_create"};
  const std::lock_guard lock(mutex_);
  if (foreign_gone_.empty()) {
    *out = kFirstForeign + kForeignStep * foreign_.size();
  } else {
    *out = foreign_gone_.back();
    foreign_gone_.pop_back();
  }
  foreign_[*out] = streams_.size();
  streams_.push_back(std::make_unique<Stream>());
  ++streams_alive_;
  return kOk;
}

Status ModelBackend::foreign_destroy(StreamHandle handle) {
  if (inherited()) return {Code::closed, 0, "foreign_destroy"};
  const std::lock_guard lock(mutex_);
  const auto found = foreign_.find(handle);
  if (found == foreign_.end()) return {Code::invalid, 0, "foreign_destroy"};
  streams_[found->second]->alive = false;
  --streams_alive_;
  foreign_.erase(found);
  foreign_gone_.push_back(handle);
  return kOk;
}

bool ModelBackend::lasting(StreamHandle handle) const {
  if (inherited()) return true;
  const std::lock_guard lock(mutex_);
  return handle < kFirstForeign || adopted_.contains(handle);
}

Status ModelBackend::stream_adopt(StreamHandle handle) {
  if (inherited()) return {Code::closed, 0, "stream_adopt"};
  const std::lock_guard lock(mutex_);
  if (stream_of(at(handle)) == nullptr) return {Code::invalid, 0, "stream_adopt"};
  if (handle >= kFirstForeign) adopted_.insert(handle);
  return kOk;
}

Status ModelBackend::stream_disown(StreamHandle handle) {
  if (inherited()) return {Code::closed, 0, "stream_disown"};
  const std::lock_guard lock(mutex_);
  return {adopted_.erase(handle) != 0 ? Code::ok : Code::invalid, 0, "stream_disown"};
}

Status ModelBackend::stream_id(StreamHandle handle, StreamId* out) {
  if (inherited()) return {Code::closed, 0, "stream_id"};
  const std::lock_guard lock(mutex_);
  *out = at(handle);
  return {stream_of(*out) != nullptr ? Code::ok : Code::invalid, 0, "stream_id"};
}

Status ModelBackend::stream_query(StreamHandle handle) {
  Lock lock;
  Status status;
  if (!begin_on(&handle, kStreamQuery, &lock, &status) || refuse_captured(handle, kStreamQuery, &status))
    return status;
  charge(kStreamQuery, kQueryUs);
  const Stream* stream = stream_of(handle);
  if (!stream) return {Code::invalid, 0, "stream_query"};
  const bool idle =
      stream->done == stream->queued && (schedule_ == Schedule::manual || stream->tail <= now_us());
  return {idle ? Code::ok : Code::not_ready, 0, "stream_query"};
}

Status ModelBackend::stream_wait(StreamHandle handle, EventHandle event) {
  Lock lock;
  Status status;
  if (!begin_on(&handle, kStreamWait, &lock, &status) || refuse_captured(handle, kStreamWait, &status))
    return status;
  charge(kStreamWait, kStreamWaitUs);
  Stream* stream = stream_of(handle);
  const Event* mark = events_.find(event);
  if (!stream || !mark) return {Code::invalid, 0, "stream_wait"};
  if (passed(*mark)) return kOk;
  if (schedule_ == Schedule::lag) {
    stream->tail = std::max(stream->tail, mark->passes);
    if (gates_.size() == 0) return kOk;  // else the time may change
  }
  Operation wait;
  wait.kind = Operation::Kind::wait;
  wait.other = mark->stream;
  wait.position = mark->position;
  enqueue(handle, std::move(wait));
  return kOk;
}

Status ModelBackend::event_create(EventHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kEventCreate, &lock, &status)) return status;
  charge(kEventCreate, kEventCreateUs);
  *out = events_.add({});
  return kOk;
}

Status ModelBackend::timing_event_create(EventHandle* out) {
  Lock lock;
  Status status;
  if (!begin(kTimingEventCreate, &lock, &status)) return status;
  charge(kTimingEventCreate, kEventCreateUs);
  Event event;
  event.timing = true;
  *out = events_.add(event);
  return kOk;
}

Status ModelBackend::elapsed_ms(EventHandle from, EventHandle to, double* out) {
  Lock lock;
  Status status;
  if (!begin(kElapsedMs, &lock, &status)) return status;
  for (const EventHandle each : {from, to}) {
    const Event* mark = events_.find(each);
    if (!mark || !mark->timing || !mark->recorded) return {Code::invalid, 0, "elapsed_ms"};
    if (!passed(*mark)) return {Code::not_ready, 0, "elapsed_ms"};
  }
  *out = (events_.find(to)->passes - events_.find(from)->passes) / 1e3;
  return kOk;
}

Status ModelBackend::event_destroy(EventHandle event) {
  Lock lock;
  Status status;
  if (!begin(kEventDestroy, &lock, &status)) return status;
  charge(kEventDestroy, kEventDestroyUs);
  if (!events_.find(event)) return {Code::invalid, 0, "event_destroy"};
  events_.remove(event);
  return kOk;
}

Status ModelBackend::event_record(EventHandle event, StreamHandle handle) {
  Lock lock;
  Status status;
  if (!begin_on(&handle, kEventRecord, &lock, &status) || refuse_captured(handle, kEventRecord, &status))
    return status;
  charge(kEventRecord, kEventRecordUs);
  Stream* stream = stream_of(handle);
  Event* mark = events_.find(event);
  if (!stream || !mark) return {Code::invalid, 0, "event_record"};
  if (schedule_ == Schedule::lag) {
    stream->tail = std::max(stream->tail, now_us() + (timed() ? 0 : lag_us_));
  } else {
    Operation operation;
    operation.kind = Operation::Kind::mark;
    enqueue(handle, std::move(operation));
  }
  *mark = {handle, stream->queued, stream->tail, mark->timing, true};
  return kOk;
}

Status ModelBackend::event_query(EventHandle event) {
  Lock lock;
  Status status;
  if (!begin(kEventQuery, &lock, &status)) return status;
  charge(kEventQuery, kQueryUs);
  const Event* mark = events_.find(event);
  if (!mark) return {Code::invalid, 0, "event_query"};
  return {passed(*mark) ? Code::ok : Code::not_ready, 0, "event_query"};
}

Status ModelBackend::stream_synchronize(StreamHandle handle) {
  Lock lock;
  Status status;
  if (!begin_on(&handle, kStreamSynchronize, &lock, &status) ||
      refuse_captured(handle, kStreamSynchronize, &status))
    return status;
  const Stream* stream = stream_of(handle);
  if (!stream) return {Code::invalid, 0, "stream_synchronize"};
  status = wait_for(kStreamSynchronize, handle, stream->queued, stream->tail, lock);
  if (status.ok()) host_has_waited();
  return status;
}

Status ModelBackend::event_synchronize(EventHandle event) {
  Lock lock;
  Status status;
  if (!begin(kEventSynchronize, &lock, &status)) return status;
  const Event* mark = events_.find(event);
  if (!mark) return {Code::invalid, 0, "event_synchronize"};
  status = wait_for(kEventSynchronize, mark->stream, mark->position, mark->passes, lock);
  if (status.ok()) host_has_waited();
  return status;
}

// The host's wait for a point of a stream: `moment` on the clock or `position` in the queue.
Status ModelBackend::wait_for(Call call, StreamHandle handle, std::uint64_t position, double moment,
                              Lock& lock) {
  const Stream* stream = streams_[handle].get();
  if (schedule_ == Schedule::lag) {
    if (moment > now_us()) {
      ++host_waits_;
      host_wait_us_ += moment - now_us();
    }
    move_clock(moment, lock);
    // What the stream waits for completes later than was known if it was queued behind a gate.
    while (stream->done < position) {
      const double next = next_completion();
      if (std::isinf(next) && !await_gates(lock)) break;
      move_clock(std::isinf(next) ? stream->tail : next, lock);
    }
    return {stream->done >= position ? Code::ok : Code::deadlock, 0, kCallNames[call]};
  }
  if (stream->done >= position) return kOk;
  ++host_waits_;
  const auto there = [stream, position] { return stream->done >= position; };
  bool reached = run_until(there, lock);
  while (!reached && await_gates(lock)) reached = run_until(there, lock);
  return {reached ? Code::ok : stuck(), 0, kCallNames[call]};
}

// Why a wait did not complete: a launched function made it, or everything waits for something else.
Code ModelBackend::stuck() const {
  return executing_ && executor_ == std::this_thread::get_id() ? Code::deadlock : Code::failed;
}

// ---- work -----------------------------------------------------------------------------------------

// With the lag schedule, only work is queued, and the stream's tail tells when it completes.
void ModelBackend::enqueue(StreamHandle handle, Operation operation) {
  if (Graph* graph = capture_on(handle)) {
    graph->operations.push_back(std::move(operation));
    return;
  }
  Stream& stream = *streams_[handle];
  if (schedule_ == Schedule::lag) {
    if (operation.kind == Operation::Kind::gate || operation.kind == Operation::Kind::wait) {
      stream.tail = std::max(stream.tail, now_us());
    } else if (operation.duration > 0) {
      double& engine = engines_[static_cast<std::size_t>(operation.engine)];
      stream.tail = std::max({stream.tail, now_us(), engine}) + operation.duration;
      engine = stream.tail;
    } else {
      stream.tail =
          timed() ? std::max(stream.tail, now_us()) + lag_us_ : std::max(stream.tail, now_us() + lag_us_);
    }
    operation.finish = stream.tail;
    operation.sequence = next_sequence_++;
  }
  stream.operations.push_back(std::move(operation));
  ++stream.queued;
  ++queued_;
}

Status ModelBackend::enqueue_work(Call call, StreamHandle stream, Operation operation) {
  const bool reached = call == kCopyPeer || may_reach(operation.touches, std::size(operation.touches));
  Lock lock;
  Status status;
  if (!begin_on(&stream, call, &lock, &status)) return status;
  if (!stream_of(stream) || !reached) return {Code::invalid, 0, kCallNames[call]};
  for (const Touch& touch : operation.touches) {
    if (ledger_.may_touch(touch.address, touch.bytes) != Code::ok)
      return {Code::invalid, 0, kCallNames[call]};
  }
  operation.id = next_own_id_++;
  hold_for_copy(operation);
  enqueue(stream, std::move(operation));
  if (lag_us_ == 0) move_clock(now_us(), lock);  // it completes immediately
  return kOk;
}

Status ModelBackend::copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) {
  Operation operation;
  operation.touches[0] = {to, bytes};
  operation.touches[1] = {from, bytes};
  operation.copies = true;
  set_engine(operation, to, from, bytes);
  return enqueue_work(kCopy, stream, std::move(operation));
}

Status ModelBackend::fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) {
  Operation operation;
  operation.fills = true;
  operation.filled = value;
  operation.touches[0] = {to, bytes};
  return enqueue_work(kFill, stream, std::move(operation));
}

Status ModelBackend::launch(StreamHandle stream, std::function<void()> work) {
  if (!work) return {Code::invalid, 0, "launch"};
  Operation operation;
  operation.function = std::move(work);
  return enqueue_work(kLaunch, stream, std::move(operation));
}

Status ModelBackend::work(StreamHandle stream, std::uint64_t id, Address address, std::uint64_t bytes) {
  if (inherited()) return {Code::closed, 0, "work"};
  const Touch touch{address, bytes};
  const bool reached = may_reach(&touch, 1);
  Lock lock(mutex_);
  stream = at(stream);
  if (!stream_of(stream) || !reached || ledger_.may_touch(address, bytes) != Code::ok)
    return {Code::invalid, 0, "work"};
  Operation operation;
  operation.id = id;
  operation.touches[0] = {address, bytes};
  enqueue(stream, std::move(operation));
  if (lag_us_ == 0) move_clock(now_us(), lock);
  return kOk;
}

// ---- executing ------------------------------------------------------------------------------------

// Waits until no other thread executes. False on the executing thread itself: a launched function cannot
// execute work that is queued behind it.
bool ModelBackend::may_execute(Lock& lock) {
  if (executing_ && executor_ == std::this_thread::get_id()) return false;
  executed_one_.wait(lock, [this] { return !executing_; });
  return true;
}

bool ModelBackend::ready(const Operation& operation) const {
  if (operation.kind == Operation::Kind::gate && gates_.find(operation.id) != nullptr) return false;
  if (schedule_ == Schedule::lag && operation.finish > now_us()) return false;
  return operation.kind != Operation::Kind::wait || streams_[operation.other]->done >= operation.position;
}

// pre: may_execute, and the stream's first operation is ready.
void ModelBackend::execute(Stream& stream, Lock& lock) {
  Operation operation = std::move(stream.operations.front());
  stream.operations.pop_front();
  if (stamps_) leave_stamps(operation);
  if (operation.function) {
    executing_ = true;
    executor_ = std::this_thread::get_id();
    lock.unlock();
    try {
      operation.function();
    } catch (const abi::__forced_unwind&) {
      throw;
    } catch (...) {
    }
    operation.function = nullptr;
    lock.lock();
    executing_ = false;
    executed_one_.notify_all();
  }
  if (operation.kind == Operation::Kind::work) executed_.push_back(operation.id);
  ++stream.done;
  --queued_;
}

bool ModelBackend::step_locked(StreamHandle handle, Lock& lock) {
  if (handle >= streams_.size()) return false;
  Stream& stream = *streams_[handle];
  if (stream.operations.empty() || !ready(stream.operations.front())) return false;
  execute(stream, lock);
  return true;
}

// Executes one step of every stream that can make one. pre: may_execute.
bool ModelBackend::step_round(Lock& lock) {
  bool moved = false;
  for (StreamHandle handle = 0; handle < streams_.size(); ++handle) {
    moved = (may_execute(lock) && step_locked(handle, lock)) || moved;
  }
  return moved;
}

bool ModelBackend::run_until(const std::function<bool()>& reached, Lock& lock) {
  while (!reached()) {
    if (!may_execute(lock)) return false;
    if (!reached() && !step_round(lock)) return reached();
  }
  return true;
}

bool ModelBackend::step(StreamHandle stream) {
  Lock lock = hold();
  stream = at(stream);
  return schedule_ == Schedule::manual && may_execute(lock) && step_locked(stream, lock);
}

bool ModelBackend::run_all() {
  Lock lock = hold();
  return finish_all(lock);
}

bool ModelBackend::finish_all(Lock& lock) {
  if (schedule_ == Schedule::manual) {
    return run_until([this] { return queued_ == 0; }, lock);
  }
  double last = now_us();
  for (const auto& stream : streams_) last = std::max(last, stream->tail);
  move_clock(last, lock);
  // What other threads have queued meanwhile completes later.
  return std::none_of(streams_.begin(), streams_.end(), [last](const auto& stream) {
    return !stream->operations.empty() && stream->operations.front().finish <= last;
  });
}

Status ModelBackend::synchronize() {
  if (inherited()) return {Code::closed, 0, "synchronize"};
  Lock lock(mutex_);
  while (!finish_all(lock))
    if (!await_gates(lock)) return {stuck(), 0, "synchronize"};
  host_has_waited();
  return kOk;
}

// Lag: the stream whose first operation is the next to complete; null if the clock has passed none.
ModelBackend::Stream* ModelBackend::first_ready() {
  Stream* first = nullptr;
  for (const auto& stream : streams_) {
    if (stream->operations.empty() || !ready(stream->operations.front())) continue;
    const Operation& candidate = stream->operations.front();
    const Operation* best = first ? &first->operations.front() : nullptr;
    const bool earlier = !best || candidate.finish < best->finish ||
                         (candidate.finish == best->finish && candidate.sequence < best->sequence);
    if (earlier) first = stream.get();
  }
  return first;
}

// Lag: the next time at which a stream's first operation may complete; infinite if there is none.
double ModelBackend::next_completion() const {
  double next = std::numeric_limits<double>::infinity();
  for (const auto& stream : streams_)
    if (!stream->operations.empty() && stream->operations.front().finish > now_us())
      next = std::min(next, stream->operations.front().finish);
  return next;
}

// Lag: executes what the clock has passed, in order of completion.
void ModelBackend::settle(Lock& lock) {
  while (queued_ > 0 && may_execute(lock)) {
    Stream* const first = first_ready();
    if (first == nullptr) return;
    execute(*first, lock);
  }
}

void ModelBackend::move_clock(double us, Lock& lock) {
  double now = now_us();
  while (now < us && !group_->now_us.compare_exchange_weak(now, us)) {
  }
  if (linked_) return settle_group(lock);
  if (queued_ > 0 && schedule_ == Schedule::lag) settle(lock);
}

double ModelBackend::now() {
  const Lock lock = hold();
  return now_us();
}

void ModelBackend::advance(double us) {
  Lock lock = hold();
  move_clock(now_us() + us, lock);
}

void ModelBackend::set_time(double us) {
  Lock lock = hold();
  move_clock(us, lock);
}

void ModelBackend::set_lag(double us) {
  const Lock lock = hold();
  lag_us_ = us;
}

Status ModelBackend::set_schedule(Schedule schedule) {
  if (inherited()) return {Code::closed, 0, "set_schedule"};
  const std::lock_guard lock(mutex_);
  if (schedule == Schedule::manual && linked_) return {Code::invalid, 0, "set_schedule"};
  const bool idle = std::all_of(streams_.begin(), streams_.end(), [this](const auto& stream) {
    return stream->done == stream->queued && (schedule_ == Schedule::manual || stream->tail <= now_us());
  });
  if (!idle) return {Code::invalid, 0, "set_schedule"};
  schedule_ = schedule;
  return kOk;
}

std::vector<std::uint64_t> ModelBackend::executed() {
  const Lock lock = hold();
  return executed_;
}

void ModelBackend::clear_executed() {
  const Lock lock = hold();
  executed_.clear();
}

// ---- state ----------------------------------------------------------------------------------------

ModelCounts ModelBackend::counts() {
  const Lock lock = hold();
  return {ledger_.plain_count(),
          ledger_.plain_bytes(),
          ledger_.space_count(),
          ledger_.page_count(),
          ledger_.page_bytes(),
          ledger_.mapping_count(),
          events_.size(),
          streams_alive_,
          queued_,
          pools_.size() - (default_pool_ != 0 ? 1 : 0),
          copies_.size(),
          ledger_.host_bytes(),
          gates_.size()};
}

bool ModelBackend::check(std::string* why) {
  const Lock lock = hold();
  const auto broken = [why](const char* what) {
    if (why) *why = what;
    return false;
  };
  std::uint64_t queued = 0, alive = 0;
  for (const auto& stream : streams_) {
    const std::uint64_t open = stream->queued - stream->done;
    const std::uint64_t running = executing_ ? 1 : 0;
    if (open < stream->operations.size() || open > stream->operations.size() + running) {
      return broken("a stream miscounts its operations");
    }
    queued += open;
    alive += stream->alive ? 1 : 0;
  }
  if (queued != queued_) return broken("the queued operations are miscounted");
  if (alive != streams_alive_) return broken("the streams are miscounted");
  bool recorded_on_known_stream = true;
  events_.each([&](EventHandle, const Event& event) {
    recorded_on_known_stream &=
        event.stream < streams_.size() && event.position <= streams_[event.stream]->queued;
  });
  if (!recorded_on_known_stream) return broken("an event marks a point that does not exist");
  return check_pools(why) && ledger_.check(why);
}

}  // namespace vram
