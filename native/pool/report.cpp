// Statistics, snapshots, reasons of out-of-memory errors, and check().
#include "pool/report.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace vram {

namespace {

void raise_peaks(PoolStats& to, const PoolStats& from) {
  const auto raise = [](std::uint64_t& a, std::uint64_t b) { a = std::max(a, b); };
  for (int kind = 0; kind < 2; ++kind) {
    raise(to.allocations[kind].peak, from.allocations[kind].peak);
    raise(to.bytes[kind].peak, from.bytes[kind].peak);
    raise(to.requested[kind].peak, from.requested[kind].peak);
    raise(to.inactive[kind].peak, from.inactive[kind].peak);
  }
  raise(to.reserved.peak, from.reserved.peak);
  raise(to.segments.peak, from.segments.peak);
  raise(to.pending.peak, from.pending.peak);
  raise(to.peak_live, from.peak_live);
  raise(to.peak_active, from.peak_active);
}

}  // namespace

Status Report::fail(const Climb& climb, OutOfMemoryReport* report) {
  ++out_of_memory_;
  OutOfMemoryReport why = explain(climb.size, *climb.stream);
  why.spill = climb.spill;
  why.align = climb.want.align > kUnit ? climb.want.align : 0;
  if (climb.no_addresses) why.addresses = space().bytes();
  if (report != nullptr) *report = why;
  std::lock_guard guard(climb.stream->lock);
  log_.note(*climb.stream, Action::out_of_memory, why.device_free, climb.size, climb.tag, 0);
  return {Code::out_of_memory, 0, "allocate"};
}

OutOfMemoryReport Report::explain(std::uint64_t size, const StreamState& asking) const {
  OutOfMemoryReport report;
  report.requested = size;
  report.limit = config_.limit;
  (void)backend_->memory_info(&report.device_free, &report.device_total);
  report.reserved = placement_.reserved_bytes();
  report.pending = accounts_.pending().current;
  for (StreamState& stream : streams_) {
    const StreamNumber number = stream.number;
    {
      std::lock_guard guard(stream.lock);
      report.live += stream.live;
      report.cached += stream.cache.bytes();
    }
    (&stream == &asking ? report.free_pages : report.free_elsewhere) += stock().free_bytes(number);
    report.largest_free = std::max(report.largest_free, placement_.largest_free(number));
  }
  report.suspended = stock().suspended_bytes();
  report.spill_limit = config_.spill;
  report.host = stock().host_bytes();
  report.spilled = spilled_live();
  report.spill_left = spiller_.left();
  report.live -= suspended_live();
  report.live -= std::min(report.live, report.spilled);
  const std::uint64_t accounted =
      report.live + report.pending + report.cached + report.free_pages + report.free_elsewhere;
  report.stranded = report.reserved > accounted ? report.reserved - accounted : 0;
  return report;
}

// Bytes of blocks in use whose pages have gone.
std::uint64_t Report::suspended_live() const {
  if (stock().suspended_bytes() == 0) return 0;
  return bytes_on([](const Page& page) { return page.handle == 0; });
}

// Bytes of blocks in use that are on host pages.
std::uint64_t Report::spilled_live() const {
  if (stock().spilled_bytes() == 0) return 0;
  return bytes_on([](const Page& page) { return page.host; });
}

std::uint64_t Report::bytes_on(bool (*counts)(const Page&)) const {
  std::uint64_t bytes = 0;
  const Slab<Page>& pages = stock().pages();
  for (Index i = 1; i < pages.end(); ++i) {
    const Page& page = pages[i];
    if (page.holder == 0 || !counts(page)) continue;
    each_block_on(page, [&](Index block, Units units) {
      const bool used = !blocks()[block].is(BlockState::none) && !blocks()[block].is(BlockState::free);
      bytes += used ? bytes_of(units) : 0;
    });
  }
  return bytes;
}

PoolStats Report::stats(PeakReader reader) const {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return {};
  PoolStats stats = gather();
  raise_peaks(stats, peaks_[static_cast<int>(reader)]);
  return stats;
}

// The counted peaks restart for all, so what the other readers have not read is kept.
void Report::reset_peaks(PeakReader reader) {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return;
  restart_peaks(reader, gather());
}

void Report::restart_peaks(PeakReader reader, const PoolStats& now) {
  for (PoolStats& peaks : peaks_) raise_peaks(peaks, now);
  peaks_[static_cast<int>(reader)] = {};
  accounts_.reset_peaks();
  for (Meter& each : inactive_) each.peak = each.current;
}

Usage Report::usage(bool restart_peak) {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return {};
  const PoolStats now = gather();
  const std::uint64_t before = peaks_[static_cast<int>(PeakReader::steps)].peak_live;
  if (restart_peak) restart_peaks(PeakReader::steps, now);
  return {now.live, std::max(now.peak_live, before), now.spilled_live};
}

PoolStats Report::gather() const {
  PoolStats stats;
  const auto sum = [](Meter& into, const Meter& from) {
    into.current += from.current;
    into.peak += from.peak;
    into.total += from.total;
  };
  for (StreamState& stream : streams_) {
    const StreamNumber number = stream.number;
    StreamStats each;
    {
      std::lock_guard guard(stream.lock);
      for (int kind = 0; kind < 2; ++kind) {
        sum(stats.allocations[kind], stream.meter(kind, &Counts::allocations));
        sum(stats.bytes[kind], stream.meter(kind, &Counts::bytes));
        sum(stats.requested[kind], stream.meter(kind, &Counts::requested));
      }
      each.live = stream.live;
      each.cached = stream.cache.bytes();
      stats.cached_blocks += stream.cache.count();
      stats.hits += stream.hits;
    }
    for (Band band = 0; band < kBands; ++band) {
      const FreeIndex& index = space().free_blocks(number, band);
      each.free += index.bytes();
      stats.free_blocks += index.count();
    }
    stats.largest_free = std::max(stats.largest_free, placement_.largest_free(number));
    each.handle = stream.handle;
    each.pending_blocks = stream.waiting.size();
    each.retired = stream.retired();
    stats.streams.push_back(each);
    stats.live += each.live;
    stats.cached += each.cached;
    stats.free_page_bytes += stock().free_bytes(number);
  }
  stats.peak_live = std::max(accounts_.peak_live(), stats.live);
  // The peaks of the parts need not be of one moment, but none is above that of the whole.
  for (int kind = 0; kind < 2; ++kind)
    for (Meter* meter : {&stats.bytes[kind], &stats.requested[kind]})
      meter->peak = std::min(meter->peak, stats.peak_live);
  stats.peak_active = accounts_.peak_active();
  stats.reserved = log_.reserved();
  stats.segments = log_.pieces();
  stats.pending = accounts_.pending();
  stats.pending_blocks = pending_.blocks_waiting();
  stats.suspended = stock().suspended_bytes();
  stats.suspended_live = suspended_live();
  stats.suspended_blocks = state_.suspended_blocks.load(std::memory_order_relaxed);
  stats.kept = state_.contents.bytes();
  stats.host = stock().host_bytes();
  stats.spilled = stock().spilled_bytes();
  stats.spilled_live = spilled_live();
  stats.parked = spiller_.parked_bytes();
  stats.spill = spiller_.counts();
  const std::uint64_t used =
      stats.live + stats.cached + accounts_.pending().current - stats.suspended_live - stats.spilled_live;
  stats.free_bytes = stats.reserved.current > used ? stats.reserved.current - used : 0;
  inactive_[0].follow(stats.free_blocks + stats.cached_blocks);
  inactive_[1].follow(stats.free_bytes - std::min(stats.free_bytes, stats.free_page_bytes) + stats.cached);
  std::copy(std::begin(inactive_), std::end(inactive_), stats.inactive);
  for (int rung = 0; rung < kRungs; ++rung) stats.rungs[rung] = ladder_.served(rung);
  stats.rungs[static_cast<int>(Rung::stream_cache)] = stats.hits;
  stats.retries = ladder_.retries();
  stats.out_of_memory = out_of_memory_;
  stats.mappings = stock().mappings().size();
  stats.paged = placement_.paged();
  return stats;
}

std::uint64_t Report::live_bytes() const {
  std::unique_lock<std::mutex> lock;
  std::uint64_t live = 0;
  if (!look(&lock)) return live;
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    live += stream.live;
  }
  return live;
}

std::uint64_t Report::cached_bytes() const {
  std::uint64_t cached = 0;
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    if (!stream.apart()) cached += stream.cache.bytes();
  }
  return cached;
}

std::uint64_t Report::steps() const {
  std::lock_guard lock(state_.mutex);
  return placement_.steps() + accounts_.steps() + caches_.steps() + lives_.steps() + pending_.steps();
}

BlockInfo Report::describe(const Block& block) const {
  BlockInfo info;
  info.address = space().address_of(block);
  info.bytes = bytes_of(block);
  info.requested = block.requested;
  info.state = block.state.load(std::memory_order_relaxed);
  info.stream = owner_of(block).handle;
  info.tag = block.tag;
  info.serial = block.serial;
  info.used_elsewhere = block.used_elsewhere;
  info.heap = home_of(block).heap;
  return info;
}

Status Report::info(Address address, BlockInfo* out) const {
  if (closed()) return {Code::closed, 0, "info"};
  const Index i = space().find(address);
  if (i == 0) return {Code::invalid, 0, "info"};
  const Block& block = blocks()[i];
  StreamState& stream = owner_of(block);
  std::lock_guard guard(stream.lock);
  if (!block.allocated()) return {Code::invalid, 0, "info"};
  if (block.owned_by() != stream.number) return {Code::invalid, 0, "info"};
  *out = describe(block);
  return {};
}

Status Report::find(Address address, BlockInfo* out) const {
  if (closed()) return {Code::closed, 0, "find"};
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("find", &lock); !status.ok()) return status;
  const Index i = space().containing(address);
  if (i == 0) return {Code::invalid, 0, "find"};
  const Block& block = blocks()[i];
  StreamState& stream = owner_of(block);
  std::lock_guard guard(stream.lock);
  if (!block.allocated()) return {Code::invalid, 0, "find"};
  *out = describe(block);
  return {};
}

bool Report::suspended(Address address) const {
  if (state_.suspended_blocks.load(std::memory_order_relaxed) == 0) [[likely]]
    return false;
  Index i = space().find(address);
  if (i == 0) {  // inside an allocation, as the pieces of arenas are
    std::unique_lock<std::mutex> lock;
    if (look(&lock)) i = space().containing(address);
  }
  return i != 0 && blocks()[i].is(BlockState::suspended);
}

// The part of a segment from one offset to another, with its blocks clipped to it.
SegmentInfo Report::describe(const Segment& segment, Units from, Units to) const {
  SegmentInfo info;
  info.address = segment.base + bytes_of(from - segment.first);
  info.bytes = bytes_of(to - from);
  info.stream = streams_[segment.stream].handle;
  info.heap = streams_[segment.stream].heap;
  info.small = segment.band == kSmall;
  info.plain = segment.plain;
  for (Index b = space().block_at(from); b != 0 && blocks()[b].offset < to; b = blocks()[b].after) {
    const Block& block = blocks()[b];
    BlockInfo clipped = describe(block);
    const Units first = std::max(block.offset, from);
    clipped.address += bytes_of(first - block.offset);
    clipped.bytes = bytes_of(std::min(block.end(), to) - first);
    if (stock().spilled_bytes() != 0) clipped.spilled = spiller_.spilled_bytes(block, first, to);
    info.blocks.push_back(clipped);
  }
  return info;
}

std::vector<SegmentInfo> Report::snapshot() const {
  std::vector<SegmentInfo> all;
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return all;
  const Standstill still(streams_);
  for (Index s = 1; s < space().segments().end(); ++s)
    if (const Segment& segment = space().segments()[s]; segment.units != 0)
      all.push_back(describe(segment, segment.first, segment.end()));
  return all;
}

std::vector<SegmentInfo> Report::backed_segments() const {
  std::vector<SegmentInfo> all;
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return all;
  const Standstill still(streams_);
  for (Index s = 1; s < space().segments().end(); ++s)
    if (const Segment& segment = space().segments()[s]; segment.plain)
      all.push_back(describe(segment, segment.first, segment.end()));
  std::vector<Mapping> mapped;  // one for each page: where it is held, or where it was mapped last
  for (Index p = 1; p < stock().pages().end(); ++p) {
    const Page& page = stock().pages()[p];
    if (page.handle == 0 || (page.unlent() && page.holder == 0)) continue;
    const Index m = page.holder != 0 ? page.holder : page.mappings;
    if (m != 0) mapped.push_back(stock().mappings()[m]);
  }
  std::sort(mapped.begin(), mapped.end(), [](const Mapping& a, const Mapping& b) { return a.slot < b.slot; });
  for (std::size_t from = 0, to = 0; from < mapped.size(); from = to) {
    Slot past = mapped[from].slot;
    for (; to < mapped.size() && mapped[to].slot == past && mapped[to].segment == mapped[from].segment; ++to)
      past += stock().pages()[mapped[to].page].slots();
    all.push_back(describe(space().segments()[mapped[from].segment], mapped[from].slot * kSlotUnits,
                           past * kSlotUnits));
  }
  return all;
}

// Where a growable buffer will grow, no queued work is active: its addresses may be mapped again.
bool Report::check_growables(std::string* why) const {
  for (Index m = 1; m < stock().mappings().end(); ++m) {
    const Mapping& mapping = stock().mappings()[m];
    if (mapping.page == 0) continue;
    const Segment& segment = space().segments()[mapping.segment];
    const Block& tail = blocks()[segment.tail];
    if (segment.growable == 0 || !tail.is(BlockState::free) || mapping.slot * kSlotUnits < tail.offset)
      continue;
    if (mapping.tick > streams_[segment.stream].passed)
      return wrong(why, "queued work where a growable buffer grows", m);
  }
  return true;
}

// What the streams have counted is what the blocks say.
bool Report::check_streams(const Standstill& still, std::string* why) const {
  std::vector<std::uint64_t> live(streams_.size(), 0);
  std::vector<std::uint64_t> cached(streams_.size(), 0);
  std::uint64_t pending = 0;
  std::uint64_t suspended = 0;
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (block.allocated()) live[block.owned_by()] += bytes_of(block);
    suspended += block.is(BlockState::suspended);
    if (block.is(BlockState::cached)) cached[block.owned_by()] += bytes_of(block);
    if (block.is(BlockState::pending)) pending += bytes_of(block);
  }
  for (const StreamState& stream : streams_) {
    const std::uint64_t ceiling = still.ceiling(stream.number);
    const bool tight = (stream.shut[0] & stream.shut[1] & StreamState::kTight) != 0;
    const bool listed = !(stream.cache.has_small() && (stream.shut[0] & StreamState::kUnlisted) != 0) &&
                        !(stream.cache.has_large() && (stream.shut[1] & StreamState::kUnlisted) != 0);
    if (stream.live != live[stream.number] || stream.cache.bytes() != cached[stream.number] ||
        stream.live > ceiling || !listed || (tight && stream.live != ceiling))
      return wrong(why, "accounts of a stream", stream.number);
  }
  if (suspended != state_.suspended_blocks) return wrong(why, "count of suspended blocks");
  return pending == accounts_.pending().current || wrong(why, "pending bytes");
}

bool Report::check(std::string* why) const {
  std::unique_lock<std::mutex> lock;
  if (!enter("check", &lock).ok()) return true;
  const Standstill still(streams_);
  return placement_.check(why) && state_.contents.check(why) && check_growables(why) &&
         check_streams(still, why) && accounts_.check(still, why);
}

}  // namespace vram
