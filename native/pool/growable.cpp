// Growable buffers: a strip of addresses each, into which pages are mapped as the buffer grows and from which
// they go as it shrinks. Finding memory is the ladder's business, as for every other request.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "pool/pool.hpp"

namespace vram {

// ---- open and close -------------------------------------------------------------------------------------

Status Pool::growable_open(std::uint64_t max, StreamHandle handle, Address* out) {
  if (closed()) return {Code::closed, 0, "growable_open"};
  if (!placement_.paged()) return {Code::unsupported, 0, "growable_open"};
  if (max == 0 || max > kMaxRequest) return {Code::invalid, 0, "growable_open"};
  Named named;
  if (Status status = name(handle, &named); !status.ok()) return status;
  if (named.capture != 0) return {Code::capturing, 0, "growable_open"};
  // It would be asked and waited for whenever the buffer is resized or closed.
  if (named.foreign) return {Code::absent, 0, "growable_open"};
  const auto slots = static_cast<std::uint32_t>(round_up(max, kSlotBytes) / kSlotBytes);
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_open", &lock); !status.ok()) return status;
  Index strip = 0;
  const auto open = [&] {
    Status why;
    StreamState* const stream = stream_of(named.handle, &why);
    if (stream == nullptr) return why;
    (void)fences_.poll(*stream);
    return placement_.open_strip(stream->number, slots, ++growables_, stream->passed, &strip);
  };
  Status status = open();
  // Addresses are plenty. Where they are used up, idle ones come back: those that are known to be, then,
  // behind a wait of the host, all.
  for (const bool wait : {false, true}) {
    if (status.code != Code::out_of_memory) break;
    if (wait)
      if (Status settled = settle(lock); !settled.ok()) return settled;
    if (Status dropped = placement_.drop_idle_strips(finished_); !dropped.ok()) return dropped;
    status = open();
  }
  if (status.ok()) *out = placement_.space().segments()[strip].base;
  verify();
  return status;
}

Status Pool::growable_close(Address address) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_close", &lock); !status.ok()) return status;
  const Index strip = placement_.space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  StreamState& home = streams_[placement_.space().segments()[strip].stream];
  if (const Index block = block_in_use(strip)) {
    StreamState& owner = streams_[placement_.space().blocks()[block].owner.load(std::memory_order_relaxed)];
    {
      std::lock_guard guard(owner.lock);
      take_live(block, owner, Action::free);
    }
    // Nothing will grow here before this is over, so the pages are its stream's at once, as any freed
    // block's.
    if (uses_.count(block) != 0 || slow_frees_.load(std::memory_order_relaxed)) {
      give_up(block);
    } else {
      give_home(block, true);
    }
  }
  placement_.close_strip(strip);
  if (!home.gone()) (void)fences_.record(home);  // tells when the strip may serve the next buffer
  keep_idle_limit();
  verify();
  return {};
}

Status Pool::growable_info(Address address, GrowableInfo* out) const {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_info", &lock); !status.ok()) return status;
  const Index strip = placement_.space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = placement_.space().segments()[strip];
  *out = {};
  for (Index b = segment.head; b != 0; b = placement_.space().blocks()[b].after) {
    const Block& block = placement_.space().blocks()[b];
    if (block.is(BlockState::live)) out->bytes += bytes_of(block);
    if (block.is(BlockState::pending)) out->pending += bytes_of(block);
  }
  out->ready = placement_.ready_bytes(strip);
  out->max = std::uint64_t{segment.units} * kUnit;
  return {};
}

// ---- growing and shrinking ------------------------------------------------------------------------------

// The block that the buffer is, or 0 where it has no memory.
Index Pool::block_in_use(Index strip) const {
  const Index head = placement_.space().segments()[strip].head;
  return placement_.space().blocks()[head].is(BlockState::live) ? head : 0;
}

Status Pool::growable_resize(Address address, std::uint64_t bytes, std::uint64_t ahead, std::uint32_t tag,
                             OutOfMemoryReport* report) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("resize", &lock); !status.ok()) return status;
  const Index strip = placement_.space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = placement_.space().segments()[strip];
  if (bytes % kSlotBytes != 0 || bytes > std::uint64_t{segment.units} * kUnit)
    return {Code::invalid, 0, "resize"};
  const std::uint64_t number = segment.growable;
  const auto held = [&]() -> Units {
    const Index block = block_in_use(strip);
    return block == 0 ? 0 : placement_.space().blocks()[block].units;
  };
  const Units before = held();
  const auto units = static_cast<Units>(bytes / kUnit);
  Status status;
  if (units != before && backend_->capturing(streams_[segment.stream].handle))
    return {Code::capturing, 0, "resize"};
  if (units > before) {
    status = grow(strip, units, tag, lock, report);
    if (closed()) return {Code::closed, 0, "resize"};
    if (segment.growable != number) return {Code::invalid, 0, "free"};
    if (status.ok() && zero_on_allocate_.load(std::memory_order_relaxed))
      status = fill_zeros(address + std::uint64_t{before} * kUnit, std::uint64_t{units - before} * kUnit,
                          streams_[segment.stream].handle);
  }
  // Less is wanted, or it failed on the way.
  const Units wanted = status.ok() ? units : before;
  if (held() > wanted) shrink(strip, wanted);
  verify();
  if (!status.ok() || ahead == 0) return status;
  if (placement_.ready_bytes(strip) >= ahead) return status;
  if (preparer_ == nullptr) preparer_ = std::make_unique<Preparer>(*this);
  preparer_->ask({address, number, ahead});
  return status;
}

// Adds to the strip's block in use until it has so many units. Neither the mutex is held throughout nor does
// anything stay as it is while it is not, so every round looks again.
Status Pool::grow(Index strip, Units units, std::uint32_t tag, std::unique_lock<std::mutex>& lock,
                  OutOfMemoryReport* report) {
  const std::uint64_t number = placement_.space().segments()[strip].growable;
  for (;;) {
    const Segment& segment = placement_.space().segments()[strip];
    if (segment.growable != number) return {Code::invalid, 0, "free"};
    StreamState& stream = streams_[segment.stream];
    if (stream.gone()) return {Code::invalid, 0, "stream"};
    const Index block = block_in_use(strip);
    const Units held = block == 0 ? 0 : placement_.space().blocks()[block].units;
    if (held >= units) return {};
    if (backend_->info().host_accessible && slow_frees_.load(std::memory_order_relaxed) &&
        pending_behind(strip)) {
      // What comes back is zeroed at once, so its work must be over.
      if (Status status = settle(lock); !status.ok()) return status;
      continue;
    }
    bool taken = false;
    if (Status status = retake(strip, units - held, tag, &taken); !status.ok()) return status;
    if (taken) continue;
    Climb request{std::uint64_t{units - held} * kUnit,
                  {stream.number, kGrowing, units - held, kUnit, strip, number},
                  tag,
                  &stream,
                  &lock};
    const Index piece = climb(request);
    if (piece == 0) return request.error.ok() ? fail(request, report) : request.error;
    if (placement_.space().blocks()[piece].before == block_in_use(strip)) {
      attach(strip, piece, tag);
    } else {
      give_up(piece);  // it was resized meanwhile
    }
  }
}

// Makes a piece in state moving, which lies directly behind the block in use, a part of it.
void Pool::attach(Index strip, Index piece, std::uint32_t tag) {
  StreamState& home = streams_[placement_.space().segments()[strip].stream];
  const Index block = block_in_use(strip);
  if (block != 0) {
    StreamState& owner = streams_[placement_.space().blocks()[block].owner.load(std::memory_order_relaxed)];
    std::lock_guard guard(owner.lock);
    take_live(block, owner, Action::free);
    placement_.space().join(block, piece);
  }
  const Index whole = block == 0 ? piece : block;
  (void)hand_out(
      whole, {bytes_of(placement_.space().blocks()[whole]), {home.number, kGrowing}, tag, &home, nullptr});
}

// What a shrink gave up directly behind the block in use and nobody else has got yet, or 0.
Index Pool::pending_behind(Index strip) const {
  const Index block = block_in_use(strip);
  const Index next =
      block == 0 ? placement_.space().segments()[strip].head : placement_.space().blocks()[block].after;
  return next != 0 && placement_.space().blocks()[next].is(BlockState::pending) ? next : 0;
}

// Takes back up to `units` that a shrink gave up directly behind the block in use and nobody else has got
// yet. Work queued from now on comes after all uses of them; nobody waits on the host.
Status Pool::retake(Index strip, Units units, std::uint32_t tag, bool* taken) {
  const Segment& segment = placement_.space().segments()[strip];
  StreamState& home = streams_[segment.stream];
  Index next = pending_behind(strip);
  *taken = next != 0;
  if (!*taken) return {};
  const Block& pending = placement_.space().blocks()[next];
  const bool whole = pending.units <= units;
  if (pending.link_after == 0) {
    // It waits to be zeroed and is used no more.
    if (whole) std::erase_if(unzeroed_, [&](const PendingBlock& each) { return each.block == next; });
  } else {
    auto& waiting = streams_[static_cast<std::uint16_t>(pending.link_after - 1)].waiting;
    auto found = waiting.lower_bound(pending.tick);
    while (found->second.block != next) ++found;
    for (const Use& use : found->second.uses)
      if (use.stream != home.number && !ordered(home, streams_[use.stream], use.tick, true))
        return {Code::failed, 0, "stream_wait"};
    if (whole) waiting.erase(found);
  }
  if (!whole) next = placement_.space().split_in_use(next, units);  // the rest waits on
  pending_.subtract(bytes_of(placement_.space().blocks()[next]));
  if (whole) --pending_blocks_;
  placement_.space().blocks()[next].set(BlockState::moving);
  attach(strip, next, tag);
  return {};
}

// pre: there is a block in use, of more units than that.
void Pool::shrink(Index strip, Units units) {
  const Index block = block_in_use(strip);
  StreamState& owner = streams_[placement_.space().blocks()[block].owner.load(std::memory_order_relaxed)];
  StreamState& home = streams_[placement_.space().segments()[strip].stream];
  const std::uint32_t tag = placement_.space().blocks()[block].tag;
  {
    std::lock_guard guard(owner.lock);
    take_live(block, owner, Action::free);
  }
  if (units != 0) {
    const Index kept = placement_.space().split_in_use(block, units);
    if (const auto uses = uses_.find(block); uses != uses_.end()) uses_[kept] = uses->second;
    (void)hand_out(kept, {std::uint64_t{units} * kUnit, {home.number, kGrowing}, tag, &home, nullptr});
  }
  give_up(block);
}

// Memory in state moving that its strip's buffer has no more. It waits for the work of its own stream, too,
// before it may go elsewhere, so that its addresses can be mapped anew when the buffer grows again.
void Pool::give_up(Index block) {
  const std::uint16_t home = placement_.space().segments()[placement_.space().blocks()[block].segment].stream;
  uses_[block].push_back(home);
  placement_.space().blocks()[block].used_elsewhere = false;  // in the journal it is free already
  make_pending(block);
}

// ---- ahead of need --------------------------------------------------------------------------------------

Status Pool::growable_prepare(Address address, std::uint64_t bytes, std::uint64_t number) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("prepare", &lock); !status.ok()) return status;
  const Index strip = placement_.space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = placement_.space().segments()[strip];
  if (number != 0 && segment.growable != number) return {Code::invalid, 0, "free"};
  StreamState& stream = streams_[segment.stream];
  if (stream.gone()) return {Code::invalid, 0, "stream"};
  if (backend_->capturing(stream.handle)) return {Code::capturing, 0, "prepare"};
  const Block& tail = placement_.space().blocks()[segment.tail];
  if (!tail.is(BlockState::free) || bytes == 0) return {};
  (void)fences_.poll(stream);
  Status status;
  for (const std::uint64_t wished : {std::min(bytes, bytes_of(tail)), kSlotBytes}) {
    const auto units = static_cast<Units>(round_up(wished, kSlotBytes) / kUnit);
    Climb request{
        wished, {stream.number, kGrowing, units, kUnit, strip, segment.growable}, 0, &stream, &lock};
    if (config_.cross_stream != CrossStream::never && streams_.size() > 1) gather_pages(request, false);
    status = placement_.prepare(request.want, budget(), stream.passed, request.place);
    note_reserved(stream);
    if (placement_.moved()) (void)fences_.record(stream);
    if (status.code != Code::out_of_memory) break;
  }
  verify();
  return status;
}

Preparer::~Preparer() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Preparer::ask(const Job& job) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable() && !start()) return;
  const auto known = std::find_if(queue_.begin(), queue_.end(),
                                  [&](const Job& each) { return each.address == job.address; });
  if (known != queue_.end()) {
    *known = job;
  } else {
    queue_.push_back(job);
  }
  changed_.notify_all();
}

// Signals are left to the program's own threads.
bool Preparer::start() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread_.joinable();
}

void Preparer::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    if (ending_) return;
    const Job job = queue_.front();
    queue_.pop_front();
    lock.unlock();
    (void)pool_.growable_prepare(job.address, job.bytes,
                                 job.number);  // the growth itself will say what fails
    lock.lock();
  }
}

}  // namespace vram
