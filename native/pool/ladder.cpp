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
  const Step own{Rung::own_blocks, &Pool::serve_own_blocks};
  const Step pending{Rung::passed_pending, &Pool::serve_passed_pending};
  const Step elsewhere{Rung::finished_elsewhere, &Pool::serve_finished_elsewhere};
  const Step pages{Rung::free_pages, &Pool::serve_free_pages};
  const Step growth{Rung::growth, &Pool::serve_growth};
  const Step waiting{Rung::stream_wait, &Pool::serve_stream_wait};
  switch (config_.cross_stream) {
    case CrossStream::ready:
      ladder_ = {own, pending, elsewhere, pages, growth, waiting};
      break;
    case CrossStream::wait:
      ladder_ = {own, pending, elsewhere, pages, waiting, growth};
      break;
    case CrossStream::never:
      ladder_ = {own, pending, pages, growth};
      break;
  }
  ladder_.push_back({Rung::flush, &Pool::serve_flush});
  ladder_.push_back({Rung::callbacks, &Pool::serve_callbacks});
  ladder_.push_back({Rung::host_wait, &Pool::serve_host_wait});
  ladder_.push_back({Rung::give_back, &Pool::serve_give_back});
}

// Walks the ladder and stops at the first rung that serves. 0 with an error in the request, or out of memory.
Index Pool::climb(Request& request) {
  for (const Step& step : ladder_) {
    if (step.rung == Rung::flush) ++retries_;
    const Index block = (this->*step.serve)(request);
    if (block != 0) {
      ++rungs_[static_cast<int>(step.rung)];
      return block;
    }
    if (!request.error.ok()) return 0;
  }
  return 0;
}

// The rungs before `flush` once more, after one of the later rungs has changed what is free.
Index Pool::search(Request& request) {
  request.thorough = true;
  for (const Step& step : ladder_) {
    if (step.rung == Rung::flush) break;
    const Index block = (this->*step.serve)(request);
    if (block != 0 || !request.error.ok()) return block;
  }
  return 0;
}

Index Pool::serve_own_blocks(Request& request) {
  // Cached blocks beyond small are merged before a search for one: kept apart they would cost memory. With
  // pages those up to 1 MiB are not in the way of large ones, and programs often have both in turn.
  StreamState& stream = *request.stream;
  const Band band = request.want.band;
  if (band != kSmall && stream.cache.has_large())
    drain(stream, segments_.paged() && band == kLarge ? kBeyondMiB : kBeyondSmall, request.ask);
  Index block = segments_.take(request.want);
  // With pages, what is beyond small and still cached lies among other addresses.
  if (block == 0 && drain(stream, segments_.paged() ? kOnlySmall : kAllSizes, request.ask))
    block = segments_.take(request.want);
  return block;
}

Index Pool::serve_passed_pending(Request& request) {
  const auto waiting = [this] { return pending_blocks_ + leaving_ + graphs_.size(); };
  const std::uint64_t before = waiting();
  if (before == 0) return 0;
  complete_passed(request.thorough);
  return waiting() == before ? 0 : segments_.take(request.want);
}

// Whether memory of `owner`, last used there at `tick`, may serve `taker` now; with by_waiting it is made so.
bool Pool::ordered(StreamState& taker, StreamState& owner, Tick tick, bool by_waiting) {
  if (tick <= owner.passed || owner.retired || taker.seen_of(owner.number) >= tick) return true;
  if (by_waiting) return fences_.order(taker, owner, tick).ok();
  return fences_.finished(owner, tick);
}

// A block in another stream's segment, used on ours; when freed it goes home (give_home).
Index Pool::lend(Request& request, bool by_waiting) {
  Index taken = 0;
  std::uint32_t asked = 0;
  const std::uint16_t from = request.thorough ? 0 : std::exchange(lend_from_, 0);
  segments_.owners().each(
      [&](std::uint16_t number) {
        StreamState& owner = streams_[number];
        if (&owner == request.stream) return false;
        Want want = request.want;
        want.stream = number;
        const std::function<bool(Tick)> allowed = [&](Tick tick) {
          return ordered(*request.stream, owner, tick, by_waiting);
        };
        taken = segments_.take(want, &allowed);
        if (taken != 0 || request.thorough || ++asked < kMostAsked) return taken != 0;
        lend_from_ = number;  // the next one goes on from here
        return true;
      },
      from);
  return taken;
}

Index Pool::serve_finished_elsewhere(Request& request) {
  // A graph keeps what it gets, so it is lent nothing.
  if (streams_.size() == 1 || request.stream->capture != 0) return 0;
  // Longer blocks move by whole pages instead (free_pages), which leaves no foreign islands in a segment.
  if (segments_.paged() && request.want.units > kLentUnits) return 0;
  return lend(request, false);
}

Index Pool::back(Request& request, std::uint64_t create_bytes) {
  Index block = 0;
  (void)fences_.poll(*request.stream);
  const Status status = segments_.back(request.want, create_bytes, request.stream->passed, &block);
  note_reserved(*request.stream);
  if (!status.ok() && status.code != Code::out_of_memory) request.error = status;
  // A fence behind the addresses that lost their pages: when it passes they may be mapped anew.
  if (block != 0 && segments_.moved()) (void)fences_.record(*request.stream);
  return block;
}

// Moves free pages of other streams to ours, as many as the request lacks.
void Pool::gather_pages(Request& request, bool by_waiting) {
  StreamState& taker = *request.stream;
  std::uint64_t lacking = segments_.lacking(request.want, taker.passed);
  if (lacking == 0) return;
  caching_[true].each([&](std::uint16_t number) {
    if (number == taker.number) return false;
    drain(streams_[number], kBeyondSmall);
    close_cache(streams_[number]);
    return false;
  });
  std::uint32_t asked = 0;
  const std::uint16_t from = request.thorough ? 0 : std::exchange(gather_from_, 0);
  segments_.free_page_owners().each(
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
                 (page = segments_.oldest_page(number, size)) != 0) {
            const Tick tick = segments_.pages()[page].tick;
            refused = !ordered(taker, owner, tick, by_waiting);
            if (refused) break;
            segments_.transfer(page, taker.number, tick <= owner.passed ? 0 : taker.owe());
            lacking -= std::min(lacking, bytes);
          }
        }
        if (lacking == 0 || !refused || request.thorough || ++asked < kMostAsked) return lacking == 0;
        gather_from_ = number;  // the next one goes on from here
        return true;
      },
      from);
}

Index Pool::serve_free_pages(Request& request) {
  const bool others = config_.cross_stream != CrossStream::never && streams_.size() > 1;
  if (!segments_.paged()) return others ? take_segment(request) : 0;
  if (others) {
    gather_pages(request, false);
    // Addresses that these pages already had here may serve without a call to the driver.
    if (const Index block = segments_.take(request.want)) return block;
  }
  return back(request, 0);
}

// Without pages, whole segments change hands.
Index Pool::take_segment(Request& request) {
  Index found = 0;
  Tick tick = 0;
  std::uint32_t asked = 0;
  segments_.free_plain_segments(request.want.padded(), [&](Index s) {
    const Segment& segment = segments_.segments()[s];
    if (segment.stream == request.stream->number) return false;
    StreamState& owner = streams_[segment.stream];
    const Tick used = segments_.blocks()[segment.head].tick;
    if (ordered(*request.stream, owner, used, false)) {
      found = s;
      tick = used <= owner.passed ? 0 : request.stream->owe();
    }
    return found != 0 || (++asked >= kMostAsked && !request.thorough);
  });
  if (found == 0) return 0;
  segments_.transfer_segment(found, request.stream->number, request.want.band, tick);
  return segments_.take(request.want);
}

Index Pool::serve_growth(Request& request) {
  const std::uint64_t bytes = budget();
  return bytes == 0 ? 0 : back(request, bytes);
}

Index Pool::serve_stream_wait(Request& request) {
  // What is captured cannot wait for what is not.
  if (streams_.size() == 1 || request.stream->capture != 0) return 0;
  if (!segments_.paged() || request.want.units <= kLentUnits)
    if (const Index block = lend(request, true)) return block;
  if (!segments_.paged()) return 0;
  gather_pages(request, true);
  if (const Index block = segments_.take(request.want)) return block;
  // Behind growth, what the others had and what the driver has left may do together.
  return back(request, config_.cross_stream == CrossStream::wait ? 0 : budget());
}

Index Pool::serve_flush(Request& request) {
  drain_all();
  return search(request);
}

Index Pool::serve_callbacks(Request& request) {
  if (!callback_) return 0;
  const auto callback = callback_;
  request.lock->unlock();
  const bool again = call_back(callback, request.size, request.stream->handle);
  const bool stopped = interrupted();
  request.lock->lock();
  if (closed()) {
    request.error = {Code::closed, 0, "allocate"};
    return 0;
  }
  if (stopped) {
    request.error = {Code::interrupted, 0, "allocate"};
    return 0;
  }
  return again ? serve_flush(request) : 0;
}

// Waits for streams with pending work, one fence at a time, until the request fits. What a graph may still
// use is not waited for.
Index Pool::serve_host_wait(Request& request) {
  for (bool waited = true; waited && pending_blocks_ != 0;) {
    waited = false;
    fences_.watched().each([&](std::uint16_t number) {
      StreamState& stream = streams_[number];
      if (stream.waiting.empty()) return false;
      const Status status = wait_for(stream, *request.lock);
      if (status.code == Code::capturing || status.code == Code::absent || status.code == Code::deadlock)
        return false;
      request.error = status;
      waited = status.ok();
      return true;
    });
    if (!request.error.ok()) return 0;
    complete_passed();
    if (const Index block = search(request)) return block;
    if (!request.error.ok()) return 0;
  }
  return 0;
}

Index Pool::serve_give_back(Request& request) {
  if (Status status = settle(*request.lock); !status.ok()) {
    if (status.code != Code::deadlock) request.error = status;
    return 0;
  }
  if (Status status = segments_.trim(0, finished_, true, &request.want); !status.ok()) {
    request.error = status;
    return 0;
  }
  note_reserved(*request.stream);
  if (const Index block = search(request)) return block;
  return request.error.ok() ? serve_other_bands(request) : 0;
}

// Rather than fail, a request goes among blocks of other sizes: what is left of their pages is all there is.
Index Pool::serve_other_bands(Request& request) {
  Index block = 0;
  const Band own = request.want.band;
  if (own == kGrowing) return 0;
  for (Band band = kSmall; band <= kLarge && block == 0 && request.error.ok(); ++band) {
    if (band == own) continue;
    request.want.band = band;
    block = segments_.take(request.want);
    if (block == 0 && segments_.paged()) block = back(request, budget());
  }
  request.want.band = own;
  return block;
}

std::uint64_t Pool::budget() const {
  const std::uint64_t limit = config_.limit != 0 ? config_.limit : ~std::uint64_t{0};
  return limit > segments_.reserved_bytes() ? limit - segments_.reserved_bytes() : 0;
}

}  // namespace vram
