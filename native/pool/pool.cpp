// Allocations, frees, pending blocks and housekeeping. The rungs of the ladder are in ladder.cpp, what the
// pool says of itself in report.cpp, suspending in suspend.cpp, placement in segments.cpp, fences and the
// stream cache in streams.cpp.
#include "pool/pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace vram {

namespace {

// With several streams, a fence is recorded after this many freed bytes, so that others find out early
// what has finished.
constexpr std::uint64_t kFenceBytes = 16 * kMiB;

// The default stream of the calling thread, where threads have one each.
constexpr StreamHandle kThisThread = 2;

// So many streams of other libraries are known at a time; before there are more, the device is waited for.
constexpr std::uint32_t kMostForeign = 256;

std::atomic<std::uint32_t> forks{1};

PlacementOptions placement(const Backend& backend, const PoolConfig& config) {
  PlacementOptions options;
  const DeviceInfo& device = backend.info();
  options.pages = config.pages && device.pages;
  // Addresses for the device many times over: pages find new addresses without anyone unmapping old ones.
  const std::uint64_t wished = 16 * std::clamp(device.total_bytes, kGiB, kMaxSpaceBytes);
  options.space_bytes = std::min(round_up(wished, kSlotBytes), kMaxSpaceBytes - kSlotBytes);
  options.segment_size = std::min(config.segment_size, kMaxRequest);
  options.max_page = config.max_page;
  options.best_fit = config.best_fit;
  return options;
}

PlacementOptions affordable(PlacementOptions options) {
  options.space_bytes = Segments::affordable_space(options.space_bytes);
  return options;
}

}  // namespace

std::uint32_t Allocator::fork_generation() { return forks.load(std::memory_order_relaxed); }

bool Allocator::call_back(const Callback& callback, std::uint64_t size, StreamHandle stream) const {
  thread_local std::vector<const Allocator*> inside;
  if (std::find(inside.begin(), inside.end(), this) != inside.end()) return false;
  struct Inside {
    explicit Inside(const Allocator* pool) { inside.push_back(pool); }
    ~Inside() { inside.pop_back(); }
  } const here(this);
  return callback(size, stream);
}

void Allocator::watch_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
}

Pool::Pool(std::shared_ptr<Backend> backend, const PoolConfig& config)
    : backend_(std::move(backend)),
      config_(config),
      segments_(*backend_, affordable(placement(*backend_, config))),
      fences_(*backend_),
      finished_([this](std::uint16_t number, Tick tick) { return fences_.finished(streams_[number], tick); }),
      stream_cache_(config.stream_cache) {
  set_zeroing(config);
  watch_forks();
  generation_.store(fork_generation(), std::memory_order_relaxed);
  cache_generation_.store(fork_generation(), std::memory_order_relaxed);
  arrange_ladder();
  if (config.journal != 0) (void)start_journal(std::min(config.journal, kMostJournaled));
}

Pool::~Pool() {
  (void)close();
  (void)preparer_.release();  // still there only in the child of a fork, where its thread is not
}

// ---- the fast paths -------------------------------------------------------------------------------------

bool Pool::try_cached(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  if (cache_generation_.load(std::memory_order_relaxed) != fork_generation()) [[unlikely]]
    return false;
  if (handle - 1 < 2) [[unlikely]]
    handle = backend_->canonical(handle);
  StreamState* stream = streams_.find(handle);
  if (stream == nullptr) [[unlikely]]
    return try_foreign(size, handle, tag, out);
  stream->lock.lock();
  return serve_cached(*stream, size, handle, tag, out);
}

// Another library's stream: its state serves if the handle is still that stream's.
bool Pool::try_foreign(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  StreamState* const stream = streams_.find_foreign(handle);
  StreamId id = 0;
  if (stream == nullptr || !backend_->stream_id(handle, &id).ok()) return false;
  stream->lock.lock();
  if (stream->foreign && stream->handle == handle && stream->id == id &&
      (stream->shut[0] & StreamState::kLeaving) == 0)
    return serve_cached(*stream, size, handle, tag, out);
  stream->lock.unlock();
  return false;
}

// Called with the stream's lock, which it lets go.
[[gnu::always_inline]] inline bool Pool::serve_cached(StreamState& stream, std::uint64_t size,
                                                      StreamHandle handle, std::uint32_t tag, Address* out) {
  const Units units = units_of(size);
  const Kind kind = kind_of(units);
  const std::uint64_t bytes = std::uint64_t{units} * kUnit;
  Index* head = stream.cache.find(units);
  if (head == nullptr || *head == 0 || stream.live + bytes > stream.ceiling) {
    stream.lock.unlock();
    return false;
  }
  Block& block = segments_.blocks()[*head];
  *head = block.link_after;
  stream.cache.removed(units);
  ++stream.hits;
  stream.live += bytes;
  stream.allocations[static_cast<int>(kind)].add(1);
  stream.bytes[static_cast<int>(kind)].add(bytes);
  stream.requested[static_cast<int>(kind)].add(size);
  block.requested = size;
  block.tag = tag;
  block.serial = static_cast<std::uint32_t>(stream.slow_serial + stream.hits);
  block.set(BlockState::live);
  *out = segments_.address_of(block);
  if (stream.journaling) [[unlikely]]
    note(stream, Action::allocate, *out, size, tag, block.serial);
  stream.lock.unlock();
  if (zero_on_allocate_.load(std::memory_order_relaxed)) [[unlikely]]
    if (!zero_new(*out, bytes, handle).ok()) {
      take_back(*out);
      return false;
    }
  return true;
}

bool Pool::try_free_cached(Address address) {
  if (closed()) [[unlikely]]
    return false;
  const Index i = segments_.find(address);
  if (i == 0) return false;
  Block& block = segments_.blocks()[i];
  StreamState& stream = streams_[block.owner.load(std::memory_order_relaxed)];
  stream.lock.lock();
  if (!block.is(BlockState::live) || block.owner.load(std::memory_order_relaxed) != stream.number ||
      block.used_elsewhere || stream.shut[block.units > kSmallUnits] != 0 ||
      slow_frees_.load(std::memory_order_relaxed) ||
      stream.cache.count() >= stream_cache_.load(std::memory_order_relaxed)) {
    stream.lock.unlock();
    return false;
  }
  Index* head = stream.cache.claim(block.units);
  if (head == nullptr) {
    stream.lock.unlock();
    return false;
  }
  const Kind kind = kind_of(block.units);
  const std::uint64_t bytes = bytes_of(block);
  block.link_after = *head;
  *head = i;
  block.set(BlockState::cached);
  stream.cache.added(block.units);
  stream.live -= bytes;
  stream.allocations[static_cast<int>(kind)].subtract(1);
  stream.bytes[static_cast<int>(kind)].subtract(bytes);
  stream.requested[static_cast<int>(kind)].subtract(block.requested);
  if (stream.journaling) [[unlikely]]
    note(stream, Action::free, address, block.requested, block.tag, block.serial);
  stream.lock.unlock();
  return true;
}

StreamState* Pool::stream_of(StreamHandle handle, Status* why) {
  StreamState* known = streams_.find(handle);
  if (known != nullptr) return known;
  const bool of_thread = handle == backend_->canonical(kThisThread);
  if (of_thread) retire_ended();
  StreamState* const made = journaled(streams_.add(handle), why);
  if (of_thread && made != nullptr) threads_.add(made->number);
  return made;
}

// The state of another library's stream. One that had the handle before is over. Too many of them are ended
// by waiting for the device, since nothing else tells when streams that are gone have done their work.
StreamState* Pool::foreign_of(const Named& named, std::unique_lock<std::mutex>& lock, Status* why) {
  StreamState* known = streams_.find_foreign(named.handle);
  if (known != nullptr && known->id == named.id) return known;
  if (foreign_ >= kMostForeign && !capture_under_way()) {
    *why = wait_for_device(lock);
    if (why->code == Code::closed) return nullptr;
    complete_passed();
    known = streams_.find_foreign(named.handle);
    if (known != nullptr && known->id == named.id) return known;
  }
  if (known != nullptr) abandon(*known);
  StreamState* const made = journaled(streams_.add_foreign(named.handle, named.id), why);
  if (made != nullptr) ++foreign_;
  return made;
}

StreamState* Pool::journaled(StreamState* stream, Status* why) {
  if (stream == nullptr) *why = {Code::unsupported, 0, kTooManyStreams};
  if (stream == nullptr || (config_.journal == 0 && recording_ == nullptr)) return stream;
  auto ring = config_.journal != 0 ? std::make_unique<JournalTape>(config_.journal) : nullptr;
  auto tape = recording_ != nullptr ? recording_->tape() : nullptr;
  std::lock_guard guard(stream->lock);
  stream->journal.swap(ring);
  // One that had another handle before may have events that were not taken yet.
  if (stream->tape == nullptr) stream->tape.swap(tape);
  stream->journaling = true;
  return stream;
}

// ---- capture --------------------------------------------------------------------------------------------
//
// What is allocated on a stream while it is captured becomes part of a graph: its address is used whenever
// the graph is launched. So a captured stream gets a state of its own, hidden from its handle, whose memory
// nobody else is given until the graph and all made of it are gone. A block freed during the capture serves
// the same stream's later captured work at once, as in any stream's order.

Status Pool::heap_begin(HeapId id, std::function<bool(StreamHandle)> serves) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_begin", &lock); !status.ok()) return status;
  auto heap = std::find_if(heaps_.begin(), heaps_.end(), [&](const Heap& each) { return each.id == id; });
  if (heap == heaps_.end())
    heap = heaps_.insert(heap, {id, ++next_heap_, 0, false, {}, std::make_shared<std::atomic<bool>>(false)});
  ++heap->begun;
  heap->open = true;
  heap->serves = std::move(serves);
  cache_generation_.store(0, std::memory_order_relaxed);
  return {};
}

Status Pool::heap_end(HeapId id) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_end", &lock); !status.ok()) return status;
  bool known = false, open = false;
  for (Heap& heap : heaps_) {
    known |= heap.id == id;
    if (heap.id == id) heap.open = false;
    open |= heap.open;
  }
  if (!open) cache_generation_.store(fork_generation(), std::memory_order_relaxed);
  return known ? Status{} : Status{Code::invalid, 0, "heap_end"};
}

Status Pool::heap_release(HeapId id) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_release", &lock); !status.ok()) return status;
  const auto heap =
      std::find_if(heaps_.begin(), heaps_.end(), [&](const Heap& each) { return each.id == id; });
  if (heap == heaps_.end()) return {Code::invalid, 0, "heap_release"};
  if (--heap->begun > 0) return {};
  heap->over->store(true, std::memory_order_release);
  heaps_.erase(heap);
  return {};
}

// The open heap that serves a stream, or null.
const Pool::Heap* Pool::heap_for(StreamHandle handle) const {
  for (const Heap& heap : heaps_)
    if (heap.open && heap.serves(handle)) return &heap;
  return nullptr;
}

// What a call that names a stream finds out about it: the only time when another library's is asked. A stream
// seen for the first time must be one of the device's; asking it once is enough.
Status Pool::name(StreamHandle handle, Named* out) {
  *out = {backend_->canonical(handle)};
  const bool known = streams_.find(out->handle) != nullptr;
  out->foreign = !known && !backend_->lasting(out->handle);
  if (out->foreign)
    if (Status status = backend_->stream_id(out->handle, &out->id); !status.ok()) return status;
  if (out->handle != 0 && backend_->info().captures)
    if (Status status = backend_->capture_of(out->handle, &out->capture); status.code == Code::invalid)
      return status;
  if (out->capture != 0 || known || out->foreign) return {};
  const Status status = backend_->stream_query(out->handle);
  return status.code == Code::invalid ? status : Status{};
}

// The state that serves a stream: its own, or that of the heap or graph its work goes into. Null with the
// reason in *why.
StreamState* Pool::stream_for(const Named& named, std::unique_lock<std::mutex>& lock, Status* why) {
  const Heap* heap = heaps_.empty() ? nullptr : heap_for(named.handle);
  if (heap == nullptr && named.capture == 0)
    return named.foreign ? foreign_of(named, lock, why) : stream_of(named.handle, why);
  const CaptureId key = heap != nullptr ? heap->key : named.capture;
  for (std::uint16_t number : graphs_) {
    StreamState& known = streams_[number];
    if (known.capture == key && known.handle == named.handle && known.id == named.id) return &known;
  }
  if (heap != nullptr) return hidden(named, key, heap->over, why);
  auto over = std::make_shared<std::atomic<bool>>(false);
  *why = backend_->capture_keep(named.handle, [over] { over->store(true, std::memory_order_release); });
  return why->ok() ? hidden(named, key, std::move(over), why) : nullptr;
}

StreamState* Pool::hidden(const Named& named, CaptureId key, std::shared_ptr<std::atomic<bool>> over,
                          Status* why) {
  StreamState* const graph = journaled(streams_.add_hidden(named.handle, named.foreign, named.id), why);
  if (graph == nullptr) return nullptr;
  foreign_ += named.foreign ? 1 : 0;
  graph->capture = key;
  graph->over = std::move(over);
  graphs_.push_back(graph->number);
  return graph;
}

// Graphs that are gone leave their memory as streams do. What they had may still be in use by work of the
// stream itself, such as a copy of a graph's result, so a last fence is recorded there.
void Pool::let_graphs_go() {
  std::erase_if(graphs_, [this](std::uint16_t number) {
    StreamState& graph = streams_[number];
    if (!graph.over->load(std::memory_order_acquire)) return false;
    const CaptureId capture = std::exchange(graph.capture, 0);
    const Status status = fences_.record(graph);
    if (!status.ok() && status.code != Code::absent) {
      graph.capture = capture;  // captured again; later, then
      return false;
    }
    graph.over.reset();
    leave(graph, status.ok() ? graph.tick - 1 : fences_.mark(graph));
    return true;
  });
}

// ---- allocation, beyond the fast path --------------------------------------------------------------------

Status Pool::allocate_slow(std::uint64_t size, StreamHandle handle, std::uint64_t align, std::uint32_t tag,
                           Address* out, OutOfMemoryReport* report) {
  *out = 0;
  if (closed()) return {Code::closed, 0, "allocate"};
  if ((align & (align - 1)) != 0) return {Code::invalid, 0, "align"};
  if (align > kMaxRequest) return {Code::invalid, 0, "align"};
  Named named;
  if (Status status = name(handle, &named); !status.ok()) return status;
  handle = named.handle;
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("allocate", &lock); !status.ok()) return status;
  Status why;
  StreamState* const serving = stream_for(named, lock, &why);
  if (serving == nullptr) return why;
  StreamState& stream = *serving;
  std::optional<Presence> presence(std::in_place, stream);
  fences_.cover(stream);
  Request request{size, {stream.number, 0, 0, std::max(align, kUnit)}, tag, &stream, &lock, {}};
  if (size > kMaxRequest) return fail(request, report);
  request.want.units = units_of(size);
  request.want.band = segments_.band_of(request.want.units);
  // The stream's cache missed, or its ceiling was in the way of what it holds.
  const std::uint64_t bytes = std::uint64_t{request.want.units} * kUnit;
  Index block = align <= kUnit ? take_cached(stream, request.want.units) : Index{0};
  if (block == 0) block = climb(request);
  if (block != 0) *out = hand_out(block, request);
  verify();
  presence.reset();
  if (block == 0) return request.error.ok() ? fail(request, report) : request.error;
  lock.unlock();
  if (!zero_on_allocate_.load(std::memory_order_relaxed)) return {};
  const Status status = zero_new(*out, bytes, handle);
  if (!status.ok()) take_back(std::exchange(*out, 0));
  return status;
}

Status Pool::fail(const Request& request, OutOfMemoryReport* report) {
  ++out_of_memory_;
  const OutOfMemoryReport why = explain(request);
  if (report != nullptr) *report = why;
  std::lock_guard guard(request.stream->lock);
  note(*request.stream, Action::out_of_memory, why.device_free, request.size, request.tag, 0);
  return {Code::out_of_memory, 0, "allocate"};
}

// A block of just this size out of the stream's cache, in state moving, or 0.
Index Pool::take_cached(StreamState& stream, Units units) {
  std::lock_guard guard(stream.lock);
  Index* head = stream.cache.find(units);
  if (head == nullptr || *head == 0) return 0;
  const Index i = *head;
  Block& block = segments_.blocks()[i];
  *head = block.link_after;
  stream.cache.removed(units);
  ++stream.hits;
  block.set(BlockState::moving);
  return i;
}

// The first two rungs for a request that the fast path missed, without a call to the device and without
// waiting for the mutex; so a caller may keep locks of its own, such as Python's. False: take the long way.
bool Pool::try_own(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  StreamState* stream = streams_.find(handle);
  if (stream == nullptr || zero_on_allocate_.load(std::memory_order_relaxed)) return false;
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || cache_generation_.load(std::memory_order_relaxed) != fork_generation() || stream->gone())
    return false;
  const Units units = units_of(size);
  Request request{size, {stream->number, segments_.band_of(units), units, kUnit}, tag, stream, &lock, {}};
  request.ask = false;
  Index block = take_cached(*stream, units);
  if (block == 0) {
    block = serve_own_blocks(request);
    if (block == 0) return false;
    ++rungs_[static_cast<int>(Rung::own_blocks)];
  }
  *out = hand_out(block, request);
  verify();
  return true;
}

// Undoes an allocation that the program has not seen.
void Pool::take_back(Address address) {
  std::lock_guard lock(mutex_);
  if (closed()) return;
  bool suspended = false;
  if (const Index block = claim_for_free(address, &suspended)) let_go(block, suspended);
}

// Turns a block that a rung produced into a live one of the request's stream.
Address Pool::hand_out(Index i, Request& request) {
  StreamState& stream = *request.stream;
  Block& block = segments_.blocks()[i];
  const std::uint64_t bytes = bytes_of(block);
  const Address address = segments_.address_of(block);
  stream.lock.lock();
  if (stream.live + bytes > stream.ceiling) {
    stream.lock.unlock();
    rise(stream, bytes);
    stream.lock.lock();
  } else {
    stream.live += bytes;
  }
  block.owner.store(stream.number, std::memory_order_relaxed);
  block.requested = request.size;
  block.tag = request.tag;
  block.used_elsewhere = request.want.band == kGrowing;
  block.serial = static_cast<std::uint32_t>(++stream.slow_serial + stream.hits);
  const int kind = static_cast<int>(kind_of(block.units));
  stream.allocations[kind].add(1);
  stream.bytes[kind].add(bytes);
  stream.requested[kind].add(request.size);
  block.set(BlockState::live);
  note(stream, Action::allocate, address, request.size, request.tag, block.serial);
  stream.lock.unlock();
  return address;
}

// `live` of a stream may rise to its ceiling without a look at the others. While one thread makes them rise,
// the ceilings add up to no more than the recorded peak, which is therefore exact: all are lowered to what is
// live, the sum is compared with the peak, and what the peak leaves goes to this stream. Several threads
// would take that from each other over and over; among them a stream keeps the ceiling it has reached, and
// the peak is what was live together whenever one of them rose further: exact for each stream alone, a lower
// bound for the sum.
void Pool::rise(StreamState& stream, std::uint64_t bytes) {
  constexpr std::uint32_t kAlone = 10'000;  // rises in a row that make a thread the only one again
  thread_local char here;
  if (last_riser_ != &here) {
    ceilings_apart_ = last_riser_ != nullptr;
    last_riser_ = &here;
    rises_in_a_row_ = 0;
  }
  if (ceilings_apart_ && ++rises_in_a_row_ >= kAlone) ceilings_apart_ = false;
  const bool alone = !ceilings_apart_;
  // What is live of a tight stream is its ceiling, so only the loose ones are looked at. They become tight,
  // so that this is repeated only for those that free something meanwhile. Among several threads a few busy
  // ones stay loose, so that their frees do not meet here.
  std::uint32_t kept = 0;
  std::uint64_t live = ceilings_;
  loose_.each([&](std::uint16_t number) {
    StreamState& each = streams_[number];
    std::lock_guard guard(each.lock);
    live -= each.ceiling - each.live;
    if (!alone && (each.live != 0 || each.cache.count() != 0) && kept++ < kMostAsked) return false;
    ceilings_ -= each.ceiling - each.live;
    each.ceiling = each.live;
    if (&each == &stream) return false;
    each.shut_for(StreamState::kTight);
    loose_.remove(number);
    return false;
  });
  peak_live_ = std::max(peak_live_, live + bytes);
  peak_active_ = std::max(peak_active_, live + bytes + pending_.current);
  std::lock_guard guard(stream.lock);
  stream.live += bytes;
  ceilings_ -= stream.ceiling;
  stream.ceiling = alone ? stream.ceiling + (peak_live_ - live) : std::max(stream.ceiling, stream.live);
  ceilings_ += stream.ceiling;
  loosen(stream);
}

// What is live of the stream may change without the pool's knowing. Under its lock.
void Pool::loosen(StreamState& stream) {
  stream.open_for(StreamState::kTight);
  loose_.add(stream.number);
}

// Makes the cache of a live block's owner take it where only the pool's books were in the way.
void Pool::open_cache(Address address) {
  const Index i = segments_.find(address);
  if (i == 0) return;
  const Block& block = segments_.blocks()[i];
  StreamState& stream = streams_[block.owner.load(std::memory_order_relaxed)];
  std::lock_guard guard(stream.lock);
  if (!block.is(BlockState::live) || block.owner.load(std::memory_order_relaxed) != stream.number) return;
  const bool large = block.units > kSmallUnits;
  if ((stream.shut[large] & StreamState::kLeaving) != 0) return;
  loosen(stream);
  stream.shut[large] = 0;
  caching_[large].add(stream.number);
}

// After blocks were taken out of a stream's cache: the pool need not look there before it is told.
void Pool::close_cache(StreamState& stream) {
  std::lock_guard guard(stream.lock);
  const bool filled[] = {stream.cache.has_small(), stream.cache.has_large()};
  for (const bool large : {false, true}) {
    if (filled[large]) continue;
    stream.shut[large] |= StreamState::kUnlisted;
    caching_[large].remove(stream.number);
  }
}

Status Pool::allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle handle, std::uint32_t tag,
                            std::vector<Address>& out, OutOfMemoryReport* report) {
  out.assign(sizes.size(), 0);
  const bool captured = backend_->capturing(handle);  // cached memory must not go into a graph
  // Largest first: equal sizes come to lie side by side.
  std::vector<std::size_t> order(sizes.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  std::size_t done = 0;
  Status status;
  while (done < order.size()) {
    // One run: as many of one band as one block of the pool's space may hold together.
    std::uint64_t units = 0;
    std::size_t run = done;
    while (run < order.size() && sizes[order[run]] <= kMaxRequest &&
           segments_.band_of(units_of(sizes[order[run]])) ==
               segments_.band_of(units_of(sizes[order[done]])) &&
           (units + units_of(sizes[order[run]])) * kUnit <= kMaxRequest)
      units += units_of(sizes[order[run++]]);
    if (run > done + 1 && carve(sizes, order, done, run, static_cast<Units>(units), handle, tag, out)) {
      done = run;
      continue;
    }
    const std::size_t stop = std::max(run, done + 1);
    for (; done < stop && status.ok(); ++done) {
      const std::uint64_t size = sizes[order[done]];
      Address* const to = &out[order[done]];
      status = captured ? allocate_slow(size, handle, 0, tag, to, report)
                        : allocate(size, handle, 0, tag, to, report);
    }
    if (!status.ok()) break;
  }
  if (status.ok()) return status;
  for (Address& address : out) {
    if (address != 0) take_back(address);
    address = 0;
  }
  return status;
}

// Serves a run of a batch from one block cut into pieces. False: there is none without asking the later
// rungs.
bool Pool::carve(const std::vector<std::uint64_t>& sizes, const std::vector<std::size_t>& order,
                 std::size_t from, std::size_t to, Units units, StreamHandle handle, std::uint32_t tag,
                 std::vector<Address>& out) {
  handle = backend_->canonical(handle);
  if (closed() || streams_.find(handle) == nullptr || backend_->capturing(handle)) return false;
  std::unique_lock lock(mutex_);
  if (closed() || (!heaps_.empty() && heap_for(handle) != nullptr)) return false;
  Status why;
  StreamState* const known = stream_of(handle, &why);
  if (known == nullptr || !segments_.can_cut(to - from)) return false;
  StreamState& stream = *known;
  Request request{0,     {stream.number, segments_.band_of(units_of(sizes[order[from]])), units, kUnit},
                  tag,   &stream,
                  &lock, {}};
  Index block = 0;
  for (const Step& step : ladder_) {
    if (step.rung == Rung::stream_wait || step.rung == Rung::flush) break;
    // A lent block must go home in one piece, so it is not cut.
    if (step.rung == Rung::finished_elsewhere) continue;
    block = (this->*step.serve)(request);
    if (block != 0 || !request.error.ok()) break;
  }
  if (block == 0) return false;
  for (std::size_t i = from; i < to; ++i) {
    const std::uint64_t size = sizes[order[i]];
    const Index piece = i + 1 < to ? segments_.split_in_use(block, units_of(size)) : block;
    Request part{size, request.want, tag, &stream, &lock, {}};
    out[order[i]] = hand_out(piece, part);
    ++rungs_[static_cast<int>(Rung::own_blocks)];
  }
  verify();
  lock.unlock();
  bool good = true;
  if (zero_on_allocate_.load(std::memory_order_relaxed))
    for (std::size_t i = from; i < to && good; ++i)
      good = zero_new(out[order[i]], std::uint64_t{units_of(sizes[order[i]])} * kUnit, handle).ok();
  for (std::size_t i = from; i < to && !good; ++i) {
    take_back(out[order[i]]);
    out[order[i]] = 0;
  }
  return good;
}

// ---- frees ----------------------------------------------------------------------------------------------

// Takes a live block out of its stream's hands, suspended or not; 0 if the address is not one.
Index Pool::claim_for_free(Address address, bool* suspended) {
  const Index i = segments_.find(address);
  if (i == 0) return 0;
  Block& block = segments_.blocks()[i];
  StreamState& stream = streams_[block.owner.load(std::memory_order_relaxed)];
  std::lock_guard guard(stream.lock);
  *suspended = block.is(BlockState::suspended);
  if (!*suspended && !block.is(BlockState::live)) return 0;
  if (block.owner.load(std::memory_order_relaxed) != stream.number) return 0;
  if (*suspended) --suspended_blocks_;
  take_live(i, stream, block.used_elsewhere && !*suspended ? Action::free_pending : Action::free);
  return i;
}

// A live block is its owner's no more; what that is called in the journal is `action`. Under the owner's
// lock.
void Pool::take_live(Index i, StreamState& owner, Action action) {
  Block& block = segments_.blocks()[i];
  block.set(BlockState::moving);
  const std::uint64_t bytes = bytes_of(block);
  const int kind = static_cast<int>(kind_of(block.units));
  loosen(owner);
  owner.live -= bytes;
  owner.allocations[kind].subtract(1);
  owner.bytes[kind].subtract(bytes);
  owner.requested[kind].subtract(block.requested);
  note(owner, action, segments_.address_of(block), block.requested, block.tag, block.serial);
}

// Where zeroing fails the block stays live; one that is dropped is pending until it could be zeroed.
Status Pool::take_from_program(Address address, bool dropped) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("free", &lock); !status.ok()) return status;
  if (const Index i = segments_.find(address); i != 0 && segments_.growing(segments_.blocks()[i]))
    return {Code::invalid, 0, "free"};
  open_cache(address);
  if (try_free_cached(address)) return {};
  bool busy = false;
  Status zeroed;
  if (slow_frees_.load(std::memory_order_relaxed)) zeroed = zero(address, &busy);
  if (!zeroed.ok() && (!dropped || zeroed.code == Code::invalid)) return zeroed;
  bool suspended = false;
  const Index block = claim_for_free(address, &suspended);
  if (block == 0) return {Code::invalid, 0, "free"};
  if (zeroed.ok()) {
    let_go(block, suspended, busy);
  } else {
    make_pending(block);
  }
  keep_idle_limit();
  verify();
  return {};
}

// A block that was claimed goes home or waits. `busy`: for its own stream, too.
void Pool::let_go(Index i, bool suspended, bool busy) {
  if (suspended) return let_go_suspended(i);
  const Block& block = segments_.blocks()[i];
  const StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
  const bool zero_later = owner.gone() || owner.capture != 0;
  if (block.used_elsewhere || busy || (zero_later && slow_frees_.load(std::memory_order_relaxed))) {
    make_pending(i);
  } else {
    give_home(i, true);
  }
}

// ---- zeroing --------------------------------------------------------------------------------------------
//
// Device memory is zeroed in stream order. Host memory is zeroed by the host, at once: programs write there
// without asking any stream, and zeros that are queued would come after what they write. For that, memory
// that is free must have no work left, so a free waits (as a pending block) until its own stream is through
// with it. Where `host_writes` is set, uses on the own stream are told, and only those are waited for.

void Pool::set_zeroing(const PoolConfig& config) {
  const DeviceInfo& info = backend_->info();
  const bool waits = config.zero_on_allocate && info.host_accessible && !info.host_writes;
  zero_on_allocate_.store(config.zero_on_allocate, std::memory_order_relaxed);
  zero_on_free_.store(config.zero_on_free, std::memory_order_relaxed);
  slow_frees_.store(config.zero_on_free || waits, std::memory_order_relaxed);
}

// Zeroes a live block that is about to be freed, where that is wanted. One that is used elsewhere, too, whose
// owner is gone or a graph, or that is suspended, is zeroed when it has no uses left (requeue); so is host
// memory that its own stream is busy with.
Status Pool::zero(Address address, bool* busy) {
  const Index i = segments_.find(address);
  if (i == 0) return {Code::invalid, 0, "free"};
  const Block& block = segments_.blocks()[i];
  StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
  if (block.is(BlockState::suspended)) return {};
  if (!block.is(BlockState::live)) return {Code::invalid, 0, "free"};
  if (block.used_elsewhere || owner.gone() || owner.capture != 0) return {};
  const DeviceInfo& info = backend_->info();
  *busy = info.host_accessible && !info.host_writes && !fences_.finished(owner, owner.now());
  if (*busy || !zero_on_free_.load(std::memory_order_relaxed)) return {};
  return fill_zeros(address, bytes_of(block), owner.handle);
}

// Zeroes what was just allocated, without the mutex.
Status Pool::zero_new(Address address, std::uint64_t bytes, StreamHandle stream) {
  const Access access(*this);
  return access.refused() ? Status{Code::closed, 0, "allocate"} : fill_zeros(address, bytes, stream);
}

// pre: of host memory, nothing queued uses it.
Status Pool::fill_zeros(Address address, std::uint64_t bytes, StreamHandle stream) {
  if (!backend_->info().host_accessible) return backend_->fill(address, 0, bytes, stream);
  std::memset(reinterpret_cast<void*>(address), 0, bytes);
  return {};
}

// A block nobody uses any more except in its owner's order goes back to its segment's stream. Unless `ask` is
// set, the device is asked nothing, and a lent block counts as still in use.
void Pool::give_home(Index i, bool ask) {
  Block& block = segments_.blocks()[i];
  StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
  StreamState& home = streams_[segments_.segments()[block.segment].stream];
  const std::uint64_t bytes = bytes_of(block);
  const Tick tick = owner.owe();
  if (&owner != &home && !(ask && fences_.finished(owner, tick))) {
    // Lent: its home may have it when our work on it has finished.
    wait_in_queue({i, tick, {{owner.number, tick}}});
    return;
  }
  segments_.put(i, &owner == &home ? tick : 0);
  home.unfenced_bytes += bytes;
  if (ask && streams_.size() > 1 && home.unfenced_bytes >= kFenceBytes && !home.retired)
    (void)fences_.record(home);
}

// Freed while other streams may still use it: it waits for one fence on each of them.
void Pool::make_pending(Index i) {
  Block& block = segments_.blocks()[i];
  const std::uint16_t owner = block.owner.load(std::memory_order_relaxed);
  PendingBlock pending{i, streams_[owner].owe(), {}, block.used_elsewhere};
  // What is to be zeroed may be zeroed on another stream than its owner.
  if (segments_.segments()[block.segment].stream != owner || slow_frees_.load(std::memory_order_relaxed))
    uses_[i].push_back(owner);
  for (std::uint16_t number : uses_[i]) {
    StreamState& stream = streams_[number];
    if (stream.retired) continue;
    pending.uses.push_back({number, stream.owe()});
    (void)fences_.record(stream);  // where it fails, it is recorded later, when somebody asks
  }
  uses_.erase(i);
  block.used_elsewhere = false;
  wait_in_queue(std::move(pending));
}

void Pool::wait_in_queue(PendingBlock&& pending) {
  Block& block = segments_.blocks()[pending.block];
  block.set(BlockState::pending);
  pending_.add(bytes_of(block));
  ++pending_blocks_;
  requeue(std::move(pending));
}

// Puts a pending block into the queue of the next stream it waits for, or gives it home.
void Pool::requeue(PendingBlock&& pending) {
  while (!pending.uses.empty()) {
    const Use use = pending.uses.back();
    StreamState& stream = streams_[use.stream];
    if (!stream.retired && use.tick > stream.passed) return queue_at(stream, use.tick, std::move(pending));
    pending.uses.pop_back();
  }
  Block& block = segments_.blocks()[pending.block];
  StreamState& home = streams_[segments_.segments()[block.segment].stream];
  StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
  Tick tick = &owner == &home ? pending.tick : 0;
  if (zero_on_free_.load(std::memory_order_relaxed) && !pending.zeroed) {
    StreamState& zeroing = home.gone() ? streams_[0] : home;
    if (!fill_resident(block, zeroing.handle).ok()) {
      block.link_after = 0;
      unzeroed_.push_back(std::move(pending));
      return;
    }
    tick = home.owe();
    if (&zeroing != &home || segments_.growing(block)) {
      pending.zeroed = true;
      pending.uses.push_back({zeroing.number, zeroing.owe()});
      return queue_at(zeroing, zeroing.now(), std::move(pending));
    }
  }
  pending_.subtract(bytes_of(block));
  --pending_blocks_;
  block.set(BlockState::moving);
  if (pending.awaited) {
    std::lock_guard guard(owner.lock);
    note(owner, Action::free_complete, segments_.address_of(block), block.requested, block.tag, block.serial);
  }
  segments_.put(pending.block, tick);
}

// The block remembers where it waits, so that it is found there (retake).
void Pool::queue_at(StreamState& stream, Tick tick, PendingBlock&& pending) {
  Block& block = segments_.blocks()[pending.block];
  block.tick = tick;
  block.link_after = stream.number + 1u;
  stream.waiting.emplace(tick, std::move(pending));
  fences_.watched().add(stream.number);
}

void Pool::complete_passed(bool thorough) {
  if (!graphs_.empty()) let_graphs_go();
  const std::uint16_t from = thorough ? 0 : std::exchange(complete_from_, 0);
  std::uint32_t asked = 0;
  std::uint32_t past = StreamTable::kMaxStreams;
  // All are asked before any block is looked at, as one may wait for several of them.
  fences_.watched().each(
      [&](std::uint16_t number) {
        StreamState& stream = streams_[number];
        const Tick before = stream.passed;
        if (stream.waiting.empty()) {
          (void)fences_.poll(stream);
        } else {
          (void)fences_.finished(stream, stream.waiting.begin()->first);
        }
        if (thorough || stream.passed != before || ++asked < kMostAsked) return false;
        past = number + 1u;
        complete_from_ = static_cast<std::uint16_t>(past);
        return true;
      },
      from);
  for (PendingBlock& pending : std::exchange(unzeroed_, {})) requeue(std::move(pending));
  fences_.watched().each(
      [&](std::uint16_t number) {
        if (number >= past) return true;
        StreamState& stream = streams_[number];
        while (!stream.waiting.empty() && stream.waiting.begin()->first <= stream.passed) {
          ++pending_steps_;
          requeue(std::move(stream.waiting.extract(stream.waiting.begin()).mapped()));
        }
        if (stream.last != 0 && !stream.retired) let_leave(stream);
        const bool leaving = stream.last != 0 && !stream.retired;
        if (stream.waiting.empty() && stream.fences.empty() && !leaving) fences_.watched().remove(number);
        return false;
      },
      from);
}

Status Pool::enter(const char* call, std::unique_lock<std::mutex>* lock) const {
  if (!closed()) *lock = std::unique_lock(mutex_);
  return closed() ? Status{Code::closed, 0, call} : Status{};
}

bool Pool::look(std::unique_lock<std::mutex>* lock) const {
  if (inherited()) return false;
  *lock = std::unique_lock(mutex_);
  return true;
}

// Sends cached blocks home; true if there were any.
bool Pool::drain(StreamState& stream, const Sizes& sizes, bool ask) {
  drained_.clear();
  {
    std::lock_guard guard(stream.lock);
    stream.cache.drain(segments_.blocks(), sizes, drained_);
  }
  send_home(ask);
  return !drained_.empty();
}

void Pool::drain_all() {
  for (const StreamSet& streams : caching_)
    streams.each([this](std::uint16_t number) {
      drain(streams_[number]);
      close_cache(streams_[number]);
      return false;
    });
}

void Pool::send_home(bool ask) {
  for (Index i : drained_) give_home(i, ask);
}

Status Pool::record_stream(Address address, StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "record_stream"};
  Named named;
  if (Status status = name(handle, &named); !status.ok()) return status;
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("record_stream", &lock); !status.ok()) return status;
  Status why;
  StreamState* const serving = stream_for(named, lock, &why);
  if (serving == nullptr) return why;
  StreamState& user = *serving;
  const Presence presence(user);
  fences_.cover(user);
  Index i = segments_.find(address);
  if (i == 0) i = segments_.containing(address);
  if (i == 0) return {Code::invalid, 0, "record_stream"};
  Block& block = segments_.blocks()[i];
  StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
  std::lock_guard guard(owner.lock);
  if (block.is(BlockState::suspended)) return {Code::suspended, 0, "record_stream"};
  if (!block.is(BlockState::live)) return {Code::invalid, 0, "record_stream"};
  if (&user == &owner && !backend_->info().host_writes) return {};
  std::vector<std::uint16_t>& uses = uses_[i];
  if (std::find(uses.begin(), uses.end(), user.number) == uses.end()) uses.push_back(user.number);
  block.used_elsewhere = true;
  return {};
}

// ---- housekeeping ---------------------------------------------------------------------------------------

// Waits on the host for the oldest fence of a stream that a pending block needs. The mutex is not held
// meanwhile.
Status Pool::wait_for(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  EventHandle event = 0;
  const Tick tick = stream.waiting.empty() ? stream.now() : stream.waiting.begin()->first;
  if (Status status = fences_.event_for(stream, tick, &event); !status.ok()) return status;
  if (event == 0) return {};
  const Status status = fences_.wait(event, lock);
  if (closed()) return {Code::closed, 0, "allocate"};
  if (!status.ok()) return status;
  return fences_.poll(stream);
}

Status Pool::wait_for_all(std::unique_lock<std::mutex>& lock) {
  Status first;
  bool device = false;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    if (stream.retired) continue;
    if (stream.foreign && !stream.present()) {
      device = device || away(stream);
      continue;
    }
    const Status status = wait_for_stream(stream, lock);
    if (status.code == Code::closed || status.unwaited()) return status;
    if (first.ok()) first = status;
  }
  if (!device) return first;
  const Status status = wait_for_device(lock);
  return first.ok() ? status : first;
}

// Whether only a wait for the device tells that what this stream did with memory of the pool has finished.
bool Pool::away(StreamState& stream) const {
  if (!stream.foreign || stream.retired || stream.capture != 0) return false;
  if (stream.last != 0) return stream.covered() < stream.last;
  if (stream.present()) return false;
  std::lock_guard guard(stream.lock);
  return stream.owed > stream.covered() || stream.live != 0 || stream.cache.count() != 0;
}

// A wait for the device would break it. Other libraries' streams cannot be asked.
bool Pool::capture_under_way() const {
  return std::any_of(graphs_.begin(), graphs_.end(), [this](std::uint16_t number) {
    const StreamState& graph = streams_[number];
    return graph.foreign || backend_->capturing(graph.handle);
  });
}

// Waits for everything, so that foreign streams have finished what they did until now. Those of which nothing
// is live leave; one that is named again comes back as a new one.
Status Pool::wait_for_device(std::unique_lock<std::mutex>& lock) {
  std::vector<Use> reached;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    if (!stream.foreign || stream.retired || stream.capture != 0) continue;
    drain(stream);
    reached.push_back({stream.number, stream.last != 0 ? stream.last : fences_.mark(stream)});
  }
  lock.unlock();
  const Status status = backend_->synchronize();
  lock.lock();
  if (closed()) return {Code::closed, 0, "synchronize"};
  if (!status.ok()) return status;
  for (const Use& each : reached) {
    StreamState& stream = streams_[each.stream];
    fences_.pass(stream, each.tick);
    // The state may have become another stream's meanwhile.
    if (!stream.foreign || stream.retired || stream.last != 0 || stream.capture != 0 || stream.named != 0)
      continue;
    stream.lock.lock();
    const bool idle = stream.live == 0;
    stream.lock.unlock();
    if (idle) abandon(stream);
  }
  return {};
}

// Waits for everything issued on the stream so far: by a fence, or where the driver refuses that, as a whole.
// What is captured is not running; the memory of graphs and of captured streams stays theirs.
Status Pool::wait_for_stream(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  EventHandle event = 0;
  Status status = fences_.event_for(stream, stream.now(), &event);
  if (status.ok() && event == 0) return status;
  if (status.code == Code::capturing) return {};
  if (!status.ok() && stream.foreign) return wait_for_device(lock);
  const bool leaving = stream.last != 0;
  const Tick tick = leaving ? stream.last : status.ok() ? stream.tick - 1 : fences_.mark(stream);
  const StreamHandle handle = stream.handle;
  for (const bool by_event : {true, leaving || stream.foreign}) {
    if (by_event && !status.ok() && event == 0) continue;
    if (by_event) {
      status = fences_.wait(event, lock);
    } else {
      lock.unlock();
      status = backend_->stream_synchronize(handle);
      lock.lock();
    }
    if (closed()) return {Code::closed, 0, "allocate"};
    if (status.ok() || status.unwaited()) break;
  }
  if (status.ok()) fences_.pass(stream, tick);
  return status;
}

// Waits for all work; nothing is cached or pending afterwards.
Status Pool::settle(std::unique_lock<std::mutex>& lock) {
  if (!graphs_.empty()) let_graphs_go();
  drain_all();
  Status status = wait_for_all(lock);
  if (!status.ok()) return status;
  complete_passed();
  if (!zero_on_free_.load(std::memory_order_relaxed)) return status;
  // What has just been zeroed.
  status = wait_for_all(lock);
  if (status.ok()) complete_passed();
  return status;
}

Status Pool::coalesce() {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("coalesce", &lock); !status.ok()) return status;
  complete_passed();
  drain_all();
  verify();
  return {};
}

Status Pool::trim(std::uint64_t keep, bool wait) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("trim", &lock); !status.ok()) return status;
  if (wait) {
    if (Status status = settle(lock); !status.ok()) return status;
  } else {
    complete_passed();
    drain_all();
  }
  const Status status = segments_.trim(keep, finished_, wait);
  note_reserved(streams_[0]);
  verify();
  return status;
}

void Pool::keep_idle_limit() {
  if (config_.idle_limit == ~std::uint64_t{0}) return;
  const std::uint64_t idle = segments_.free_page_bytes();
  if (idle <= config_.idle_limit) return;
  const std::uint64_t keep = segments_.reserved_bytes() - (idle - config_.idle_limit);
  (void)segments_.release_free_pages(keep, finished_, kMostAsked);
  note_reserved(streams_[0]);
}

Status Pool::set_limit(std::uint64_t bytes) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("limit", &lock); !status.ok()) return status;
  config_.limit = bytes;
  return {};
}

Status Pool::configure(const PoolConfig& config) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("configure", &lock); !status.ok()) return status;
  // What was freed before may have work left.
  const bool slow_before = slow_frees_.load(std::memory_order_relaxed);
  set_zeroing(config);
  if (!slow_before && slow_frees_.load(std::memory_order_relaxed) && backend_->info().host_accessible)
    if (Status status = settle(lock); !status.ok()) {
      if (!closed()) set_zeroing(config_);
      return status;
    }
  const bool pages = config_.pages;
  const std::uint32_t journal_entries = config_.journal;
  config_ = config;
  config_.pages = pages;
  config_.journal = journal_entries;
  segments_.configure(placement(*backend_, config_));
  stream_cache_.store(config.stream_cache, std::memory_order_relaxed);
  arrange_ladder();
  keep_idle_limit();
  return {};
}

PoolConfig Pool::config() const {
  std::unique_lock<std::mutex> lock;
  return look(&lock) ? config_ : PoolConfig{};
}

Status Pool::retire_stream(StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "retire_stream"};
  Named named{backend_->canonical(handle)};
  handle = named.handle;
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("retire_stream", &lock); !status.ok()) return status;
  if (StreamState* const stream = streams_.find_foreign(handle)) {
    if (Status status = backend_->stream_id(handle, &named.id); !status.ok()) return status;
    if (stream->id != named.id) {
      abandon(*stream);
    } else {
      const Presence presence(*stream);
      if (Status status = retire(*stream, lock); !status.ok()) return status;
    }
  }
  StreamState* stream = streams_.find(handle);
  const bool captured = std::any_of(graphs_.begin(), graphs_.end(), [&](std::uint16_t number) {
    return streams_[number].handle == handle && !streams_[number].foreign;
  });
  Status why;
  if (stream == nullptr && captured) stream = stream_of(handle, &why);
  if (!why.ok()) return why;
  if (stream != nullptr)
    if (Status status = retire(*stream, lock); !status.ok()) return status;
  if (closed()) return {};
  if (stream != nullptr && stream->last != 0 && !stream->retired) let_leave(*stream);
  complete_passed(false);
  verify();
  return {};
}

// A last fence covers all the work of the stream, which is still there. Its memory stays with it until that
// has passed and then goes to the default stream; neither the caller nor anyone else waits.
Status Pool::retire(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  if (stream.number == 0) return {Code::invalid, 0, "retire_stream"};
  const StreamHandle handle = stream.handle;
  if (!fences_.record(stream).ok()) {
    // Without a fence only waiting tells when its work is done, and it cannot be asked later.
    const Tick tick = fences_.mark(stream);
    lock.unlock();
    const Status status = backend_->stream_synchronize(handle);
    lock.lock();
    if (closed()) return {};
    if (!status.ok()) return status;
    fences_.pass(stream, tick);
    // Another thread may have retired it meanwhile; what the handle means since then is not about to go.
    if ((stream.foreign ? streams_.find_foreign(handle) : streams_.find(handle)) != &stream) return {};
  }
  // Graphs captured on it go on in the order of the default stream, which waits for what was done with them.
  for (std::uint16_t number : graphs_) {
    StreamState& graph = streams_[number];
    if (graph.handle != handle || graph.foreign != stream.foreign || graph.id != stream.id) continue;
    (void)fences_.order(streams_[0], stream, stream.tick - 1);
    graph.handle = 0;
    foreign_ -= graph.foreign ? 1 : 0;
    graph.foreign = false;
  }
  streams_.forget(stream);
  leave(stream, stream.tick - 1);
  return {};
}

// The stream is gone, or may be, and its handle with it. It leaves when its fences have passed; where they do
// not cover what it did, when the device was waited for.
void Pool::abandon(StreamState& stream) {
  streams_.forget(stream);
  drain(stream);
  stream.lock.lock();
  const bool covered = stream.owed <= stream.covered() && stream.live == 0;
  stream.lock.unlock();
  const bool finished = covered && stream.fences.empty();
  const Tick last = covered && !finished ? stream.fences.back().tick : fences_.mark(stream);
  if (finished) fences_.pass(stream, last);
  leave(stream, last);
}

// Nothing is queued on the stream after `last`, which some fence, or the device, tells to have passed.
void Pool::leave(StreamState& stream, Tick last) {
  {
    std::lock_guard guard(stream.lock);
    stream.shut_for(StreamState::kLeaving);
  }
  stream.last = last;
  ++leaving_;
  fences_.watched().add(stream.number);
  drain(stream);
}

// Streams of threads that have ended leave when another thread brings its own.
void Pool::retire_ended() {
  threads_.each([this](std::uint16_t number) {
    StreamState& stream = streams_[number];
    if (!stream.gone()) {
      if (stream.capture != 0 || !backend_->ended(stream.handle)) return false;
      if (!fences_.record(stream).ok()) return false;  // next time
      streams_.forget(stream);
      leave(stream, stream.tick - 1);
    }
    threads_.remove(number);
    return false;
  });
}

// A stream on its way out whose last fence has passed leaves its memory to the default stream.
void Pool::let_leave(StreamState& stream) {
  if (operating_) return;  // its pages stay whose they are
  if (!fences_.finished(stream, stream.last) || !stream.waiting.empty()) return;
  streams_.retire(stream);
  --leaving_;
  foreign_ -= stream.foreign ? 1 : 0;
  segments_.inherit(stream.number, 0);
}

void Pool::on_out_of_memory(Callback callback) {
  std::unique_lock<std::mutex> lock;
  if (look(&lock)) callback_.swap(callback);
}

// From here on no fast path of a stream has any effect: they look for cached blocks, and at `shut`, under
// its lock. What the stream holds is over; totals and peaks stay to be read.
void Pool::end_streams() {
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    fences_.clear(stream);
    std::lock_guard guard(stream.lock);
    stream.shut_for(StreamState::kLeaving);
    stream.live = 0;
    stream.cache.forget();
    for (Meter(&meters)[2] :
         {std::ref(stream.allocations), std::ref(stream.bytes), std::ref(stream.requested)})
      for (Meter& meter : meters) meter.current = 0;
  }
}

// Calls that are under way end first: those that touch memory (Access), those that hold the mutex, and on the
// fast paths those that hold the lock of a stream. Later ones find the pool closed, the stream's cache empty
// and its end declared. Only then does memory go.
Status Pool::close() {
  std::unique_ptr<Preparer> ended;  // after the mutex was let go, as its thread may wait for that
  // In the child of a fork the locks and the memory are the parent's; nothing is touched.
  if (closed()) return {};
  Turn turn(*this);
  if (!turn.ours()) return {Code::invalid, 0, "close"};
  const Shut shut(*this);
  std::unique_lock lock(mutex_);
  if (closed()) return {};
  Status status = wait_for_all(lock);
  if (closed()) return {};
  if (status.unwaited()) return status;  // work goes on in the memory: the pool stays open
  generation_.store(0, std::memory_order_relaxed);
  cache_generation_.store(0, std::memory_order_relaxed);
  end_streams();
  for (const Status& each : {segments_.release_all(), fences_.close()})
    if (status.ok()) status = each;
  for (StreamHandle stream : copy_streams_)
    if (const Status each = backend_->stream_destroy(stream); status.ok()) status = each;
  for (EventHandle event : copy_events_)
    if (const Status each = backend_->event_destroy(event); status.ok()) status = each;
  copy_streams_.clear();
  copy_events_.clear();
  std::vector<KeptPiece> unused;
  contents_.drop_all(unused);
  for (const KeptPiece& piece : unused) piece.give_back();
  suspended_blocks_ = 0;
  callback_ = nullptr;
  ended = std::move(preparer_);
  note_reserved(streams_[0]);
  pending_.current = pending_blocks_ = 0;
  unzeroed_.clear();
  return status;
}

}  // namespace vram
