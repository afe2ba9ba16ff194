// What policies over blocks share: the counting device, the blocks, the statistics, and memory that waits for
// another stream. Each policy adds where a block comes from and where it goes.
#pragma once

#include <map>

#include "replay/policies/blocks.hpp"
#include "replay/policies/policy.hpp"

namespace vram {

class BlockPolicy : public Policy {
 public:
  void free(Token token, std::int64_t time_us) override;
  Ticket free_later(Token token, std::uint32_t stream, std::int64_t time_us) override;
  void complete(Ticket ticket) override;
  Placement placement(Token token) const override;
  PolicyUsage usage() const override;
  const std::vector<std::uint64_t>& segment_sizes() const override { return device_.sizes(); }
  // Verifies neighbors, sums, and the invariants of the policy.
  bool check(std::string* why) const override;

 protected:
  explicit BlockPolicy(PolicyDevice device) : device_(std::move(device)) {}

  // Takes back an unused block: merge it, keep it, or release it to the device.
  virtual void reclaim(PolicyBlock* block) = 0;
  // Whether an unused block is where the policy would look for it.
  virtual bool is_kept(const PolicyBlock& block) const = 0;
  // The number of free blocks of the policy; with is_kept: exactly the free ones.
  virtual std::size_t kept() const = 0;

  // Whether blocks with memory account for all reserved memory.
  virtual bool reserves_every_block() const { return true; }

  // Marks `block` as allocated.
  Token hand_out(PolicyBlock* block) {
    block->live = true;
    allocated_ += block->size;
    peak_allocated_ = std::max(peak_allocated_, allocated_);
    return block;
  }
  // Waits for every other stream.
  void complete_all();

  PolicyDevice device_;
  PolicyBlocks blocks_;
  std::uint64_t retries_ = 0;

 private:
  PolicyBlock* give_up(Token token);

  std::uint64_t allocated_ = 0;
  std::uint64_t peak_allocated_ = 0;
  Ticket next_ticket_ = 1;
  std::map<Ticket, PolicyBlock*> pending_;
};

}  // namespace vram
