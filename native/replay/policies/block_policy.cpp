// Statistics, pending memory and checks. See block_policy.hpp.
#include "replay/policies/block_policy.hpp"

#include <utility>

namespace vram {

PolicyBlock* BlockPolicy::give_up(Token token) {
  PolicyBlock* block = static_cast<PolicyBlock*>(token);
  block->live = false;
  allocated_ -= block->size;
  return block;
}

void BlockPolicy::free(Token token, std::int64_t) { reclaim(give_up(token)); }

Ticket BlockPolicy::free_later(Token token, std::uint32_t, std::int64_t) {
  PolicyBlock* block = give_up(token);
  block->pending = true;
  pending_.emplace(next_ticket_, block);
  return next_ticket_++;
}

void BlockPolicy::complete(Ticket ticket) {
  const auto found = pending_.find(ticket);
  if (found == pending_.end()) return;
  PolicyBlock* block = found->second;
  pending_.erase(found);
  block->pending = false;
  reclaim(block);
}

void BlockPolicy::complete_all() {
  for (auto& [ticket, block] : std::exchange(pending_, {})) {
    block->pending = false;
    reclaim(block);
  }
}

Placement BlockPolicy::placement(Token token) const {
  const PolicyBlock* block = static_cast<const PolicyBlock*>(token);
  return {block->address, block->size};
}

PolicyUsage BlockPolicy::usage() const {
  PolicyUsage usage;
  usage.allocated = allocated_;
  usage.peak_allocated = peak_allocated_;
  usage.reserved = device_.reserved();
  usage.peak_reserved = device_.peak_reserved();
  usage.driver_calls = device_.calls();
  usage.driver_us = device_.us();
  usage.retries = retries_;
  return usage;
}

bool BlockPolicy::check(std::string* why) const {
  std::uint64_t live = 0;
  std::uint64_t mapped = 0;
  std::size_t pending = 0;
  std::size_t free = 0;
  const char* broken = nullptr;
  blocks_.each([&](const PolicyBlock& block) {
    live += block.live ? block.size : 0;
    mapped += block.mapped ? block.size : 0;
    pending += block.pending ? 1 : 0;
    free += block.is_free() ? 1 : 0;
    if (block.live && (block.pending || !block.mapped)) broken = "a live block is pending or has no memory";
    if (block.next != nullptr && block.next->prev != &block) broken = "neighbours do not agree";
    if (block.next != nullptr && block.next->address != block.address + block.size)
      broken = "neighbours do not touch";
    if (block.is_free() && !is_kept(block)) broken = "a free block is not kept";
  });
  if (live != allocated_) broken = "live blocks are not what is allocated";
  if (pending != pending_.size()) broken = "pending blocks are not what waits";
  if (free != kept()) broken = "kept blocks are not the free ones";
  if (reserves_every_block() && mapped != device_.reserved())
    broken = "blocks with memory are not what is reserved";
  if (broken != nullptr) *why = broken;
  return broken == nullptr;
}

}  // namespace vram
