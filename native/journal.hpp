// The journal: a bounded ring of what the pool did, one for each stream so that streams share no lock.
// It counts what it drops. Reading it and writing it to disk happen elsewhere.
#pragma once

#include <vector>

#include "types.hpp"

namespace vram {

enum class Action : std::uint8_t {
  allocate,
  free,           // the program gave the block back
  free_pending,   // as free, but another stream may still use it
  free_complete,  // a pending block became reusable
  grow,           // memory came from the driver
  shrink,         // memory went back to the driver
  out_of_memory,
};

// One event, of fixed size.
struct JournalEntry {
  std::uint64_t sequence = 0;  // the pool's order of events
  std::uint64_t time_ns = 0;   // monotonic clock
  Address address = 0;
  std::uint64_t bytes = 0;  // requested for allocate; the block's for free
  std::uint32_t tag = 0;
  std::uint32_t serial = 0;  // of the allocation
  StreamHandle stream = 0;
  Action action = Action::allocate;
};

// A ring of entries, overwriting the oldest. Guarded by the stream's lock.
class JournalRing {
 public:
  explicit JournalRing(std::size_t capacity) : entries_(capacity) {}
  void add(const JournalEntry& entry) {
    entries_[next_ % entries_.size()] = entry;
    ++next_;
  }
  std::uint64_t dropped() const { return next_ > entries_.size() ? next_ - entries_.size() : 0; }
  void copy_to(std::vector<JournalEntry>& out) const {
    for (std::uint64_t i = dropped(); i < next_; ++i) out.push_back(entries_[i % entries_.size()]);
  }

 private:
  std::vector<JournalEntry> entries_;
  std::uint64_t next_ = 0;
};

}  // namespace vram
