// Parts of segments, linked to their neighbors, and the ordered index in which policies keep the free ones.
// Each policy decides which block is used, split or merged.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "base/types.hpp"

namespace vram {

// Invariant: next == nullptr or next->prev == this and next->address == address + size.
struct PolicyBlock {
  Address address = 0;
  std::uint64_t size = 0;
  PolicyBlock* prev = nullptr;
  PolicyBlock* next = nullptr;
  std::uint64_t mark = 0;  // used by the policy: an age, a segment, a time
  std::uint32_t stream = 0;
  bool small = false;    // in the pool for small requests, if the policy has one
  bool live = false;     // the program holds it
  bool pending = false;  // the program freed it, and another stream still uses it
  bool mapped = true;    // it has memory, not only addresses

  bool is_free() const { return !live && !pending; }
  bool is_whole() const { return prev == nullptr && next == nullptr; }
};

// Blocks whose host addresses never change.
class PolicyBlocks {
 public:
  PolicyBlock* add(const PolicyBlock& value) {
    if (spare_.empty()) return &blocks_.emplace_back(value);
    PolicyBlock* block = spare_.back();
    spare_.pop_back();
    *block = value;
    return block;
  }
  void drop(PolicyBlock* block) {
    block->size = 0;
    spare_.push_back(block);
  }
  // Splits `size` bytes off the front of `block`, which keeps the rest. Returns the front.
  PolicyBlock* split_front(PolicyBlock* block, std::uint64_t size) {
    PolicyBlock front = *block;
    front.size = size;
    front.next = block;
    PolicyBlock* added = add(front);
    if (added->prev != nullptr) added->prev->next = added;
    block->prev = added;
    block->address += size;
    block->size -= size;
    return added;
  }
  // Merges the neighbor `other` into `block`. `other` is deleted.
  void absorb(PolicyBlock* block, PolicyBlock* other) {
    if (block->prev == other) {
      block->address = other->address;
      block->prev = other->prev;
      if (block->prev != nullptr) block->prev->next = block;
    } else {
      block->next = other->next;
      if (block->next != nullptr) block->next->prev = block;
    }
    block->size += other->size;
    drop(other);
  }
  // Every block in use, in no order.
  template <typename Visit>
  void each(Visit visit) const {
    for (const PolicyBlock& block : blocks_)
      if (block.size != 0) visit(block);
  }

 private:
  std::deque<PolicyBlock> blocks_;
  std::vector<PolicyBlock*> spare_;
};

// How blocks are ordered: by size and then address, or by address alone.
struct BlockKey {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  friend bool operator<(const BlockKey& a, const BlockKey& b) {
    return a.first != b.first ? a.first < b.first : a.second < b.second;
  }
};
struct BySize {
  static BlockKey key(const PolicyBlock* block) { return {block->size, block->address}; }
};
struct ByAddress {
  static BlockKey key(const PolicyBlock* block) { return {block->address, 0}; }
};

// An ordered set of blocks in short sorted runs: the free lists of policies are usually so short that moving
// a few entries is cheaper than following a tree. A block's key must not change while it is in the set.
// Invariant: no run is empty, and every key of a run is below every key of the next.
template <typename Order>
class BlockSet {
  static constexpr std::size_t kRun = 64;
  struct Entry {
    BlockKey key;
    PolicyBlock* block;
  };
  struct Run {
    std::size_t count = 0;
    std::array<Entry, kRun> entries;
    BlockKey last() const { return entries[count - 1].key; }
  };

 public:
  // A position in the set; the end if block() is nullptr. Valid until the set changes.
  class Cursor {
   public:
    PolicyBlock* block() const {
      return run_ < set_->runs_.size() ? set_->runs_[run_]->entries[place_].block : nullptr;
    }
    void advance() {
      if (++place_ < set_->runs_[run_]->count) return;
      ++run_;
      place_ = 0;
    }

   private:
    friend BlockSet;
    Cursor(const BlockSet* set, std::size_t run, std::size_t place) : set_(set), run_(run), place_(place) {}
    const BlockSet* set_;
    std::size_t run_;
    std::size_t place_;
  };

  bool empty() const { return runs_.empty(); }
  std::size_t size() const { return size_; }
  Cursor begin() const { return Cursor(this, 0, 0); }
  // The first block whose key is not below {first, second}.
  Cursor lower_bound(std::uint64_t first, std::uint64_t second = 0) const { return find({first, second}); }
  PolicyBlock* last() const {
    return empty() ? nullptr : runs_.back()->entries[runs_.back()->count - 1].block;
  }

  void insert(PolicyBlock* block) {
    const BlockKey key = Order::key(block);
    Cursor at = find(key);
    if (at.run_ == runs_.size()) {  // greater than all others: append
      if (runs_.empty()) runs_.push_back(std::make_unique<Run>());
      at.run_ = runs_.size() - 1;
      at.place_ = runs_.back()->count;
    }
    if (runs_[at.run_]->count == kRun) {
      halve(at.run_);
      if (at.place_ > kRun / 2) {
        at.place_ -= kRun / 2;
        ++at.run_;
      }
    }
    Run& run = *runs_[at.run_];
    Entry* place = run.entries.data() + at.place_;
    std::memmove(place + 1, place, (run.count - at.place_) * sizeof(Entry));
    *place = {key, block};
    ++run.count;
    ++size_;
  }

  // pre: the block is in the set.
  void erase(const PolicyBlock* block) {
    const Cursor at = find(Order::key(block));
    Run& run = *runs_[at.run_];
    Entry* place = run.entries.data() + at.place_;
    std::memmove(place, place + 1, (run.count - at.place_ - 1) * sizeof(Entry));
    if (--run.count == 0) runs_.erase(runs_.begin() + static_cast<std::ptrdiff_t>(at.run_));
    --size_;
  }

  // Every block in order, for loops that change the set.
  std::vector<PolicyBlock*> list() const {
    std::vector<PolicyBlock*> blocks;
    for (Cursor at = begin(); at.block() != nullptr; at.advance()) blocks.push_back(at.block());
    return blocks;
  }

 private:
  Cursor find(const BlockKey& key) const {
    std::size_t low = 0;
    for (std::size_t count = runs_.size(); count > 0;) {
      const std::size_t half = count / 2;
      const bool below = runs_[low + half]->last() < key;
      low += below ? half + 1 : 0;
      count = below ? count - half - 1 : half;
    }
    if (low == runs_.size()) return Cursor(this, low, 0);
    const Run& run = *runs_[low];
    std::size_t place = 0;
    for (std::size_t count = run.count; count > 0;) {
      const std::size_t half = count / 2;
      const bool below = run.entries[place + half].key < key;
      place += below ? half + 1 : 0;
      count = below ? count - half - 1 : half;
    }
    return Cursor(this, low, place);
  }
  void halve(std::size_t index) {
    auto upper = std::make_unique<Run>();
    Run& lower = *runs_[index];
    upper->count = kRun - kRun / 2;
    std::memcpy(upper->entries.data(), lower.entries.data() + kRun / 2, upper->count * sizeof(Entry));
    lower.count = kRun / 2;
    runs_.insert(runs_.begin() + static_cast<std::ptrdiff_t>(index) + 1, std::move(upper));
  }

  std::vector<std::unique_ptr<Run>> runs_;
  std::size_t size_ = 0;
};

}  // namespace vram
