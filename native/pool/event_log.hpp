// What happens in a pool, written down: the journal's rings and the tapes of a recording, one of each for
// every stream. Defines EventLog and Standstill.
#pragma once

#include "pool/state.hpp"

namespace vram {

class EventLog : PoolPart {
 public:
  explicit EventLog(PoolState& state) : PoolPart(state) {}

  // Gives a new stream its ring and tape. Null with the reason in *why if there is no stream.
  StreamState* attach(StreamState* stream, Status* why);
  // Under the stream's lock.
  void note(StreamState& stream, Action action, Address address, std::uint64_t bytes, std::uint32_t tag,
            std::uint32_t serial) {
    if (stream.journaling) [[unlikely]]
      write(stream, action, address, bytes, tag, serial);
  }
  void note(StreamState& stream, Action action, const Block& block) {
    if (stream.journaling) [[unlikely]]
      write(stream, action, space().address_of(block), block.requested, block.tag, block.serial);
  }
  // Calls back for every event from now on, with the mutex held; empty: no more.
  void listen(std::function<void(const PoolEvent&)> listener);
  void tell_completed(const StreamState& owner, const Block& block) const;
  // Follows what is reserved from the driver; a change is written into the journal of `stream`.
  void note_reserved(StreamState& stream);

  Status start_journal(std::uint32_t entries);
  void copy_journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const;
  void start_recording(std::uint64_t most);
  void mark(std::uint64_t number);
  std::uint64_t take_recorded(std::vector<JournalEntry>& out);

  Meter& reserved() { return reserved_; }
  Meter& pieces() { return pieces_; }

 private:
  void write(StreamState& stream, Action action, Address address, std::uint64_t bytes, std::uint32_t tag,
             std::uint32_t serial);
  JournalEntry entry(const StreamState& stream, Action action, Address address, std::uint64_t bytes,
                     std::uint32_t tag, std::uint32_t serial);
  void record_existing();
  void tell(PoolEvent::Kind kind, Index segment, Address address, std::uint64_t bytes,
            StreamHandle stream) const;

  std::atomic<std::uint64_t> sequence_{0};
  std::shared_ptr<Recording> recording_;  // null: none
  std::function<void(const PoolEvent&)> listener_;
  Meter reserved_;  // bytes from the driver
  Meter pieces_;    // pages and plain segments
};

// While it exists, every stream stands still without its lock being held: the fast paths find a ceiling that
// nothing fits under and a cache that takes no more blocks, and go to the mutex, which the caller holds. So a
// look at all blocks sees one moment, and threads that allocate meanwhile sleep instead of spinning.
class Standstill {
 public:
  // pre: the mutex is held, here and in the destructor.
  explicit Standstill(const StreamTable& streams);
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;
  std::uint64_t ceiling(std::uint32_t number) const { return ceilings_[number]; }

 private:
  const StreamTable& streams_;
  std::vector<std::uint64_t> ceilings_;
};

}  // namespace vram
