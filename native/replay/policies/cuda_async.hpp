// A model of the driver's stream-ordered pool (cudaMallocAsync) that never gives memory back by itself, as
// PyTorch sets it. NVIDIA does not publish the algorithm; this is the simplest one that agrees with measured
// peaks of real jobs, which are all multiples of 32 MiB:
// - memory comes in pages of 32 MiB, appended to one range of addresses for requests up to 1 MiB and
//   another for larger ones, which are rounded up to 2 MiB;
// - best fit among free ranges, split and merged at will, by all streams alike: the driver orders a reuse
//   behind the free by itself.
// It stayed within 4 % of what five recorded jobs really held (traces/README.md).
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
  // Appends pages until the last block has `size` bytes, and takes it out.
  PolicyBlock* grow(Range& range, bool small, std::uint64_t size);

  void reclaim(PolicyBlock* block) override;
  bool is_kept(const PolicyBlock& block) const override;
  std::size_t kept() const override { return ranges_[0].free.size() + ranges_[1].free.size(); }

  std::array<Range, 2> ranges_;  // by small
};

}  // namespace vram
