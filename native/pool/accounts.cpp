// What the pool says of itself: statistics, snapshots, the journal, the reasons of an out-of-memory, and
// check(). It changes nothing but peaks and the journal.
#include <algorithm>
#include <chrono>
#include <utility>

#include "pool/pool.hpp"

namespace vram {

namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace

// Follows what is held from the driver; what came or went is written into the journal of `stream`.
void Pool::note_reserved(StreamState& stream) {
  const auto follow = [](Meter& meter, std::uint64_t value) {
    if (value > meter.current) {
      meter.add(value - meter.current);
    } else {
      meter.subtract(meter.current - value);
    }
  };
  const std::uint64_t before = reserved_.current;
  const std::uint64_t now = segments_.reserved_bytes();
  follow(reserved_, now);
  follow(segment_count_, segments_.pieces());
  if (now == before) return;
  std::lock_guard guard(stream.lock);
  note(stream, now > before ? Action::grow : Action::shrink, 0, now > before ? now - before : before - now, 0,
       0);
}

void Pool::note(StreamState& stream, Action action, Address address, std::uint64_t bytes, std::uint32_t tag,
                std::uint32_t serial) {
  if (!stream.journaling) return;
  const JournalEntry event = entry(stream, action, address, bytes, tag, serial);
  if (stream.journal != nullptr) stream.journal->add(event);
  if (stream.tape != nullptr) stream.tape->add(event);
}

JournalEntry Pool::entry(const StreamState& stream, Action action, Address address, std::uint64_t bytes,
                         std::uint32_t tag, std::uint32_t serial) {
  JournalEntry event;
  event.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  event.time_ns = now_ns();
  event.address = address;
  event.bytes = bytes;
  event.tag = tag;
  event.serial = serial;
  event.stream = stream.handle;
  event.action = action;
  return event;
}

// While it exists, every stream stands still without its lock being held: the fast paths find a ceiling that
// nothing fits under and a cache that takes no more blocks, and go to the mutex, which the caller has. So a
// look at all blocks sees one moment, and whoever allocates meanwhile sleeps instead of spinning.
class Pool::Standstill {
 public:
  // pre: the mutex is held, here and when it goes.
  explicit Standstill(const Pool& pool) : pool_(pool), ceilings_(pool.streams_.size()) {
    each([](StreamState& stream, std::uint64_t& ceiling) {
      ceiling = std::exchange(stream.ceiling, 0);
      stream.shut_for(StreamState::kStanding);
    });
  }
  ~Standstill() {
    each([](StreamState& stream, std::uint64_t& ceiling) {
      stream.ceiling = ceiling;
      stream.open_for(StreamState::kStanding);
    });
  }
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;
  std::uint64_t ceiling(std::uint32_t number) const { return ceilings_[number]; }

 private:
  template <typename Do>
  void each(Do apply) {
    for (std::uint32_t n = 0; n < ceilings_.size(); ++n) {
      StreamState& stream = pool_.streams_[static_cast<std::uint16_t>(n)];
      std::lock_guard guard(stream.lock);
      apply(stream, ceilings_[n]);
    }
  }

  const Pool& pool_;
  std::vector<std::uint64_t> ceilings_;
};

Status Pool::start_journal(std::uint32_t entries) {
  if (entries > kMostJournaled) return {Code::invalid, 0, "journal"};
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("journal", &lock); !status.ok()) return status;
  std::vector<std::unique_ptr<JournalTape>> rings(streams_.size());  // all of them or none
  for (auto& ring : rings) ring = entries != 0 ? std::make_unique<JournalTape>(entries) : nullptr;
  config_.journal = entries;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    std::lock_guard guard(stream.lock);
    stream.journal.swap(rings[n]);
    stream.journaling = stream.journal != nullptr || stream.tape != nullptr;
  }
  return {};
}

void Pool::start_recording(std::uint64_t most) {
  std::vector<std::unique_ptr<JournalTape>> tapes;  // the new ones, then the old ones
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return;
  recording_ = most == 0 ? nullptr : std::make_shared<Recording>(most);
  for (std::uint32_t n = 0; n < streams_.size(); ++n)
    tapes.push_back(recording_ == nullptr ? nullptr : recording_->tape());
  const Standstill still(*this);  // so that what is there and what comes after add up
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    std::lock_guard guard(stream.lock);
    stream.tape.swap(tapes[n]);
    stream.journaling = stream.journal != nullptr || stream.tape != nullptr;
  }
  if (recording_ != nullptr) record_what_is_there();
}

void Pool::record_what_is_there() {
  // Under the lock: a mark may come at any time.
  const auto add = [this](StreamState& stream, Action action, Address address, std::uint64_t bytes,
                          std::uint32_t tag, std::uint32_t serial) {
    std::lock_guard guard(stream.lock);
    stream.tape->add(entry(stream, action, address, bytes, tag, serial));
  };
  const auto record = [&](Action action, const Block& block) {
    add(streams_[block.owner.load(std::memory_order_relaxed)], action, segments_.address_of(block),
        block.requested, block.tag, block.serial);
  };
  if (reserved_.current != 0) add(streams_[0], Action::grow, 0, reserved_.current, 0, 0);
  for (Index i = 1; i < segments_.blocks().end(); ++i)
    if (const Block& block = segments_.blocks()[i];
        block.is(BlockState::live) || block.is(BlockState::suspended))
      record(Action::allocate, block);
  for (std::uint32_t n = 0; n < streams_.size(); ++n)
    for (const auto& [tick, pending] : streams_[static_cast<std::uint16_t>(n)].waiting)
      if (pending.awaited)
        for (const Action action : {Action::allocate, Action::free_pending})
          record(action, segments_.blocks()[pending.block]);
}

void Pool::mark(std::uint64_t number) {
  if (closed()) return;
  StreamState& stream = streams_[0];
  std::lock_guard guard(stream.lock);
  if (stream.tape != nullptr) stream.tape->add(entry(stream, Action::mark, 0, number, 0, 0));
}

std::uint64_t Pool::take_recorded(std::vector<JournalEntry>& out) {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock) || recording_ == nullptr) return 0;
  const std::shared_ptr<Recording> recording = recording_;
  std::vector<JournalTape::Taken> taken(streams_.size());
  // Relaxed is enough. An event takes its number under its stream's lock. If it does so after we have had
  // that lock, this load happens before it, and the number is not below what was loaded; else it is on the
  // tape.
  const std::uint64_t complete = sequence_.load(std::memory_order_relaxed);
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    std::lock_guard guard(stream.lock);
    if (stream.tape != nullptr) taken[n] = stream.tape->take();
  }
  lock.unlock();
  return recording->merge(taken, complete, out);
}

void Pool::journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const {
  *dropped = 0;
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return;
  {
    const Standstill still(*this);
    for (std::uint32_t n = 0; n < streams_.size(); ++n) {
      const StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
      if (stream.journal == nullptr) continue;
      stream.journal->copy_to(out);
      *dropped += stream.journal->dropped();
    }
  }
  lock.unlock();
  std::sort(out.begin(), out.end(),
            [](const JournalEntry& a, const JournalEntry& b) { return a.sequence < b.sequence; });
}

OutOfMemoryReport Pool::explain(const Request& request) const {
  OutOfMemoryReport report;
  report.requested = request.size;
  report.limit = config_.limit;
  (void)backend_->memory_info(&report.device_free, &report.device_total);
  report.reserved = segments_.reserved_bytes();
  report.pending = pending_.current;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    const auto number = static_cast<std::uint16_t>(n);
    StreamState& stream = streams_[number];
    {
      std::lock_guard guard(stream.lock);
      report.live += stream.live;
      report.cached += stream.cache.bytes();
    }
    (&stream == request.stream ? report.free_pages : report.free_elsewhere) +=
        segments_.free_page_bytes(number);
    report.largest_free = std::max(report.largest_free, segments_.largest_free(number));
  }
  report.suspended = segments_.suspended_bytes();
  report.live -= suspended_live();
  const std::uint64_t accounted =
      report.live + report.pending + report.cached + report.free_pages + report.free_elsewhere;
  report.stranded = report.reserved > accounted ? report.reserved - accounted : 0;
  return report;
}

PoolStats Pool::stats() const {
  PoolStats stats;
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return stats;
  const auto sum = [](Meter& into, const Meter& from) {
    into.current += from.current;
    into.peak += from.peak;
    into.total += from.total;
  };
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    const auto number = static_cast<std::uint16_t>(n);
    StreamState& stream = streams_[number];
    StreamStats each;
    {
      std::lock_guard guard(stream.lock);
      for (int kind = 0; kind < 2; ++kind) {
        sum(stats.allocations[kind], stream.allocations[kind]);
        sum(stats.bytes[kind], stream.bytes[kind]);
        sum(stats.requested[kind], stream.requested[kind]);
      }
      each.live = stream.live;
      each.cached = stream.cache.bytes();
      stats.cached_blocks += stream.cache.count();
      stats.hits += stream.hits;
    }
    for (Band band = 0; band < kBands; ++band) {
      const FreeIndex& index = segments_.free_blocks(number, band);
      each.free += index.bytes();
      stats.free_blocks += index.count();
    }
    stats.largest_free = std::max(stats.largest_free, segments_.largest_free(number));
    each.handle = stream.handle;
    each.pending_blocks = stream.waiting.size();
    each.retired = stream.retired;
    stats.streams.push_back(each);
    stats.live += each.live;
    stats.cached += each.cached;
    stats.free_page_bytes += segments_.free_page_bytes(number);
  }
  stats.peak_live = peak_live_;
  stats.peak_active = std::max(peak_active_, peak_live_);
  stats.reserved = reserved_;
  stats.segments = segment_count_;
  stats.pending = pending_;
  stats.pending_blocks = pending_blocks_;
  stats.suspended = segments_.suspended_bytes();
  stats.suspended_live = suspended_live();
  stats.suspended_blocks = suspended_blocks_.load(std::memory_order_relaxed);
  stats.kept = contents_.bytes();
  const std::uint64_t used = stats.live + stats.cached + pending_.current - stats.suspended_live;
  stats.free_bytes = reserved_.current > used ? reserved_.current - used : 0;
  std::copy(rungs_, rungs_ + kRungs, stats.rungs);
  stats.rungs[static_cast<int>(Rung::stream_cache)] = stats.hits;
  stats.retries = retries_;
  stats.out_of_memory = out_of_memory_;
  stats.mappings = segments_.mappings().size();
  stats.paged = segments_.paged();
  return stats;
}

std::uint64_t Pool::live_bytes() const {
  std::uint64_t live = 0;
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return live;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    std::lock_guard guard(stream.lock);
    live += stream.live;
  }
  return live;
}

std::uint64_t Pool::steps() const {
  std::lock_guard lock(mutex_);
  return segments_.steps() + loose_.steps() + caching_[0].steps() + caching_[1].steps() +
         fences_.watched().steps() + threads_.steps() + pending_steps_;
}

void Pool::reset_peak() {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return;
  std::uint64_t live = 0;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    std::lock_guard guard(stream.lock);
    for (int kind = 0; kind < 2; ++kind)
      for (Meter* meter : {&stream.allocations[kind], &stream.bytes[kind], &stream.requested[kind]})
        meter->peak = meter->current;
    stream.ceiling = stream.live;
    live += stream.live;
  }
  peak_live_ = ceilings_ = live;
  peak_active_ = live + pending_.current;
  for (Meter* meter : {&reserved_, &segment_count_, &pending_}) meter->peak = meter->current;
}

BlockInfo Pool::describe(const Block& block) const {
  BlockInfo info;
  info.address = segments_.address_of(block);
  info.bytes = bytes_of(block);
  info.requested = block.requested;
  info.state = block.state.load(std::memory_order_relaxed);
  info.stream = streams_[block.owner.load(std::memory_order_relaxed)].handle;
  info.tag = block.tag;
  info.serial = block.serial;
  return info;
}

Status Pool::info(Address address, BlockInfo* out) const {
  if (closed()) return {Code::closed, 0, "info"};
  const Index i = segments_.find(address);
  if (i == 0) return {Code::invalid, 0, "info"};
  const Block& block = segments_.blocks()[i];
  StreamState& stream = streams_[block.owner.load(std::memory_order_relaxed)];
  std::lock_guard guard(stream.lock);
  if (!block.is(BlockState::live) && !block.is(BlockState::suspended)) return {Code::invalid, 0, "info"};
  if (block.owner.load(std::memory_order_relaxed) != stream.number) return {Code::invalid, 0, "info"};
  *out = describe(block);
  return {};
}

Status Pool::find(Address address, BlockInfo* out) const {
  if (closed()) return {Code::closed, 0, "find"};
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("find", &lock); !status.ok()) return status;
  const Index i = segments_.containing(address);
  if (i == 0) return {Code::invalid, 0, "find"};
  const Block& block = segments_.blocks()[i];
  StreamState& stream = streams_[block.owner.load(std::memory_order_relaxed)];
  std::lock_guard guard(stream.lock);
  if (!block.is(BlockState::live) && !block.is(BlockState::suspended)) return {Code::invalid, 0, "find"};
  *out = describe(block);
  return {};
}

bool Pool::suspended(Address address) const {
  if (!any_suspended()) [[likely]]
    return false;
  Index i = segments_.find(address);
  if (i == 0) {  // inside an allocation, as the pieces of arenas are
    std::unique_lock<std::mutex> lock;
    if (look(&lock)) i = segments_.containing(address);
  }
  return i != 0 && segments_.blocks()[i].is(BlockState::suspended);
}

std::vector<SegmentInfo> Pool::snapshot() const {
  std::vector<SegmentInfo> all;
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return all;
  const Standstill still(*this);
  for (Index s = 1; s < segments_.segments().end(); ++s) {
    const Segment& segment = segments_.segments()[s];
    if (segment.units == 0) continue;
    SegmentInfo info;
    info.address = segment.base;
    info.bytes = std::uint64_t{segment.units} * kUnit;
    info.stream = streams_[segment.stream].handle;
    info.small = segment.band == kSmall;
    info.plain = segment.plain;
    for (Index b = segment.head; b != 0; b = segments_.blocks()[b].after)
      info.blocks.push_back(describe(segments_.blocks()[b]));
    all.push_back(std::move(info));
  }
  return all;
}

bool Pool::check(std::string* why) const {
  std::unique_lock<std::mutex> lock;
  if (!enter("check", &lock).ok()) return true;
  const Standstill still(*this);
  bool good = segments_.check(why);
  std::vector<std::uint64_t> live(streams_.size(), 0);
  std::vector<std::uint64_t> cached(streams_.size(), 0);
  std::uint64_t pending = 0;
  std::uint64_t suspended = 0;
  good = good && contents_.check(why);
  for (Index i = 1; i < segments_.blocks().end() && good; ++i) {
    const Block& block = segments_.blocks()[i];
    const std::uint16_t owner = block.owner.load(std::memory_order_relaxed);
    if (block.is(BlockState::live) || block.is(BlockState::suspended)) live[owner] += bytes_of(block);
    suspended += block.is(BlockState::suspended);
    if (block.is(BlockState::cached)) cached[owner] += bytes_of(block);
    if (block.is(BlockState::pending)) pending += bytes_of(block);
  }
  // Where a growable buffer will grow, nothing queued is at work: its addresses may be mapped anew.
  for (Index m = 1; m < segments_.mappings().end() && good; ++m) {
    const Mapping& mapping = segments_.mappings()[m];
    if (mapping.page == 0) continue;
    const Segment& segment = segments_.segments()[mapping.segment];
    const Block& tail = segments_.blocks()[segment.tail];
    if (segment.growable == 0 || !tail.is(BlockState::free) || mapping.slot * kSlotUnits < tail.offset)
      continue;
    good = mapping.tick <= streams_[segment.stream].passed;
    if (!good && why != nullptr) *why = "queued work where a growable buffer grows";
  }
  // The sets by which the others are passed over.
  std::vector<int> owners(streams_.size(), 0);
  std::vector<int> with_free_pages(streams_.size(), 0);
  for (Index p = 1; p < segments_.pages().end(); ++p)
    if (segments_.pages()[p].exists()) owners[segments_.pages()[p].owner] = 1;
  for (Index s = 1; s < segments_.segments().end(); ++s)
    if (segments_.segments()[s].units != 0 && segments_.segments()[s].plain)
      owners[segments_.segments()[s].stream] = 1;
  for (std::uint32_t n = 0; n < streams_.size(); ++n)
    with_free_pages[n] = segments_.free_page_bytes(static_cast<std::uint16_t>(n)) != 0;
  segments_.owners().each([&](std::uint16_t number) { return --owners[number] < 0; });
  segments_.free_page_owners().each([&](std::uint16_t number) { return --with_free_pages[number] < 0; });
  const auto odd = [](const std::vector<int>& left) {
    return std::any_of(left.begin(), left.end(), [](int each) { return each != 0; });
  };
  if (good && (odd(owners) || odd(with_free_pages))) {
    good = false;
    if (why != nullptr) *why = "streams that own memory, or have free pages";
  }
  std::uint64_t ceilings = 0;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    const std::uint64_t ceiling = still.ceiling(n);
    const bool tight = (stream.shut[0] & stream.shut[1] & StreamState::kTight) != 0;
    const bool listed = !(stream.cache.has_small() && (stream.shut[0] & StreamState::kUnlisted) != 0) &&
                        !(stream.cache.has_large() && (stream.shut[1] & StreamState::kUnlisted) != 0);
    const bool agrees = stream.live == live[n] && stream.cache.bytes() == cached[n] &&
                        stream.live <= ceiling && listed && (!tight || stream.live == ceiling);
    if (good && !agrees) {
      good = false;
      if (why != nullptr) *why = "accounts of stream #" + std::to_string(n);
    }
    ceilings += still.ceiling(n);
  }
  if (good && suspended != suspended_blocks_) {
    good = false;
    if (why != nullptr) *why = "count of suspended blocks";
  }
  if (good &&
      (pending != pending_.current || ceilings != ceilings_ || (ceilings > peak_live_ && !ceilings_apart_))) {
    good = false;
    if (why != nullptr) *why = pending != pending_.current ? "pending bytes" : "ceilings, or above the peak";
  }
  return good;
}

// In builds with checks, a walk on the slow path ends with one; in a large pool not every walk, as a check
// looks at every block. Called with the mutex held.
void Pool::verify() const {
#ifdef VRAM_CHECKS
  constexpr std::size_t kFew = 64;
  std::string why;
  if (++walks_ % (segments_.blocks().size() / kFew + 1) == 0 && !segments_.check(&why)) {
    std::fprintf(stderr, "vram: pool check failed: %s\n", why.c_str());
    std::abort();
  }
#endif
}

}  // namespace vram
