// RMM's arena_memory_resource: one large range of memory, divided into superblocks that each stream's arena
// takes for requests up to 1 MiB; larger ones are served from the range itself. First fit by address
// throughout, so the memory reserved here is the smallest arena that would suffice: RMM reserves the
// configured size at the start.
#pragma once

#include <map>
#include <memory>

#include "replay/policies/block_policy.hpp"

namespace vram {

class RmmArenaPolicy : public BlockPolicy {
 public:
  explicit RmmArenaPolicy(PolicyDevice device);

  Token allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) override;

 private:
  struct Superblock;
  using Arena = std::map<Address, Superblock*>;
  // A range of addresses that one arena holds. Invariant: largest is the size of its largest free block.
  struct Superblock {
    Address address = 0;
    std::uint64_t size = 0;
    Arena* owner = nullptr;
    BlockSet<ByAddress> free;
    std::uint64_t largest = 0;

    bool is_empty() const { return largest == size; }
    void insert(PolicyBlock* block);
    void erase(PolicyBlock* block);
  };

  PolicyBlock* serve(std::uint64_t size, std::uint32_t stream);
  // Takes the first superblock with space for `size` out of the shared ones, split if it is empty.
  Superblock* acquire(std::uint64_t size);
  // Returns a superblock to the shared ones; empty neighbors are merged.
  void release(Superblock* superblock);
  void defragment();
  // The first free block of the superblock that is large enough, split; nullptr if the device is full.
  PolicyBlock* first_fit(Superblock* superblock, std::uint64_t size);
  bool reach(Address end);
  Superblock* join(Superblock* low, Superblock* high);
  static Superblock* first_with_room(const Arena& arena, std::uint64_t size);
  static void give(Superblock* superblock, Arena* arena);
  Superblock* add_superblock(Address address, std::uint64_t size, PolicyBlock* whole);

  void reclaim(PolicyBlock* block) override;
  bool is_kept(const PolicyBlock& block) const override;
  std::size_t kept() const override;
  bool reserves_every_block() const override { return false; }

  Address base_;
  Arena shared_;
  std::map<std::uint32_t, Arena> arenas_;  // by stream
  std::map<const Superblock*, std::unique_ptr<Superblock>> superblocks_;
};

}  // namespace vram
