// What a pool says of itself: statistics, snapshots, the reasons of an out-of-memory error, check(). Defines
// Report. It changes nothing but peaks.
#pragma once

#include "pool/ladder.hpp"

namespace vram {

// Who resets the peaks, each for itself; `steps`: code that follows the steps of a program (Report::usage).
enum class PeakReader : std::uint8_t { program, framework, steps };
inline constexpr int kPeakReaders = 3;

class Report : PoolPart {
 public:
  Report(PoolState& state, EventLog& log, Accounts& accounts, Pending& pending, const Caches& caches,
         const StreamLives& lives, const Spiller& spiller, const Ladder& ladder)
      : PoolPart(state),
        log_(log),
        accounts_(accounts),
        pending_(pending),
        caches_(caches),
        lives_(lives),
        spiller_(spiller),
        ladder_(ladder) {}

  // With the peaks since this reader has reset them last.
  PoolStats stats(PeakReader reader = PeakReader::program) const;
  void reset_peaks(PeakReader reader = PeakReader::program);
  // What is in use, and its peak since this was called with `restart_peak` last.
  Usage usage(bool restart_peak);
  std::uint64_t live_bytes() const;
  // In the caches of streams, without those of graphs and heaps. Under the pool's mutex.
  std::uint64_t cached_bytes() const;
  std::uint64_t steps() const;
  std::vector<SegmentInfo> snapshot() const;
  std::vector<SegmentInfo> backed_segments() const;
  Status info(Address address, BlockInfo* out) const;
  Status find(Address address, BlockInfo* out) const;
  bool suspended(Address address) const;
  bool check(std::string* why) const;

  // A request found no memory: counts it, notes it in the journal, and says why in *report, if given.
  Status fail(const Climb& climb, OutOfMemoryReport* report);
  OutOfMemoryReport explain(std::uint64_t size, const StreamState& stream) const;
  BlockInfo describe(const Block& block) const;

 private:
  PoolStats gather() const;  // under the mutex
  void restart_peaks(PeakReader reader, const PoolStats& now);
  SegmentInfo describe(const Segment& segment, Units from, Units to) const;
  std::uint64_t suspended_live() const;
  std::uint64_t spilled_live() const;
  std::uint64_t bytes_on(bool (*counts)(const Page&)) const;
  bool check_growables(std::string* why) const;
  bool check_streams(const Standstill& still, std::string* why) const;

  EventLog& log_;
  Accounts& accounts_;
  Pending& pending_;
  const Caches& caches_;
  const StreamLives& lives_;
  const Spiller& spiller_;
  const Ladder& ladder_;
  std::uint64_t out_of_memory_ = 0;
  mutable Meter inactive_[2];
  PoolStats peaks_[kPeakReaders];  // before the peaks restarted last; only peaks are used
};

}  // namespace vram
