// RMM's pool_memory_resource: a free list per stream, best fit, stealing from other streams before the pool
// grows, and growth that doubles the pool while the device has memory.
#pragma once

#include "replay/policies/block_policy.hpp"

namespace vram {

struct RmmPoolConfig {
  std::uint64_t initial_size = 0;
  std::uint64_t maximum_size = 0;  // 0: only that of the device
};

class RmmPoolPolicy : public BlockPolicy {
 public:
  RmmPoolPolicy(const RmmPoolConfig& config, PolicyDevice device);

  Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) override;

 private:
  PolicyBlock* take(std::uint32_t stream, std::uint64_t size);
  // From another stream's list as it is; otherwise from all lists, merged into this stream's one by one.
  PolicyBlock* take_from_others(std::uint32_t stream, std::uint64_t size);
  PolicyBlock* merge_others(std::uint32_t stream, std::uint64_t size);
  PolicyBlock* grow(std::uint32_t stream, std::uint64_t size);
  PolicyBlock* add_segment(std::uint32_t stream, std::uint64_t bytes);
  // Puts a free block into the list of its stream, merged with free neighbors there.
  void keep(PolicyBlock* block);

  void reclaim(PolicyBlock* block) override { keep(block); }
  bool is_kept(const PolicyBlock& block) const override;
  std::size_t kept() const override;

  const RmmPoolConfig config_;
  std::vector<BlockSet<BySize>> free_;  // by stream
};

}  // namespace vram
