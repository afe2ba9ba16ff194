// The journal: what a pool did, one entry per event, with a tape for each stream so that streams share no
// lock. JournalTape keeps the last events of a stream, or every event until the recorder takes it; Recording
// merges the tapes of a pool. Both count what they drop. Writing to disk happens elsewhere.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/types.hpp"

namespace vram {

enum class Action : std::uint8_t {
  allocate,
  free,           // the program freed the block
  free_pending,   // as free, but another stream may still use it
  free_complete,  // a pending block became reusable
  grow,           // memory came from the driver
  shrink,         // memory went back to the driver
  out_of_memory,
  mark,      // the program marked a point in the recording; `bytes` is the mark's number
  spilled,   // `bytes` of a live block moved to host memory …
  returned,  // … and back
};

// One event, of fixed size.
struct JournalEntry {
  std::uint64_t sequence = 0;  // the pool's order of events
  std::uint64_t time_ns = 0;   // monotonic clock
  Address address = 0;         // of out_of_memory: the bytes that were free on the device
  std::uint64_t bytes = 0;     // as requested, for frees too; of grow and shrink: the change
  std::uint32_t tag = 0;
  std::uint32_t serial = 0;  // of the allocation
  StreamHandle stream = 0;
  Action action = Action::allocate;
};

// A piece of a tape: entries in order.
using JournalChunk = std::vector<JournalEntry>;
inline constexpr std::size_t kChunkEntries = 4096;
// The most entries of a tape that keeps the last ones: 1 GiB for each stream.
inline constexpr std::uint32_t kMostJournaled = std::uint32_t{1} << 24;

// The supply of chunks of one or several tapes, bounded so that together they hold `most` entries or a little
// more. Its lock is the innermost of all.
class JournalChunks {
 public:
  explicit JournalChunks(std::uint64_t most, std::size_t entries = kChunkEntries)
      : entries_(entries), left_(most / entries + 1) {}
  bool take(JournalChunk* out);  // an empty one; false: none is left
  void give_back(JournalChunk&& chunk);

 private:
  std::mutex mutex_;
  std::vector<JournalChunk> spare_;
  const std::size_t entries_;  // of each chunk
  std::uint64_t left_;         // chunks that may still be allocated
};

// The events of one stream, in order. Guarded by the stream's lock.
class JournalTape {
 public:
  // Keeps every event until it is taken, or drops it if no chunk is left.
  explicit JournalTape(std::shared_ptr<JournalChunks> chunks) : chunks_(std::move(chunks)) {}
  // Keeps the last `keep` events: the oldest chunk is reused. pre: 0 < keep <= kMostJournaled.
  explicit JournalTape(std::uint32_t keep);
  void add(const JournalEntry& entry) {
    if (last_.size() == last_.capacity() && !turn()) [[unlikely]] {
      ++dropped_;
      return;
    }
    last_.push_back(entry);
    // The next lock would wait for a store into memory that no cache has.
    __builtin_prefetch(last_.data() + last_.size() + kAhead, 1);
  }
  // Appends the last `keep` events to `out`.
  void copy_to(std::vector<JournalEntry>& out) const;
  std::uint64_t dropped() const { return dropped_ + surplus(); }
  // Takes everything since the last time, in order. Allocates nothing.
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
  std::uint64_t surplus() const;  // entries beyond `keep_` that are still here

  static constexpr std::size_t kAhead = 8;  // entries
  std::shared_ptr<JournalChunks> chunks_;
  JournalChunk last_;
  std::vector<JournalChunk> full_;  // a ring that begins at `oldest_` if only the last events are kept
  std::size_t oldest_ = 0;
  const std::uint32_t keep_ = 0;  // 0: everything
  std::uint64_t dropped_ = 0;
};

// Merges the tapes of one pool by sequence. One thread at a time takes events.
//
// Invariant: an event gets its sequence and its place on a tape under the same lock of its stream. If a
// number is read first and all tapes are taken after that, every event below that number is among them; the
// few beyond it wait for the next time.
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
