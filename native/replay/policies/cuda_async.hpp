// A model of the driver's stream-ordered pool (cudaMallocAsync) that never releases memory on its own, as
// PyTorch configures it. NVIDIA does not publish the algorithm; this is the simplest one that agrees with the
// measured peaks of real jobs, which are all multiples of 32 MiB:
// - memory comes in pages of 32 MiB, appended to one range of addresses for requests up to 1 MiB and another
// for
//   larger ones, which are rounded up to 2 MiB;
// - best fit among free ranges, split and merged freely, equally for all streams: the driver orders a reuse
// after the
//   free by itself.
// It stayed within 4 % of the actual memory of five recorded jobs (traces/README.md).
#pragma once

#include <array>

#include "replay/policies/block_policy.hpp"

namespace vram {

class CudaAsyncPolicy : public BlockPolicy {
 public:
  explicit CudaAsyncPolicy(PolicyDevice device) : BlockPolicy(std::move(device)) {}

  Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) override;
  // The next owner waits on the device, not here.
  Ticket free_later(Token token, std::uint32_t stream, std::int64_t time_us) override;

 private:
  struct Range {
    BlockSet<BySize> free;
    PolicyBlock* last = nullptr;  // the block with the highest address
  };

  PolicyBlock* search(Range& range, std::uint64_t size);
  // Appends pages until the last block has `size` bytes, and removes it from the free blocks.
  PolicyBlock* grow(Range& range, bool small, std::uint64_t size);

  void reclaim(PolicyBlock* block) override;
  bool is_kept(const PolicyBlock& block) const override;
  std::size_t kept() const override { return ranges_[0].free.size() + ranges_[1].free.size(); }

  std::array<Range, 2> ranges_;  // by small
};

}  // namespace vram
