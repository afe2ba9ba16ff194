// The real pool as a policy: native/pool/pool.hpp on a model device with the clock of the recording.
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
  // The model device decides when work has completed.
  void complete(Ticket) override {}
  void trim() override { (void)pool_.trim(0, true); }

  // Only the address: the pool does not report the allocated bytes.
  Placement placement(Token token) const override { return {reinterpret_cast<Address>(token), 0}; }
  PolicyUsage usage() const override;
  const std::vector<std::uint64_t>& segment_sizes() const override { return no_sizes_; }
  bool check(std::string* why) const override { return pool_.check(why); }

 private:
  void notice(std::uint32_t stream);
  std::uint32_t other_than(std::uint32_t stream) const;

  std::shared_ptr<ModelBackend> model_;
  Pool pool_;
  std::vector<StreamHandle> handles_{0};
  std::uint32_t recent_ = 0;   // the last stream that was used, and
  std::uint32_t earlier_ = 0;  // the last one before it that differs
  std::uint64_t calls_before_;
  double us_before_;
  std::vector<std::uint64_t> no_sizes_;  // pages come one by one; their sizes carry no information
};

}  // namespace vram
