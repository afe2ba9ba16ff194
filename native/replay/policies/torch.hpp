// PyTorch's caching allocator, as in torch 2.6 to 2.12: two pools per stream, best fit, splitting and
// merging, and the ladder it climbs before it reports that memory ran out. Its expandable segments are in
// torch_expandable.hpp; graph pools are not modelled.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "replay/policies/block_policy.hpp"

namespace vram {

// The options of PYTORCH_ALLOC_CONF that affect placement, in bytes. The defaults are PyTorch's.
struct TorchConfig {
  static constexpr std::size_t kIntervals =
      16;  // [1 MiB, 2 MiB), [2 MiB, 4 MiB), …; smaller ones share the first

  std::uint64_t max_split_size = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t max_non_split_rounding = 20 * kMiB;
  std::uint64_t large_segment = 20 * kMiB;
  double garbage_collection_threshold = 0;  // of `allowed`; 0: never
  std::array<std::uint64_t, kIntervals> roundup_power2_divisions{};
  // What set_per_process_memory_fraction allows; absent: unlimited.
  std::optional<std::uint64_t> allowed;
};

class TorchPolicy : public BlockPolicy {
 public:
  // The config sets the limit, so the device should have no other.
  TorchPolicy(const TorchConfig& config, PolicyDevice device);

  Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) override;
  void trim() override;

 protected:
  // Free blocks of one stream, of the small or the large kind.
  struct Pool {
    std::uint32_t stream = 0;
    bool small = false;
    BlockSet<BySize> free;
    BlockSet<ByAddress> unmapped;  // addresses without memory; expandable segments only
  };
  struct Request {
    Pool& pool;
    std::uint64_t size;  // rounded
  };

  // The three operations in which expandable segments differ.
  virtual PolicyBlock* best_fit(const Request& request) const;
  virtual PolicyBlock* grow(const Request& request);
  virtual bool should_split(const PolicyBlock& block, std::uint64_t size) const;
  virtual void release_free_blocks(Pool& pool);

  void reclaim(PolicyBlock* block) override;
  bool is_kept(const PolicyBlock& block) const override;
  std::size_t kept() const override;

  bool is_allowed(std::uint64_t segment) const;
  std::uint64_t segment_size(std::uint64_t size) const;
  void keep(PolicyBlock* block);
  // Merges `neighbour` into `block` if it is free as well and both or neither have memory.
  void merge(PolicyBlock* block, PolicyBlock* neighbour);
  Pool& pool_of(const PolicyBlock& block) { return *pools_[2 * block.stream + (block.small ? 1 : 0)]; }

  const TorchConfig config_;

 private:
  using Rung = PolicyBlock* (TorchPolicy::*)(const Request&);
  static const Rung kLadder[];

  Pool& pool_for(std::uint32_t stream, bool small);
  PolicyBlock* search(const Request& request);
  PolicyBlock* collect_and_grow(const Request& request);
  PolicyBlock* release_oversize_and_grow(const Request& request);
  PolicyBlock* release_all_and_grow(const Request& request);
  std::uint64_t rounded(std::uint64_t size) const;
  bool collects_garbage() const;
  void collect_garbage();
  bool release_oversize(const Request& request);
  void release(PolicyBlock* block);
  std::uint64_t age(const PolicyBlock& block) const;

  std::vector<std::unique_ptr<Pool>> pools_;  // 2 · stream + (1 for small)
  std::array<std::uint64_t, 2> searches_{};   // by small; the unit of a block's age
};

}  // namespace vram
