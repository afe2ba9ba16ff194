// The arena's slow paths: chunks, lifetimes, and stream order. The cursor itself moves in arena.hpp.
#include "arena/arena.hpp"

#include <algorithm>
#include <cstring>

namespace vram {

namespace {

bool same_stream(const Backend& backend, StreamHandle a, StreamHandle b) {
  return backend.canonical(a) == backend.canonical(b);
}

}  // namespace

// ---- lifetime ---------------------------------------------------------------------------------------------

Arena::Arena(std::shared_ptr<Allocator> pool, const ArenaOptions& options)
    : pool_(std::move(pool)),
      backend_(pool_->backend()),
      options_(options),
      host_(pool_->host_accessible()),
      stream_(options.stream),
      owner_(this_thread()) {
  if (options_.align == 0) options_.align = host_ ? kHostAlign : kDeviceAlign;
  begin_frame();
}

Status Arena::open(std::shared_ptr<Allocator> pool, const ArenaOptions& options, std::unique_ptr<Arena>* out,
                   OutOfMemoryReport* report) {
  const std::uint64_t align = options.align;
  if ((align & (align - 1)) != 0 || align > kMaxAlign) return {Code::invalid, 0, kBadAlign};
  if (options.size == 0 && !options.growable) return {Code::invalid, 0, kFull};
  std::unique_ptr<Arena> arena(new Arena(std::move(pool), options));
  if (options.size != 0) {
    const bool round = options.growable && options.size <= kMaxRequest;
    const std::uint64_t bytes = round ? round_up(options.size, kChunkAlign) : options.size;
    if (Status status = arena->request(bytes, kChunkAlign, report); !status.ok()) return status;
  }
  *out = std::move(arena);
  return {};
}

// If closing fails, the memory stays live in the pool: a leak is better than freeing memory that work still
// uses.
Arena::~Arena() { (void)close(); }

std::uint64_t Arena::this_thread() {
  static std::atomic<std::uint64_t> count{0};
  thread_local const std::uint64_t number = ++count;
  return number;
}

Status Arena::refusal() const {
  if (!ours()) return {Code::invalid, 0, kOtherThread};
  if (in_callback_) return {Code::invalid, 0, kInCallback};
  if (closed()) return {Code::closed, 0, "arena"};
  return {};
}

// In the child of a fork, everything that the functions would release belongs to the parent.
void Arena::end() {
  if (ended_ || in_callback_) return;
  if (!pool_->inherited()) call_back();
  callbacks_.clear();
  ended_ = true;
  end_frames(0);
  soil();
  end_ = cursor_;  // nothing more can be allocated
}

Status Arena::close() {
  if (pool_->inherited()) return {};  // its locks and events belong to the parent
  if (in_callback_) return {Code::invalid, 0, kInCallback};
  const std::lock_guard closing(close_mutex_);
  if (closed_) return {};
  end();
  Status status;
  if (!pool_->closed()) {
    bool busy = false;
    if (status = settle(&busy); !status.ok()) return status;
    if (busy) status = rest();
    while (status.ok() && !rests_.empty()) status = wait_for_oldest();
    if (!status.ok()) return status;
    go_to({});
    status = give_back_from(0);
    if (!status.ok() && status.code != Code::closed) return status;
  }
  closed_ = true;
  forget_uses();
  while (!rests_.empty()) wake(0);
  chunks_.clear();
  for (const EventHandle event : events_) (void)backend_.event_destroy(event);
  events_.clear();
  in_use_ = 0;
  cursor_ = end_ = 0;
  used_.set(0);
  capacity_.set(0);
  resting_.set(0);
  chunk_count_.set(0);
  return {};
}

// ---- allocation -------------------------------------------------------------------------------------------

// The chunk at the cursor is full: use the next one, or the best-fitting spare chunk, or request another. If
// the pool has none, return the spare chunks to it, which are too small, and retry. Then let the host wait
// for the oldest resting chunks.
Status Arena::allocate_slow(std::uint64_t size, std::uint64_t align, Address* out,
                            OutOfMemoryReport* report) {
  if (const Status status = refusal(); !status.ok()) return status;
  if (align == 0) align = options_.align;
  if ((align & (align - 1)) != 0 || align > kMaxAlign) return {Code::invalid, 0, kBadAlign};
  const std::uint64_t bytes = size + (size == 0);
  for (;;) {
    bool entered = false;
    Status status = enter_spare(bytes, align, &entered);
    if (status.ok() && !entered) status = grow(bytes, align, report);
    if (status.ok()) {
      if (!place(size, align, out)) return {Code::failed, 0, "arena"};
      return {};
    }
    if (status.code != Code::out_of_memory) return status;
    if (options_.growable && in_use_ < chunks_.size()) {
      if (!give_back_from(in_use_).ok()) return status;
    } else if (rests_.empty()) {
      return status;
    } else if (const Status waited = wait_for_oldest(); !waited.ok()) {
      return waited.code == Code::deadlock ? status : waited;
    }
  }
}

bool Arena::fits(const Chunk& chunk, std::uint64_t bytes, std::uint64_t align) {
  const std::uint64_t padding = round_up(chunk.base, align) - chunk.base;
  return padding <= chunk.bytes && bytes <= chunk.bytes - padding;
}

Status Arena::enter_spare(std::uint64_t bytes, std::uint64_t align, bool* entered) {
  collect_rested();
  std::size_t best = chunks_.size();
  for (std::size_t i = in_use_; i < chunks_.size(); ++i) {
    if (!fits(chunks_[i], bytes, align)) continue;
    if (best == chunks_.size() || chunks_[i].bytes < chunks_[best].bytes) best = i;
    if (i == in_use_) break;  // as in the previous iteration
  }
  if (best == chunks_.size()) return {};
  *entered = true;
  return enter(best);
}

Status Arena::enter(std::size_t chunk) {
  if (const Status status = clear(chunks_[chunk]); !status.ok()) return status;
  soil();
  std::swap(chunks_[chunk], chunks_[in_use_]);
  ++in_use_;
  cursor_ = chunks_[in_use_ - 1].base;
  end_ = cursor_ + chunks_[in_use_ - 1].bytes;
  return {};
}

Status Arena::grow(std::uint64_t bytes, std::uint64_t align, OutOfMemoryReport* report) {
  if (!options_.growable) {
    if (report != nullptr) *report = {.requested = bytes, .limit = options_.size};
    return {Code::out_of_memory, 0, kFull};
  }
  align = std::max(align, kChunkAlign);
  if (bytes > kMaxRequest) return request(bytes, align, report);
  const std::uint64_t there = capacity_.get() - resting_.get();
  const std::uint64_t missing = high_water_.get() - std::min(there, high_water_.get());
  const std::uint64_t least = round_up(bytes, kChunkAlign);
  const std::uint64_t wanted =
      round_up(std::max({least, missing, there / kGrowthShare, kLeastChunk}), kChunkAlign);
  Status status = request(wanted, align, report);
  if (status.code == Code::out_of_memory && wanted > least) status = request(least, align, report);
  return status.ok() ? enter(chunks_.size() - 1) : status;
}

// Requests one more chunk, which is spare.
Status Arena::request(std::uint64_t bytes, std::uint64_t align, OutOfMemoryReport* report) {
  Chunk chunk{0, bytes, bytes};
  const Status status = pool_->allocate_slow(bytes, stream(), align, options_.tag, &chunk.base, report);
  if (!status.ok()) return status;
  if (ended_) {  // by a callback of the pool
    (void)pool_->free_slow(chunk.base);
    return {Code::closed, 0, "arena"};
  }
  chunks_.push_back(chunk);
  capacity_.add(bytes);
  requests_.add(1);
  chunk_count_.add(1);
  return {};
}

void Arena::soil() {
  if (in_use_ == 0) return;
  Chunk& chunk = chunks_[in_use_ - 1];
  chunk.dirty = std::max(chunk.dirty, cursor_ - chunk.base);
}

Status Arena::clear(Chunk& chunk) {
  if (!zeroing_ || chunk.dirty == 0) return {};
  const Status status = set_bytes(chunk.base, 0, chunk.dirty);
  if (status.ok()) chunk.dirty = 0;
  return status;
}

Status Arena::set_bytes(Address from, std::uint8_t value, std::uint64_t bytes) {
  const Allocator::Access access(*pool_);
  if (access.refused()) return {Code::closed, 0, "arena"};
  if (!host_ && bytes == 0) return {};
  if (!host_) return backend_.beside_swaps([&] { return backend_.fill(from, value, bytes, stream()); });
  std::memset(reinterpret_cast<void*>(from), value, bytes);
  return {};
}

// Overwrites everything allocated since the position, if that is requested.
Status Arena::overwrite(const Position& from) {
  soil();
  for (std::size_t i = from.chunks == 0 ? 0 : from.chunks - 1; i < in_use_ && options_.poison; ++i) {
    const Chunk& chunk = chunks_[i];
    const Address begin = i + 1 == from.chunks ? from.cursor : chunk.base;
    const Address end = i + 1 == in_use_ ? cursor_ : chunk.base + chunk.dirty;
    if (const Status status = set_bytes(begin, kPoison, end - begin); !status.ok()) return status;
  }
  return {};
}

// ---- lifetimes --------------------------------------------------------------------------------------------

void Arena::begin_frame() {
  frames_.push_back({next_id_++, {in_use_, cursor_, used_.get()}, nullptr});
  depth_.set(frames_.size() - 1);
}

void Arena::end_frames(std::size_t keep) {
  for (std::size_t i = keep; i < frames_.size(); ++i)
    if (frames_[i].over) frames_[i].over->store(true, std::memory_order_release);
  frames_.resize(keep);
  depth_.set(keep == 0 ? 0 : keep - 1);
}

void Arena::go_to(const Position& position) {
  soil();
  in_use_ = position.chunks;
  cursor_ = position.cursor;
  end_ = in_use_ == 0 ? cursor_ : chunks_[in_use_ - 1].base + chunks_[in_use_ - 1].bytes;
  used_.set(position.used);
}

Arena::Over Arena::over() {
  if (frames_.empty()) return std::make_shared<const std::atomic<bool>>(true);
  Frame& frame = frames_.back();
  if (!frame.over) frame.over = std::make_shared<std::atomic<bool>>(false);
  return frame.over;
}

Status Arena::mark(Mark* out) {
  if (const Status status = refusal(); !status.ok()) return status;
  begin_frame();
  *out = {frames_.back().id, static_cast<std::uint32_t>(frames_.size() - 1)};
  return {};
}

bool Arena::open_at(const Mark& mark) const {
  return mark.depth > 0 && mark.depth < frames_.size() && frames_[mark.depth].id == mark.id;
}

Status Arena::may_rewind(const Mark& mark) const {
  if (const Status status = refusal(); !status.ok()) return status;
  return open_at(mark) ? Status{} : Status{Code::invalid, 0, kMarkOver};
}

Status Arena::may_reset() const {
  if (const Status status = refusal(); !status.ok()) return status;
  return frames_.size() == 1 ? Status{} : Status{Code::invalid, 0, kOpenMarks};
}

Status Arena::on_reset(void (*function)(void*), void* argument) {
  if (const Status status = refusal(); !status.ok()) return status;
  callbacks_.push_back({function, argument, frames_.size() - 1});
  return {};
}

// The fast path of allocate does not look at in_callback_, so there must be no space for it at the cursor.
void Arena::call_back(std::size_t depth) {
  if (callbacks_.empty() || callbacks_.back().depth < depth) return;
  struct Restore {
    Arena& arena;
    const Address end;
    ~Restore() {
      arena.end_ = end;
      arena.in_callback_ = false;
    }
  } const restore{*this, end_};
  in_callback_ = true;
  end_ = cursor_;
  while (!callbacks_.empty() && callbacks_.back().depth >= depth) {
    const Callback last = callbacks_.back();
    callbacks_.pop_back();
    last.function(last.argument);
  }
}

// Memory that the host writes and that queued work still uses is not reused before the reset.
Status Arena::rewind(const Mark& mark) {
  if (const Status status = may_rewind(mark); !status.ok()) return status;
  call_back(mark.depth);
  if (closed()) return {Code::closed, 0, "arena"};  // by a callback that closed the pool
  bool busy = false;
  if (const Status status = settle(&busy); !status.ok()) return status;
  const Position from = frames_[mark.depth].from;
  if (!busy)
    if (const Status status = overwrite(from); !status.ok()) return status;
  end_frames(mark.depth);
  if (!busy) go_to(from);
  return {};
}

Status Arena::reset(bool zero) {
  if (const Status status = may_reset(); !status.ok()) return status;
  call_back();
  if (closed()) return {Code::closed, 0, "arena"};  // by a callback that closed the pool
  bool busy = false;
  Status status = settle(&busy);
  if (status.ok()) status = busy ? rest() : overwrite({});
  if (!status.ok()) return status;
  forget_uses();
  go_to({});
  end_frames(0);
  begin_frame();
  zeroing_ = zero;
  resets_.add(1);
  return {};
}

// ---- streams ----------------------------------------------------------------------------------------------

Status Arena::record_stream(StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "arena"};
  handle = backend_.canonical(handle);
  const std::lock_guard lock(uses_mutex_);
  if (!host_ && same_stream(backend_, handle, stream())) return {};
  const bool known = std::any_of(uses_.begin(), uses_.end(),
                                 [&](const Use& use) { return use.event == 0 && use.stream == handle; });
  if (!known) uses_.push_back({handle, 0, !backend_.lasting(handle)});
  return {};
}

// Records an event behind everything queued on the stream so far.
Status Arena::mark_end(StreamHandle handle, EventHandle* out) {
  if (events_.empty()) {
    EventHandle event = 0;
    if (const Status status = backend_.event_create(&event); !status.ok()) return status;
    events_.push_back(event);
  }
  if (const Status status = backend_.event_record(events_.back(), handle); !status.ok()) return status;
  *out = events_.back();
  events_.pop_back();
  return {};
}

// If no event can be recorded at its end, the host waits for the stream; if that fails as well, the handle
// cannot be used anymore.
Status Arena::retire_stream(StreamHandle handle) {
  if (closed_ || pool_->closed()) return {};
  handle = backend_.canonical(handle);
  const std::lock_guard lock(uses_mutex_);
  const bool own = stream() != 0 && same_stream(backend_, handle, stream());
  const auto use = std::find_if(uses_.begin(), uses_.end(),
                                [&](const Use& each) { return each.event == 0 && each.stream == handle; });
  if (!own && use == uses_.end()) return {};
  EventHandle event = 0;
  Status status = mark_end(handle, &event);
  if (status.ok() && own) status = backend_.stream_wait(0, event);
  if (status.code == Code::capturing) return status;
  if (!status.ok()) status = backend_.stream_synchronize(handle);
  if (own) stream_.store(0, std::memory_order_relaxed);
  if (use != uses_.end() && event != 0) {
    use->event = event;
    use->foreign = false;
  } else {
    if (use != uses_.end()) uses_.erase(use);
    if (event != 0) events_.push_back(event);
  }
  return status;
}

// Called before memory is reused. On a device the arena's stream waits for the others. For memory that the
// host writes, *busy tells whether queued work still uses it.
Status Arena::settle(bool* busy) {
  if (const Status status = wait_for_foreign(); !status.ok()) return status;
  const std::lock_guard lock(uses_mutex_);
  *busy = false;
  return host_ ? ask(busy) : wait_in_order();
}

// Streams of other libraries have completed when the device has; there is no other way to tell. If the
// arena's own stream is one of them, it cannot wait for others either: it may have been destroyed when the
// arena is closed.
Status Arena::wait_for_foreign() {
  const bool own = !host_ && !backend_.lasting(backend_.canonical(stream()));
  std::vector<Use> foreign;
  {
    const std::lock_guard lock(uses_mutex_);
    const auto first = std::stable_partition(uses_.begin(), uses_.end(),
                                             [own](const Use& use) { return !use.foreign && !own; });
    foreign.assign(first, uses_.end());
    uses_.erase(first, uses_.end());
  }
  if (foreign.empty()) return {};
  const Status status = backend_.synchronize();
  const std::lock_guard lock(uses_mutex_);
  if (!status.ok()) uses_.insert(uses_.end(), foreign.begin(), foreign.end());
  for (const Use& use : foreign)
    if (status.ok() && use.event != 0) events_.push_back(use.event);
  return status;
}

Status Arena::wait_in_order() {
  for (const Use& use : uses_) {
    if (use.event != 0) {
      if (const Status status = backend_.stream_wait(stream(), use.event); !status.ok()) return status;
      continue;
    }
    // A wait between a captured stream and one that is not captured would break the capture.
    if (backend_.capturing(use.stream) != backend_.capturing(stream()))
      return {Code::capturing, 0, "stream_wait"};
    EventHandle event = 0;
    if (const Status status = mark_end(use.stream, &event); !status.ok()) return status;
    const Status status = backend_.stream_wait(stream(), event);
    events_.push_back(event);
    if (!status.ok()) return status;
  }
  return {};
}

Status Arena::ask(bool* busy) {
  for (const Use& use : uses_) {
    const Status status =
        use.event != 0 ? backend_.event_query(use.event) : backend_.stream_query(use.stream);
    if (status.code == Code::not_ready) *busy = true;
    if (!status.ok() && status.code != Code::not_ready) return status;
  }
  return {};
}

// Sets the chunks in use aside until everything that uses them has completed.
Status Arena::rest() {
  const std::lock_guard lock(uses_mutex_);
  std::vector<EventHandle> marked;
  for (const Use& use : uses_) {
    if (use.event != 0) continue;
    marked.emplace_back();
    if (const Status status = mark_end(use.stream, &marked.back()); !status.ok()) {
      events_.insert(events_.end(), marked.begin(), marked.end() - 1);
      return status;
    }
  }
  Rest rest{{}, std::move(marked)};
  for (const Use& use : uses_)
    if (use.event != 0) rest.events.push_back(use.event);
  uses_.clear();
  soil();
  rest.chunks.assign(chunks_.begin(), chunks_.begin() + static_cast<std::ptrdiff_t>(in_use_));
  chunks_.erase(chunks_.begin(), chunks_.begin() + static_cast<std::ptrdiff_t>(in_use_));
  in_use_ = 0;
  cursor_ = end_ = 0;
  for (const Chunk& chunk : rest.chunks) resting_.add(chunk.bytes);
  rests_.push_back(std::move(rest));
  return {};
}

void Arena::forget_uses() {
  const std::lock_guard lock(uses_mutex_);
  for (const Use& use : uses_)
    if (use.event != 0) events_.push_back(use.event);
  uses_.clear();
}

// Chunks whose work has completed are spare again.
void Arena::wake(std::size_t i) {
  {
    const std::lock_guard lock(uses_mutex_);
    events_.insert(events_.end(), rests_[i].events.begin(), rests_[i].events.end());
  }
  for (const Chunk& chunk : rests_[i].chunks) {
    chunks_.push_back(chunk);
    resting_.set(resting_.get() - chunk.bytes);
  }
  rests_.erase(rests_.begin() + static_cast<std::ptrdiff_t>(i));
}

void Arena::collect_rested() {
  for (std::size_t i = 0; i < rests_.size();) {
    const std::vector<EventHandle>& events = rests_[i].events;
    const bool passed = std::all_of(events.begin(), events.end(),
                                    [&](EventHandle event) { return backend_.event_query(event).ok(); });
    if (passed)
      wake(i);
    else
      ++i;
  }
}

Status Arena::wait_for_oldest() {
  host_waits_.add(1);
  for (const EventHandle event : rests_.front().events)
    if (const Status status = backend_.event_synchronize(event); !status.ok()) return status;
  wake(0);
  return {};
}

// ---- housekeeping -----------------------------------------------------------------------------------------

// Continues after a failure; what could not be returned stays.
Status Arena::give_back_from(std::size_t first) {
  Status failure;
  std::vector<Chunk> kept(chunks_.begin(), chunks_.begin() + static_cast<std::ptrdiff_t>(first));
  std::uint64_t returned = 0;
  for (std::size_t i = first; i < chunks_.size(); ++i) {
    const Status status = pool_->free_slow(chunks_[i].base);
    if (status.ok()) {
      returned += chunks_[i].bytes;
      continue;
    }
    kept.push_back(chunks_[i]);
    if (failure.ok()) failure = status;
  }
  chunks_ = std::move(kept);
  capacity_.set(capacity_.get() - returned);
  chunk_count_.set(chunks_.size());
  for (const Rest& rest : rests_) chunk_count_.add(rest.chunks.size());
  return failure;
}

Status Arena::trim() {
  if (const Status status = refusal(); !status.ok()) return status;
  if (!options_.growable) return {};
  collect_rested();
  return give_back_from(in_use_);
}

// ---- queries ----------------------------------------------------------------------------------------------

ArenaStats Arena::stats() const {
  return {.used = used_.get(),
          .high_water = high_water_.get(),
          .capacity = capacity_.get(),
          .resting = resting_.get(),
          .chunks = chunk_count_.get(),
          .depth = depth_.get(),
          .allocations = allocations_.get(),
          .allocated = allocated_.get(),
          .requests = requests_.get(),
          .resets = resets_.get(),
          .host_waits = host_waits_.get()};
}

void Arena::reset_peak() { high_water_.set(used_.get()); }

bool Arena::chunk_of(Address address, Address* base, std::uint64_t* bytes) const {
  const auto holds = [&](const Chunk& chunk) {
    if (address < chunk.base || address - chunk.base >= chunk.bytes) return false;
    *base = chunk.base;
    *bytes = chunk.bytes;
    return true;
  };
  if (in_use_ != 0 && holds(chunks_[in_use_ - 1])) return true;  // the most recent allocation
  if (std::any_of(chunks_.begin(), chunks_.end(), holds)) return true;
  return std::any_of(rests_.begin(), rests_.end(), [&](const Rest& rest) {
    return std::any_of(rest.chunks.begin(), rest.chunks.end(), holds);
  });
}

bool Arena::check(std::string* why) const {
  const auto broken = [&](const char* what) {
    if (why != nullptr) *why = what;
    return false;
  };
  std::vector<Chunk> all = chunks_;
  std::uint64_t resting = 0;
  for (const Rest& rest : rests_) {
    if (rest.events.empty()) return broken("chunks rest behind nothing");
    for (const Chunk& chunk : rest.chunks) resting += chunk.bytes;
    all.insert(all.end(), rest.chunks.begin(), rest.chunks.end());
  }
  std::uint64_t capacity = 0;
  for (const Chunk& chunk : all) {
    capacity += chunk.bytes;
    if (chunk.dirty > chunk.bytes) return broken("a chunk is dirty beyond its end");
    BlockInfo block;
    if (!pool_->closed() && (!pool_->info(chunk.base, &block).ok() || block.requested < chunk.bytes))
      return broken("a chunk is not live in the pool");
  }
  std::sort(all.begin(), all.end(), [](const Chunk& a, const Chunk& b) { return a.base < b.base; });
  for (std::size_t i = 1; i < all.size(); ++i)
    if (all[i - 1].base + all[i - 1].bytes > all[i].base) return broken("chunks overlap");
  if (capacity != capacity_.get() || resting != resting_.get() || all.size() != chunk_count_.get())
    return broken("the accounts of chunks do not add up");
  if (in_use_ > chunks_.size()) return broken("more chunks are in use than there are");
  const Chunk none;
  const Chunk& last = in_use_ == 0 ? none : chunks_[in_use_ - 1];
  if ((end_ != last.base + last.bytes && !ended_ && !in_callback_) || cursor_ < last.base || cursor_ > end_)
    return broken("the cursor is not in the last chunk in use");
  if (used_.get() > high_water_.get()) return broken("more is used than ever was");
  if (ended_) return frames_.empty() ? true : broken("lifetimes are open after the end");
  if (frames_.empty() || depth_.get() != frames_.size() - 1) return broken("the depth is not that of marks");
  for (std::size_t i = 0; i < frames_.size(); ++i) {
    const Position& at = frames_[i].from;
    if (at.chunks > in_use_ || at.used > used_.get()) return broken("a mark lies behind the cursor");
    if (i > 0 && (frames_[i - 1].id >= frames_[i].id || frames_[i - 1].from.used > at.used ||
                  frames_[i - 1].from.chunks > at.chunks))
      return broken("marks do not ascend");
    if (frames_[i].over && frames_[i].over->load()) return broken("an open lifetime is over");
    if (at.chunks == 0) continue;
    const Chunk& chunk = chunks_[at.chunks - 1];
    if (at.cursor < chunk.base || at.cursor > chunk.base + chunk.bytes) return broken("a mark lies outside");
  }
  for (std::size_t i = 0; i < callbacks_.size(); ++i)
    if (callbacks_[i].depth >= frames_.size() || (i > 0 && callbacks_[i - 1].depth > callbacks_[i].depth))
      return broken("a callback belongs to a lifetime that has ended");
  return true;
}

}  // namespace vram
