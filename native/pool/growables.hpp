// Growable buffers: a strip of addresses each, into which pages are mapped as the buffer grows and from which
// they are released as it shrinks. Defines Growables. Finding memory is the ladder's responsibility, as for
// every other request. See Pool for the calls.
#pragma once

#include "pool/preparer.hpp"
#include "pool/report.hpp"

namespace vram {

class Growables : PoolPart {
 public:
  Growables(PoolState& state, EventLog& log, Accounts& accounts, Zeroing& zeroing, Pending& pending,
            StreamLives& lives, Ladder& ladder, Report& report)
      : PoolPart(state),
        log_(log),
        accounts_(accounts),
        zeroing_(zeroing),
        pending_(pending),
        lives_(lives),
        ladder_(ladder),
        report_(report) {}
  ~Growables() { (void)preparer_.release(); }  // still there only in the child of a fork, without its thread

  Status open(std::uint64_t max, StreamHandle stream, Address* out);
  Status resize(Address address, std::uint64_t bytes, std::uint64_t ahead, std::uint32_t tag,
                OutOfMemoryReport* report);
  Status prepare(Address address, std::uint64_t bytes, std::uint64_t number);
  Status close(Address address);
  Status info(Address address, GrowableInfo* out) const;
  // Ends the thread that prepares pages; the caller destroys it when it holds no lock.
  std::unique_ptr<Preparer> end() { return std::move(preparer_); }

 private:
  Index block_in_use(Index strip) const;
  Units units_in_use(Index strip) const;
  Index pending_behind(Index strip) const;
  Status grow(Index strip, Units units, std::uint32_t tag, std::unique_lock<std::mutex>& lock,
              OutOfMemoryReport* report);
  void attach(Index strip, Index piece, std::uint32_t tag);
  void shrink(Index strip, Units units);
  void free_behind_fence(Index block, Index kept = 0);

  EventLog& log_;
  Accounts& accounts_;
  Zeroing& zeroing_;
  Pending& pending_;
  StreamLives& lives_;
  Ladder& ladder_;
  Report& report_;
  std::uint64_t opened_ = 0;            // so far
  std::unique_ptr<Preparer> preparer_;  // null until it is needed
};

}  // namespace vram
