// The journal: what a pool did, one event an entry, kept apart for each stream so that streams share no lock.
// A ring keeps the last events and overwrites the oldest; a tape keeps every event until the recorder takes
// it. Both count what they drop. Writing to disk happens elsewhere.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/slab.hpp"
#include "base/types.hpp"

namespace vram {

enum class Action : std::uint8_t {
  allocate,
  free,           // the program gave the block back
  free_pending,   // as free, but another stream may still use it
  free_complete,  // a pending block became reusable
  grow,           // memory came from the driver
  shrink,         // memory went back to the driver
  out_of_memory,
  mark,  // the program marked a place in the recording; `bytes` is the mark's number
};

// One event, of fixed size.
struct JournalEntry {
  std::uint64_t sequence = 0;  // the pool's order of events
  std::uint64_t time_ns = 0;   // monotonic clock
  Address address = 0;         // of out_of_memory: the bytes that the device had free
  std::uint64_t bytes = 0;     // as requested, also where it is freed; what came or went
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
    entries_[next_ % entries_.capacity()] = entry;
    ++next_;
  }
  std::uint64_t dropped() const { return next_ > entries_.capacity() ? next_ - entries_.capacity() : 0; }
  void copy_to(std::vector<JournalEntry>& out) const {
    for (std::uint64_t i = dropped(); i < next_; ++i) out.push_back(entries_[i % entries_.capacity()]);
  }

 private:
  LazyArray<JournalEntry> entries_;  // costs memory as it fills
  std::uint64_t next_ = 0;
};
// Entries of a ring, at most: 1 GiB for each stream.
inline constexpr std::uint32_t kMostJournaled = std::uint32_t{1} << 24;

// A piece of a tape: entries in order, with room for kChunkEntries.
using JournalChunk = std::vector<JournalEntry>;
inline constexpr std::size_t kChunkEntries = 4096;

// The chunks of one recording, full or empty: at most so many that all tapes together hold `most` entries.
// Its lock is the innermost of all.
class JournalChunks {
 public:
  explicit JournalChunks(std::uint64_t most) : left_(most / kChunkEntries + 1) {}
  bool take(JournalChunk* out);  // an empty one; false: none is left
  void give_back(JournalChunk&& chunk);

 private:
  std::mutex mutex_;
  std::vector<JournalChunk> spare_;
  std::uint64_t left_;  // that may still be made
};

// Every event of one stream since the last take. Guarded by the stream's lock.
class JournalTape {
 public:
  explicit JournalTape(std::shared_ptr<JournalChunks> chunks) : chunks_(std::move(chunks)) {}
  void add(const JournalEntry& entry) {
    if (last_.size() == last_.capacity() && !turn()) [[unlikely]] {
      ++dropped_;
      return;
    }
    last_.push_back(entry);
    // The next lock would wait for a store into memory that no cache has.
    __builtin_prefetch(last_.data() + last_.size() + kAhead, 1);
  }
  // Everything since the last time, in order. Allocates nothing.
  struct Taken {
    std::vector<JournalChunk> full;
    JournalChunk last;
    std::uint64_t dropped = 0;
  };
  Taken take() {
    return {std::exchange(full_, {}), last_.empty() ? JournalChunk() : std::exchange(last_, {}),
            std::exchange(dropped_, 0)};
  }

 private:
  bool turn();

  static constexpr std::size_t kAhead = 8;  // entries
  std::shared_ptr<JournalChunks> chunks_;
  JournalChunk last_;
  std::vector<JournalChunk> full_;
  std::uint64_t dropped_ = 0;
};

// What the tapes of one pool come to, in order. One thread at a time takes.
//
// Invariant: an event gets its sequence and its place on a tape under one lock of its stream. So when a
// number is read first and all tapes are taken after, every event below that number is among them; the few
// beyond it wait for the next time.
class Recording {
 public:
  explicit Recording(std::uint64_t most) : chunks_(std::make_shared<JournalChunks>(most)) {}
  std::unique_ptr<JournalTape> tape() const { return std::make_unique<JournalTape>(chunks_); }
  // Appends to `out` all events below `complete`, by sequence; returns how many were dropped. `taken` is what
  // the tapes gave.
  std::uint64_t merge(std::vector<JournalTape::Taken>& taken, std::uint64_t complete,
                      std::vector<JournalEntry>& out);

 private:
  std::shared_ptr<JournalChunks> chunks_;
  std::vector<JournalEntry> early_;  // beyond `complete` the last time
};

}  // namespace vram
