// The rungs, one function each, in the order in which an allocation climbs them. Each returns a block or
// nothing and leaves the rest to the next.
#include "pool/ladder.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/waits.hpp"

namespace vram {

namespace {

// Blocks up to this size may be lent to other streams: they seldom have a page to themselves that could move
// instead.
constexpr Units kLentUnits = static_cast<Units>(kMiB / kUnit);
// How often pages move to the host for one request.
constexpr int kMostSpills = 8;

}  // namespace

const char* name_of(Rung rung) {
  static constexpr const char* kNames[kRungs] = {
      "stream_cache", "own_blocks",  "passed_pending", "finished_elsewhere", "free_pages",
      "growth",       "stream_wait", "flush",          "callbacks",          "host_wait",
      "give_back",    "driver",      "spill"};
  return kNames[static_cast<int>(rung)];
}

void Ladder::arrange() {
  const Step cache{Rung::stream_cache, &Ladder::serve_stream_cache};
  const Step own{Rung::own_blocks, &Ladder::serve_own_blocks};
  const Step pending{Rung::passed_pending, &Ladder::serve_passed_pending};
  const Step elsewhere{Rung::finished_elsewhere, &Ladder::serve_finished_elsewhere};
  const Step pages{Rung::free_pages, &Ladder::serve_free_pages};
  const Step growth{Rung::growth, &Ladder::serve_growth};
  const Step waiting{Rung::stream_wait, &Ladder::serve_stream_wait};
  switch (config_.cross_stream) {
    case CrossStream::ready:
      steps_ = {cache, own, pending, elsewhere, pages, growth, waiting};
      break;
    case CrossStream::wait:
      steps_ = {cache, own, pending, elsewhere, pages, waiting, growth};
      break;
    case CrossStream::never:
      steps_ = {cache, own, pending, pages, growth};
      break;
  }
  steps_.push_back({Rung::flush, &Ladder::serve_flush});
  steps_.push_back({Rung::callbacks, &Ladder::serve_callbacks});
  steps_.push_back({Rung::host_wait, &Ladder::serve_host_wait});
  steps_.push_back({Rung::give_back, &Ladder::serve_give_back});
  if (config_.spill != 0) steps_.push_back({Rung::spill, &Ladder::serve_spill});
}

Index Ladder::climb(Climb& climb) {
  Rung served{};
  const Index block = try_rungs(climb, climb.rungs, &served);
  if (block != 0) count(served);
  return block;
}

[[gnu::flatten]] Index Ladder::climb_own(Climb& climb) {
  Index block = pop_cached(climb);
  climb.stream->lock.unlock();
  if (block != 0) return block;
  block = serve_own_blocks(climb);
  if (block != 0) count(Rung::own_blocks);
  return block;
}

// After one of the later rungs has changed what is free.
Index Ladder::search_again(Climb& climb) {
  Rung served{};
  climb.thorough = true;
  return try_rungs(climb, climb.rungs & kBeforeFlush, &served);
}

Index Ladder::try_rungs(Climb& climb, Rungs rungs, Rung* served) {
  // A rung may release the mutex, and another thread or a callback may arrange the steps anew meanwhile.
  std::array<Step, kRungs> steps{};
  const auto end = std::copy(steps_.begin(), steps_.end(), steps.begin());
  for (auto step = steps.begin(); step != end; ++step) {
    if ((rungs & only(step->rung)) == 0) continue;
    if (step->rung == Rung::flush) ++retries_;
    *served = step->rung;
    const Index block = (this->*step->serve)(climb);
    if (block != 0 || !climb.error.ok()) return block;
  }
  return 0;
}

// A block of exactly this size. The fast path (serve_cached) missed it, or the stream's ceiling was in the
// way.
Index Ladder::serve_stream_cache(Climb& climb) {
  if (climb.want.align > kUnit || climb.want.strip != 0) return 0;
  std::lock_guard guard(climb.stream->lock);
  return pop_cached(climb);
}

// The same under the stream's lock. If there is none, those that the next rung merges are taken out.
Index Ladder::pop_cached(const Climb& climb) {
  StreamState& stream = *climb.stream;
  const Index block = stream.cache.pop(blocks(), climb.want.units);
  if (block != 0) {
    ++stream.hits;
    blocks()[block].set(BlockState::moving);
  } else if (merges_cached(climb)) {
    caches_.collect(stream, merged_before(climb.want));
  }
  return block;
}

// Cached blocks beyond small are merged before a search for such a block, because keeping them apart would
// cost memory.
bool Ladder::merges_cached(const Climb& climb) const {
  return climb.want.band != kSmall && (climb.stream->cache.has_large() || caches_.collected());
}

// With pages, those up to 1 MiB do not hinder large ones, and programs often alternate.
Sizes Ladder::merged_before(const Want& want) const {
  return placement_.paged(want) && want.band == kLarge ? kBeyondMiB : kBeyondSmall;
}

Index Ladder::serve_own_blocks(Climb& climb) {
  StreamState& stream = *climb.stream;
  if (merges_cached(climb)) caches_.drain(stream, merged_before(climb.want), climb.may_call_device());
  Index block = placement_.take(climb.want);
  // With pages, blocks beyond small that are still cached have other addresses.
  if (block == 0 &&
      caches_.drain(stream, placement_.paged(climb.want) ? kOnlySmall : kAllSizes, climb.may_call_device()))
    block = placement_.take(climb.want);
  return block;
}

Index Ladder::serve_passed_pending(Climb& climb) {
  const std::uint64_t before = lives_.incomplete();
  if (before == 0) return 0;
  lives_.complete(climb.thorough);
  return lives_.incomplete() == before ? 0 : placement_.take(climb.want);
}

// A block in another stream's segment, used on ours; when it is freed it returns (Pending::return_home).
Index Ladder::lend(Climb& climb, bool by_waiting) {
  Index taken = 0;
  std::uint32_t asked = 0;
  const StreamNumber from = climb.thorough ? 0 : std::exchange(lend_from_, 0);
  placement_.owners().each(
      [&](StreamNumber number) {
        StreamState& owner = streams_[number];
        if (&owner == climb.stream || owner.apart()) return false;
        Want want = climb.want;
        want.stream = number;
        const std::function<bool(Tick)> allowed = [&](Tick tick) {
          return pending_.ordered(*climb.stream, owner, tick, by_waiting);
        };
        taken = placement_.take(want, &allowed);
        if (taken != 0 || climb.thorough || ++asked < kMostAsked) return taken != 0;
        lend_from_ = number;  // the next call continues here
        return true;
      },
      from);
  return taken;
}

Index Ladder::serve_finished_elsewhere(Climb& climb) {
  // A graph keeps what it gets, so nothing is lent to it.
  if (streams_.size() == 1 || climb.stream->capture != 0) return 0;
  // Longer blocks move by whole pages instead (free_pages), which leaves no foreign islands in a segment.
  if (placement_.paged() && climb.want.units > kLentUnits) return 0;
  return lend(climb, false);
}

Index Ladder::back(Climb& climb, std::uint64_t create_bytes) {
  Index block = 0;
  (void)fences_.poll(*climb.stream);
  const Status status =
      placement_.back(climb.want, create_bytes, climb.stream->passed, climb.place(), &block);
  log_.note_reserved(*climb.stream);
  climb.no_addresses =
      status.code == Code::out_of_memory && std::strcmp(status.call, AddressSpace::kNoPlace) == 0;
  if (!status.ok() && status.code != Code::out_of_memory) climb.error = status;
  // A fence behind the addresses that lost their pages: when it completes they may be mapped again.
  if (block != 0 && placement_.moved()) fences_.try_record(*climb.stream);
  return block;
}

// Moves free pages of one stream to another until nothing is lacking; false: the last page examined is still
// in use.
bool Ladder::move_pages(StreamState& owner, StreamState& taker, bool by_waiting, std::uint64_t* lacking) {
  bool refused = false;
  for (int turn = 0; turn < 2 * kPageSizes && *lacking > 0; ++turn) {
    // Pages that fit the need, largest first; then, if necessary, one that is larger.
    const bool fitting = turn < kPageSizes;
    const int size = fitting ? kPageSizes - 1 - turn : turn - kPageSizes;
    const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
    Index page = 0;
    while (*lacking > 0 && (!fitting || bytes <= *lacking) &&
           (page = stock().oldest(owner.number, size)) != 0) {
      const Tick tick = stock().pages()[page].tick;
      refused = !pending_.ordered(taker, owner, tick, by_waiting);
      if (refused) break;
      stock().transfer(page, taker.number, tick <= owner.passed ? 0 : taker.owe());
      *lacking -= std::min(*lacking, bytes);
    }
  }
  return !refused;
}

void Ladder::gather_pages(Climb& climb, bool by_waiting) {
  StreamState& taker = *climb.stream;
  std::uint64_t lacking = placement_.lacking(climb.want, taker.passed, climb.place());
  if (lacking == 0) return;
  caches_.with_large().each([&](StreamNumber number) {
    if (number == taker.number) return false;
    caches_.drain(streams_[number], kBeyondSmall);
    caches_.close(streams_[number]);
    return false;
  });
  std::uint32_t asked = 0;
  const StreamNumber from = climb.thorough ? 0 : std::exchange(gather_from_, 0);
  stock().free_owners().each(
      [&](StreamNumber number) {
        StreamState& owner = streams_[number];
        if (&owner == &taker || owner.apart()) return false;
        const bool refused = !move_pages(owner, taker, by_waiting, &lacking);
        if (lacking == 0 || !refused || climb.thorough || ++asked < kMostAsked) return lacking == 0;
        gather_from_ = number;  // the next call continues here
        return true;
      },
      from);
}

Index Ladder::serve_free_pages(Climb& climb) {
  const bool others = config_.cross_stream != CrossStream::never && streams_.size() > 1;
  if (!placement_.paged(climb.want)) return others && climb.want.heap == nullptr ? take_segment(climb) : 0;
  if (others) {
    gather_pages(climb, false);
    // Addresses that these pages already had here may serve without a call to the driver.
    if (const Index block = placement_.take(climb.want)) return block;
  }
  return back(climb, 0);
}

// Without pages, whole segments change owners.
Index Ladder::take_segment(Climb& climb) {
  Index found = 0;
  Tick tick = 0;
  std::uint32_t asked = 0;
  space().free_plain_segments(climb.want.padded(), [&](Index s) {
    const Segment& segment = space().segments()[s];
    if (segment.stream == climb.stream->number || streams_[segment.stream].apart()) return false;
    StreamState& owner = streams_[segment.stream];
    const Tick used = blocks()[segment.head].tick;
    if (pending_.ordered(*climb.stream, owner, used, false)) {
      found = s;
      tick = used <= owner.passed ? 0 : climb.stream->owe();
    }
    return found != 0 || (++asked >= kMostAsked && !climb.thorough);
  });
  if (found == 0) return 0;
  space().transfer(found, climb.stream->number, climb.want.band, tick);
  return placement_.take(climb.want);
}

Index Ladder::serve_growth(Climb& climb) {
  const std::uint64_t bytes = budget();
  return bytes == 0 ? 0 : back(climb, bytes);
}

Index Ladder::serve_stream_wait(Climb& climb) {
  // Captured work cannot wait for work that is not captured.
  if (streams_.size() == 1 || climb.stream->capture != 0) return 0;
  if (!placement_.paged() || climb.want.units <= kLentUnits)
    if (const Index block = lend(climb, true)) return block;
  if (!placement_.paged()) return 0;
  gather_pages(climb, true);
  if (const Index block = placement_.take(climb.want)) return block;
  // After growth, pages of the others and what the driver has left may suffice together.
  return back(climb, config_.cross_stream == CrossStream::wait ? 0 : budget());
}

Index Ladder::serve_flush(Climb& climb) {
  caches_.drain_all();
  return search_again(climb);
}

Index Ladder::serve_callbacks(Climb& climb) {
  if (!state_.callback) return 0;
  const Allocator::Callback callback = state_.callback;
  climb.lock->unlock();
  const bool again = call_back_(callback, climb.size, climb.stream->handle);
  const bool stopped = interrupted();
  climb.lock->lock();
  if (closed()) {
    climb.error = {Code::closed, 0, "allocate"};
    return 0;
  }
  if (stopped) {
    climb.error = {Code::interrupted, 0, "allocate"};
    return 0;
  }
  return again ? serve_flush(climb) : 0;
}

// Waits for streams with pending work, one fence at a time, until the request fits. What a graph may still
// use is not waited for.
Index Ladder::serve_host_wait(Climb& climb) {
  for (bool waited = true; waited && pending_.blocks_waiting() != 0;) {
    waited = false;
    fences_.watched().each([&](StreamNumber number) {
      StreamState& stream = streams_[number];
      if (stream.waiting.empty()) return false;
      const Status status = lives_.wait_for_pending(stream, *climb.lock);
      if (status.code == Code::capturing || status.code == Code::absent || status.code == Code::deadlock)
        return false;
      climb.error = status;
      waited = status.ok();
      return true;
    });
    if (!climb.error.ok()) return 0;
    lives_.complete();
    if (const Index block = search_again(climb)) return block;
    if (!climb.error.ok()) return 0;
  }
  return 0;
}

Index Ladder::serve_give_back(Climb& climb) {
  if (Status status = lives_.wait_until_idle(*climb.lock); !status.ok() && status.code != Code::capturing) {
    if (status.code != Code::deadlock) climb.error = status;
    return 0;
  }
  if (Status status = placement_.trim(0, finished_, true, &climb.want); !status.ok()) {
    climb.error = status;
    return 0;
  }
  log_.note_reserved(*climb.stream);
  if (const Index block = search_again(climb)) return block;
  if (!climb.error.ok()) return 0;
  if (const Index block = serve_other_bands(climb)) return block;
  return climb.error.ok() && climb.stream->capture == 0 && climb.want.band != kGrowing ? lend_heaps(climb)
                                                                                       : 0;
}

// Moves pages that were not used for long to the host, before the request fails. What is lacking may grow
// meanwhile, because one of the pages was partly under the place for the request, or because the driver has
// less than it says; then more pages move. So does what the pool has beyond a limit that was lowered.
Index Ladder::serve_spill(Climb& climb) {
  if (!placement_.paged(climb.want)) return 0;
  if (climb.stream->capture != 0 && backend_->capturing(climb.stream->handle)) return serve_lent_pages(climb);
  // Trying to hold the streams would break the capture of another one.
  if (captures_.under_way(false)) climb.spill = {Code::capturing, 0, "spill"};
  std::uint64_t wished = 0;
  for (int turn = 0; turn < kMostSpills && climb.error.ok() && climb.spill.ok(); ++turn) {
    (void)fences_.poll(*climb.stream);
    const std::uint64_t beyond = state_.beyond_limit();
    const std::uint64_t bytes = lacking(climb) + beyond;
    const Status status = spiller_.make_room(bytes, wished, *climb.stream, *climb.lock);
    climb.spill = status;
    if (closed()) climb.error = {Code::closed, 0, "allocate"};
    if (status.code == Code::interrupted) climb.error = status;
    if (beyond != 0 && climb.error.ok())
      climb.error = placement_.release_free(config_.limit, finished_, kMostAsked, false);
    if (!climb.error.ok()) return 0;
    // Even if nothing could move: others may have freed memory while the mutex was released.
    if (const Index block = search_again(climb)) return block;
    if (!climb.error.ok()) return 0;
    if (const Index block = serve_new_pages(climb)) return block;
    if (!status.ok()) return 0;
    wished = 4 * std::max(bytes, wished);
  }
  return 0;
}

// What the driver has not for the place; at least a slot.
std::uint64_t Ladder::lacking(Climb& climb) {
  std::uint64_t bytes = placement_.lacking(climb.want, climb.stream->passed, climb.place());
  std::uint64_t unused = 0, total = 0;
  if (backend_->memory_info(&unused, &total).ok())
    bytes -= std::min({bytes, budget(), unused / kSlotBytes * kSlotBytes});
  return std::max(kSlotBytes, bytes);
}

// While a stream is captured, nothing may move, but what a graph gets has no contents yet: it gets host
// pages. They have device memory before the graph runs (Spiller::settle). If the larger ones do not fit into
// the gaps of the place, small ones do.
Index Ladder::serve_lent_pages(Climb& climb) {
  for (const std::uint64_t request : {climb.want.bytes(), std::uint64_t{0}}) {
    climb.spill = spiller_.lend(lacking(climb), request, *climb.stream, *climb.lock);
    if (closed()) climb.error = {Code::closed, 0, "allocate"};
    if (!climb.spill.ok() || !climb.error.ok()) return 0;
    if (const Index block = back(climb, budget())) return block;
    if (!climb.error.ok()) return 0;
  }
  return 0;
}

// Gives free pages back to the driver for pages of other sizes: those that are free are too large for the
// place.
Index Ladder::serve_new_pages(Climb& climb) {
  const std::uint64_t keep = placement_.reserved_bytes() - idle_bytes();
  climb.error = placement_.release_free(keep, finished_, kMostAsked, false);
  log_.note_reserved(*climb.stream);
  return climb.error.ok() ? search_again(climb) : 0;
}

// Free memory of heaps that allow it, before the request fails; when it is freed it returns to the heap. A
// heap has no fences, so its stream is waited for.
Index Ladder::lend_heaps(Climb& climb) {
  for (std::size_t i = 0; i < captures_.graphs().size() && climb.error.ok(); ++i) {
    const StreamNumber number = captures_.graphs()[i];
    StreamState& owner = streams_[number];
    const CaptureId key = owner.capture;
    const auto lends = [&] {
      const Captures::Heap* const heap = captures_.heap_of(owner);
      return heap != nullptr && heap->key == key && heap->use_on_oom;
    };
    if (!lends()) continue;
    caches_.drain(owner);
    Want want = climb.want;
    want.stream = number;
    want.heap = owner.plain.get();
    want.last_resort = true;
    want.band = placement_.band_of(want.units, want.heap);
    bool fits = false;
    Tick reached = 0;
    const std::function<bool(Tick)> allowed = [&](Tick tick) {
      fits = true;
      return tick <= reached;
    };
    if (const Index block = placement_.take(want, &allowed)) return block;  // never used
    if (!fits) continue;
    reached = fences_.mark(owner);
    if (Status status = lives_.wait_for_heap(owner, *climb.lock); !status.ok()) {
      if (status.code == Code::closed || status.code == Code::interrupted) climb.error = status;
      continue;
    }
    if (!lends()) continue;  // it was released meanwhile
    want.heap = owner.plain.get();
    if (const Index block = placement_.take(want, &allowed)) return block;
  }
  return 0;
}

// Before it fails, a request is placed among blocks of other sizes: only the rest of their pages is left.
Index Ladder::serve_other_bands(Climb& climb) {
  Index block = 0;
  const Band own = climb.want.band;
  if (own == kGrowing) return 0;
  for (Band band = kSmall; band <= kLarge && block == 0 && climb.error.ok(); ++band) {
    if (band == own) continue;
    climb.want.band = band;
    block = placement_.take(climb.want);
    if (block == 0 && placement_.paged(climb.want)) block = back(climb, budget());
  }
  climb.want.band = own;
  if (block == 0 && climb.want.heap != nullptr) {
    climb.want.last_resort = true;
    block = placement_.take(climb.want);
  }
  return block;
}

std::uint64_t Ladder::idle_bytes() {
  std::uint64_t idle = stock().free_bytes() + space().free_plain_bytes();
  for (const StreamNumber number : captures_.graphs())
    if (streams_[number].apart()) idle -= stock().free_bytes(number) + space().free_plain_bytes(number);
  return idle;
}

void Ladder::keep_threshold(std::uint32_t patience, bool may_wait) {
  if (!config_.bounded()) return;
  if (stock().free_bytes() + space().free_plain_bytes() <= config_.release_threshold) return;
  const std::uint64_t idle = idle_bytes();
  if (idle <= config_.release_threshold) return;
  const std::uint64_t keep = placement_.reserved_bytes() - (idle - config_.release_threshold);
  (void)placement_.release_free(keep, finished_, patience, may_wait);
  log_.note_reserved(streams_[0]);
}

}  // namespace vram
