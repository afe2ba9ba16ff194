// Best fit with coalescing. See bfc.hpp.
#include "replay/policies/bfc.hpp"

namespace vram {

namespace {

constexpr std::uint64_t kGranule = 256;
constexpr std::uint64_t kFirstRegion = 2 * kMiB;
constexpr std::uint64_t kLargestRest = 128 * kMiB;  // a remainder this large is always split off

std::uint64_t rounded_down(std::uint64_t bytes) { return bytes / kGranule * kGranule; }

}  // namespace

BfcPolicy::BfcPolicy(const BfcConfig& config, PolicyDevice device)
    : BlockPolicy(std::move(device)), config_(config) {
  const bool takes_all = !config_.allow_growth && device_.capacity() < PolicyDevice::kUnlimited;
  region_ = rounded_down(takes_all ? device_.capacity() : std::min(device_.capacity(), kFirstRegion));
}

Token BfcPolicy::allocate(std::uint64_t size, std::uint32_t, std::int64_t) {
  if (size > device_.capacity()) return nullptr;
  const std::uint64_t bytes = round_up(std::max<std::uint64_t>(size, 1), kGranule);
  PolicyBlock* block = search(bytes);
  if (block == nullptr && extend(bytes)) block = search(bytes);
  if (block == nullptr && config_.garbage_collection && release_free_regions(bytes) && extend(bytes))
    block = search(bytes);
  if (block == nullptr) return nullptr;
  const std::uint64_t rest = block->size - bytes;
  if (rest < bytes && rest < kLargestRest) return hand_out(block);
  PolicyBlock* front = blocks_.split_front(block, bytes);
  free_.insert(block);
  return hand_out(front);
}

PolicyBlock* BfcPolicy::search(std::uint64_t size) {
  PolicyBlock* block = free_.lower_bound(size).block();
  if (block != nullptr) free_.erase(block);
  return block;
}

bool BfcPolicy::extend(std::uint64_t size) {
  const std::uint64_t available = rounded_down(device_.capacity() - device_.reserved());
  if (size > available) return false;
  const bool enlarged = size > region_;
  while (region_ < size) region_ *= 2;
  PolicyBlock block;
  block.size = std::min(region_, available);
  if (!device_.allocate(block.size, &block.address)) return false;
  if (!enlarged) region_ = std::min(region_ * 2, PolicyDevice::kUnlimited);
  free_.insert(blocks_.add(block));
  return true;
}

// Returns whether this made enough space for `size` bytes.
bool BfcPolicy::release_free_regions(std::uint64_t size) {
  std::vector<PolicyBlock*> regions;
  std::uint64_t bytes = device_.capacity() - device_.reserved();
  for (PolicyBlock* block : free_.list()) {
    if (!block->is_whole()) continue;
    regions.push_back(block);
    bytes += block->size;
  }
  if (regions.empty() || bytes < size) return false;
  ++retries_;
  for (PolicyBlock* block : regions) {
    free_.erase(block);
    device_.release(block->address, block->size);
    blocks_.drop(block);
  }
  return true;
}

void BfcPolicy::reclaim(PolicyBlock* block) {
  for (PolicyBlock* neighbour : {block->prev, block->next}) {
    if (neighbour == nullptr || !neighbour->is_free()) continue;
    free_.erase(neighbour);
    blocks_.absorb(block, neighbour);
  }
  free_.insert(block);
}

bool BfcPolicy::is_kept(const PolicyBlock& block) const {
  const bool merged = block.next == nullptr || !block.next->is_free();
  return merged && free_.lower_bound(block.size, block.address).block() == &block;
}

}  // namespace vram
