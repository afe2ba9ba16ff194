// PyTorch's caching allocator. See torch.hpp.
#include "replay/policies/torch.hpp"

#include <bit>

namespace vram {

namespace {

constexpr std::uint64_t kMinBlock = 512;
constexpr std::uint64_t kSmallSize = kMiB;         // the largest request of the small pools
constexpr std::uint64_t kSmallSegment = 2 * kMiB;  // segment size of the small pools
constexpr std::uint64_t kMinLargeSegment =
    10 * kMiB;  // requests of at least this size get their own segments
constexpr std::uint64_t kSegmentRounding = 2 * kMiB;
constexpr std::uint64_t kLargestRequest = PolicyDevice::kUnlimited;

// Rounds up to the next of the `divisions` equal steps between two powers of two.
std::uint64_t next_division(std::uint64_t size, std::uint64_t divisions) {
  if (std::has_single_bit(size)) return size;
  const std::uint64_t floor = std::bit_floor(size);
  const std::uint64_t step = floor >> (std::bit_width(divisions) - 1);
  return step == 0 ? floor << 1 : round_up(size, step);
}

}  // namespace

TorchPolicy::TorchPolicy(const TorchConfig& config, PolicyDevice device)
    : BlockPolicy(std::move(device)), config_(config) {}

// ---- allocation -------------------------------------------------------------------------------------

const TorchPolicy::Rung TorchPolicy::kLadder[] = {&TorchPolicy::search, &TorchPolicy::collect_and_grow,
                                                  &TorchPolicy::release_oversize_and_grow,
                                                  &TorchPolicy::release_all_and_grow};

Token TorchPolicy::allocate(std::uint64_t size, std::uint32_t stream, std::int64_t) {
  if (size > kLargestRequest) return nullptr;
  const std::uint64_t bytes = rounded(size);
  const Request request{pool_for(stream, bytes <= kSmallSize), bytes};
  for (const Rung rung : kLadder) {
    PolicyBlock* block = (this->*rung)(request);
    if (block == nullptr) continue;
    if (!should_split(*block, bytes)) return hand_out(block);
    PolicyBlock* front = blocks_.split_front(block, bytes);
    keep(block);
    return hand_out(front);
  }
  return nullptr;
}

TorchPolicy::Pool& TorchPolicy::pool_for(std::uint32_t stream, bool small) {
  while (pools_.size() <= 2 * static_cast<std::size_t>(stream) + 1) {
    pools_.push_back(std::make_unique<Pool>());
    pools_.back()->stream = static_cast<std::uint32_t>((pools_.size() - 1) / 2);
    pools_.back()->small = pools_.size() % 2 == 0;
  }
  return *pools_[2 * static_cast<std::size_t>(stream) + (small ? 1 : 0)];
}

std::uint64_t TorchPolicy::rounded(std::uint64_t size) const {
  if (size < kMinBlock) return kMinBlock;
  constexpr int kFirst = std::bit_width(kMiB) - 1;
  const int interval = std::clamp(static_cast<int>(std::bit_width(size)) - 1 - kFirst, 0,
                                  static_cast<int>(TorchConfig::kIntervals) - 1);
  const std::uint64_t divisions = config_.roundup_power2_divisions[static_cast<std::size_t>(interval)];
  if (divisions > 1 && size > kMinBlock * divisions) return next_division(size, divisions);
  return round_up(size, kMinBlock);
}

std::uint64_t TorchPolicy::segment_size(std::uint64_t size) const {
  if (size <= kSmallSize) return kSmallSegment;
  if (size < kMinLargeSegment) return std::max(config_.large_segment, round_up(size, kSegmentRounding));
  return round_up(size, kSegmentRounding);
}

bool TorchPolicy::should_split(const PolicyBlock& block, std::uint64_t size) const {
  const std::uint64_t rest = block.size - size;
  if (block.small) return rest >= kMinBlock;
  return size < config_.max_split_size && rest > kSmallSize;
}

PolicyBlock* TorchPolicy::best_fit(const Request& request) const {
  return request.pool.free.lower_bound(request.size).block();
}

PolicyBlock* TorchPolicy::search(const Request& request) {
  if (collects_garbage()) ++searches_[request.pool.small];
  PolicyBlock* block = best_fit(request);
  if (block == nullptr) return nullptr;
  const std::uint64_t limit = config_.max_split_size;
  if (request.size < limit && block->size >= limit) return nullptr;
  if (request.size >= limit && block->size >= request.size + config_.max_non_split_rounding) return nullptr;
  request.pool.free.erase(block);
  return block;
}

bool TorchPolicy::is_allowed(std::uint64_t segment) const {
  return !config_.allowed || device_.reserved() + segment <= *config_.allowed;
}

PolicyBlock* TorchPolicy::grow(const Request& request) {
  const std::uint64_t bytes = segment_size(request.size);
  PolicyBlock block;
  if (!is_allowed(bytes) || !device_.allocate(bytes, &block.address)) return nullptr;
  block.size = bytes;
  block.stream = request.pool.stream;
  block.small = request.pool.small;
  return blocks_.add(block);
}

// ---- the ladder -------------------------------------------------------------------------------------

PolicyBlock* TorchPolicy::collect_and_grow(const Request& request) {
  if (collects_garbage()) collect_garbage();
  return grow(request);
}

PolicyBlock* TorchPolicy::release_oversize_and_grow(const Request& request) {
  return release_oversize(request) ? grow(request) : nullptr;
}

void TorchPolicy::trim() {
  complete_all();
  for (const bool small : {false, true})
    for (const auto& pool : pools_)
      if (pool->small == small) release_free_blocks(*pool);
}

PolicyBlock* TorchPolicy::release_all_and_grow(const Request& request) {
  trim();
  ++retries_;
  return grow(request);
}

bool TorchPolicy::collects_garbage() const {
  return config_.allowed && config_.garbage_collection_threshold > 0;
}

std::uint64_t TorchPolicy::age(const PolicyBlock& block) const { return searches_[block.small] - block.mark; }

// Releases whole segments, least recently used first, until the reserved memory is below the threshold.
void TorchPolicy::collect_garbage() {
  const auto threshold = static_cast<std::uint64_t>(config_.garbage_collection_threshold *
                                                    static_cast<double>(*config_.allowed));
  if (device_.reserved() <= threshold) return;
  const std::uint64_t target = device_.reserved() - threshold;
  std::uint64_t ages = 0;
  std::vector<PolicyBlock*> whole;
  for (const auto& pool : pools_) {
    if (pool->small) continue;
    for (PolicyBlock* block : pool->free.list()) {
      if (!block->is_whole()) continue;
      ages += age(*block);
      whole.push_back(block);
    }
  }
  for (std::uint64_t reclaimed = 0; reclaimed < target && !whole.empty();) {
    const double average = static_cast<double>(ages) / static_cast<double>(whole.size());
    std::vector<PolicyBlock*> younger;
    for (PolicyBlock* block : whole) {
      if (static_cast<double>(age(*block)) < average) {
        younger.push_back(block);
        continue;
      }
      reclaimed += block->size;
      ages -= age(*block);
      release(block);
    }
    whole = std::move(younger);
  }
}

// Returns whether enough unsplittable blocks were released for the request.
bool TorchPolicy::release_oversize(const Request& request) {
  const std::uint64_t limit = config_.max_split_size;
  if (limit == TorchConfig{}.max_split_size) return false;
  const std::uint64_t wanted = std::max(request.size, limit);
  BlockSet<BySize>& free = request.pool.free;
  if (PolicyBlock* enough = free.lower_bound(wanted).block()) {
    if (!enough->is_whole()) return false;
    release(enough);
    return true;
  }
  std::uint64_t released = 0;
  while (released < wanted && free.last() != nullptr && free.last()->size >= limit &&
         free.last()->is_whole()) {
    released += free.last()->size;
    release(free.last());
  }
  return released >= wanted;
}

void TorchPolicy::release_free_blocks(Pool& pool) {
  for (PolicyBlock* block : pool.free.list())
    if (block->is_whole()) release(block);
}

void TorchPolicy::release(PolicyBlock* block) {
  pool_of(*block).free.erase(block);
  device_.release(block->address, block->size);
  blocks_.drop(block);
}

// ---- free blocks ------------------------------------------------------------------------------------

void TorchPolicy::keep(PolicyBlock* block) {
  block->mark = searches_[block->small];
  pool_of(*block).free.insert(block);
}

void TorchPolicy::merge(PolicyBlock* block, PolicyBlock* neighbour) {
  if (neighbour == nullptr || !neighbour->is_free() || neighbour->mapped != block->mapped) return;
  Pool& pool = pool_of(*block);
  if (neighbour->mapped)
    pool.free.erase(neighbour);
  else
    pool.unmapped.erase(neighbour);
  blocks_.absorb(block, neighbour);
}

void TorchPolicy::reclaim(PolicyBlock* block) {
  merge(block, block->prev);
  merge(block, block->next);
  keep(block);
}

bool TorchPolicy::is_kept(const PolicyBlock& block) const {
  const Pool& pool = *pools_[2 * block.stream + (block.small ? 1 : 0)];
  const bool merged = block.next == nullptr || !block.next->is_free() || block.next->mapped != block.mapped;
  if (!block.mapped) return merged && pool.unmapped.lower_bound(block.address).block() == &block;
  return merged && pool.free.lower_bound(block.size, block.address).block() == &block;
}

std::size_t TorchPolicy::kept() const {
  std::size_t count = 0;
  for (const auto& pool : pools_) count += pool->free.size() + pool->unmapped.size();
  return count;
}

}  // namespace vram
