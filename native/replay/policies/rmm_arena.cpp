// RMM's arenas. See rmm_arena.hpp.
#include "replay/policies/rmm_arena.hpp"

#include <bit>

namespace vram {

namespace {

constexpr std::uint64_t kGranule = 256;
constexpr std::uint64_t kSuperblock = kMiB;  // minimum size, and largest request of a stream's arena
constexpr std::uint64_t kAddresses = std::uint64_t{1} << 50;

// RMM's size classes: four between two powers of two, finer below 2 KiB; 54 KiB replaces 56.
std::uint64_t size_class(std::uint64_t size) {
  if (size <= 2 * kKiB) return round_up(std::max<std::uint64_t>(size, 1), kGranule);
  const std::uint64_t rounded = round_up(size, std::bit_floor(size - 1) / 4);
  if (rounded != 56 * kKiB) return rounded;
  return size <= 54 * kKiB ? 54 * kKiB : 64 * kKiB;
}

}  // namespace

void RmmArenaPolicy::Superblock::insert(PolicyBlock* block) {
  block->mark = reinterpret_cast<std::uint64_t>(this);
  free.insert(block);
  largest = std::max(largest, block->size);
}

void RmmArenaPolicy::Superblock::erase(PolicyBlock* block) {
  free.erase(block);
  if (block->size < largest) return;
  largest = 0;
  for (auto at = free.begin(); at.block() != nullptr; at.advance())
    largest = std::max(largest, at.block()->size);
}

RmmArenaPolicy::RmmArenaPolicy(PolicyDevice device) : BlockPolicy(std::move(device)) {
  base_ = device_.reserve_addresses(kAddresses, kSlotBytes);
  PolicyBlock block;
  block.address = base_;
  block.size = kAddresses;
  give(add_superblock(base_, kAddresses, blocks_.add(block)), &shared_);
}

RmmArenaPolicy::Superblock* RmmArenaPolicy::add_superblock(Address address, std::uint64_t size,
                                                           PolicyBlock* whole) {
  auto added = std::make_unique<Superblock>();
  added->address = address;
  added->size = size;
  added->insert(whole);
  Superblock* superblock = added.get();
  superblocks_.emplace(superblock, std::move(added));
  return superblock;
}

Token RmmArenaPolicy::allocate(std::uint64_t size, std::uint32_t stream, std::int64_t) {
  if (size > device_.capacity() || size > kAddresses / 2) return nullptr;
  const std::uint64_t bytes = size_class(size);
  PolicyBlock* block = serve(bytes, stream);
  if (block == nullptr) {
    ++retries_;
    defragment();
    block = serve(bytes, stream);
  }
  return block != nullptr ? hand_out(block) : nullptr;
}

PolicyBlock* RmmArenaPolicy::serve(std::uint64_t size, std::uint32_t stream) {
  Arena& arena = size > kSuperblock ? shared_ : arenas_[stream];
  Superblock* superblock = size > kSuperblock ? nullptr : first_with_room(arena, size);
  if (superblock == nullptr) {
    superblock = acquire(size);
    if (superblock == nullptr) return nullptr;
    give(superblock, &arena);
  }
  return first_fit(superblock, size);
}

RmmArenaPolicy::Superblock* RmmArenaPolicy::first_with_room(const Arena& arena, std::uint64_t size) {
  for (const auto& [address, superblock] : arena)
    if (superblock->largest >= size) return superblock;
  return nullptr;
}

void RmmArenaPolicy::give(Superblock* superblock, Arena* arena) {
  superblock->owner = arena;
  arena->emplace(superblock->address, superblock);
}

RmmArenaPolicy::Superblock* RmmArenaPolicy::acquire(std::uint64_t size) {
  Superblock* superblock = first_with_room(shared_, size);
  if (superblock == nullptr) return nullptr;
  const std::uint64_t bytes = std::max(size, kSuperblock);
  shared_.erase(superblock->address);
  if (!superblock->is_empty() || superblock->size < bytes + kSuperblock) return superblock;
  PolicyBlock* rest = superblock->free.begin().block();
  superblock->erase(rest);
  PolicyBlock* front = blocks_.split_front(rest, bytes);
  rest->prev = front->next = nullptr;  // blocks never cross the edge of a superblock
  superblock->address += bytes;
  superblock->size -= bytes;
  superblock->insert(rest);
  give(superblock, &shared_);
  return add_superblock(front->address, bytes, front);
}

PolicyBlock* RmmArenaPolicy::first_fit(Superblock* superblock, std::uint64_t size) {
  auto at = superblock->free.begin();
  while (at.block()->size < size) at.advance();
  PolicyBlock* block = at.block();
  if (!reach(block->address + size)) return nullptr;
  superblock->erase(block);
  if (block->size == size) return block;
  PolicyBlock* front = blocks_.split_front(block, size);
  superblock->insert(block);
  front->mark = block->mark;
  return front;
}

// Returns whether the device has memory up to `end`.
bool RmmArenaPolicy::reach(Address end) {
  const std::uint64_t wanted = round_up(end - base_, kSuperblock);
  return wanted <= device_.reserved() || device_.extend(wanted - device_.reserved());
}

void RmmArenaPolicy::reclaim(PolicyBlock* block) {
  Superblock* superblock = reinterpret_cast<Superblock*>(block->mark);
  for (PolicyBlock* neighbour : {block->prev, block->next}) {
    if (neighbour == nullptr || !neighbour->is_free()) continue;
    superblock->erase(neighbour);
    blocks_.absorb(block, neighbour);
  }
  superblock->insert(block);
  if (superblock->owner == &shared_ && superblock->is_empty()) release(superblock);
}

void RmmArenaPolicy::release(Superblock* superblock) {
  superblock->owner->erase(superblock->address);
  give(superblock, &shared_);
  auto at = shared_.find(superblock->address);
  if (at != shared_.begin()) superblock = join(std::prev(at)->second, superblock);
  at = std::next(shared_.find(superblock->address));
  if (at != shared_.end()) join(superblock, at->second);
}

// Merges two empty adjacent superblocks; otherwise returns `high`.
RmmArenaPolicy::Superblock* RmmArenaPolicy::join(Superblock* low, Superblock* high) {
  if (!low->is_empty() || !high->is_empty() || low->address + low->size != high->address) return high;
  PolicyBlock* front = low->free.begin().block();
  PolicyBlock* back = high->free.begin().block();
  low->erase(front);
  front->next = back;
  back->prev = front;
  blocks_.absorb(front, back);
  low->size += high->size;
  low->insert(front);
  shared_.erase(high->address);
  superblocks_.erase(high);
  return low;
}

void RmmArenaPolicy::defragment() {
  for (auto& [stream, arena] : arenas_) {
    std::vector<Superblock*> empty;
    for (const auto& [address, superblock] : arena)
      if (superblock->is_empty()) empty.push_back(superblock);
    for (Superblock* superblock : empty) release(superblock);
  }
}

bool RmmArenaPolicy::is_kept(const PolicyBlock& block) const {
  const Superblock* superblock = reinterpret_cast<const Superblock*>(block.mark);
  const bool merged = block.next == nullptr || !block.next->is_free();
  return merged && superblock->free.lower_bound(block.address).block() == &block;
}

std::size_t RmmArenaPolicy::kept() const {
  std::size_t count = 0;
  for (const auto& [key, superblock] : superblocks_) count += superblock->free.size();
  return count;
}

}  // namespace vram
