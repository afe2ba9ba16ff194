// Allocation with its short ladder, ordered frees, and statistics. See driver_pool.hpp.
#include "driver_pool/driver_pool.hpp"

#include <algorithm>
#include <chrono>

#include "base/waits.hpp"

namespace vram {

namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                    std::chrono::nanoseconds(1));
}

int kind_index(std::uint64_t bytes) { return static_cast<int>(kind_of(static_cast<Units>(bytes / kUnit))); }

}  // namespace

const DriverPool::Step DriverPool::kLadder[] = {
    {Rung::driver, &DriverPool::serve_driver},
    {Rung::host_wait, &DriverPool::serve_host_wait},
    {Rung::callbacks, &DriverPool::serve_callbacks},
    {Rung::give_back, &DriverPool::serve_give_back},
};

// ---- creating -------------------------------------------------------------------------------------------

DriverPool::DriverPool(std::shared_ptr<Backend> backend, DriverPoolBackend* driver, const Source& source,
                       const PoolConfig& config)
    : backend_(std::move(backend)), driver_(driver), source_(source), config_(config), events_(*backend_) {
  generation_.store(process_generation(), std::memory_order_relaxed);
  // Options of placement apply only to vram's own pool.
  config_.pages = false;
  config_.stream_cache = 0;
}

Status DriverPool::open(std::shared_ptr<Backend> backend, const Source& source, const PoolConfig& config,
                        std::shared_ptr<DriverPool>* out) {
  DriverPoolBackend* driver = backend->driver_pools();
  if (driver == nullptr) return {Code::unsupported, 0, kNoDriverPools};
  DriverPoolHandle handle = 0;
  Status status;
  switch (source.origin) {
    case Origin::created:
      status = driver->pool_create(source.properties, &handle);
      break;
    case Origin::shared_default:
      status = driver->pool_default(&handle);
      break;
    case Origin::imported:
      status = driver->pool_import(source.fd, &handle);
      break;
  }
  if (!status.ok()) return status;
  out->reset(new DriverPool(std::move(backend), driver, source, config), end<DriverPool>);
  (*out)->handle_ = handle;
  // Peaks that others reached before are not ours.
  if (source.origin == Origin::shared_default)
    (void)driver->pool_get(handle, DriverPoolAttribute::reserved_mem_high, &(*out)->high_at_reset_);
  if (config.journal != 0) (void)(*out)->start_journal(std::min(config.journal, kMostJournaled));
  return {};
}

DriverPool::~DriverPool() { (void)close(); }

bool DriverPool::begin_access() const {
  std::lock_guard lock(mutex_);
  if (closed()) return false;
  ++calls_;
  return true;
}

void DriverPool::end_access() const {
  std::lock_guard lock(mutex_);
  if (--calls_ == 0) calls_ended_.notify_all();
}

// ---- allocation -----------------------------------------------------------------------------------------

Status DriverPool::allocate_slow(std::uint64_t size, StreamHandle stream, std::uint64_t align,
                                 std::uint32_t tag, Address* out, OutOfMemoryReport* report) {
  if (closed()) return {Code::closed, 0, "allocate"};
  if (source_.origin == Origin::imported) return {Code::unsupported, 0, kImported};
  if ((align & (align - 1)) != 0 || align > kMaxRequest) return {Code::invalid, 0, "align"};
  Request request{size, 0, 0, std::max(align, kUnit), backend_->canonical(stream), tag, 0, 0, {}};
  if (Status status = known_stream(request.stream, &request.capture); !status.ok()) return status;
  free_kept();
  bool served = false;
  if (size <= kMaxRequest) {
    request.bytes = std::uint64_t{units_of(size)} * kUnit;
    request.taken = request.bytes + request.align - kUnit;
    served = climb(request);
  }
  if (served) {
    *out = request.out;
    if (std::uint64_t reserved = 0;
        high_water_.any() && attribute(DriverPoolAttribute::reserved_mem_current, &reserved).ok())
      high_water_.look(reserved);
    if (!config().zero_on_allocate) return {};
    const Status status = zero_new(*out, request.bytes, request.stream);
    if (!status.ok()) take_back(std::exchange(*out, 0));
    return status;
  }
  if (!request.error.ok()) return request.error;
  std::lock_guard lock(mutex_);
  ++out_of_memory_;
  const OutOfMemoryReport why = explain(request);
  note(request.stream, Action::out_of_memory, why.device_free, size, tag, 0);
  if (report != nullptr) *report = why;
  return {Code::out_of_memory, 0, "allocate"};
}

Status DriverPool::zero_new(Address address, std::uint64_t bytes, StreamHandle stream) {
  const Access call(*this);
  return call.refused() ? Status{Code::closed, 0, "allocate"} : backend_->fill(address, 0, bytes, stream);
}

Status DriverPool::allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle stream,
                                  std::uint32_t tag, std::vector<Address>& out, OutOfMemoryReport* report) {
  out.assign(sizes.size(), 0);
  Status status = closed() ? Status{Code::closed, 0, "allocate"} : Status{};
  for (std::size_t i = 0; i < sizes.size() && status.ok(); ++i)
    status = allocate_slow(sizes[i], stream, 0, tag, &out[i], report);
  if (status.ok()) return status;
  for (Address& address : out) {
    if (address != 0) take_back(address);
    address = 0;
  }
  return status;
}

// The capture of a stream; 0: none. The default stream gets the full query: it must not be used while others
// are captured, which `capturing` does not tell.
Status DriverPool::capture_of(StreamHandle stream, CaptureId* out) const {
  *out = 0;
  return stream == 0 || backend_->capturing(stream) ? backend_->capture_of(stream, out) : Status{};
}

// Checks that a stream belongs to the device; one that was seen before does. Also returns its capture: a
// captured stream must not be queried any further.
Status DriverPool::known_stream(StreamHandle stream, CaptureId* capture) {
  if (Status status = capture_of(stream, capture); !status.ok()) return status;
  {
    std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    if (*capture != 0 || (found != streams_.end() && !found->second.retired)) return {};
  }
  const Status status = backend_->stream_query(stream);
  return status.code == Code::invalid ? status : Status{};
}

// Stops at the first rung that serves the request. False with an error in the request, or out of memory.
bool DriverPool::climb(Request& request) {
  for (const Step& step : kLadder) {
    const bool served = (this->*step.serve)(request);
    if (!served && !request.error.ok()) return false;
    std::lock_guard lock(mutex_);
    if (served) {
      ++rungs_[static_cast<int>(step.rung)];
      return true;
    }
    retries_ += step.rung == Rung::driver ? 1 : 0;
  }
  return false;
}

bool DriverPool::fits_limit(const Request& request) const {
  std::lock_guard lock(mutex_);
  return config_.limit == 0 || live_bytes_ + promised_ + request.bytes <= config_.limit;
}

// Tries the driver once.
bool DriverPool::serve_driver(Request& request) {
  const Access call(*this);
  if (call.refused()) {
    request.error = {Code::closed, 0, "allocate"};
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    if (config_.limit != 0 && live_bytes_ + promised_ + request.bytes > config_.limit) return false;
    promised_ += request.bytes;
  }
  Address base = 0;
  Status status = driver_->pool_allocate(handle_, request.taken, request.stream, &base);
  if (status.ok() && base % kUnit != 0) {
    (void)driver_->pool_free(base, request.stream);
    status = {Code::failed, 0, "pool_allocate: less than 512 bytes of alignment"};
  }
  std::lock_guard lock(mutex_);
  promised_ -= request.bytes;
  if (status.ok()) request.out = enter(request, base);
  if (!status.ok() && status.code != Code::out_of_memory) request.error = status;
  return status.ok();
}

// The driver fails while usable memory waits for frees that a stream has not reached, or that the driver has
// not noticed. Waits for each stream that has freed memory, starting with those that freed most.
bool DriverPool::serve_host_wait(Request& request) {
  if (request.capture != 0 || !fits_limit(request)) return false;
  for (const StreamHandle stream : streams_with_frees()) {
    if (synchronize(stream).code == Code::interrupted) request.error = {Code::interrupted, 0, "allocate"};
    if (request.error.ok() && serve_driver(request)) return true;
    if (!request.error.ok()) return false;
  }
  return false;
}

bool DriverPool::serve_callbacks(Request& request) {
  Callback callback;
  {
    std::lock_guard lock(mutex_);
    callback = callback_;
  }
  const bool again = callback && call_back(callback, request.size, request.stream);
  if (interrupted()) request.error = {Code::interrupted, 0, "allocate"};
  if (!again || !request.error.ok()) return false;
  if (serve_driver(request)) return true;
  return request.error.ok() && serve_host_wait(request);
}

bool DriverPool::serve_give_back(Request& request) {
  if (request.capture != 0 || !fits_limit(request)) return false;
  {
    const Access call(*this);
    if (!call.refused()) (void)driver_->pool_trim(handle_, 0);
  }
  return serve_driver(request);
}

// Registers an allocation of the driver. Called with the mutex held.
Address DriverPool::enter(const Request& request, Address base) {
  const Address address = round_up(base, request.align);
  Block block;
  block.base = base;
  block.bytes = request.bytes;
  block.requested = request.size;
  block.taken = request.taken;
  block.stream = request.stream;
  block.capture = request.capture;
  block.tag = request.tag;
  block.serial = ++serial_;
  count_in(block, false);
  note(block.stream, Action::allocate, address, block.requested, block.tag, block.serial);
  live_.emplace(address, std::move(block));
  return address;
}

// ---- frees ----------------------------------------------------------------------------------------------

Status DriverPool::free_slow(Address address) {
  if (closed()) return {Code::closed, 0, "free"};
  free_kept();
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "free"};
  Block block;
  if (Status status = remove(address, &block); !status.ok()) return status;
  const Status status = give(address, block);
  if (!status.ok()) put_back(address, std::move(block));
  return status;
}

Status DriverPool::drop(Address address) {
  if (closed()) return {Code::closed, 0, "free"};
  free_kept();
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "free"};
  Block block;
  if (Status status = remove(address, &block); !status.ok()) return status;
  if (!give(address, block).ok()) keep_for_later(address, std::move(block));
  return {};
}

// Keeps a block that is no longer registered and that the driver could not take yet.
void DriverPool::keep_for_later(Address address, Block&& block) {
  std::lock_guard lock(kept_->mutex);
  kept_->ready.emplace(address, std::move(block));
  kept_->any_ready.store(true, std::memory_order_relaxed);
}

// Undoes an allocation that the program has not seen.
void DriverPool::take_back(Address address) {
  const Access call(*this);
  Block block;
  if (call.refused() || !remove(address, &block).ok()) return;
  if (!driver_->pool_free(block.base, block.stream).ok()) put_back(address, std::move(block));
}

Status DriverPool::remove(Address address, Block* out) {
  std::lock_guard lock(mutex_);
  const auto found = live_.find(address);
  if (found == live_.end()) return {Code::invalid, 0, "free"};
  *out = std::move(found->second);
  live_.erase(found);
  count_out(*out);
  note(out->stream, Action::free, address, out->requested, out->tag, out->serial);
  if (out->gone) drop_books(out->stream);
  return {};
}

// The driver did not take it, so it stays live.
void DriverPool::put_back(Address address, Block&& block) {
  std::lock_guard lock(mutex_);
  count_in(block, true);
  note(block.stream, Action::allocate, address, block.requested, block.tag, block.serial);
  live_.emplace(address, std::move(block));
}

// Frees an unregistered block to the driver, ordered after everything that uses it. Streams of other
// libraries may have been destroyed, so only a wait for the whole device ensures that they have completed.
Status DriverPool::give(Address address, Block& block) {
  const auto foreign = [this](StreamHandle stream) { return !backend_->lasting(stream); };
  const bool lost = !block.gone && foreign(block.stream);
  if (block.capture == 0 && (lost || std::any_of(block.uses.begin(), block.uses.end(), foreign))) {
    if (Status status = backend_->synchronize(); !status.ok()) return status;
    block.gone |= lost;
    block.behind |= std::erase_if(block.uses, foreign) != 0;
  }
  StreamHandle captured = 0;
  CaptureId capture = 0;
  const Status status = captured_stream(block, &captured, &capture);
  if (status.code == Code::capturing) {
    // The default stream cannot be used while others are captured, so free it later.
    keep_for_later(address, std::move(block));
    return {};
  }
  if (!status.ok()) return status;
  if (capture != 0 && block.capture != 0) return give_in_capture(address, block);
  if (capture != 0) return keep_for_capture(address, block, captured);
  if (block.gone || block.behind || !block.uses.empty()) return give_behind(address, block);
  return give_on(address, block, block.stream);
}

// The first of the block's streams that is captured, if any.
Status DriverPool::captured_stream(const Block& block, StreamHandle* stream, CaptureId* capture) const {
  *capture = 0;
  if (!block.gone) {
    *stream = block.stream;
    if (Status status = capture_of(*stream, capture); !status.ok() || *capture != 0) return status;
  }
  for (const StreamHandle use : block.uses) {
    *stream = use;
    if (Status status = capture_of(use, capture); !status.ok() || *capture != 0) return status;
  }
  return {};
}

// Memory of a graph is freed by a node of the graph, ordered after other captured streams that use it.
Status DriverPool::give_in_capture(Address address, Block& block) {
  {
    std::lock_guard lock(mutex_);
    for (const StreamHandle use : block.uses)
      if (Status status = wait_behind(block.stream, use); !status.ok()) return status;
  }
  return give_on(address, block, block.stream);
}

// A graph uses the block, and may run again at any time until it is destroyed.
Status DriverPool::keep_for_capture(Address address, Block& block, StreamHandle captured) {
  {
    std::lock_guard lock(kept_->mutex);
    kept_->waiting.emplace(address, block);
  }
  const Status status = backend_->capture_keep(captured, [kept = kept_, address] {
    std::lock_guard lock(kept->mutex);
    const auto found = kept->waiting.find(address);
    if (found == kept->waiting.end()) return;
    kept->ready.insert(kept->waiting.extract(found));
    kept->any_ready.store(true, std::memory_order_relaxed);
  });
  if (status.ok()) return status;
  std::lock_guard lock(kept_->mutex);
  kept_->waiting.erase(address);
  kept_->ready.erase(address);  // the backend may have dropped what it could not keep
  return status;
}

// Frees what destroyed graphs have kept.
void DriverPool::free_kept() {
  if (!kept_->any_ready.load(std::memory_order_relaxed)) return;
  const Access call(*this);
  if (call.refused()) return;
  std::map<Address, Block> ready;
  {
    std::lock_guard lock(kept_->mutex);
    ready.swap(kept_->ready);
    kept_->any_ready.store(false, std::memory_order_relaxed);
  }
  for (auto& [address, block] : ready) {
    if (!give(address, block).ok()) keep_for_later(address, std::move(block));  // the next call tries again
  }
}

// Frees on the private stream, ordered after every stream that uses the block.
Status DriverPool::give_behind(Address address, Block& block) {
  StreamHandle freeing = 0;
  {
    std::lock_guard lock(mutex_);
    if (Status status = freeing_stream(&freeing); !status.ok()) return status;
    if (!block.gone)
      if (Status status = wait_behind(freeing, block.stream); !status.ok()) return status;
    for (const StreamHandle use : block.uses)
      if (Status status = wait_behind(freeing, use); !status.ok()) return status;
  }
  return give_on(address, block, freeing);
}

Status DriverPool::give_on(Address address, Block& block, StreamHandle stream) {
  if (config().zero_on_free)
    if (Status status = backend_->fill(address, 0, block.bytes, stream); !status.ok()) return status;
  if (Status status = driver_->pool_free(block.base, stream); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  account_of(stream).freed += block.taken;
  return {};
}

// Called with the mutex held.
Status DriverPool::freeing_stream(StreamHandle* out) {
  if (freeing_ == 0)
    if (Status status = backend_->stream_create(&freeing_); !status.ok()) return status;
  *out = freeing_;
  return {};
}

// Makes later work of `waiter` wait for what is queued on `stream` now. Called with the mutex held.
Status DriverPool::wait_behind(StreamHandle waiter, StreamHandle stream) {
  EventHandle event = 0;
  if (Status status = events_.take(&event); !status.ok()) return status;
  Status status = backend_->event_record(event, stream);
  if (status.ok()) status = backend_->stream_wait(waiter, event);
  events_.put(event);  // a wait refers to the event as it was when the wait was queued
  return status;
}

Status DriverPool::record_stream(Address address, StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "record_stream"};
  const StreamHandle stream = backend_->canonical(handle);
  CaptureId capture = 0;
  if (Status status = known_stream(stream, &capture); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  auto found = live_.upper_bound(address);
  if (found == live_.begin()) return {Code::invalid, 0, "record_stream"};
  --found;
  Block& block = found->second;
  if (address - found->first >= block.bytes) return {Code::invalid, 0, "record_stream"};
  if (stream == block.stream && !block.gone) return {};
  if (std::find(block.uses.begin(), block.uses.end(), stream) != block.uses.end()) return {};
  block.uses.push_back(stream);
  (void)account_of(stream);
  return {};
}

// ---- housekeeping ---------------------------------------------------------------------------------------

std::vector<StreamHandle> DriverPool::streams_with_frees() const {
  std::vector<std::pair<std::uint64_t, StreamHandle>> found;
  std::lock_guard lock(mutex_);
  for (const auto& [handle, account] : streams_)
    if (account.freed != 0 && !account.retired) found.emplace_back(account.freed, handle);
  std::sort(found.begin(), found.end(), std::greater<>());
  std::vector<StreamHandle> handles;
  for (const auto& [freed, handle] : found) handles.push_back(handle);
  return handles;
}

// Waits for the streams in use: individually for lasting ones, and for the device for others, which may have
// been destroyed. Returns immediately if this thread cannot wait, else the first failure.
Status DriverPool::wait_for_streams() {
  std::vector<StreamHandle> streams;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [handle, account] : streams_)
      if (!account.retired) streams.push_back(handle);
  }
  Status first;
  if (std::erase_if(streams, [this](StreamHandle stream) { return !backend_->lasting(stream); }) != 0)
    first = backend_->synchronize();
  for (const StreamHandle stream : streams) {
    if (first.unwaited()) break;
    const Status status = synchronize(stream);
    if (status.unwaited() || (first.ok() && status.code != Code::capturing)) first = status;
  }
  return first;
}

// Waits for a stream, unless it is captured.
Status DriverPool::synchronize(StreamHandle stream) {
  CaptureId capture = 0;
  if (Status status = capture_of(stream, &capture); !status.ok()) return status;
  if (capture != 0) return {Code::capturing, 0, "stream_synchronize"};
  std::uint64_t reached = 0;
  {
    std::lock_guard lock(mutex_);
    reached = account_of(stream).freed;
  }
  if (Status status = backend_->stream_synchronize(stream); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  StreamAccount& account = account_of(stream);
  account.freed -= std::min(account.freed, reached);
  return {};
}

Status DriverPool::coalesce() {
  if (closed()) return {Code::closed, 0, "coalesce"};
  free_kept();
  return {};
}

Status DriverPool::trim(std::uint64_t keep, bool wait) {
  if (closed()) return {Code::closed, 0, "trim"};
  free_kept();
  if (wait)
    for (const StreamHandle stream : streams_with_frees())
      if (Status status = synchronize(stream); !status.ok()) return status;
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "trim"};
  return driver_->pool_trim(handle_, keep);
}

Status DriverPool::set_limit(std::uint64_t bytes) {
  Lock lock;
  if (Status status = open_for("limit", &lock); !status.ok()) return status;
  config_.limit = bytes;
  return {};
}

Status DriverPool::change(const Setting& set) {
  Lock lock;
  if (Status status = open_for("configure", &lock); !status.ok()) return status;
  PoolConfig config = config_;
  set(config);
  config_.limit = config.limit;
  config_.zero_on_allocate = config.zero_on_allocate;
  config_.zero_on_free = config.zero_on_free;
  return {};
}

// Like Pool::enter and Pool::look.
Status DriverPool::open_for(const char* call, Lock* lock) const {
  if (!closed()) *lock = Lock(mutex_);
  return closed() ? Status{Code::closed, 0, call} : Status{};
}

bool DriverPool::look(Lock* lock) const {
  if (inherited()) return false;
  *lock = Lock(mutex_);
  return true;
}

PoolConfig DriverPool::config() const {
  Lock lock;
  return look(&lock) ? config_ : PoolConfig{};
}

// The private stream is ordered after everything the stream did; remaining blocks are freed there.
Status DriverPool::retire_stream(StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "retire_stream"};
  const StreamHandle stream = backend_->canonical(handle);
  {
    std::lock_guard lock(mutex_);
    if (!streams_.contains(stream)) return {};
  }
  if (stream == 0) return {Code::invalid, 0, "retire_stream"};
  CaptureId capture = 0;
  if (Status status = capture_of(stream, &capture); !status.ok()) return status;
  if (capture != 0) return {Code::capturing, 0, "retire_stream"};
  Status status;
  {
    Lock lock;
    if (Status open = open_for("retire_stream", &lock); !open.ok()) return open;
    StreamHandle freeing = 0;
    status = freeing_stream(&freeing);
    if (status.ok()) status = wait_behind(freeing, stream);
  }
  if (!status.ok())
    if (status = backend_->stream_synchronize(stream); !status.ok()) return status;
  Lock lock(mutex_);
  // Blocks that are being freed may still need the stream.
  calls_ended_.wait(lock, [this] { return calls_ == 0; });
  forget_stream(stream);
  return {};
}

// Called with the mutex held.
void DriverPool::forget_stream(StreamHandle stream) {
  std::lock_guard kept(kept_->mutex);
  for (auto* blocks : {&live_, &kept_->waiting, &kept_->ready})
    for (auto& [address, block] : *blocks) {
      block.gone |= block.stream == stream;
      block.behind |= std::erase(block.uses, stream) != 0;
    }
  StreamAccount& account = account_of(stream);
  account.retired = true;
  if (freeing_ != 0) account_of(freeing_).freed += account.freed;
  account.freed = 0;
  drop_books(stream);
}

// Forgets a destroyed stream once nothing of it is live; its events are merged with those of other such
// streams.
void DriverPool::drop_books(StreamHandle stream) {
  const StreamAccount& account = account_of(stream);
  if (!account.retired || account.live != 0) return;
  if (account.journal != nullptr && old_journal_ != nullptr) {
    std::vector<JournalEntry> entries;
    account.journal->copy_to(entries);
    for (const JournalEntry& entry : entries) old_journal_->add(entry);
    old_dropped_ += account.journal->dropped();
  }
  streams_.erase(stream);
}

void DriverPool::on_out_of_memory(Callback callback) {
  Lock lock;
  if (look(&lock)) callback_.swap(callback);
}

Status DriverPool::close() {
  // In the child of a fork the locks and the memory belong to the parent; nothing is touched.
  if (closed()) return {};
  if (Access::ours(*this)) return {Code::deadlock, 0, "close"};
  // If this thread cannot wait now, the pool stays open; what is queued from here on is waited for below.
  if (const Status status = wait_for_streams(); status.unwaited()) return status;
  const InterruptScope quiet(nullptr);
  {
    Lock lock(mutex_);
    if (closed()) return {};
    generation_.store(0, std::memory_order_relaxed);
    calls_ended_.wait(lock, [this] { return calls_ == 0; });
  }
  const Status status = return_everything();
  std::lock_guard lock(mutex_);
  callback_ = nullptr;
  live_.clear();
  // Nothing is held anymore; totals and peaks stay readable.
  for (auto& [handle, account] : streams_) account.live = account.freed = 0;
  live_bytes_ = reserved_.current = used_ = 0;
  for (int kind = 0; kind < 2; ++kind)
    for (Meter* meter : {&allocations_[kind], &bytes_[kind], &requested_[kind]}) meter->current = 0;
  return status;
}

// Waits for all work, frees what is live or kept, and destroys the pool unless it is the shared default.
// Continues after a failure and returns the first. pre: closed, and no call is running.
Status DriverPool::return_everything() {
  Status first;
  const auto remember = [&first](const Status& status) {
    if (first.ok()) first = status;
  };
  remember(wait_for_streams());
  std::map<Address, Block> all;
  {
    std::scoped_lock lock(mutex_, kept_->mutex);
    all.swap(live_);
    all.merge(kept_->waiting);
    all.merge(kept_->ready);
    kept_->waiting.clear();
    kept_->ready.clear();
  }
  StreamHandle freeing = 0;
  if (!all.empty()) (void)freeing_stream(&freeing);  // if that fails, use the default stream
  for (const auto& [address, block] : all) {
    Status status = config_.zero_on_free ? backend_->fill(address, 0, block.bytes, freeing) : Status{};
    if (status.ok()) status = driver_->pool_free(block.base, freeing);
    // Memory of a graph that never ran does not exist.
    if (block.capture == 0) remember(status);
  }
  if (!all.empty()) remember(backend_->stream_synchronize(freeing));
  if (freeing_ != 0) remember(backend_->stream_destroy(freeing_));
  remember(events_.destroy_all());
  if (source_.origin != Origin::shared_default) remember(driver_->pool_destroy(handle_));
  return first;
}

// ---- attributes and other processes ---------------------------------------------------------------------

Status DriverPool::attribute(DriverPoolAttribute attribute, std::uint64_t* out) const {
  if (closed()) return {Code::closed, 0, "attribute"};
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "attribute"};
  return driver_->pool_get(handle_, attribute, out);
}

Status DriverPool::set_attribute(DriverPoolAttribute attribute, std::uint64_t value) {
  if (closed()) return {Code::closed, 0, "attribute"};
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "attribute"};
  return driver_->pool_set(handle_, attribute, value);
}

Status DriverPool::add_peer(int device) {
  if (closed()) return {Code::closed, 0, "add_peer"};
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "add_peer"};
  return driver_->pool_open(handle_, device);
}

Status DriverPool::export_pool(int* fd) {
  if (closed()) return {Code::closed, 0, "export"};
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "export"};
  return driver_->pool_export(handle_, fd);
}

Status DriverPool::export_pointer(Address address, SharedPointer* out, std::uint64_t* offset) {
  if (closed()) return {Code::closed, 0, "export"};
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "export"};
  Address base = 0;
  {
    std::lock_guard lock(mutex_);
    const auto found = live_.find(address);
    if (found == live_.end()) return {Code::invalid, 0, "export"};
    base = found->second.base;
  }
  *offset = address - base;
  return driver_->pool_export_pointer(base, out);
}

Status DriverPool::import_pointer(const SharedPointer& pointer, std::uint64_t offset, std::uint64_t size,
                                  StreamHandle stream, std::uint32_t tag, Address* out) {
  if (closed()) return {Code::closed, 0, "import"};
  Request request{size, 0, 0, 1, backend_->canonical(stream), tag, 0, 0, {}};
  if (Status status = known_stream(request.stream, &request.capture); !status.ok()) return status;
  if (size > kMaxRequest || offset > kMaxRequest) return {Code::invalid, 0, "import"};
  const Access call(*this);
  if (call.refused()) return {Code::closed, 0, "import"};
  Address base = 0;
  if (Status status = driver_->pool_import_pointer(handle_, pointer, &base); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  if (live_.contains(base + offset)) return {Code::invalid, 0, "import"};
  request.bytes = std::uint64_t{units_of(size)} * kUnit;
  *out = enter(request, base + offset);
  live_[*out].base = base;
  return {};
}

// ---- statistics -----------------------------------------------------------------------------------------

// Called with the mutex held, like everything down to look_at_driver.
DriverPool::StreamAccount& DriverPool::account_of(StreamHandle stream) {
  const auto [found, added] = streams_.try_emplace(stream);
  StreamAccount& account = found->second;
  if (added && config_.journal != 0) account.journal = std::make_unique<JournalTape>(config_.journal);
  return account;
}

void DriverPool::count_in(const Block& block, bool again) {
  const int kind = kind_index(block.bytes);
  const auto add = [again](Meter& meter, std::uint64_t amount) {
    meter.add(amount);
    if (again) meter.total -= amount;
  };
  add(allocations_[kind], 1);
  add(bytes_[kind], block.bytes);
  add(requested_[kind], block.requested);
  StreamAccount& account = account_of(block.stream);
  account.live += block.bytes;
  account.retired = block.gone;  // a new stream may have the handle of an old one
  live_bytes_ += block.bytes;
  peak_live_ = std::max(peak_live_, live_bytes_);
}

void DriverPool::count_out(const Block& block) {
  const int kind = kind_index(block.bytes);
  allocations_[kind].subtract(1);
  bytes_[kind].subtract(block.bytes);
  requested_[kind].subtract(block.requested);
  account_of(block.stream).live -= block.bytes;
  live_bytes_ -= block.bytes;
}

void DriverPool::note(StreamHandle stream, Action action, Address address, std::uint64_t bytes,
                      std::uint32_t tag, std::uint32_t serial) {
  if (config_.journal == 0 && tape_ == nullptr) return;
  const JournalEntry entry{sequence_++, now_ns(), address, bytes, tag, serial, stream, action};
  if (JournalTape* ring = account_of(stream).journal.get()) ring->add(entry);
  if (tape_ != nullptr) tape_->add(entry);
}

// Only into the recording.
void DriverPool::record(StreamHandle stream, Action action, Address address, std::uint64_t bytes,
                        std::uint32_t tag, std::uint32_t serial) const {
  if (tape_ != nullptr) tape_->add({sequence_++, now_ns(), address, bytes, tag, serial, stream, action});
}

// Queries what the driver holds. After close, the last values stay.
void DriverPool::look_at_driver() const {
  if (closed()) return;
  std::uint64_t reserved = reserved_.current;
  std::uint64_t high = 0;
  (void)driver_->pool_get(handle_, DriverPoolAttribute::reserved_mem_current, &reserved);
  (void)driver_->pool_get(handle_, DriverPoolAttribute::reserved_mem_high, &high);
  (void)driver_->pool_get(handle_, DriverPoolAttribute::used_mem_current, &used_);
  const bool grown = reserved > reserved_.current;
  const std::uint64_t change = grown ? reserved - reserved_.current : reserved_.current - reserved;
  if (grown) {
    reserved_.add(change);
  } else {
    reserved_.subtract(change);
  }
  // The driver grows on its own, so growth is recorded when it is noticed.
  if (change != 0) record(0, grown ? Action::grow : Action::shrink, 0, change, 0, 0);
  if (high > high_at_reset_) reserved_.peak = std::max(reserved_.peak, high);
  reserved_.total = std::max(reserved_.total, reserved_.peak);
}

BlockInfo DriverPool::describe(Address address, const Block& block, BlockState state) {
  BlockInfo info;
  info.address = address;
  info.bytes = block.bytes;
  info.requested = block.requested;
  info.state = state;
  info.stream = block.stream;
  info.tag = block.tag;
  info.serial = block.serial;
  return info;
}

Status DriverPool::info(Address address, BlockInfo* out) const {
  Lock lock;
  if (Status status = open_for("info", &lock); !status.ok()) return status;
  const auto found = live_.find(address);
  if (found == live_.end()) return {Code::invalid, 0, "info"};
  *out = describe(address, found->second, BlockState::live);
  return {};
}

std::uint64_t DriverPool::live_bytes() const {
  Lock lock;
  return look(&lock) ? live_bytes_ : 0;
}

OutOfMemoryReport DriverPool::explain(const Request& request) const {
  look_at_driver();
  OutOfMemoryReport report;
  report.requested = request.size;
  const std::uint64_t most = source_.properties.max_size;
  report.limit =
      config_.limit == 0 || most == 0 ? std::max(config_.limit, most) : std::min(config_.limit, most);
  (void)backend_->memory_info(&report.device_free, &report.device_total);
  report.reserved = reserved_.current;
  report.live = live_bytes_;
  {
    std::lock_guard kept(kept_->mutex);
    for (const auto* blocks : {&kept_->waiting, &kept_->ready})
      for (const auto& [address, block] : *blocks) report.pending += block.bytes;
  }
  // For memory of others in a shared pool, only the sum is known.
  const std::uint64_t used = std::max(used_, live_bytes_ + report.pending);
  const std::uint64_t free = report.reserved > used ? report.reserved - used : 0;
  (free < request.size ? report.free_pages : report.stranded) = free;
  report.largest_free = report.free_pages;
  return report;
}

PoolStats DriverPool::stats() const {
  PoolStats stats;
  Lock lock;
  if (!look(&lock)) return stats;
  look_at_driver();
  for (int kind = 0; kind < 2; ++kind) {
    stats.allocations[kind] = allocations_[kind];
    stats.bytes[kind] = bytes_[kind];
    stats.requested[kind] = requested_[kind];
  }
  for (const auto& [handle, account] : streams_) {
    if (freeing_ != 0 && handle == freeing_) continue;
    StreamStats each;
    each.handle = handle;
    each.live = account.live;
    each.retired = account.retired;
    stats.streams.push_back(each);
  }
  {
    std::lock_guard kept(kept_->mutex);
    for (const auto* blocks : {&kept_->waiting, &kept_->ready})
      for (const auto& [address, block] : *blocks) {
        stats.pending.add(block.bytes);
        ++stats.pending_blocks;
      }
  }
  stats.live = live_bytes_;
  stats.peak_live = peak_live_;
  stats.peak_active = std::max(peak_live_, live_bytes_ + stats.pending.current);
  stats.reserved = reserved_;
  stats.segments = {reserved_.current != 0, reserved_.peak != 0, reserved_.total != 0};
  const std::uint64_t ours = live_bytes_ + stats.pending.current;
  const std::uint64_t used = source_.origin == Origin::created ? ours : std::max(used_, ours);
  stats.free_bytes = reserved_.current > used ? reserved_.current - used : 0;
  // The driver moves pages by itself; its efficiency is unknown.
  stats.free_page_bytes = stats.largest_free = stats.free_bytes;
  std::copy(rungs_, rungs_ + kRungs, stats.rungs);
  stats.retries = retries_;
  stats.out_of_memory = out_of_memory_;
  return stats;
}

// Also restarts the driver's own high-water mark, if the pool is not shared.
void DriverPool::reset_peak() {
  Lock lock;
  if (!look(&lock)) return;
  look_at_driver();
  for (int kind = 0; kind < 2; ++kind)
    for (Meter* meter : {&allocations_[kind], &bytes_[kind], &requested_[kind]}) meter->peak = meter->current;
  peak_live_ = live_bytes_;
  reserved_.peak = reserved_.current;
  if (closed()) return;
  high_at_reset_ = 0;
  if (source_.origin == Origin::created &&
      driver_->pool_set(handle_, DriverPoolAttribute::reserved_mem_high, 0).ok())
    return;
  (void)driver_->pool_get(handle_, DriverPoolAttribute::reserved_mem_high, &high_at_reset_);
}

std::vector<SegmentInfo> DriverPool::snapshot() const {
  Lock lock;
  if (!look(&lock)) return {};
  std::map<Address, BlockInfo> blocks;
  for (const auto& [address, block] : live_)
    blocks.emplace(address, describe(address, block, BlockState::live));
  {
    std::lock_guard kept(kept_->mutex);
    for (const auto* pending : {&kept_->waiting, &kept_->ready})
      for (const auto& [address, block] : *pending)
        blocks.emplace(address, describe(address, block, BlockState::pending));
  }
  std::vector<SegmentInfo> segments;
  for (const auto& [address, block] : blocks) {
    if (segments.empty() || segments.back().address + segments.back().bytes != address) {
      SegmentInfo segment;
      segment.address = address;
      segment.stream = block.stream;
      segments.push_back(std::move(segment));
    }
    segments.back().bytes += block.bytes;
    segments.back().blocks.push_back(block);
  }
  return segments;
}

Status DriverPool::start_journal(std::uint32_t entries) {
  if (entries > kMostJournaled) return {Code::invalid, 0, "journal"};
  Lock lock;
  if (Status status = open_for("journal", &lock); !status.ok()) return status;
  config_.journal = entries;
  for (auto& [handle, account] : streams_)
    account.journal = entries == 0 ? nullptr : std::make_unique<JournalTape>(entries);
  old_journal_ = entries == 0 ? nullptr : std::make_unique<JournalTape>(entries);
  old_dropped_ = 0;
  return {};
}

void DriverPool::journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const {
  *dropped = 0;
  Lock lock;
  if (!look(&lock)) return;
  *dropped = old_dropped_;
  const auto read = [&](const std::unique_ptr<JournalTape>& ring) {
    if (ring == nullptr) return;
    ring->copy_to(out);
    *dropped += ring->dropped();
  };
  read(old_journal_);
  for (const auto& [handle, account] : streams_) read(account.journal);
  std::sort(out.begin(), out.end(),
            [](const JournalEntry& a, const JournalEntry& b) { return a.sequence < b.sequence; });
}

void DriverPool::start_recording(std::uint64_t most) {
  Lock lock;
  if (!look(&lock)) return;
  recording_ = most == 0 ? nullptr : std::make_shared<Recording>(most);
  tape_ = recording_ == nullptr ? nullptr : recording_->tape();
  if (reserved_.current != 0) record(0, Action::grow, 0, reserved_.current, 0, 0);
  for (const auto& [address, block] : live_)
    record(block.stream, Action::allocate, address, block.requested, block.tag, block.serial);
}

void DriverPool::mark(std::uint64_t number) {
  Lock lock;
  if (open_for("mark", &lock).ok()) record(0, Action::mark, 0, number, 0, 0);
}

std::uint64_t DriverPool::take_recorded(std::vector<JournalEntry>& out) {
  Lock lock;
  if (!look(&lock) || recording_ == nullptr) return 0;
  const std::shared_ptr<Recording> recording = recording_;
  look_at_driver();
  std::vector<JournalTape::Taken> taken;
  taken.push_back(tape_->take());
  const std::uint64_t complete = sequence_;
  lock.unlock();
  return recording->merge(taken, complete, out);
}

// Invariants
//   live_bytes = Σ bytes of live blocks = Σ live of streams = Σ bytes by kind <= peak_live
//   blocks do not overlap, and each is inside the driver's allocation for it
//   a pool of our own: the driver's `used` >= Σ taken of live blocks that no graph allocated
bool DriverPool::check(std::string* why) const {
  Lock lock;
  if (!open_for("check", &lock).ok()) return true;
  const auto broken = [why](const char* what) {
    if (why != nullptr) *why = what;
    return false;
  };
  std::uint64_t live = 0, taken = 0, end = 0;
  std::uint64_t kinds[2] = {}, counts[2] = {};
  std::map<StreamHandle, std::uint64_t> by_stream;
  for (const auto& [address, block] : live_) {
    const int kind = kind_index(block.bytes);
    live += block.bytes;
    kinds[kind] += block.bytes;
    ++counts[kind];
    taken += block.capture == 0 ? block.taken : 0;
    by_stream[block.stream] += block.bytes;
    if (address < end) return broken("allocations overlap");
    end = address + block.bytes;
    if (address < block.base) return broken("an allocation is outside of the driver's allocation");
    if (block.taken != 0 && end > block.base + block.taken)
      return broken("an allocation is larger than the driver's allocation");
  }
  if (live != live_bytes_ || live > peak_live_) return broken("live bytes");
  for (int kind = 0; kind < 2; ++kind)
    if (kinds[kind] != bytes_[kind].current || counts[kind] != allocations_[kind].current)
      return broken("the meters");
  for (const auto& [handle, account] : streams_)
    if (account.live != by_stream[handle]) return broken("live bytes of a stream");
  std::uint64_t used = 0;
  if (source_.origin == Origin::created &&
      driver_->pool_get(handle_, DriverPoolAttribute::used_mem_current, &used).ok() && used < taken)
    return broken("the driver counts fewer bytes than are live");
  return true;
}

}  // namespace vram
