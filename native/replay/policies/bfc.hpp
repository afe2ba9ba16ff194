// The best-fit-with-coalescing allocator of TensorFlow and XLA: regions that double in size while the device
// has memory, requests rounded to 256 bytes, and a remainder that stays with its block unless it is large.
// Memory of one stream is immediately available to all, because these frameworks compute on one stream.
#pragma once

#include "replay/policies/block_policy.hpp"

namespace vram {

struct BfcConfig {
  bool allow_growth = true;         // otherwise the first request reserves the whole device
  bool garbage_collection = false;  // release free regions before reporting out of memory
};

class BfcPolicy : public BlockPolicy {
 public:
  BfcPolicy(const BfcConfig& config, PolicyDevice device);

  Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) override;

 private:
  PolicyBlock* search(std::uint64_t size);
  // Returns whether a region with space for `size` bytes was added.
  bool extend(std::uint64_t size);
  bool release_free_regions(std::uint64_t size);

  void reclaim(PolicyBlock* block) override;
  bool is_kept(const PolicyBlock& block) const override;
  std::size_t kept() const override { return free_.size(); }

  const BfcConfig config_;
  std::uint64_t region_;  // bytes of the next region
  BlockSet<BySize> free_;
};

}  // namespace vram
