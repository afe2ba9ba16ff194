// The ladder: the rungs that a request climbs until one serves it. Defines Ladder.
#pragma once

#include "pool/spiller.hpp"

namespace vram {

class Ladder : PoolPart {
 public:
  // Calls the user's out-of-memory callback; true: try again.
  using CallBack = std::function<bool(const Allocator::Callback&, std::uint64_t size, StreamHandle)>;
  Ladder(PoolState& state, EventLog& log, Caches& caches, Pending& pending, const Captures& captures,
         StreamLives& lives, Spiller& spiller, CallBack call_back)
      : PoolPart(state),
        log_(log),
        caches_(caches),
        pending_(pending),
        captures_(captures),
        lives_(lives),
        spiller_(spiller),
        call_back_(std::move(call_back)) {
    arrange();
  }
  // After the configuration has changed.
  void arrange();

  // A block in state moving; or 0, with the error in climb.error or because memory has run out.
  Index climb(Climb& climb);
  // The first two rungs alone, which most requests need; they do not call the device. Called with the
  // stream's lock, which it releases.
  Index climb_own(Climb& climb);
  // The loop over the rungs: tries those of a set in order and stops at the first that serves.
  Index try_rungs(Climb& climb, Rungs rungs, Rung* served);
  // Moves free pages of other streams to the request's, as many as it lacks.
  void gather_pages(Climb& climb, bool by_waiting);
  void count(Rung rung) { ++served_[static_cast<int>(rung)]; }
  // Bytes that the pool may still reserve.
  std::uint64_t budget() const { return state_.budget(); }
  // Releases free memory beyond PoolConfig::release_threshold whose last use has completed. Examines at most
  // `patience` pages and segments that are still in use. Without `may_wait`, what a release would wait for
  // stays.
  void keep_threshold(std::uint32_t patience = kMostAsked, bool may_wait = false);
  // Free memory that a release threshold counts; without cached blocks, and without what graphs and heaps
  // keep for themselves.
  std::uint64_t idle_bytes();

  std::uint64_t served(int rung) const { return served_[rung]; }
  std::uint64_t retries() const { return retries_; }

 private:
  using Serve = Index (Ladder::*)(Climb&);
  struct Step {
    Rung rung;
    Serve serve;
  };

  Index search_again(Climb& climb);
  Index pop_cached(const Climb& climb);
  bool merges_cached(const Climb& climb) const;
  Sizes merged_before(const Want& want) const;
  Index serve_stream_cache(Climb& climb);
  Index serve_own_blocks(Climb& climb);
  Index serve_passed_pending(Climb& climb);
  Index serve_finished_elsewhere(Climb& climb);
  Index serve_free_pages(Climb& climb);
  Index serve_growth(Climb& climb);
  Index serve_stream_wait(Climb& climb);
  Index serve_flush(Climb& climb);
  Index serve_callbacks(Climb& climb);
  Index serve_host_wait(Climb& climb);
  Index serve_give_back(Climb& climb);
  Index serve_spill(Climb& climb);
  Index serve_lent_pages(Climb& climb);
  std::uint64_t lacking(Climb& climb);
  Index serve_new_pages(Climb& climb);
  Index serve_other_bands(Climb& climb);
  Index back(Climb& climb, std::uint64_t create_bytes);
  bool move_pages(StreamState& owner, StreamState& taker, bool by_waiting, std::uint64_t* lacking);
  Index take_segment(Climb& climb);
  Index lend(Climb& climb, bool by_waiting);
  Index lend_heaps(Climb& climb);

  EventLog& log_;
  Caches& caches_;
  Pending& pending_;
  const Captures& captures_;
  StreamLives& lives_;
  Spiller& spiller_;
  const CallBack call_back_;
  std::vector<Step> steps_;
  StreamNumber lend_from_ = 0;  // where lend and gather_pages stopped
  StreamNumber gather_from_ = 0;
  std::uint64_t served_[kRungs] = {};
  std::uint64_t retries_ = 0;
};

}  // namespace vram
