// The cache of freed blocks in front of everything else. Defines StreamCache, and SpinLock, which guards it.
#pragma once

#include <sched.h>

#include <atomic>

#include "placement/blocks.hpp"

namespace vram {

// Held for tens of nanoseconds and never across a call to the backend or to Python.
class SpinLock {
 public:
  void lock() {
    for (int spins = 0; held_.exchange(true, std::memory_order_acquire); ++spins)
      while (held_.load(std::memory_order_relaxed))
        if (++spins > kSpins) sched_yield();
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 64;
  std::atomic<bool> held_{false};
};

// Freed blocks kept whole, by exact size, last in first out. Guarded by the stream's lock.
class StreamCache {
 public:
  static constexpr Units kPlaces = 256;  // sizes above kSmallUnits share these; one size each

  // Takes the block of a size that was cached last, or returns 0.
  Index pop(Blocks& blocks, Units units) {
    Index* const head = find(units);
    if (head == nullptr || *head == 0) return 0;
    const Index block = *head;
    *head = blocks[block].link_after;
    count_one(units, -1);
    return block;
  }
  // Puts a block in front of those of its size; false if its size has no place.
  bool push(Blocks& blocks, Index i) {
    Block& block = blocks[i];
    Index* const head = claim(block.units);
    if (head == nullptr) return false;
    block.link_after = *head;
    *head = i;
    count_one(block.units, 1);
    return true;
  }
  // Takes out every cached block of these sizes, in state moving: a list by `link_after`, ended by `rest`.
  Index drain(Blocks& blocks, const Sizes& sizes, Index rest) {
    if (sizes.least <= kSmallUnits && has_small()) rest = drain_small(blocks, rest);
    if (sizes.most > kSmallUnits && has_large()) rest = drain_large(blocks, sizes, rest);
    return rest;
  }

  std::uint32_t count() const { return count_; }  // blocks held
  std::uint64_t bytes() const { return bytes_; }
  // Whether there are larger ones than kSmallUnits. Needs no lock; without it the answer may be a moment old.
  bool has_large() const { return large_count_.load(std::memory_order_relaxed) != 0; }
  bool has_small() const { return count_ != large_count_.load(std::memory_order_relaxed); }
  // Its blocks have become invalid.
  void forget();

 private:
  Index drain_small(Blocks& blocks, Index rest);
  Index drain_large(Blocks& blocks, const Sizes& sizes, Index rest);
  Index* empty(Blocks& blocks, Index& head, Index* end);
  // The head of the list for a size, or null if a larger size has no place (yet).
  Index* find(Units units) {
    if (units <= kSmallUnits) return &small_[units];
    Place& place = place_of(units);
    return place.units == units ? &place.head : nullptr;
  }
  // The same, taking the place if it is empty; null if another size has it.
  Index* claim(Units units) {
    if (units <= kSmallUnits) {
      // Written only if it changes, so that threads which free each other's blocks can share it.
      std::uint64_t& used = small_used_[units / 64];
      const std::uint64_t bit = std::uint64_t{1} << (units % 64);
      if ((used & bit) == 0) used |= bit;
      return &small_[units];
    }
    Place& place = place_of(units);
    if (place.head == 0) place.units = units;
    if (place.units != units) return nullptr;
    if (!place.listed) {
      place.listed = true;
      listed_[listed_count_++] = static_cast<std::uint8_t>(&place - places_);
    }
    return &place.head;
  }
  void count_one(Units units, int change) {
    count_ += static_cast<std::uint32_t>(change);
    bytes_ += static_cast<std::uint64_t>(change) * units * kUnit;
    if (units > kSmallUnits)
      large_count_.store(large_count_.load(std::memory_order_relaxed) + static_cast<std::uint32_t>(change),
                         std::memory_order_relaxed);
  }
  struct Place {
    Units units = 0;
    Index head = 0;
    bool listed = false;  // in listed_
  };
  Place& place_of(Units units) { return places_[(units * 2654435761u) >> 24]; }
  static_assert(kPlaces == 256, "place_of takes the top 8 bits of the hash");

  std::uint32_t count_ = 0;
  std::atomic<std::uint32_t> large_count_{0};  // written under the lock only
  std::uint64_t bytes_ = 0;
  Index small_[kSmallUnits + 1] = {};
  Place places_[kPlaces];
  // The lists that a block was put on since the last drain.
  std::uint64_t small_used_[kSmallUnits / 64 + 1] = {};
  std::uint32_t listed_count_ = 0;
  std::uint8_t listed_[kPlaces];  // numbers of places, in order of their first block
};

}  // namespace vram
