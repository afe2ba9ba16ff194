// Live bytes of the streams and their peaks.
#include "pool/accounts.hpp"

#include <algorithm>

namespace vram {

Address Accounts::make_live(Index i, const Climb& climb) {
  StreamState& stream = *climb.stream;
  Block& block = blocks()[i];
  const std::uint64_t bytes = bytes_of(block);
  stream.lock.lock();
  if (stream.live + bytes > stream.ceiling) {
    stream.lock.unlock();
    rise(stream, bytes);
    stream.lock.lock();
  } else {
    stream.live += bytes;
  }
  block.owner.store(stream.number, std::memory_order_relaxed);
  block.requested = climb.size;
  block.tag = climb.tag;
  block.used_elsewhere = climb.want.band == kGrowing;
  block.serial = static_cast<std::uint32_t>(++stream.slow_serial + stream.hits);
  const int kind = static_cast<int>(kind_of(block.units));
  stream.count_in(kind, bytes, climb.size);
  block.set(BlockState::live);
  log_.note(stream, Action::allocate, block);
  stream.lock.unlock();
  return space().address_of(block);
}

void Accounts::end_live(Index i, StreamState& owner, Action action) {
  Block& block = blocks()[i];
  block.set(BlockState::moving);
  const std::uint64_t bytes = bytes_of(block);
  const int kind = static_cast<int>(kind_of(block.units));
  loosen(owner);
  owner.live -= bytes;
  owner.count_out(kind, bytes, block.requested);
  log_.note(owner, action, block);
}

// A stream's live bytes may rise to its ceiling without a look at the other streams. While only one thread
// makes ceilings rise, they add up to no more than the recorded peak, which is therefore exact: all are
// lowered to what is live, the sum is compared with the peak, and the difference goes to this stream. Several
// threads would take the difference from each other again and again, so then a stream keeps the ceiling that
// it has reached, and the peak is the sum at the moments when a ceiling rose: exact for each stream alone, a
// lower bound for the sum.
void Accounts::rise(StreamState& stream, std::uint64_t bytes) {
  constexpr std::uint32_t kAlone = 10'000;  // rises in a row that make a thread the only one again
  thread_local char here;
  if (last_riser_ != &here) {
    ceilings_apart_ = last_riser_ != nullptr;
    last_riser_ = &here;
    rises_in_a_row_ = 0;
  }
  if (ceilings_apart_ && ++rises_in_a_row_ >= kAlone) ceilings_apart_ = false;
  const bool alone = !ceilings_apart_;
  // The live bytes of a tight stream equal its ceiling, so only loose streams are examined. They become
  // tight, so that this is repeated only for streams that free something meanwhile. Among several threads a
  // few busy streams stay loose, so that their frees do not contend here.
  std::uint32_t kept = 0;
  std::uint64_t live = ceilings_;
  loose_.each([&](StreamNumber number) {
    StreamState& each = streams_[number];
    std::lock_guard guard(each.lock);
    live -= each.ceiling - each.live;
    if (!alone && (each.live != 0 || each.cache.count() != 0) && kept++ < kMostAsked) return false;
    ceilings_ -= each.ceiling - each.live;
    each.ceiling = each.live;
    if (&each == &stream) return false;
    each.shut_for(StreamState::kTight);
    loose_.remove(number);
    return false;
  });
  peak_live_ = std::max(peak_live_, live + bytes);
  peak_active_ = std::max(peak_active_, live + bytes + pending_.current);
  std::lock_guard guard(stream.lock);
  stream.live += bytes;
  ceilings_ -= stream.ceiling;
  stream.ceiling = alone ? stream.ceiling + (peak_live_ - live) : std::max(stream.ceiling, stream.live);
  ceilings_ += stream.ceiling;
  loosen(stream);
}

void Accounts::loosen(StreamState& stream) {
  stream.open_for(StreamState::kTight);
  loose_.add(stream.number);
}

void Accounts::reset_peaks() {
  std::uint64_t live = 0;
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    for (int kind = 0; kind < 2; ++kind) stream.peak[kind] = stream.now(kind);
    stream.ceiling = stream.live;
    live += stream.live;
  }
  peak_live_ = ceilings_ = live;
  peak_active_ = live + pending_.current;
  for (Meter* meter : {&log_.reserved(), &log_.pieces(), &pending_}) meter->peak = meter->current;
}

// Under the stream's lock.
void Accounts::close(StreamState& stream) {
  stream.live = 0;
  stream.small = stream.large = {};
}

bool Accounts::check(const Standstill& still, std::string* why) const {
  std::uint64_t ceilings = 0;
  for (std::uint32_t n = 0; n < streams_.size(); ++n) ceilings += still.ceiling(n);
  return (ceilings == ceilings_ && (ceilings <= peak_live_ || ceilings_apart_)) ||
         wrong(why, "ceilings, or above the peak");
}

}  // namespace vram
