// The fast paths, allocations, frees, batches and housekeeping of a pool.
#include "pool/pool.hpp"

#include <algorithm>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

namespace vram {

bool Allocator::call_back(const Callback& callback, std::uint64_t size, StreamHandle stream) const {
  thread_local std::vector<const Allocator*> inside;
  if (std::find(inside.begin(), inside.end(), this) != inside.end()) return false;
  struct Inside {
    explicit Inside(const Allocator* pool) { inside.push_back(pool); }
    ~Inside() { inside.pop_back(); }
  } const here(this);
  return callback(size, stream);
}

Pool::Pool(std::shared_ptr<Backend> backend, const PoolConfig& config)
    : state_(std::move(backend), config),
      stream_cache_(config.stream_cache),
      log_(state_),
      accounts_(state_, log_),
      zeroing_(state_),
      pending_(state_, log_, accounts_, zeroing_),
      caches_(state_, accounts_, pending_),
      captures_(state_),
      lives_(state_, log_, zeroing_, caches_, pending_, captures_),
      shares_(state_),
      spiller_(state_, log_, caches_, pending_, lives_, shares_),
      ladder_(state_, log_, caches_, pending_, captures_, lives_, spiller_,
              [this](const Callback& callback, std::uint64_t size, StreamHandle stream) {
                return call_back(callback, size, stream);
              }),
      report_(state_, log_, accounts_, pending_, caches_, lives_, spiller_, ladder_),
      checkpoints_(state_, accounts_, zeroing_, pending_, caches_, captures_, lives_, report_, shares_),
      growables_(state_, log_, accounts_, zeroing_, pending_, lives_, ladder_, report_),
      suspender_(state_, log_, zeroing_, caches_, pending_, lives_, ladder_, report_, shares_) {
  if (config.journal != 0) (void)start_journal(std::min(config.journal, kMostJournaled));
}

Pool::~Pool() { (void)close(); }

bool Pool::try_cached(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  if (state_.cache_generation.load(std::memory_order_relaxed) != process_generation()) [[unlikely]]
    return false;
  if (handle - 1 < 2) [[unlikely]]
    handle = state_.backend->canonical(handle);
  StreamState* stream = state_.streams.find(handle);
  if (stream == nullptr) [[unlikely]]
    return try_foreign(size, handle, tag, out);
  const bool zero = zeroing_.on_allocate();
  stream->lock.lock();
  if (serve_cached(*stream, size, tag, zero, out)) return !zero || zeroed(*out, size, handle);
  stream->lock.unlock();
  return false;
}

// Another library's stream: its state serves if the handle is still that stream's.
bool Pool::try_foreign(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  StreamState* const stream = state_.streams.find_foreign(handle);
  StreamId id = 0;
  if (stream == nullptr || !state_.backend->stream_id(handle, &id).ok()) return false;
  const bool zero = zeroing_.on_allocate();
  stream->lock.lock();
  if (stream->foreign && stream->handle == handle && stream->id == id &&
      (stream->shut[0] & StreamState::kLeaving) == 0 && serve_cached(*stream, size, tag, zero, out))
    return !zero || zeroed(*out, size, handle);
  stream->lock.unlock();
  return false;
}

// Called with the stream's lock, which it releases if it serves.
[[gnu::always_inline]] inline bool Pool::serve_cached(StreamState& stream, std::uint64_t size,
                                                      std::uint32_t tag, bool zero, Address* out) {
  const Units units = units_of(size);
  const Kind kind = kind_of(units);
  const std::uint64_t bytes = bytes_of(units);
  const bool fits = stream.live + bytes <= stream.ceiling;
  const Index i = fits ? stream.cache.pop(blocks(), units) : 0;
  if (i == 0) return false;
  Block& block = blocks()[i];
  ++stream.hits;
  stream.live += bytes;
  stream.count_in(static_cast<int>(kind), bytes, size);
  block.requested = size;
  block.tag = tag;
  block.serial = static_cast<std::uint32_t>(stream.slow_serial + stream.hits);
  if (zero) [[unlikely]]
    block.unzeroed.store(true, std::memory_order_relaxed);
  block.set(BlockState::live);
  *out = state_.placement.space().address_of(block);
  log_.note(stream, Action::allocate, block);
  stream.lock.unlock();
  return true;
}

// Zeroes what a cache served. If that fails, the cache has not served.
bool Pool::zeroed(Address address, std::uint64_t size, StreamHandle handle) {
  if (zero_new(address, bytes_of(units_of(size)), handle).ok()) return true;
  undo_allocation(address);
  return false;
}

bool Pool::try_free_cached(Address address) {
  if (closed()) [[unlikely]]
    return false;
  const Index i = state_.placement.space().find(address);
  if (i == 0) return false;
  Block& block = blocks()[i];
  StreamState& stream = state_.owner_of(block);
  stream.lock.lock();
  if (!block.is(BlockState::live) || block.owned_by() != stream.number || block.used_elsewhere ||
      stream.shut[block.units > kSmallUnits] != 0 || zeroing_.slow_frees() ||
      stream.cache.count() >= stream_cache_.load(std::memory_order_relaxed) ||
      !stream.cache.push(blocks(), i)) {
    stream.lock.unlock();
    return false;
  }
  const Kind kind = kind_of(block.units);
  const std::uint64_t bytes = bytes_of(block);
  block.set(BlockState::cached);
  stream.live -= bytes;
  stream.count_out(static_cast<int>(kind), bytes, block.requested);
  log_.note(stream, Action::free, block);
  stream.lock.unlock();
  return true;
}

Status Pool::allocate_padded(std::uint64_t size, std::uint64_t room, StreamHandle handle, std::uint64_t align,
                             std::uint32_t tag, Address* out, OutOfMemoryReport* report) {
  *out = 0;
  if (closed()) return {Code::closed, 0, "allocate"};
  if (room < size) return {Code::invalid, 0, "room"};
  if ((align & (align - 1)) != 0) return {Code::invalid, 0, "align"};
  if (align > kMaxRequest) return {Code::invalid, 0, "align"};
  NamedStream named;
  if (Status status = lives_.name(handle, &named); !status.ok()) return status;
  if (Status status = allocate_named(named, size, room, align, tag, out, report); !status.ok()) return status;
  look_at_high_water();
  if (!is_unzeroed(*out)) return {};
  const Status status = zero_new(*out, bytes_of(units_of(room)), named.handle);
  if (!status.ok()) undo_allocation(std::exchange(*out, 0));
  return status;
}

Status Pool::allocate_named(const NamedStream& named, std::uint64_t size, std::uint64_t room,
                            std::uint64_t align, std::uint32_t tag, Address* out, OutOfMemoryReport* report) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("allocate", &lock); !status.ok()) return status;
  Status why;
  StreamState* const stream = lives_.state_for(named, lock, &why);
  if (stream == nullptr) return why;
  const Presence presence(*stream);
  state_.fences.cover(*stream);
  if (named.capture != 0 && pending_.blocks_waiting() != 0)
    pending_.return_joined(*stream, captures_.graphs());
  Climb request{size, {stream->number, 0, 0, std::max(align, kUnit)}, tag, stream, &lock};
  if (room > kMaxRequest) return report_.fail(request, report);
  request.want.units = units_of(room);
  request.want.heap = stream->plain.get();
  request.want.band = state_.placement.band_of(request.want.units, request.want.heap);
  const Index block = ladder_.climb(request);
  if (block != 0) *out = make_new(block, request);
  state_.verify();
  if (block != 0) return {};
  return request.error.ok() ? report_.fail(request, report) : request.error;
}

bool Pool::try_own(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  const std::uint32_t generation = process_generation();
  if (state_.cache_generation.load(std::memory_order_relaxed) != generation) [[unlikely]]
    return false;
  StreamState* const stream = state_.streams.find(handle);
  if (stream == nullptr) [[unlikely]]
    return try_cached(size, handle, tag, out);
  const bool zero = zeroing_.on_allocate();
  stream->lock.lock();
  if (serve_cached(*stream, size, tag, zero, out)) return !zero || zeroed(*out, size, handle);
  // Nobody who has the mutex waits for us here, because we do not wait for the mutex.
  std::unique_lock lock(state_.mutex, std::try_to_lock);
  if (!lock || zeroing_.on_allocate() ||
      state_.cache_generation.load(std::memory_order_relaxed) != generation || stream->gone()) {
    stream->lock.unlock();
    return false;
  }
  const Units units = units_of(size);
  Climb request{size,  {stream->number, state_.placement.band_of(units), units, kUnit},
                tag,   stream,
                &lock, kWithoutDevice};
  const Index block = ladder_.climb_own(request);
  if (block == 0) return false;
  *out = accounts_.make_live(block, request);
  state_.verify();
  return true;
}

// Makes a block in state moving a live one, to be zeroed if so configured.
Address Pool::make_new(Index block, const Climb& climb) {
  blocks()[block].unzeroed.store(zeroing_.on_allocate(), std::memory_order_relaxed);
  return accounts_.make_live(block, climb);
}

void Pool::look_at_high_water() {
  if (!high_water_.any()) return;
  std::unique_lock<std::mutex> lock;
  if (!state_.look(&lock)) return;
  const std::uint64_t reserved = state_.placement.reserved_bytes();
  lock.unlock();
  high_water_.look(reserved);
}

// Undoes an allocation that the program has not seen.
void Pool::undo_allocation(Address address) {
  std::lock_guard lock(state_.mutex);
  if (closed()) return;
  pending_.make_room(state_.placement.space().find(address));
  suspender_.make_room();
  bool suspended = false;
  if (const Index block = claim(address, &suspended)) {
    blocks()[block].unzeroed.store(false, std::memory_order_relaxed);
    free_claimed(block, suspended);
  }
}

Status Pool::allocate_batch(const std::vector<std::uint64_t>& sizes, StreamHandle handle, std::uint32_t tag,
                            std::vector<Address>& out, OutOfMemoryReport* report) {
  out.assign(sizes.size(), 0);
  const bool captured = state_.backend->capturing(handle);  // cached memory must not go into a graph
  // Largest first, so that equal sizes are adjacent.
  Batch batch{sizes, std::vector<std::size_t>(sizes.size()), handle, tag, out};
  std::iota(batch.order.begin(), batch.order.end(), std::size_t{0});
  std::stable_sort(batch.order.begin(), batch.order.end(),
                   [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  const auto undo = [&] {
    for (Address& address : out)
      if (address != 0) undo_allocation(std::exchange(address, 0));
  };
  try {
    const Status status = serve_batch(batch, captured, report);
    if (status.ok()) look_at_high_water();
    if (!status.ok()) undo();
    return status;
  } catch (const std::bad_alloc&) {
    undo();
    throw;
  }
}

Status Pool::serve_batch(Batch& batch, bool captured, OutOfMemoryReport* report) {
  Status status;
  for (std::size_t done = 0; done < batch.order.size() && status.ok();) {
    Units units = 0;
    const std::size_t run = run_from(batch, done, &units);
    if (run > done + 1 && allocate_run(batch, done, run, units)) {
      done = run;
      continue;
    }
    for (const std::size_t stop = std::max(run, done + 1); done < stop && status.ok(); ++done) {
      Address* const to = &batch.out[batch.order[done]];
      status = captured ? allocate_slow(batch.size(done), batch.stream, 0, batch.tag, to, report)
                        : allocate(batch.size(done), batch.stream, 0, batch.tag, to, report);
    }
  }
  return status;
}

// The end of a run: as many requests of one band as one block of the pool's space may contain together.
std::size_t Pool::run_from(const Batch& batch, std::size_t from, Units* units) const {
  const auto band = [&](std::size_t i) { return state_.placement.band_of(units_of(batch.size(i))); };
  std::uint64_t sum = 0;
  std::size_t run = from;
  while (run < batch.order.size() && batch.size(run) <= kMaxRequest && band(run) == band(from) &&
         (sum + units_of(batch.size(run))) * kUnit <= kMaxRequest)
    sum += units_of(batch.size(run++));
  *units = static_cast<Units>(sum);
  return run;
}

// Serves a run of a batch from one block that is split into pieces. False: there is none without the later
// rungs.
bool Pool::allocate_run(Batch& batch, std::size_t from, std::size_t to, Units units) {
  const StreamHandle handle = state_.backend->canonical(batch.stream);
  if (closed() || state_.streams.find(handle) == nullptr || state_.backend->capturing(handle)) return false;
  std::unique_lock lock(state_.mutex);
  if (closed() || captures_.heap_for(handle) != nullptr) return false;
  Status why;
  StreamState* const stream = lives_.lasting(handle, &why);
  if (stream == nullptr || !state_.placement.space().can_split(to - from)) return false;
  // A cached block is not this long, and a lent block must be returned in one piece. Memory of other streams
  // that a stream wait would serve comes before growth if so configured; then the requests are served one by
  // one.
  Rungs rungs = only(Rung::own_blocks) | only(Rung::passed_pending) | only(Rung::free_pages);
  bool others = false;
  state_.placement.owners().each([&](StreamNumber owner) { return others = owner != stream->number; });
  if (state_.config.cross_stream != CrossStream::wait || !others) rungs |= only(Rung::growth);
  const Want want{stream->number, state_.placement.band_of(units_of(batch.size(from))), units, kUnit};
  Climb request{0, want, batch.tag, stream, &lock, rungs};
  Rung served{};
  const Index block = ladder_.try_rungs(request, rungs, &served);
  if (block == 0) return false;
  for (std::size_t i = from; i < to; ++i) {
    const Units part = units_of(batch.size(i));
    const Index piece = i + 1 < to ? state_.placement.space().split_in_use(block, part) : block;
    batch.out[batch.order[i]] = make_new(piece, {batch.size(i), want, batch.tag, stream, &lock});
    ladder_.count(Rung::own_blocks);
  }
  state_.verify();
  lock.unlock();
  bool good = true;
  for (std::size_t i = from; i < to && good; ++i)
    if (const Address address = batch.out[batch.order[i]]; is_unzeroed(address))
      good = zero_new(address, bytes_of(units_of(batch.size(i))), handle).ok();
  for (std::size_t i = from; i < to && !good; ++i)
    undo_allocation(std::exchange(batch.out[batch.order[i]], 0));
  return good;
}

// Makes a live block, suspended or not, a block in state moving; 0 if there is none at the address.
Index Pool::claim(Address address, bool* suspended) {
  const Index i = state_.placement.space().find(address);
  if (i == 0) return 0;
  Block& block = blocks()[i];
  StreamState& stream = state_.owner_of(block);
  std::lock_guard guard(stream.lock);
  *suspended = block.is(BlockState::suspended);
  if (!*suspended && !block.is(BlockState::live)) return 0;
  if (block.owned_by() != stream.number) return 0;
  if (*suspended) --state_.suspended_blocks;
  accounts_.end_live(i, stream, block.used_elsewhere && !*suspended ? Action::free_pending : Action::free);
  return i;
}

// If zeroing fails the block stays live; a dropped one is pending until it can be zeroed.
Status Pool::free_block(Address address, bool dropped) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("free", &lock); !status.ok()) return status;
  if (const Index i = state_.placement.space().find(address);
      i != 0 && state_.placement.space().growing(blocks()[i]))
    return {Code::invalid, 0, "free"};
  caches_.open(address);
  if (try_free_cached(address)) return {};
  bool busy = false;
  Status zeroed;
  if (zeroing_.slow_frees()) zeroed = zeroing_.before_free(address, &busy);
  if (!zeroed.ok() && (!dropped || zeroed.code == Code::invalid)) return zeroed;
  pending_.make_room(state_.placement.space().find(address));
  suspender_.make_room();
  bool suspended = false;
  const Index block = claim(address, &suspended);
  if (block == 0) return {Code::invalid, 0, "free"};
  shares_.forget(block);
  if (zeroed.ok()) {
    free_claimed(block, suspended, busy);
  } else {
    pending_.make_pending(block);
  }
  ladder_.keep_threshold();
  state_.verify();
  return {};
}

// Returns a claimed block, or makes it pending. `busy`: its own stream still uses it.
void Pool::free_claimed(Index i, bool suspended, bool busy) {
  if (suspended) return suspender_.free(i);
  const Block& block = blocks()[i];
  const StreamState& owner = state_.owner_of(block);
  const bool zero_later = owner.gone() || owner.capture != 0;
  if (block.used_elsewhere || busy || (zero_later && zeroing_.slow_frees())) {
    pending_.make_pending(i);
  } else {
    pending_.return_home(i, true);
  }
}

// Zeroes what was just allocated, without the mutex.
Status Pool::zero_new(Address address, std::uint64_t bytes, StreamHandle stream) {
  const Access access(*this);
  Status status{Code::closed, 0, "allocate"};
  if (!access.refused())
    status = state_.backend->beside_swaps([&] { return zeroing_.fill(address, bytes, stream); });
  blocks()[state_.placement.space().find(address)].unzeroed.store(false, std::memory_order_release);
  return status;
}

bool Pool::is_unzeroed(Address address) {
  return blocks()[state_.placement.space().find(address)].unzeroed.load(std::memory_order_relaxed);
}

Status Pool::record_stream(Address address, StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "record_stream"};
  NamedStream named;
  if (Status status = lives_.name(handle, &named); !status.ok()) return status;
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("record_stream", &lock); !status.ok()) return status;
  Status why;
  StreamState* const serving = lives_.user_for(named, lock, &why);
  if (serving == nullptr) return why;
  StreamState& user = *serving;
  const Presence presence(user);
  state_.fences.cover(user);
  Index i = state_.placement.space().find(address);
  if (i == 0) i = state_.placement.space().containing(address);
  if (i == 0) return {Code::invalid, 0, "record_stream"};
  Block& block = blocks()[i];
  StreamState& owner = state_.owner_of(block);
  std::lock_guard guard(owner.lock);
  if (block.is(BlockState::suspended)) return {Code::suspended, 0, "record_stream"};
  if (!block.is(BlockState::live)) return {Code::invalid, 0, "record_stream"};
  const bool own =
      &user == &owner || (owner.heap != HeapId{} && owner.capture != 0 && owner.same_stream(user));
  if (own && !state_.backend->info().host_writes) return {};
  pending_.add_use(i, user.number);
  block.used_elsewhere = true;
  if (user.foreign) (void)user.owe();  // no fence covers the use before the stream is named again
  return {};
}

Status Pool::share(Address address, SharedBlock* out) {
  std::uint64_t bytes = 0, moved = 0;
  if (spiller_.spilled(address, &bytes).ok() && bytes != 0) {
    if (Status status = spiller_.prefetch(address, &moved); !status.ok()) return status;
    // A page that is lent to a graph stays in host memory.
    if (spiller_.spilled(address, &bytes).ok() && bytes != 0) return {Code::unsupported, 0, "share"};
  }
  return shares_.share(address, out);
}

Status Pool::coalesce() {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("coalesce", &lock); !status.ok()) return status;
  lives_.complete();
  caches_.drain_all();
  state_.verify();
  return {};
}

Status Pool::trim(std::uint64_t keep, bool wait) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("trim", &lock); !status.ok()) return status;
  if (wait) {
    if (Status status = lives_.wait_until_idle(lock); !status.ok()) return status;
  } else {
    lives_.complete();
    caches_.drain_all();
  }
  Status status = state_.placement.trim(keep, state_.finished, wait);
  if (status.ok()) status = state_.placement.stock().release_spare(0, state_.finished);
  log_.note_reserved(state_.streams[0]);
  state_.verify();
  return status;
}

Status Pool::release_unused(bool wait) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("release_unused", &lock); !status.ok()) return status;
  const std::uint64_t keep = state_.config.release_threshold;
  if (!state_.config.bounded()) return {};
  lives_.complete();
  if (ladder_.idle_bytes() + report_.cached_bytes() <= keep) return {};
  caches_.drain_all();
  if (wait && ladder_.idle_bytes() > keep) {
    const Status status = lives_.wait_until_idle(lock);
    if (status.code == Code::closed || status.code == Code::interrupted) return status;
    wait = status.ok();  // else a stream is being captured, or this thread runs for one
  }
  ladder_.keep_threshold(~std::uint32_t{0}, wait);
  state_.verify();
  return {};
}

Status Pool::heap_end(HeapId id) {
  std::vector<StreamNumber> states;
  bool others = false;
  const Status status = captures_.end(id, &states, &others);
  if (status.ok()) spiller_.settle(states, !others);
  return status;
}

Status Pool::heap_trim(HeapId id, bool wait) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("heap_trim", &lock); !status.ok()) return status;
  const Status status = lives_.trim_heap(id, wait, lock);
  state_.verify();
  return status;
}

Status Pool::set_limit(std::uint64_t bytes) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("limit", &lock); !status.ok()) return status;
  state_.config.limit = bytes;
  return {};
}

Status Pool::add_peer(int device) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("add_peer", &lock); !status.ok()) return status;
  if (!state_.placement.paged()) return {};  // the driver opens plain memory itself
  if (Status status = state_.backend->add_peer(device); !status.ok()) return status;
  return state_.placement.stock().grant_again();
}

Status Pool::change(const Setting& set) {
  std::unique_lock<std::mutex> lock;
  if (Status status = state_.enter("configure", &lock); !status.ok()) return status;
  PoolConfig config = state_.config;
  set(config);
  // The host zeroes its memory at once, so what was freed before must have no work left.
  std::optional<Zeroing::SlowFrees> slow;
  if (zeroing_.wants_slow_frees(config) && !zeroing_.wants_slow_frees(state_.config) &&
      state_.backend->info().host_accessible) {
    slow.emplace(zeroing_, lock);
    if (Status status = lives_.wait_until_idle(lock); !status.ok()) return status;
    config = state_.config;  // others may have changed it meanwhile
    set(config);
  }
  const bool pages = state_.config.pages;
  const std::uint32_t journal_entries = state_.config.journal;
  const bool was_bounded = state_.config.bounded();
  state_.config = config;
  state_.config.pages = pages;
  state_.config.journal = journal_entries;
  state_.placement.configure(placement_options(*state_.backend, state_.config));
  stream_cache_.store(config.stream_cache, std::memory_order_relaxed);
  zeroing_.configure(state_.config);
  ladder_.arrange();
  if (config.bounded() != was_bounded) caches_.arrange();
  ladder_.keep_threshold();
  spiller_.keep_budget();
  return {};
}

PoolConfig Pool::config() const {
  std::unique_lock<std::mutex> lock;
  return state_.look(&lock) ? state_.config : PoolConfig{};
}

void Pool::on_out_of_memory(Callback callback) {
  std::unique_lock<std::mutex> lock;
  if (state_.look(&lock)) state_.callback.swap(callback);
}

// From here on no fast path of a stream has any effect: it looks for cached blocks, and at `shut`, under the
// stream's lock. Nothing is live any more; totals and peaks can still be read.
void Pool::end_streams() {
  for (StreamState& stream : state_.streams) {
    state_.fences.clear(stream);
    std::lock_guard guard(stream.lock);
    stream.shut_for(StreamState::kLeaving);
    stream.cache.forget();
    accounts_.close(stream);
  }
}

// First, nothing new is queued: calls that touch memory (Access) end and later ones are refused, and frees
// queue no zeros (Zeroing). Then all streams are waited for, one after the other, while other calls go on.
// Then the pool is closed: calls that hold the mutex, and on the fast paths those that hold the lock of a
// stream, have ended, and later ones find the pool closed and the stream's cache empty and shut. Only then is
// memory released.
Status Pool::close() {
  std::unique_ptr<Preparer> ended;  // destroyed after the lock, as its thread may wait for the mutex
  // In the child of a fork the locks and the memory are the parent's; nothing is touched.
  if (closed()) return {};
  if (Access::ours(*this)) return {Code::deadlock, 0, "close"};
  const Turn turn(state_.turn);
  if (!turn.ours()) return {Code::invalid, 0, "close"};
  const Shut shut(*this);
  std::unique_lock lock(state_.mutex);
  if (closed()) return {};
  Status status = lives_.wait_for_all(lock);
  if (closed()) return {};
  if (status.unwaited()) return status;  // work goes on in the memory: the pool stays open
  state_.generation.store(0, std::memory_order_relaxed);
  state_.cache_generation.store(0, std::memory_order_relaxed);
  end_streams();
  for (const Status& each : {state_.placement.release_all(), state_.fences.close(), suspender_.close()})
    if (status.ok()) status = each;
  shares_.clear();
  state_.callback = nullptr;
  ended = growables_.end();
  log_.note_reserved(state_.streams[0]);
  pending_.clear();
  return status;
}

}  // namespace vram
