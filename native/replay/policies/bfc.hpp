// The best-fit-with-coalescing allocator of TensorFlow and XLA: regions that double in size while the device
// has room, requests rounded to 256 bytes, and a rest that goes with its block unless it is large.
// One stream's memory is at once every stream's, as these frameworks compute on one.
#pragma once

#include "replay/policies/block_policy.hpp"

namespace vram {

struct BfcConfig {
  bool allow_growth = true;         // else all of the device is taken with the first request
  bool garbage_collection = false;  // give free regions back before memory is said to have run out
};

class BfcPolicy : public BlockPolicy {
 public:
  BfcPolicy(const BfcConfig& config, PolicyDevice device);

  Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) override;

 private:
  PolicyBlock* search(std::uint64_t size);
  // Whether a region with room for `size` bytes was added.
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
