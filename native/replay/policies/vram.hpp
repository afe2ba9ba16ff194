// The real pool as a policy: native/pool/pool.hpp on a model device with the clock of the recording.
//
// If the pool spills, memory on host pages has to be used there. A recording does not say when, so this is
// assumed: a block on host pages is read once, from beginning to end, before it is freed, and once in every
// step at whose end it is still there. Without steps, the end of the program counts as the end of one.
// Memory returns as in a running process: once a second of the recording and of the time that swaps took, if
// nothing was spilled in between. Who drives the replay may do what a framework does in a running process:
// look at the memory, bring it back and say what goes first (vram.replay.saved).
#pragma once

#include "backends/model.hpp"
#include "pool/pool.hpp"
#include "replay/policies/policy.hpp"

namespace vram {

class VramPolicy : public Policy {
 public:
  // capacity: of the model device. Work completes `lag_us` after it was issued, in recorded time.
  VramPolicy(const PoolConfig& config, std::uint64_t capacity, double lag_us);

  Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) override;
  void free(Token token, std::int64_t time_us) override;
  Ticket free_later(Token token, std::uint32_t stream, std::int64_t time_us) override;
  // ---- what a framework does

  struct Look {
    Usage usage;
    std::uint64_t needed = 0;  // bytes that were lacking since the last look, when pages had to move
  };
  Look look(bool restart_peak);
  // Returns the bytes that returned. None return by themselves for kPostponed from now on.
  std::uint64_t bring_back(std::uint64_t most, std::int64_t time_us);
  // Host memory for copies of tensors; false: there is not so much.
  bool take_host_bytes(std::uint64_t bytes) { return pool_.take_host_bytes(bytes).ok(); }
  void give_host_bytes(std::uint64_t bytes) { pool_.give_host_bytes(bytes); }
  // Replaces what was said before.
  void steer(const std::vector<Token>& first, const std::vector<Token>& last);

  // The model device decides when work has completed.
  void complete(Ticket) override {}
  void trim() override { (void)pool_.trim(0, true); }
  void step() override;

  // Only the address: the pool does not report the allocated bytes.
  Placement placement(Token token) const override { return {reinterpret_cast<Address>(token), 0}; }
  PolicyUsage usage() const override;
  const std::vector<std::uint64_t>& segment_sizes() const override { return no_sizes_; }
  std::vector<SpillTraffic> spill_steps() const override;
  bool check(std::string* why) const override { return pool_.check(why); }

 private:
  void notice(std::uint32_t stream);
  void set_time(std::int64_t time_us);
  void follow_spill(std::int64_t time_us);
  void bring_back_in_time(std::int64_t time_us);
  void read_before_free(Address address);
  SpillTraffic traffic(const PoolStats& stats) const;
  std::uint32_t other_than(std::uint32_t stream) const;

  std::shared_ptr<ModelBackend> model_;
  Pool pool_;
  std::vector<StreamHandle> handles_{0};
  std::uint32_t recent_ = 0;   // the last stream that was used, and
  std::uint32_t earlier_ = 0;  // the last one before it that differs
  std::uint64_t calls_before_;
  double us_before_;
  const bool spills_;             // the pool may spill
  bool spilled_ = false;          // it has
  bool spilling_ = false;         // the request in progress spills
  double shift_us_ = 0;           // how far the device's clock is ahead because the host waited for swaps
  double looked_us_ = 0;          // when memory was last brought back …
  std::uint64_t swaps_seen_ = 0;  // … and how many swaps there had been
  std::uint64_t needed_ = 0;      // bytes lacking since the last look
  std::uint64_t read_ = 0;
  std::uint64_t peak_host_ = 0;
  std::vector<SpillTraffic> steps_;
  std::vector<std::uint64_t> no_sizes_;  // pages come one by one; their sizes carry no information
};

}  // namespace vram
