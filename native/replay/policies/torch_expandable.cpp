// Expandable segments. See torch_expandable.hpp.
#include "replay/policies/torch_expandable.hpp"

namespace vram {

namespace {

constexpr std::uint64_t kMinRest = 512;
constexpr std::uint64_t kSmallPage = 2 * kMiB;
// PyTorch reserves addresses for 9/8 of the device. A recording does not contain the size of the device.
constexpr std::uint64_t kLikelyDevice = 128 * kGiB;
constexpr std::uint64_t kLargestDevice = 16 * 1024 * kGiB;

// The size that a block could grow to: its own bytes and the addresses behind it.
std::uint64_t reach(const PolicyBlock& block) {
  return block.size + (block.next != nullptr && !block.next->mapped ? block.next->size : 0);
}

}  // namespace

std::uint64_t TorchExpandablePolicy::page(bool small) const {
  return small ? kSmallPage : config_.large_segment;
}

// A request that is allowed fits into its range: a device without a limit is larger than any request.
std::uint64_t TorchExpandablePolicy::address_space(const Request& request) const {
  const std::uint64_t device =
      std::clamp(config_.allowed.value_or(kLikelyDevice), kLikelyDevice, kLargestDevice);
  return std::max(device + device / 8, request.size);
}

bool TorchExpandablePolicy::should_split(const PolicyBlock& block, std::uint64_t size) const {
  return block.size - size >= kMinRest;
}

// The best-fitting block; a block that can still grow counts with its maximum size.
PolicyBlock* TorchExpandablePolicy::best_fit(const Request& request) const {
  auto at = request.pool.free.lower_bound(request.size);
  PolicyBlock* best = at.block();
  if (best == nullptr) return nullptr;
  for (at.advance(); at.block() != nullptr && reach(*at.block()) < reach(*best); at.advance())
    best = at.block();
  return best;
}

PolicyBlock* TorchExpandablePolicy::grow(const Request& request) {
  // The limit applies to a plain segment, not to the missing pages.
  if (!is_allowed(segment_size(request.size))) return nullptr;
  PolicyBlock* block = find_room(request);
  if (block == nullptr) return nullptr;
  if (!block->mapped && !map(block, std::min(block->size, request.size))) return nullptr;
  while (block->size < request.size) {
    PolicyBlock* behind = block->next;
    if (!map(behind, std::min(request.size - block->size, behind->size))) return nullptr;
    block = behind;  // which was merged with the one before it
  }
  request.pool.free.erase(block);
  return block;
}

PolicyBlock* TorchExpandablePolicy::find_room(const Request& request) {
  for (auto at = request.pool.unmapped.begin(); at.block() != nullptr; at.advance()) {
    PolicyBlock* first = at.block();
    if (first->prev != nullptr && first->prev->is_free()) first = first->prev;
    std::uint64_t room = 0;
    for (PolicyBlock* block = first; block != nullptr && block->is_free() && room < request.size;
         block = block->next)
      room += block->size;
    if (room >= request.size) return first;
  }
  return add_segment(request);
}

PolicyBlock* TorchExpandablePolicy::add_segment(const Request& request) {
  Pool& pool = request.pool;
  PolicyBlock block;
  block.size = round_up(address_space(request), page(pool.small));
  block.address = device_.reserve_addresses(block.size, page(pool.small));
  if (block.address == 0) return nullptr;
  block.stream = pool.stream;
  block.small = pool.small;
  block.mapped = false;
  PolicyBlock* added = blocks_.add(block);
  pool.unmapped.insert(added);
  return added;
}

bool TorchExpandablePolicy::map(PolicyBlock* block, std::uint64_t size) {
  const std::uint64_t bytes = round_up(size, page(block->small));
  if (!device_.map(bytes, page(block->small))) return false;
  Pool& pool = pool_of(*block);
  pool.unmapped.erase(block);
  if (bytes < block->size) {
    // The mapped block keeps its identity, because the caller continues to use it.
    PolicyBlock rest = *block;
    rest.address += bytes;
    rest.size -= bytes;
    rest.prev = block;
    PolicyBlock* behind = blocks_.add(rest);
    if (behind->next != nullptr) behind->next->prev = behind;
    block->next = behind;
    block->size = bytes;
    pool.unmapped.insert(behind);
  }
  block->mapped = true;
  merge(block, block->prev);
  merge(block, block->next);
  keep(block);
  return true;
}

void TorchExpandablePolicy::release_free_blocks(Pool& pool) {
  for (PolicyBlock* block : pool.free.list()) unmap(block);
}

void TorchExpandablePolicy::unmap(PolicyBlock* block) {
  const std::uint64_t size = page(block->small);
  const Address begin = round_up(block->address, size);
  const Address end = (block->address + block->size) / size * size;
  if (begin >= end) return;
  Pool& pool = pool_of(*block);
  pool.free.erase(block);
  if (begin > block->address) keep(blocks_.split_front(block, begin - block->address));
  PolicyBlock* middle = block;
  if (end - begin < block->size) {
    middle = blocks_.split_front(block, end - begin);
    keep(block);
  }
  device_.unmap(middle->size, size);
  middle->mapped = false;
  merge(middle, middle->prev);
  merge(middle, middle->next);
  pool.unmapped.insert(middle);
}

}  // namespace vram
