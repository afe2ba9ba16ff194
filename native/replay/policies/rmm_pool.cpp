// RMM's pool. See rmm_pool.hpp.
#include "replay/policies/rmm_pool.hpp"

namespace vram {

namespace {
constexpr std::uint64_t kAlignment = 256;
}  // namespace

RmmPoolPolicy::RmmPoolPolicy(const RmmPoolConfig& config, PolicyDevice device)
    : BlockPolicy(std::move(device)), config_(config) {
  free_.resize(1);
  if (config_.initial_size == 0) return;
  PolicyBlock* block = add_segment(0, round_up(config_.initial_size, kAlignment));
  if (block != nullptr) keep(block);
}

Token RmmPoolPolicy::allocate(std::uint64_t size, std::uint32_t stream, std::int64_t) {
  if (size > device_.capacity()) return nullptr;
  if (stream >= free_.size()) free_.resize(stream + std::size_t{1});
  const std::uint64_t bytes = round_up(std::max<std::uint64_t>(size, 1), kAlignment);
  PolicyBlock* block = take(stream, bytes);
  if (block == nullptr) block = take_from_others(stream, bytes);
  if (block == nullptr) block = merge_others(stream, bytes);
  if (block == nullptr) block = grow(stream, bytes);
  if (block == nullptr) return nullptr;
  if (block->size == bytes) {
    block->stream = stream;
    return hand_out(block);
  }
  PolicyBlock* front = blocks_.split_front(block, bytes);
  front->stream = stream;
  free_[block->stream].insert(block);  // the remainder stays at the end of the block
  return hand_out(front);
}

PolicyBlock* RmmPoolPolicy::take(std::uint32_t stream, std::uint64_t size) {
  PolicyBlock* block = free_[stream].lower_bound(size).block();
  if (block != nullptr) free_[stream].erase(block);
  return block;
}

PolicyBlock* RmmPoolPolicy::take_from_others(std::uint32_t stream, std::uint64_t size) {
  for (std::uint32_t other = 0; other < free_.size(); ++other)
    if (PolicyBlock* block = other != stream ? take(other, size) : nullptr) return block;
  return nullptr;
}

PolicyBlock* RmmPoolPolicy::merge_others(std::uint32_t stream, std::uint64_t size) {
  for (std::uint32_t other = 0; other < free_.size(); ++other) {
    if (other == stream || free_[other].empty()) continue;
    for (auto at = free_[other].begin(); at.block() != nullptr; at = free_[other].begin()) {
      PolicyBlock* block = at.block();
      free_[other].erase(block);
      block->stream = stream;
      keep(block);
    }
    if (PolicyBlock* block = take(stream, size)) return block;
  }
  return nullptr;
}

PolicyBlock* RmmPoolPolicy::grow(std::uint32_t stream, std::uint64_t size) {
  const std::uint64_t pool = device_.reserved();
  const std::uint64_t limit = config_.maximum_size;
  if (limit != 0 && (pool >= limit || size > limit - pool)) return nullptr;
  std::uint64_t bytes =
      limit != 0 ? std::max(size, (limit - pool) / 2 / kAlignment * kAlignment) : std::max(size, pool);
  for (;;) {
    if (PolicyBlock* block = add_segment(stream, bytes)) return block;
    if (bytes == size) return nullptr;
    bytes = std::max(size, bytes / 2 / kAlignment * kAlignment);
  }
}

PolicyBlock* RmmPoolPolicy::add_segment(std::uint32_t stream, std::uint64_t bytes) {
  PolicyBlock block;
  block.size = bytes;
  block.stream = stream;
  return device_.allocate(bytes, &block.address) ? blocks_.add(block) : nullptr;
}

void RmmPoolPolicy::keep(PolicyBlock* block) {
  BlockSet<BySize>& free = free_[block->stream];
  for (PolicyBlock* neighbour : {block->prev, block->next}) {
    if (neighbour == nullptr || !neighbour->is_free() || neighbour->stream != block->stream) continue;
    free.erase(neighbour);
    blocks_.absorb(block, neighbour);
  }
  free.insert(block);
}

bool RmmPoolPolicy::is_kept(const PolicyBlock& block) const {
  return free_[block.stream].lower_bound(block.size, block.address).block() == &block;
}

std::size_t RmmPoolPolicy::kept() const {
  std::size_t count = 0;
  for (const auto& free : free_) count += free.size();
  return count;
}

}  // namespace vram
