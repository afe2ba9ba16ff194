// Growable buffers in stream order, and the thread that prepares pages for them.
#include "pool/growables.hpp"

#include <algorithm>

#include "base/waits.hpp"

namespace vram {

Status Growables::open(std::uint64_t max, StreamHandle handle, Address* out) {
  if (closed()) return {Code::closed, 0, "growable_open"};
  if (!placement_.paged()) return {Code::unsupported, 0, "growable_open"};
  if (max == 0 || max > kMaxRequest) return {Code::invalid, 0, "growable_open"};
  NamedStream named;
  if (Status status = lives_.name(handle, &named); !status.ok()) return status;
  if (named.capture != 0) return {Code::capturing, 0, "growable_open"};
  // It would be queried and waited for whenever the buffer is resized or closed.
  if (named.foreign) return {Code::absent, 0, "growable_open"};
  const auto slots = static_cast<Slot>(round_up(max, kSlotBytes) / kSlotBytes);
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_open", &lock); !status.ok()) return status;
  Index strip = 0;
  const auto open = [&] {
    Status why;
    StreamState* const stream = lives_.lasting(named.handle, &why);
    if (stream == nullptr) return why;
    (void)fences_.poll(*stream);
    return placement_.open_strip(stream->number, slots, ++opened_, stream->passed, &strip);
  };
  Status status = open();
  // If addresses are used up, idle strips are dropped: those that are known to be idle, then, after a host
  // wait, all.
  for (const bool wait : {false, true}) {
    if (status.code != Code::out_of_memory) break;
    if (wait)
      if (Status settled = lives_.wait_until_idle(lock); !settled.ok()) return settled;
    if (Status dropped = placement_.drop_idle_strips(finished_); !dropped.ok()) return dropped;
    status = open();
  }
  if (status.ok()) *out = space().segments()[strip].base;
  verify();
  return status;
}

Status Growables::close(Address address) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_close", &lock); !status.ok()) return status;
  const Index strip = space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  StreamState& home = streams_[space().segments()[strip].stream];
  if (const Index block = block_in_use(strip)) {
    StreamState& owner = owner_of(blocks()[block]);
    pending_.make_room(block);
    {
      std::lock_guard guard(owner.lock);
      accounts_.end_live(block, owner, Action::free);
    }
    // Nothing grows here before this has completed, so the stream gets the pages at once, as from any freed
    // block.
    if (pending_.uses_of(block) != nullptr || zeroing_.slow_frees()) {
      free_behind_fence(block);
    } else {
      pending_.return_home(block, true);
    }
  }
  placement_.close_strip(strip);
  if (!home.gone()) fences_.try_record(home);  // tells when the strip may serve the next buffer
  ladder_.keep_threshold();
  verify();
  return {};
}

Status Growables::info(Address address, GrowableInfo* out) const {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_info", &lock); !status.ok()) return status;
  const Index strip = space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = space().segments()[strip];
  *out = {};
  for (Index b = segment.head; b != 0; b = blocks()[b].after) {
    const Block& block = blocks()[b];
    if (block.is(BlockState::live)) out->bytes += bytes_of(block);
    if (block.is(BlockState::pending)) out->pending += bytes_of(block);
  }
  out->ready = placement_.ready_bytes(strip);
  out->max = bytes_of(segment.units);
  return {};
}

// The block that the buffer is, or 0 where it has no memory.
Index Growables::block_in_use(Index strip) const {
  const Index head = space().segments()[strip].head;
  return blocks()[head].is(BlockState::live) ? head : 0;
}

Units Growables::units_in_use(Index strip) const {
  const Index block = block_in_use(strip);
  return block == 0 ? 0 : blocks()[block].units;
}

Status Growables::resize(Address address, std::uint64_t bytes, std::uint64_t ahead, std::uint32_t tag,
                         OutOfMemoryReport* report) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("resize", &lock); !status.ok()) return status;
  const Index strip = space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = space().segments()[strip];
  if (bytes % kSlotBytes != 0 || bytes > bytes_of(segment.units)) return {Code::invalid, 0, "resize"};
  const std::uint64_t number = segment.growable;
  const Units before = units_in_use(strip);
  const auto units = static_cast<Units>(bytes / kUnit);
  Status status;
  if (units != before && backend_->capturing(streams_[segment.stream].handle))
    return {Code::capturing, 0, "resize"};
  if (units > before) {
    status = grow(strip, units, tag, lock, report);
    if (closed()) return {Code::closed, 0, "resize"};
    if (segment.growable != number) return {Code::invalid, 0, "free"};
    if (status.ok() && zeroing_.on_allocate())
      status = zeroing_.fill(address + bytes_of(before), bytes_of(units - before),
                             streams_[segment.stream].handle);
  }
  // Less is wanted, or it failed on the way.
  const Units wanted = status.ok() ? units : before;
  if (units_in_use(strip) > wanted) shrink(strip, wanted);
  verify();
  if (!status.ok() || ahead == 0) return status;
  if (placement_.ready_bytes(strip) >= ahead) return status;
  if (preparer_ == nullptr) preparer_ = std::make_unique<Preparer>(*this);
  preparer_->ask({address, number, ahead});
  return status;
}

// Adds to the strip's block in use until it has so many units. The mutex may be released in between, so every
// round looks everything up again.
Status Growables::grow(Index strip, Units units, std::uint32_t tag, std::unique_lock<std::mutex>& lock,
                       OutOfMemoryReport* report) {
  const std::uint64_t number = space().segments()[strip].growable;
  for (;;) {
    const Segment& segment = space().segments()[strip];
    if (segment.growable != number) return {Code::invalid, 0, "free"};
    StreamState& stream = streams_[segment.stream];
    if (stream.gone()) return {Code::invalid, 0, "stream"};
    const Units held = units_in_use(strip);
    if (held >= units) return {};
    const Index pending = pending_behind(strip);
    if (pending != 0 && backend_->info().host_accessible && zeroing_.slow_frees()) {
      // What comes back is zeroed at once, so its work must have completed.
      if (Status status = lives_.wait_until_idle(lock); !status.ok()) return status;
      continue;
    }
    Index piece = 0;
    if (pending != 0) {
      // A shrink released it and no other allocation has it yet. Nothing waits on the host.
      if (Status status = pending_.take_back(pending, units - held, stream, &piece); !status.ok())
        return status;
      attach(strip, piece, tag);
      continue;
    }
    Climb request{bytes_of(units - held),
                  {stream.number, kGrowing, units - held, kUnit, strip, number},
                  tag,
                  &stream,
                  &lock};
    piece = ladder_.climb(request);
    if (piece == 0) return request.error.ok() ? report_.fail(request, report) : request.error;
    if (blocks()[piece].before == block_in_use(strip)) {
      attach(strip, piece, tag);
    } else {
      free_behind_fence(piece);  // it was resized meanwhile
    }
  }
}

// Makes a piece in state moving, directly behind the block in use, a part of it.
void Growables::attach(Index strip, Index piece, std::uint32_t tag) {
  StreamState& home = streams_[space().segments()[strip].stream];
  const Index block = block_in_use(strip);
  if (block != 0) {
    StreamState& owner = owner_of(blocks()[block]);
    std::lock_guard guard(owner.lock);
    accounts_.end_live(block, owner, Action::free);
    space().join(block, piece);
  }
  const Index whole = block == 0 ? piece : block;
  (void)accounts_.make_live(whole, {bytes_of(blocks()[whole]), {home.number, kGrowing}, tag, &home, nullptr});
}

// What a shrink released directly behind the block in use and no other allocation has yet, or 0.
Index Growables::pending_behind(Index strip) const {
  const Index block = block_in_use(strip);
  const Index next = block == 0 ? space().segments()[strip].head : blocks()[block].after;
  return next != 0 && blocks()[next].is(BlockState::pending) ? next : 0;
}

// pre: there is a block in use, of more units than that.
void Growables::shrink(Index strip, Units units) {
  const Index block = block_in_use(strip);
  StreamState& owner = owner_of(blocks()[block]);
  StreamState& home = streams_[space().segments()[strip].stream];
  const std::uint32_t tag = blocks()[block].tag;
  pending_.make_room(block);
  {
    std::lock_guard guard(owner.lock);
    accounts_.end_live(block, owner, Action::free);
  }
  Index kept = 0;
  if (units != 0) {
    kept = space().split_in_use(block, units);
    (void)accounts_.make_live(kept, {bytes_of(units), {home.number, kGrowing}, tag, &home, nullptr});
  }
  free_behind_fence(block, kept);
}

// Memory in state moving that its buffer no longer has. It waits for the work of its own stream, too, before
// other allocations get it, so that its addresses can be mapped again when the buffer grows. `kept` is the
// part that the buffer still has, or 0.
void Growables::free_behind_fence(Index block, Index kept) {
  blocks()[block].used_elsewhere = false;  // in the journal it is free already
  pending_.make_pending(block, true, kept);
}

Status Growables::prepare(Address address, std::uint64_t bytes, std::uint64_t number) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("prepare", &lock); !status.ok()) return status;
  const Index strip = space().strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = space().segments()[strip];
  if (number != 0 && segment.growable != number) return {Code::invalid, 0, "free"};
  StreamState& stream = streams_[segment.stream];
  if (stream.gone()) return {Code::invalid, 0, "stream"};
  if (backend_->capturing(stream.handle)) return {Code::capturing, 0, "prepare"};
  const Block& tail = blocks()[segment.tail];
  if (!tail.is(BlockState::free) || bytes == 0) return {};
  (void)fences_.poll(stream);
  Status status;
  for (const std::uint64_t wished : {std::min(bytes, bytes_of(tail)), kSlotBytes}) {
    const auto units = static_cast<Units>(round_up(wished, kSlotBytes) / kUnit);
    Climb request{
        wished, {stream.number, kGrowing, units, kUnit, strip, segment.growable}, 0, &stream, &lock};
    if (config_.cross_stream != CrossStream::never && streams_.size() > 1)
      ladder_.gather_pages(request, false);
    status = placement_.prepare(request.want, ladder_.budget(), stream.passed, request.place());
    log_.note_reserved(stream);
    if (placement_.moved()) fences_.try_record(stream);
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
  if (!thread_.joinable()) thread_ = start_quietly([this] { run(); });
  if (!thread_.joinable()) return;
  const auto known = std::find_if(queue_.begin(), queue_.end(),
                                  [&](const Job& each) { return each.address == job.address; });
  if (known != queue_.end()) {
    *known = job;
  } else {
    queue_.push_back(job);
  }
  changed_.notify_all();
}

void Preparer::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    if (ending_) return;
    const Job job = queue_.front();
    queue_.pop_front();
    lock.unlock();
    (void)growables_.prepare(job.address, job.bytes, job.number);  // a failure shows when it grows
    lock.lock();
  }
}

}  // namespace vram
