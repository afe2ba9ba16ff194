// Allocations, frees, pending blocks and housekeeping. The rungs of the ladder are in ladder.cpp, what the
// pool says of itself in report.cpp, suspending in suspend.cpp, placement in segments.cpp, fences and the
// stream cache in streams.cpp.
#include "pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace vram {

namespace {

// With several streams, a fence is recorded after this many freed bytes, so that others find out early
// what has finished.
constexpr std::uint64_t kFenceBytes = 16 * kMiB;

std::atomic<std::uint32_t> forks{1};

PlacementOptions placement(const Backend& backend, const PoolConfig& config) {
  PlacementOptions options;
  const DeviceInfo& device = backend.info();
  options.pages = config.pages && device.pages;
  // Addresses for the device many times over: pages find new addresses without anyone unmapping old ones.
  const std::uint64_t wished = std::max<std::uint64_t>(16 * device.total_bytes, 16 * kGiB);
  options.space_bytes = std::min(round_up(wished, kSlotBytes), kMaxSpaceBytes - kSlotBytes);
  options.segment_size = config.segment_size;
  options.max_page = config.max_page;
  options.best_fit = config.best_fit;
  return options;
}

}  // namespace

std::uint32_t Allocator::fork_generation() { return forks.load(std::memory_order_relaxed); }

void Allocator::watch_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
}

Pool::Pool(std::shared_ptr<Backend> backend, const PoolConfig& config)
    : backend_(std::move(backend)),
      config_(config),
      segments_(*backend_, placement(*backend_, config)),
      fences_(*backend_),
      finished_([this](std::uint16_t number, Tick tick) { return fences_.finished(streams_[number], tick); }),
      stream_cache_(config.stream_cache) {
  set_zeroing(config);
  watch_forks();
  generation_.store(fork_generation(), std::memory_order_relaxed);
  gate_.store(fork_generation(), std::memory_order_relaxed);
  arrange_ladder();
  if (config.journal != 0) start_journal(config.journal);
}

Pool::~Pool() {
  (void)close();
  (void)ahead_.release();  // still there only in the child of a fork, where its thread is not
}

// ---- the fast paths -------------------------------------------------------------------------------------

bool Pool::try_cached(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  if (gate_.load(std::memory_order_relaxed) != fork_generation()) [[unlikely]] {
    if (closed() || heap_open_.load(std::memory_order_relaxed)) return false;
    const Planned* const steps = planned_.load(std::memory_order_acquire);
    if (steps != nullptr && steps->open()) return try_planned(size, handle, tag, out);
  }
  if (handle - 1 < 2) [[unlikely]]
    handle = backend_->canonical(handle);
  StreamState* stream = streams_.find(handle);
  if (stream == nullptr) return false;
  const Units units = units_of(size);
  const Kind kind = kind_of(units);
  const std::uint64_t bytes = std::uint64_t{units} * kUnit;
  stream->lock.lock();
  Index* head = stream->cache.find(units);
  if (head == nullptr || *head == 0 || stream->live + bytes > stream->ceiling) {
    stream->lock.unlock();
    return false;
  }
  Block& block = segments_.blocks()[*head];
  *head = block.link_after;
  stream->cache.removed(units);
  ++stream->hits;
  stream->live += bytes;
  stream->allocations[static_cast<int>(kind)].add(1);
  stream->bytes[static_cast<int>(kind)].add(bytes);
  stream->requested[static_cast<int>(kind)].add(size);
  block.requested = size;
  block.tag = tag;
  block.serial = static_cast<std::uint32_t>(stream->slow_serial + stream->hits);
  block.set(BlockState::live);
  *out = segments_.address_of(block);
  if (stream->journaling) [[unlikely]]
    note(*stream, Action::allocate, *out, size, tag, block.serial);
  stream->lock.unlock();
  if (zero_on_allocate_.load(std::memory_order_relaxed)) [[unlikely]]
    if (!fill_zeros(*out, bytes, handle).ok()) {
      take_back(*out);
      return false;
    }
  return true;
}

bool Pool::try_free_cached(Address address) {
  if (gate_.load(std::memory_order_relaxed) != fork_generation()) [[unlikely]] {
    if (closed()) return false;
    if (Planned* const steps = planned_.load(std::memory_order_acquire)) {
      const Planned::Freed freed = steps->free(address);
      if (freed != Planned::Freed::elsewhere) return freed == Planned::Freed::done;
    }
  }
  const Index i = segments_.find(address);
  if (i == 0) return false;
  Block& block = segments_.blocks()[i];
  StreamState& stream = streams_[block.owner.load(std::memory_order_relaxed)];
  stream.lock.lock();
  if (!block.is(BlockState::live) || block.owner.load(std::memory_order_relaxed) != stream.number ||
      block.used_elsewhere || stream.leaving || slow_frees_.load(std::memory_order_relaxed) ||
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

StreamState& Pool::stream_of(StreamHandle handle) {
  StreamState* known = streams_.find(handle);
  if (known != nullptr) return *known;
  return journaled(streams_.add(handle));
}

StreamState& Pool::journaled(StreamState* stream) {
  if (stream == nullptr) throw std::bad_alloc();
  if (config_.journal == 0 && recording_ == nullptr) return *stream;
  std::lock_guard guard(stream->lock);
  if (config_.journal != 0) stream->journal = std::make_unique<JournalRing>(config_.journal);
  // One that had another handle before may have events that were not taken yet.
  if (recording_ != nullptr && stream->tape == nullptr) stream->tape = recording_->tape();
  stream->journaling = true;
  return *stream;
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
  set_gate();
  return {};
}

Status Pool::heap_end(HeapId id) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_end", &lock); !status.ok()) return status;
  bool known = false;
  for (Heap& heap : heaps_) {
    known |= heap.id == id;
    if (heap.id == id) heap.open = false;
  }
  set_gate();
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

void Pool::set_gate() {
  const bool open = std::any_of(heaps_.begin(), heaps_.end(), [](const Heap& heap) { return heap.open; });
  heap_open_.store(open, std::memory_order_relaxed);
  const bool shut = open || planning_ || (planned_steps_ != nullptr && planned_steps_->holds_regions());
  gate_.store(shut ? 0 : fork_generation(), std::memory_order_relaxed);
}

// The open heap that serves a stream, or null.
const Pool::Heap* Pool::heap_for(StreamHandle handle) const {
  for (const Heap& heap : heaps_)
    if (heap.open && heap.serves(handle)) return &heap;
  return nullptr;
}

// The capture that the stream's work goes into now, if any. A stream seen for the first time must be one
// of the device's; asking it once is enough.
Status Pool::capture_of(StreamHandle handle, CaptureId* out) {
  *out = 0;
  if (handle != 0 && backend_->info().captures)
    if (Status status = backend_->capture_of(handle, out); status.code == Code::invalid) return status;
  if (*out != 0 || streams_.find(handle) != nullptr) return {};
  const Status status = backend_->stream_query(handle);
  return status.code == Code::invalid ? status : Status{};
}

// The state that serves a stream: its own, or that of the heap or graph its work goes into. Null with the
// reason in *why.
StreamState* Pool::stream_for(StreamHandle handle, CaptureId capture, Status* why) {
  const Heap* heap = heaps_.empty() ? nullptr : heap_for(handle);
  if (heap == nullptr && capture == 0) return &stream_of(handle);
  const CaptureId key = heap != nullptr ? heap->key : capture;
  for (std::uint16_t number : graphs_) {
    StreamState& known = streams_[number];
    if (known.capture == key && known.handle == handle) return &known;
  }
  if (heap != nullptr) return &hidden(handle, key, heap->over);
  auto over = std::make_shared<std::atomic<bool>>(false);
  *why = backend_->capture_keep(handle, [over] { over->store(true, std::memory_order_release); });
  return why->ok() ? &hidden(handle, key, std::move(over)) : nullptr;
}

StreamState& Pool::hidden(StreamHandle handle, CaptureId key, std::shared_ptr<std::atomic<bool>> over) {
  StreamState& graph = journaled(streams_.add_hidden(handle));
  graph.capture = key;
  graph.over = std::move(over);
  graphs_.push_back(graph.number);
  return graph;
}

// Graphs that are gone leave their memory as streams do. What they had may still be in use by work of the
// stream itself, such as a copy of a graph's result, so a last fence is recorded there.
void Pool::let_graphs_go() {
  std::erase_if(graphs_, [this](std::uint16_t number) {
    StreamState& graph = streams_[number];
    if (!graph.over->load(std::memory_order_acquire)) return false;
    const CaptureId capture = std::exchange(graph.capture, 0);
    if (!fences_.record(graph).ok()) {
      graph.capture = capture;  // captured again; later, then
      return false;
    }
    {
      std::lock_guard guard(graph.lock);
      graph.leaving = true;
    }
    graph.last = graph.tick - 1;
    graph.over.reset();
    leaving_.push_back(number);
    drain(graph);
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
  handle = backend_->canonical(handle);
  CaptureId capture = 0;
  if (Status status = capture_of(handle, &capture); !status.ok()) return status;
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("allocate", &lock); !status.ok()) return status;
  Status why;
  StreamState* const serving = stream_for(handle, capture, &why);
  if (serving == nullptr) return why;
  StreamState& stream = *serving;
  Request request{size, {stream.number, 0, 0, std::max(align, kUnit)}, tag, &stream, &lock, {}};
  if (size > kMaxRequest) return fail(request, report);
  request.want.units = units_of(size);
  request.want.band = segments_.band_of(request.want.units);
  // The stream's cache missed, or its ceiling was in the way of what it holds.
  const std::uint64_t bytes = std::uint64_t{request.want.units} * kUnit;
  const bool planned = align <= kUnit && capture == 0 && planned_serves(handle);
  std::uint32_t entry = Planned::kNone;
  Index block = 0;
  if (!planned || !serve_planned(request, out, &entry)) {
    if (align <= kUnit) block = take_cached(stream, request.want.units);
    if (block == 0) block = climb(request);
    if (block == 0 && request.error.ok() && give_up_regions()) block = climb(request);
    if (block != 0) *out = hand_out(block, request);
    if (block != 0 && planned) planned_steps_->note({request.want.units, size, handle, tag}, *out, entry);
  }
  verify();
  if (*out != 0) {
    lock.unlock();
    if (!zero_on_allocate_.load(std::memory_order_relaxed)) return {};
    const Status status = fill_zeros(*out, bytes, handle);
    if (!status.ok()) take_back(*out);
    return status;
  }
  return request.error.ok() ? fail(request, report) : request.error;
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
  if (!lock || gate_.load(std::memory_order_relaxed) != fork_generation() || stream->gone()) return false;
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
  if (closed() || free_planned(address)) return;
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
  std::uint64_t live = 0;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& each = streams_[static_cast<std::uint16_t>(n)];
    std::lock_guard guard(each.lock);
    if (alone) each.ceiling = each.live;
    live += each.live;
  }
  peak_live_ = std::max(peak_live_, live + bytes);
  peak_active_ = std::max(peak_active_, live + bytes + pending_.current);
  std::lock_guard guard(stream.lock);
  stream.live += bytes;
  stream.ceiling = alone ? stream.ceiling + (peak_live_ - live) : std::max(stream.ceiling, stream.live);
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
  StreamState& stream = stream_of(handle);
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
      good = fill_zeros(out[order[i]], std::uint64_t{units_of(sizes[order[i]])} * kUnit, handle).ok();
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
  owner.live -= bytes;
  owner.allocations[kind].subtract(1);
  owner.bytes[kind].subtract(bytes);
  owner.requested[kind].subtract(block.requested);
  note(owner, action, segments_.address_of(block), block.requested, block.tag, block.serial);
}

Status Pool::free_slow(Address address) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("free", &lock); !status.ok()) return status;
  if (planned_steps_ != nullptr) {
    if (planned_steps_->is_region(address)) return {Code::invalid, 0, "free"};
    if (free_planned(address)) return {};
  }
  if (const Index i = segments_.find(address); i != 0 && segments_.growing(segments_.blocks()[i]))
    return {Code::invalid, 0, "free"};
  bool busy = false;
  if (slow_frees_.load(std::memory_order_relaxed))
    if (Status status = zero(address, &busy); !status.ok()) return status;
  bool suspended = false;
  const Index block = claim_for_free(address, &suspended);
  if (block == 0) return {Code::invalid, 0, "free"};
  let_go(block, suspended, busy);
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
  const Tick tick = owner.now();
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
  PendingBlock pending{i, streams_[owner].now(), {}, block.used_elsewhere};
  // What is to be zeroed may be zeroed on another stream than its owner.
  if (segments_.segments()[block.segment].stream != owner || slow_frees_.load(std::memory_order_relaxed))
    uses_[i].push_back(owner);
  for (std::uint16_t number : uses_[i]) {
    StreamState& stream = streams_[number];
    if (stream.retired) continue;
    pending.uses.push_back({number, stream.now()});
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
    if (!stream.retired && use.tick > stream.passed) {
      stream.waiting.push_back(std::move(pending));
      return;
    }
    pending.uses.pop_back();
  }
  Block& block = segments_.blocks()[pending.block];
  StreamState& home = streams_[segments_.segments()[block.segment].stream];
  StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
  Tick tick = &owner == &home ? pending.tick : 0;
  if (zero_on_free_.load(std::memory_order_relaxed) && !pending.zeroed) {
    StreamState& zeroing = home.gone() ? streams_[0] : home;
    (void)fill_resident(block, zeroing.handle);
    tick = home.tick;
    if (&zeroing != &home || segments_.growing(block)) {
      pending.zeroed = true;
      pending.uses.push_back({zeroing.number, zeroing.tick});
      zeroing.waiting.push_back(std::move(pending));
      return;
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

// Gives home every pending block whose uses have finished; asks each stream once and never waits.
void Pool::complete_passed() {
  if (!graphs_.empty()) let_graphs_go();
  // All are asked before any block is looked at, as one may wait for several of them.
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    if (stream.waiting.empty()) {
      (void)fences_.poll(stream);
    } else {
      (void)fences_.finished(stream, stream.waiting.front().uses.back().tick);
    }
  }
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    if (stream.waiting.empty()) continue;
    std::deque<PendingBlock> waiting;
    waiting.swap(stream.waiting);
    for (PendingBlock& pending : waiting) requeue(std::move(pending));
  }
  if (!leaving_.empty()) let_leave();
}

Status Pool::enter(const char* call, std::unique_lock<std::mutex>* lock) const {
  if (!closed()) *lock = std::unique_lock(mutex_);
  return closed() ? Status{Code::closed, 0, call} : Status{};
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
  for (std::uint32_t n = 0; n < streams_.size(); ++n) drain(streams_[static_cast<std::uint16_t>(n)]);
}

void Pool::send_home(bool ask) {
  for (Index i : drained_) give_home(i, ask);
}

Status Pool::record_stream(Address address, StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "record_stream"};
  handle = backend_->canonical(handle);
  CaptureId capture = 0;
  if (Status status = capture_of(handle, &capture); !status.ok()) return status;
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("record_stream", &lock); !status.ok()) return status;
  Index i = segments_.find(address);
  if (i == 0) i = segments_.containing(address);
  if (i == 0) return {Code::invalid, 0, "record_stream"};
  Block& block = segments_.blocks()[i];
  Status why;
  StreamState* const serving = stream_for(handle, capture, &why);
  if (serving == nullptr) return why;
  StreamState& user = *serving;
  if (planned_steps_ != nullptr) {
    const bool own = user.capture == 0 && !backend_->info().host_writes;
    if (planned_steps_->use(address, user.number, own, handle)) return {};
    if (planned_steps_->is_region(segments_.address_of(block))) return {Code::invalid, 0, "record_stream"};
  }
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
  const Tick tick = stream.waiting.empty() ? stream.now() : stream.waiting.front().uses.back().tick;
  if (Status status = fences_.event_for(stream, tick, &event); !status.ok()) return status;
  if (event == 0) return {};
  lock.unlock();
  const Status status = backend_->event_synchronize(event);
  lock.lock();
  if (closed()) return {Code::closed, 0, "allocate"};
  if (!status.ok()) return status;
  return fences_.poll(stream);
}

Status Pool::wait_for_all(std::unique_lock<std::mutex>& lock) {
  Status first;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    if (stream.retired) continue;
    const Status status = wait_for_stream(stream, lock);
    if (status.code == Code::closed || status.unwaited()) return status;
    if (first.ok()) first = status;
  }
  return first;
}

// Waits for everything issued on the stream so far: by a fence, or where the driver refuses that, as a whole.
// What is captured is not running; the memory of graphs and of captured streams stays theirs.
Status Pool::wait_for_stream(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  EventHandle event = 0;
  Status status = fences_.event_for(stream, stream.now(), &event);
  if (status.ok() && event == 0) return status;
  if (status.code == Code::capturing) return {};
  const bool leaving = stream.last != 0;
  const Tick tick = leaving ? stream.last : status.ok() ? stream.tick - 1 : fences_.mark(stream);
  const StreamHandle handle = stream.handle;
  for (const bool by_event : {true, leaving}) {
    if (by_event && !status.ok() && event == 0) continue;
    lock.unlock();
    status = by_event ? backend_->event_synchronize(event) : backend_->stream_synchronize(handle);
    lock.lock();
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
  if (planned_steps_ != nullptr && !planned_steps_->open()) (void)give_up_regions();
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
  std::uint64_t idle = 0;
  for (std::uint32_t n = 0; n < streams_.size(); ++n)
    idle += segments_.free_page_bytes(static_cast<std::uint16_t>(n));
  if (idle <= config_.idle_limit) return;
  (void)segments_.trim(segments_.reserved_bytes() - (idle - config_.idle_limit), finished_, false);
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
  std::lock_guard lock(mutex_);
  return config_;
}

// A last fence covers all the work of the stream. Its memory stays with it until that has passed and then
// goes to the default stream; neither the caller nor anyone else waits.
Status Pool::retire_stream(StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "retire_stream"};
  handle = backend_->canonical(handle);
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("retire_stream", &lock); !status.ok()) return status;
  StreamState* stream = streams_.find(handle);
  const bool captured = std::any_of(graphs_.begin(), graphs_.end(),
                                    [&](std::uint16_t number) { return streams_[number].handle == handle; });
  if (stream == nullptr && captured) stream = &stream_of(handle);
  if (stream == nullptr) return {};
  if (stream->number == 0) return {Code::invalid, 0, "retire_stream"};
  if (!fences_.record(*stream).ok()) {
    // Without a fence only waiting tells when its work is done, and it cannot be asked later.
    const Tick tick = fences_.mark(*stream);
    lock.unlock();
    const Status status = backend_->stream_synchronize(handle);
    lock.lock();
    if (closed()) return {};
    if (!status.ok()) return status;
    fences_.pass(*stream, tick);
  }
  // Graphs captured on it go on in the order of the default stream, which waits for what was done with them.
  for (std::uint16_t number : graphs_) {
    if (streams_[number].handle != handle) continue;
    (void)fences_.order(streams_[0], *stream, stream->tick - 1);
    streams_[number].handle = 0;
  }
  streams_.forget(*stream);
  stream->last = stream->tick - 1;
  leaving_.push_back(stream->number);
  if (planned_steps_ != nullptr) {
    std::vector<Planned::Block> gone;
    planned_steps_->forget_stream(handle, &gone);
    give_back_regions(gone);
  }
  drain(*stream);
  complete_passed();
  verify();
  return {};
}

// Streams on their way out whose last fence has passed leave their memory to the default stream.
void Pool::let_leave() {
  if (operating_) return;  // its pages stay whose they are
  std::erase_if(leaving_, [this](std::uint16_t number) {
    StreamState& stream = streams_[number];
    if (!fences_.finished(stream, stream.last) || !stream.waiting.empty()) return false;
    streams_.retire(stream);
    segments_.inherit(number, 0);
    return true;
  });
}

void Pool::on_out_of_memory(std::function<bool(std::uint64_t, StreamHandle)> callback) {
  std::lock_guard lock(mutex_);
  callback_ = std::move(callback);
}

Status Pool::close() {
  std::unique_ptr<Ahead> ended;  // after the mutex was let go, as its thread may wait for that
  // In the child of a fork the locks and the memory are the parent's; nothing is touched.
  if (closed()) return {};
  Turn turn(*this);
  if (!turn.ours()) return {Code::invalid, 0, "close"};
  std::unique_lock lock(mutex_);
  if (closed()) return {};
  Status status = wait_for_all(lock);
  if (closed()) return {};
  if (status.unwaited()) return status;  // work goes on in the memory: the pool stays open
  generation_.store(0, std::memory_order_relaxed);
  gate_.store(0, std::memory_order_relaxed);
  for (std::uint32_t n = 0; n < streams_.size(); ++n) fences_.clear(streams_[static_cast<std::uint16_t>(n)]);
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
  planning_ = false;
  std::vector<Planned::Block> gone;  // with everything else
  if (planned_steps_ != nullptr) planned_steps_->reset(&gone);
  ended = std::move(ahead_);
  // Nothing is held any more; totals and peaks stay to be read.
  note_reserved(streams_[0]);
  pending_.current = pending_blocks_ = 0;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    std::lock_guard guard(stream.lock);
    stream.live = 0;
    stream.cache.forget();
    for (Meter(&meters)[2] :
         {std::ref(stream.allocations), std::ref(stream.bytes), std::ref(stream.requested)})
      for (Meter& meter : meters) meter.current = 0;
  }
  return status;
}

}  // namespace vram
