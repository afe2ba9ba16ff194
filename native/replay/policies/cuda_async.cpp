// A model of the driver's pool. See cuda_async.hpp.
#include "replay/policies/cuda_async.hpp"

namespace vram {

namespace {

constexpr std::uint64_t kGranule = 512;
constexpr std::uint64_t kSmallSize = kMiB;
constexpr std::uint64_t kLargeGranule = 2 * kMiB;
constexpr std::uint64_t kPage = 32 * kMiB;
constexpr std::uint64_t kAddresses = PolicyDevice::kUnlimited;

}  // namespace

Token CudaAsyncPolicy::allocate(std::uint64_t size, std::uint32_t, std::int64_t) {
  if (size > device_.capacity()) return nullptr;
  const bool small = size <= kSmallSize;
  const std::uint64_t bytes = round_up(std::max<std::uint64_t>(size, 1), small ? kGranule : kLargeGranule);
  Range& range = ranges_[small];
  PolicyBlock* block = search(range, bytes);
  if (block == nullptr) block = grow(range, small, bytes);
  if (block == nullptr) return nullptr;
  if (block->size == bytes) return hand_out(block);
  PolicyBlock* front = blocks_.split_front(block, bytes);
  range.free.insert(block);
  return hand_out(front);
}

PolicyBlock* CudaAsyncPolicy::search(Range& range, std::uint64_t size) {
  PolicyBlock* block = range.free.lower_bound(size).block();
  if (block != nullptr) range.free.erase(block);
  return block;
}

PolicyBlock* CudaAsyncPolicy::grow(Range& range, bool small, std::uint64_t size) {
  const bool extends = range.last != nullptr && range.last->is_free();
  const std::uint64_t bytes = round_up(size - (extends ? range.last->size : 0), kPage);
  if (!device_.map(bytes, kPage)) return nullptr;
  if (extends) {
    range.free.erase(range.last);
    range.last->size += bytes;
    return range.last;
  }
  PolicyBlock block;
  block.address = range.last != nullptr ? range.last->address + range.last->size
                                        : device_.reserve_addresses(kAddresses, kPage);
  block.size = bytes;
  block.small = small;
  block.prev = range.last;
  PolicyBlock* added = blocks_.add(block);
  if (range.last != nullptr) range.last->next = added;
  range.last = added;
  return added;
}

Ticket CudaAsyncPolicy::free_later(Token token, std::uint32_t, std::int64_t time_us) {
  free(token, time_us);
  return 0;
}

void CudaAsyncPolicy::reclaim(PolicyBlock* block) {
  Range& range = ranges_[block->small];
  for (PolicyBlock* neighbour : {block->prev, block->next}) {
    if (neighbour == nullptr || !neighbour->is_free()) continue;
    range.free.erase(neighbour);
    if (range.last == neighbour) range.last = block;
    blocks_.absorb(block, neighbour);
  }
  range.free.insert(block);
}

bool CudaAsyncPolicy::is_kept(const PolicyBlock& block) const {
  const bool merged = block.next == nullptr || !block.next->is_free();
  return merged && ranges_[block.small].free.lower_bound(block.size, block.address).block() == &block;
}

}  // namespace vram
