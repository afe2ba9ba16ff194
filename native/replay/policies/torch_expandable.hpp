// PyTorch's caching allocator with expandable_segments:True: one range of addresses for each stream and kind
// of request, grown by mapping pages at the lowest place that serves. All else is as in torch.hpp.
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

  // The lowest free addresses with room for the request, with or without memory.
  PolicyBlock* find_room(const Request& request);
  PolicyBlock* add_segment(Pool& pool);
  // Gives the first `size` bytes of a block memory, in whole pages, and merges it with free neighbours.
  bool map(PolicyBlock* block, std::uint64_t size);
  // Takes the memory of every page that lies in the block as a whole.
  void unmap(PolicyBlock* block);
  std::uint64_t page(bool small) const;
  std::uint64_t address_space() const;
};

}  // namespace vram
