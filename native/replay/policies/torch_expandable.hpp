// PyTorch's caching allocator with expandable_segments:True: one range of addresses per stream and kind of
// request, which grows by mapping pages at the lowest suitable place. Everything else is as in torch.hpp.
#pragma once

#include "replay/policies/torch.hpp"

namespace vram {

class TorchExpandablePolicy : public TorchPolicy {
 public:
  using TorchPolicy::TorchPolicy;

 private:
  PolicyBlock* best_fit(const Request& request) const override;
  PolicyBlock* grow(const Request& request) override;
  bool should_split(const PolicyBlock& block, std::uint64_t size) const override;
  void release_free_blocks(Pool& pool) override;

  // The lowest free addresses with space for the request, with or without memory; nullptr if there are none.
  PolicyBlock* find_room(const Request& request);
  PolicyBlock* add_segment(const Request& request);
  // Backs the first `size` bytes of a block with memory, in whole pages, and merges it with free neighbors.
  bool map(PolicyBlock* block, std::uint64_t size);
  // Releases the memory of every page that is completely inside the block.
  void unmap(PolicyBlock* block);
  std::uint64_t page(bool small) const;
  std::uint64_t address_space(const Request& request) const;
};

}  // namespace vram
