// Growable buffers: a strip of addresses each, into which pages are mapped as the buffer grows and from which
// they go as it shrinks. Parts of Segments (the strips), of Pool (growing and shrinking in stream order) and
// Preparer. Finding memory is the ladder's business, as for every other request.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "pool/pool.hpp"

namespace vram {

namespace {

// Idle strips of one size looked at for the one that has most of its pages.
constexpr int kMostStrips = 64;

}  // namespace

// ---- strips ---------------------------------------------------------------------------------------------

Index Segments::strip_at(Address address) const {
  const Index block = find(address);
  if (block == 0) return 0;
  const Index strip = blocks_[block].segment;
  return segments_[strip].growable != 0 && segments_[strip].base == address ? strip : 0;
}

// Where the strip's buffer will grow to, if there is room.
Spot Segments::strip_spot(const Want& want) const {
  const Segment& segment = segments_[want.strip];
  const Block& tail = blocks_[segment.tail];
  if (segment.growable != want.growable || !tail.is(BlockState::free) || tail.units < want.units) return {};
  return {segment.tail, tail.offset};
}

// Of the tightest idle strips, the one that has most of its pages. What queued work may still use is not
// taken: once other memory has its pages, its buffer could not grow before that work was done.
Index Segments::idle_strip(std::uint16_t stream, Units units, Tick passed) const {
  Index best = 0;
  std::uint32_t most = 0;
  int looked = 0;
  const auto visit = [&](Index i) {
    const Block& block = blocks_[i];
    const Segment& segment = segments_[block.segment];
    if (segment.growable != 0 || block.units != segment.units || block.tick > passed) return false;
    const std::uint32_t backed = backed_.count(segment.first / kSlotUnits, segment.end() / kSlotUnits);
    if (best == 0 || backed > most) {
      best = block.segment;
      most = backed;
    }
    return ++looked >= kMostStrips;
  };
  free_blocks(stream, kGrowing).candidates(blocks_, units, visit, [&] { return best != 0; });
  return best;
}

Status Segments::open_strip(std::uint16_t stream, std::uint32_t slots, std::uint64_t number, Tick passed,
                            Index* out) {
  if (!can_cut()) return {Code::out_of_memory, 0, "blocks"};
  if (space_ == 0)
    if (Status status = reserve_space(); !status.ok()) return status;
  *out = idle_strip(stream, slots * kSlotUnits, passed);
  if (*out == 0) {
    const std::uint32_t slot = space_take(slots);
    if (slot == 0) return {Code::out_of_memory, 0, "space_reserve"};
    *out = add_strip(stream, kGrowing, slot, slots);
  }
  segments_[*out].growable = number;
  segments_[*out].promised = segments_[*out].first;
  return {};
}

void Segments::close_strip(Index strip) { segments_[strip].growable = 0; }

Status Segments::drop_idle_strips(const Finished& finished) {
  for (Index s = 1; s < segments_.end(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.units == 0 || segment.band != kGrowing || segment.growable != 0 || segment.in_use != 0 ||
        !finished(segment.stream, blocks_[segment.head].tick))
      continue;
    for (std::uint32_t slot = segment.first / kSlotUnits; slot < segment.end() / kSlotUnits; ++slot)
      if (slots_[slot] != 0)
        if (Status status = unmap(slots_[slot]); !status.ok()) return status;
    drop_segment(s);
  }
  return {};
}

void Segments::join(Index front, Index back) {
  blocks_[front].units += blocks_[back].units;
  --segments_[blocks_[front].segment].in_use;
  drop_block(back);
}

// ---- pages ahead of need --------------------------------------------------------------------------------

// Whether a free page is where a growable buffer is to find it.
bool Segments::promised(Index page) const {
  for (Index m = pages_[page].mappings; m != 0; m = mappings_[m].next) {
    const Segment& segment = segments_[mappings_[m].segment];
    if (segment.growable != 0 && mappings_[m].usable && mappings_[m].slot * kSlotUnits < segment.promised)
      return true;
  }
  return false;
}

// The stream's oldest free page of a size that is promised to nobody, or unless `spare` is set any, or 0.
Index Segments::pick(std::uint16_t stream, int size, bool spare) const {
  const Index oldest = shelf(stream).pages[size].head;
  Index page = oldest;
  while (page != 0 && promised(page)) page = pages_[page].list_after;
  return page != 0 || spare ? page : oldest;
}

Status Segments::prepare(const Want& want, std::uint64_t create_bytes, Tick passed, FoundPlace& found) {
  moved_ = false;
  const FoundPlace& place = cheapest(want, passed, found);
  if (place.spot.block == 0) return {Code::out_of_memory, 0, "prepare"};
  segments_[want.strip].promised = place.spot.offset + want.units;
  if (place.plan.gaps.empty()) return {};
  std::vector<Index> held;
  if (Status status = supply(want, place.plan, create_bytes, true, &held); !status.ok()) return status;
  for (Index page : held) let_go(page, pages_[page].tick);
  return {};
}

std::uint64_t Segments::ready_bytes(Index strip) const {
  const Block& tail = blocks_[segments_[strip].tail];
  if (!tail.is(BlockState::free)) return 0;
  const std::uint32_t first = tail.offset / kSlotUnits;
  std::uint32_t slot = first;
  while (slot < tail.end() / kSlotUnits && backed_.count(slot, slot + 1) != 0) ++slot;
  return (slot - first) * kSlotBytes;
}

// ---- open and close -------------------------------------------------------------------------------------

Status Pool::growable_open(std::uint64_t max, StreamHandle handle, Address* out) {
  if (closed()) return {Code::closed, 0, "growable_open"};
  if (!segments_.paged()) return {Code::unsupported, 0, "growable_open"};
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
    return segments_.open_strip(stream->number, slots, ++growables_, stream->passed, &strip);
  };
  Status status = open();
  // Addresses are plenty. Where they are used up, idle ones come back: those that are known to be, then,
  // behind a wait of the host, all.
  for (const bool wait : {false, true}) {
    if (status.code != Code::out_of_memory) break;
    if (wait)
      if (Status settled = settle(lock); !settled.ok()) return settled;
    if (Status dropped = segments_.drop_idle_strips(finished_); !dropped.ok()) return dropped;
    status = open();
  }
  if (status.ok()) *out = segments_.segments()[strip].base;
  verify();
  return status;
}

Status Pool::growable_close(Address address) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_close", &lock); !status.ok()) return status;
  const Index strip = segments_.strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  StreamState& home = streams_[segments_.segments()[strip].stream];
  if (const Index block = block_in_use(strip)) {
    StreamState& owner = streams_[segments_.blocks()[block].owner.load(std::memory_order_relaxed)];
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
  segments_.close_strip(strip);
  if (!home.gone()) (void)fences_.record(home);  // tells when the strip may serve the next buffer
  keep_idle_limit();
  verify();
  return {};
}

Status Pool::growable_info(Address address, GrowableInfo* out) const {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("growable_info", &lock); !status.ok()) return status;
  const Index strip = segments_.strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = segments_.segments()[strip];
  *out = {};
  for (Index b = segment.head; b != 0; b = segments_.blocks()[b].after) {
    const Block& block = segments_.blocks()[b];
    if (block.is(BlockState::live)) out->bytes += bytes_of(block);
    if (block.is(BlockState::pending)) out->pending += bytes_of(block);
  }
  out->ready = segments_.ready_bytes(strip);
  out->max = std::uint64_t{segment.units} * kUnit;
  return {};
}

// ---- growing and shrinking ------------------------------------------------------------------------------

// The block that the buffer is, or 0 where it has no memory.
Index Pool::block_in_use(Index strip) const {
  const Index head = segments_.segments()[strip].head;
  return segments_.blocks()[head].is(BlockState::live) ? head : 0;
}

Status Pool::growable_resize(Address address, std::uint64_t bytes, std::uint64_t ahead, std::uint32_t tag,
                             OutOfMemoryReport* report) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("resize", &lock); !status.ok()) return status;
  const Index strip = segments_.strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = segments_.segments()[strip];
  if (bytes % kSlotBytes != 0 || bytes > std::uint64_t{segment.units} * kUnit)
    return {Code::invalid, 0, "resize"};
  const std::uint64_t number = segment.growable;
  const auto held = [&]() -> Units {
    const Index block = block_in_use(strip);
    return block == 0 ? 0 : segments_.blocks()[block].units;
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
  if (segments_.ready_bytes(strip) >= ahead) return status;
  if (preparer_ == nullptr) preparer_ = std::make_unique<Preparer>(*this);
  preparer_->ask({address, number, ahead});
  return status;
}

// Adds to the strip's block in use until it has so many units. Neither the mutex is held throughout nor does
// anything stay as it is while it is not, so every round looks again.
Status Pool::grow(Index strip, Units units, std::uint32_t tag, std::unique_lock<std::mutex>& lock,
                  OutOfMemoryReport* report) {
  const std::uint64_t number = segments_.segments()[strip].growable;
  for (;;) {
    const Segment& segment = segments_.segments()[strip];
    if (segment.growable != number) return {Code::invalid, 0, "free"};
    StreamState& stream = streams_[segment.stream];
    if (stream.gone()) return {Code::invalid, 0, "stream"};
    const Index block = block_in_use(strip);
    const Units held = block == 0 ? 0 : segments_.blocks()[block].units;
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
    if (segments_.blocks()[piece].before == block_in_use(strip)) {
      attach(strip, piece, tag);
    } else {
      give_up(piece);  // it was resized meanwhile
    }
  }
}

// Makes a piece in state moving, which lies directly behind the block in use, a part of it.
void Pool::attach(Index strip, Index piece, std::uint32_t tag) {
  StreamState& home = streams_[segments_.segments()[strip].stream];
  const Index block = block_in_use(strip);
  if (block != 0) {
    StreamState& owner = streams_[segments_.blocks()[block].owner.load(std::memory_order_relaxed)];
    std::lock_guard guard(owner.lock);
    take_live(block, owner, Action::free);
    segments_.join(block, piece);
  }
  const Index whole = block == 0 ? piece : block;
  (void)hand_out(whole, {bytes_of(segments_.blocks()[whole]), {home.number, kGrowing}, tag, &home, nullptr});
}

// What a shrink gave up directly behind the block in use and nobody else has got yet, or 0.
Index Pool::pending_behind(Index strip) const {
  const Index block = block_in_use(strip);
  const Index next = block == 0 ? segments_.segments()[strip].head : segments_.blocks()[block].after;
  return next != 0 && segments_.blocks()[next].is(BlockState::pending) ? next : 0;
}

// Takes back up to `units` that a shrink gave up directly behind the block in use and nobody else has got
// yet. Work queued from now on comes after all uses of them; nobody waits on the host.
Status Pool::retake(Index strip, Units units, std::uint32_t tag, bool* taken) {
  const Segment& segment = segments_.segments()[strip];
  StreamState& home = streams_[segment.stream];
  Index next = pending_behind(strip);
  *taken = next != 0;
  if (!*taken) return {};
  const Block& pending = segments_.blocks()[next];
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
  if (!whole) next = segments_.split_in_use(next, units);  // the rest waits on
  pending_.subtract(bytes_of(segments_.blocks()[next]));
  if (whole) --pending_blocks_;
  segments_.blocks()[next].set(BlockState::moving);
  attach(strip, next, tag);
  return {};
}

// pre: there is a block in use, of more units than that.
void Pool::shrink(Index strip, Units units) {
  const Index block = block_in_use(strip);
  StreamState& owner = streams_[segments_.blocks()[block].owner.load(std::memory_order_relaxed)];
  StreamState& home = streams_[segments_.segments()[strip].stream];
  const std::uint32_t tag = segments_.blocks()[block].tag;
  {
    std::lock_guard guard(owner.lock);
    take_live(block, owner, Action::free);
  }
  if (units != 0) {
    const Index kept = segments_.split_in_use(block, units);
    if (const auto uses = uses_.find(block); uses != uses_.end()) uses_[kept] = uses->second;
    (void)hand_out(kept, {std::uint64_t{units} * kUnit, {home.number, kGrowing}, tag, &home, nullptr});
  }
  give_up(block);
}

// Memory in state moving that its strip's buffer has no more. It waits for the work of its own stream, too,
// before it may go elsewhere, so that its addresses can be mapped anew when the buffer grows again.
void Pool::give_up(Index block) {
  const std::uint16_t home = segments_.segments()[segments_.blocks()[block].segment].stream;
  uses_[block].push_back(home);
  segments_.blocks()[block].used_elsewhere = false;  // in the journal it is free already
  make_pending(block);
}

// ---- ahead of need --------------------------------------------------------------------------------------

Status Pool::growable_prepare(Address address, std::uint64_t bytes, std::uint64_t number) {
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("prepare", &lock); !status.ok()) return status;
  const Index strip = segments_.strip_at(address);
  if (strip == 0) return {Code::invalid, 0, "free"};
  const Segment& segment = segments_.segments()[strip];
  if (number != 0 && segment.growable != number) return {Code::invalid, 0, "free"};
  StreamState& stream = streams_[segment.stream];
  if (stream.gone()) return {Code::invalid, 0, "stream"};
  if (backend_->capturing(stream.handle)) return {Code::capturing, 0, "prepare"};
  const Block& tail = segments_.blocks()[segment.tail];
  if (!tail.is(BlockState::free) || bytes == 0) return {};
  (void)fences_.poll(stream);
  Status status;
  for (const std::uint64_t wished : {std::min(bytes, bytes_of(tail)), kSlotBytes}) {
    const auto units = static_cast<Units>(round_up(wished, kSlotBytes) / kUnit);
    Climb request{
        wished, {stream.number, kGrowing, units, kUnit, strip, segment.growable}, 0, &stream, &lock};
    if (config_.cross_stream != CrossStream::never && streams_.size() > 1) gather_pages(request, false);
    status = segments_.prepare(request.want, budget(), stream.passed, request.place);
    note_reserved(stream);
    if (segments_.moved()) (void)fences_.record(stream);
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
