// Live bytes: what each stream has allocated, and the peaks of their sum. Defines Accounts.
#pragma once

#include "pool/climb.hpp"
#include "pool/event_log.hpp"

namespace vram {

class Accounts : PoolPart {
 public:
  Accounts(PoolState& state, EventLog& log) : PoolPart(state), log_(log) {}

  // Makes a block in state moving a live one of the request's stream.
  Address make_live(Index block, const Climb& climb);
  // A live block is no longer its owner's; `action` is its name in the journal. Under the owner's lock.
  void end_live(Index block, StreamState& owner, Action action);
  // The stream's live bytes may change without the mutex. Under the stream's lock.
  void loosen(StreamState& stream);
  void reset_peaks();
  // From now on nothing is live; totals and peaks stay.
  void close(StreamState& stream);

  Meter& pending() { return pending_; }  // bytes of pending blocks (Pending)
  std::uint64_t peak_live() const { return peak_live_; }
  std::uint64_t peak_active() const { return std::max(peak_active_, peak_live_); }
  std::uint64_t steps() const { return loose_.steps(); }
  bool check(const Standstill& still, std::string* why) const;

 private:
  void rise(StreamState& stream, std::uint64_t bytes);

  EventLog& log_;
  const void* last_riser_ = nullptr;  // the thread that made a ceiling rise last
  std::uint32_t rises_in_a_row_ = 0;  // by it
  bool ceilings_apart_ = false;       // they may add up to more than the peak
  std::uint64_t ceilings_ = 0;        // their sum
  StreamSet loose_;                   // streams that are not tight: StreamState::kTight
  std::uint64_t peak_live_ = 0;
  std::uint64_t peak_active_ = 0;  // live and pending
  Meter pending_;
};

}  // namespace vram
