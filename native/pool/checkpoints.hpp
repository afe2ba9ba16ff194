// What is live in a heap, and putting it back into the state of an earlier moment. Defines Checkpoints.
#pragma once

#include "pool/report.hpp"
#include "pool/shares.hpp"

namespace vram {

class Checkpoints : PoolPart {
 public:
  Checkpoints(PoolState& state, Accounts& accounts, const Zeroing& zeroing, Pending& pending, Caches& caches,
              const Captures& captures, StreamLives& lives, const Report& report, Shares& shares)
      : PoolPart(state),
        accounts_(accounts),
        zeroing_(zeroing),
        pending_(pending),
        caches_(caches),
        captures_(captures),
        lives_(lives),
        report_(report),
        shares_(shares) {}

  // See Pool.
  std::vector<BlockInfo> live(HeapId id) const;
  Status restore(HeapId id, const std::vector<BlockInfo>& wanted);

 private:
  class Still;
  // What a restore does. Everything is decided, and room is made, before anything changes.
  struct Plan {
    struct Place {
      Units offset = 0;
      Units units = 0;
      StreamNumber stream = 0;
      const BlockInfo* info = nullptr;
      bool kept = false;  // it is live already
      Units end() const { return offset + units; }
    };
    std::vector<Place> places;    // where blocks are allocated, in order
    std::vector<Index> freed;     // live blocks that go
    std::vector<Index> waiting;   // live blocks that wait for others after they are freed
    std::vector<Index> returned;  // pending ones that go
  };
  bool plan_places(const Captures::Heap& heap, const std::vector<BlockInfo>& wanted, Plan& plan) const;
  bool plan_blocks(const Captures::Heap& heap, Plan& plan) const;
  bool plan_block(const Captures::Heap& heap, StreamNumber home, Index block, Plan& plan) const;
  bool pages_allow(const std::vector<StreamNumber>& states, const Plan& plan) const;
  bool used_outside(const Captures::Heap& heap, Index block) const;
  void carry_out(const Plan& plan, std::unique_lock<std::mutex>& lock);
  void end(Index block, Action action);

  Accounts& accounts_;
  const Zeroing& zeroing_;
  Pending& pending_;
  Caches& caches_;
  const Captures& captures_;
  StreamLives& lives_;
  const Report& report_;
  Shares& shares_;
};

}  // namespace vram
