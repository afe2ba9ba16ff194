// The ladder: one rung a function, in the order an allocation climbs them. Each returns a block or nothing
// and leaves the rest to the next; allocating and freeing around it are in pool.cpp.
#include <algorithm>
#include <utility>

#include "base/waits.hpp"
#include "pool/pool.hpp"

namespace vram {

namespace {

// Blocks up to here may be lent to other streams: they seldom have a page to themselves that could go
// instead.
constexpr Units kLentUnits = static_cast<Units>(kMiB / kUnit);

}  // namespace

const char* name_of(Rung rung) {
  static constexpr const char* kNames[kRungs] = {
      "stream_cache", "own_blocks", "passed_pending", "finished_elsewhere", "free_pages", "growth",
      "stream_wait",  "flush",      "callbacks",      "host_wait",          "give_back",  "driver"};
  return kNames[static_cast<int>(rung)];
}

void Pool::arrange_ladder() {
  const Step cache{Rung::stream_cache, &Pool::serve_stream_cache};
  const Step own{Rung::own_blocks, &Pool::serve_own_blocks};
  const Step pending{Rung::passed_pending, &Pool::serve_passed_pending};
  const Step elsewhere{Rung::finished_elsewhere, &Pool::serve_finished_elsewhere};
  const Step pages{Rung::free_pages, &Pool::serve_free_pages};
  const Step growth{Rung::growth, &Pool::serve_growth};
  const Step waiting{Rung::stream_wait, &Pool::serve_stream_wait};
  switch (config_.cross_stream) {
    case CrossStream::ready:
      ladder_ = {cache, own, pending, elsewhere, pages, growth, waiting};
      break;
    case CrossStream::wait:
      ladder_ = {cache, own, pending, elsewhere, pages, waiting, growth};
      break;
    case CrossStream::never:
      ladder_ = {cache, own, pending, pages, growth};
      break;
  }
  ladder_.push_back({Rung::flush, &Pool::serve_flush});
  ladder_.push_back({Rung::callbacks, &Pool::serve_callbacks});
  ladder_.push_back({Rung::host_wait, &Pool::serve_host_wait});
  ladder_.push_back({Rung::give_back, &Pool::serve_give_back});
}

// 0 with the error in climb.error, or because memory has run out.
Index Pool::climb(Climb& climb) {
  Rung served{};
  const Index block = try_rungs(climb, climb.rungs, &served);
  if (block != 0) ++rungs_[static_cast<int>(served)];
  return block;
}

// After one of the later rungs has changed what is free.
Index Pool::search_again(Climb& climb) {
  Rung served{};
  climb.thorough = true;
  return try_rungs(climb, climb.rungs & kBeforeFlush, &served);
}

// The ladder: tries the rungs of a set in order and stops at the first that serves.
Index Pool::try_rungs(Climb& climb, Rungs rungs, Rung* served) {
  for (const Step& step : ladder_) {
    if ((rungs & only(step.rung)) == 0) continue;
    if (step.rung == Rung::flush) ++retries_;
    *served = step.rung;
    const Index block = (this->*step.serve)(climb);
    if (block != 0 || !climb.error.ok()) return block;
  }
  return 0;
}

// A block of exactly this size. The fast path (serve_cached) missed it, or the stream's ceiling was in the
// way.
Index Pool::serve_stream_cache(Climb& climb) {
  if (climb.want.align > kUnit || climb.want.strip != 0) return 0;
  StreamState& stream = *climb.stream;
  std::lock_guard guard(stream.lock);
  const Index block = stream.cache.pop(placement_.space().blocks(), climb.want.units);
  if (block == 0) return 0;
  ++stream.hits;
  placement_.space().blocks()[block].set(BlockState::moving);
  return block;
}

Index Pool::serve_own_blocks(Climb& climb) {
  // Cached blocks beyond small are merged before a search for one: kept apart they would cost memory. With
  // pages those up to 1 MiB are not in the way of large ones, and programs often have both in turn.
  StreamState& stream = *climb.stream;
  const Band band = climb.want.band;
  if (band != kSmall && stream.cache.has_large())
    drain(stream, placement_.paged() && band == kLarge ? kBeyondMiB : kBeyondSmall, climb.may_call_device());
  Index block = placement_.take(climb.want);
  // With pages, what is beyond small and still cached lies among other addresses.
  if (block == 0 && drain(stream, placement_.paged() ? kOnlySmall : kAllSizes, climb.may_call_device()))
    block = placement_.take(climb.want);
  return block;
}

Index Pool::serve_passed_pending(Climb& climb) {
  const auto waiting = [this] { return pending_blocks_ + leaving_ + graphs_.size(); };
  const std::uint64_t before = waiting();
  if (before == 0) return 0;
  complete_passed(climb.thorough);
  return waiting() == before ? 0 : placement_.take(climb.want);
}

// Whether memory of `owner`, last used there at `tick`, may serve `taker` now; with by_waiting it is made so.
bool Pool::ordered(StreamState& taker, StreamState& owner, Tick tick, bool by_waiting) {
  if (tick <= owner.passed || owner.retired || taker.seen_of(owner.number) >= tick) return true;
  if (by_waiting) return fences_.order(taker, owner, tick).ok();
  return fences_.finished(owner, tick);
}

// A block in another stream's segment, used on ours; when freed it goes home (give_home).
Index Pool::lend(Climb& climb, bool by_waiting) {
  Index taken = 0;
  std::uint32_t asked = 0;
  const std::uint16_t from = climb.thorough ? 0 : std::exchange(lend_from_, 0);
  placement_.owners().each(
      [&](std::uint16_t number) {
        StreamState& owner = streams_[number];
        if (&owner == climb.stream) return false;
        Want want = climb.want;
        want.stream = number;
        const std::function<bool(Tick)> allowed = [&](Tick tick) {
          return ordered(*climb.stream, owner, tick, by_waiting);
        };
        taken = placement_.take(want, &allowed);
        if (taken != 0 || climb.thorough || ++asked < kMostAsked) return taken != 0;
        lend_from_ = number;  // the next one goes on from here
        return true;
      },
      from);
  return taken;
}

Index Pool::serve_finished_elsewhere(Climb& climb) {
  // A graph keeps what it gets, so it is lent nothing.
  if (streams_.size() == 1 || climb.stream->capture != 0) return 0;
  // Longer blocks move by whole pages instead (free_pages), which leaves no foreign islands in a segment.
  if (placement_.paged() && climb.want.units > kLentUnits) return 0;
  return lend(climb, false);
}

Index Pool::back(Climb& climb, std::uint64_t create_bytes) {
  Index block = 0;
  (void)fences_.poll(*climb.stream);
  const Status status = placement_.back(climb.want, create_bytes, climb.stream->passed, climb.place, &block);
  note_reserved(*climb.stream);
  if (!status.ok() && status.code != Code::out_of_memory) climb.error = status;
  // A fence behind the addresses that lost their pages: when it passes they may be mapped anew.
  if (block != 0 && placement_.moved()) (void)fences_.record(*climb.stream);
  return block;
}

// Moves free pages of other streams to ours, as many as the request lacks.
void Pool::gather_pages(Climb& climb, bool by_waiting) {
  StreamState& taker = *climb.stream;
  std::uint64_t lacking = placement_.lacking(climb.want, taker.passed, climb.place);
  if (lacking == 0) return;
  caching_[true].each([&](std::uint16_t number) {
    if (number == taker.number) return false;
    drain(streams_[number], kBeyondSmall);
    close_cache(streams_[number]);
    return false;
  });
  std::uint32_t asked = 0;
  const std::uint16_t from = climb.thorough ? 0 : std::exchange(gather_from_, 0);
  placement_.stock().free_owners().each(
      [&](std::uint16_t number) {
        StreamState& owner = streams_[number];
        if (&owner == &taker) return false;
        bool refused = false;
        for (int turn = 0; turn < 2 * kPageSizes && lacking > 0; ++turn) {
          // Pages that fit the need, largest first; then, if need be, one that is larger.
          const bool fitting = turn < kPageSizes;
          const int size = fitting ? kPageSizes - 1 - turn : turn - kPageSizes;
          const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
          Index page = 0;
          while (lacking > 0 && (!fitting || bytes <= lacking) &&
                 (page = placement_.stock().oldest(number, size)) != 0) {
            const Tick tick = placement_.stock().pages()[page].tick;
            refused = !ordered(taker, owner, tick, by_waiting);
            if (refused) break;
            placement_.stock().transfer(page, taker.number, tick <= owner.passed ? 0 : taker.owe());
            lacking -= std::min(lacking, bytes);
          }
        }
        if (lacking == 0 || !refused || climb.thorough || ++asked < kMostAsked) return lacking == 0;
        gather_from_ = number;  // the next one goes on from here
        return true;
      },
      from);
}

Index Pool::serve_free_pages(Climb& climb) {
  const bool others = config_.cross_stream != CrossStream::never && streams_.size() > 1;
  if (!placement_.paged()) return others ? take_segment(climb) : 0;
  if (others) {
    gather_pages(climb, false);
    // Addresses that these pages already had here may serve without a call to the driver.
    if (const Index block = placement_.take(climb.want)) return block;
  }
  return back(climb, 0);
}

// Without pages, whole segments change hands.
Index Pool::take_segment(Climb& climb) {
  Index found = 0;
  Tick tick = 0;
  std::uint32_t asked = 0;
  placement_.space().free_plain_segments(climb.want.padded(), [&](Index s) {
    const Segment& segment = placement_.space().segments()[s];
    if (segment.stream == climb.stream->number) return false;
    StreamState& owner = streams_[segment.stream];
    const Tick used = placement_.space().blocks()[segment.head].tick;
    if (ordered(*climb.stream, owner, used, false)) {
      found = s;
      tick = used <= owner.passed ? 0 : climb.stream->owe();
    }
    return found != 0 || (++asked >= kMostAsked && !climb.thorough);
  });
  if (found == 0) return 0;
  placement_.space().transfer(found, climb.stream->number, climb.want.band, tick);
  return placement_.take(climb.want);
}

Index Pool::serve_growth(Climb& climb) {
  const std::uint64_t bytes = budget();
  return bytes == 0 ? 0 : back(climb, bytes);
}

Index Pool::serve_stream_wait(Climb& climb) {
  // What is captured cannot wait for what is not.
  if (streams_.size() == 1 || climb.stream->capture != 0) return 0;
  if (!placement_.paged() || climb.want.units <= kLentUnits)
    if (const Index block = lend(climb, true)) return block;
  if (!placement_.paged()) return 0;
  gather_pages(climb, true);
  if (const Index block = placement_.take(climb.want)) return block;
  // Behind growth, what the others had and what the driver has left may do together.
  return back(climb, config_.cross_stream == CrossStream::wait ? 0 : budget());
}

Index Pool::serve_flush(Climb& climb) {
  drain_all();
  return search_again(climb);
}

Index Pool::serve_callbacks(Climb& climb) {
  if (!callback_) return 0;
  const auto callback = callback_;
  climb.lock->unlock();
  const bool again = call_back(callback, climb.size, climb.stream->handle);
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
Index Pool::serve_host_wait(Climb& climb) {
  for (bool waited = true; waited && pending_blocks_ != 0;) {
    waited = false;
    fences_.watched().each([&](std::uint16_t number) {
      StreamState& stream = streams_[number];
      if (stream.waiting.empty()) return false;
      const Status status = wait_for(stream, *climb.lock);
      if (status.code == Code::capturing || status.code == Code::absent || status.code == Code::deadlock)
        return false;
      climb.error = status;
      waited = status.ok();
      return true;
    });
    if (!climb.error.ok()) return 0;
    complete_passed();
    if (const Index block = search_again(climb)) return block;
    if (!climb.error.ok()) return 0;
  }
  return 0;
}

Index Pool::serve_give_back(Climb& climb) {
  if (Status status = settle(*climb.lock); !status.ok()) {
    if (status.code != Code::deadlock) climb.error = status;
    return 0;
  }
  if (Status status = placement_.trim(0, finished_, true, &climb.want); !status.ok()) {
    climb.error = status;
    return 0;
  }
  note_reserved(*climb.stream);
  if (const Index block = search_again(climb)) return block;
  return climb.error.ok() ? serve_other_bands(climb) : 0;
}

// Rather than fail, a request goes among blocks of other sizes: what is left of their pages is all there is.
Index Pool::serve_other_bands(Climb& climb) {
  Index block = 0;
  const Band own = climb.want.band;
  if (own == kGrowing) return 0;
  for (Band band = kSmall; band <= kLarge && block == 0 && climb.error.ok(); ++band) {
    if (band == own) continue;
    climb.want.band = band;
    block = placement_.take(climb.want);
    if (block == 0 && placement_.paged()) block = back(climb, budget());
  }
  climb.want.band = own;
  return block;
}

std::uint64_t Pool::budget() const {
  const std::uint64_t limit = config_.limit != 0 ? config_.limit : ~std::uint64_t{0};
  return limit > placement_.reserved_bytes() ? limit - placement_.reserved_bytes() : 0;
}

}  // namespace vram
