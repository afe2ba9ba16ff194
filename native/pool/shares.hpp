// Allocations that other processes may map. Defines Shares. How they get them is in sharing/.
#pragma once

#include <unordered_map>
#include <vector>

#include "pool/state.hpp"

namespace vram {

// A live allocation as another process will see it.
struct SharedBlock {
  Address base = 0;          // the start of its first page, or of its plain segment
  std::uint64_t bytes = 0;   // of its pages, or of the segment
  Address block = 0;         // the start of the allocation
  std::uint64_t number = 0;  // tells it from other allocations at this address; 0: a plain segment
};

// One page of a shared allocation, in order of their addresses.
struct SharedPage {
  int fd = -1;
  std::uint64_t bytes = 0;
};

// A shared allocation keeps its pages as long as it lives: it is not suspended, and no cache takes it when it
// is freed (Block::used_elsewhere), so that its end is seen here.
class Shares : PoolPart {
 public:
  explicit Shares(PoolState& state) : PoolPart(state) {}

  // Of the live allocation that contains the address. Sharing one again gives the same number.
  Status share(Address address, SharedBlock* out);
  // Exports at most `most` pages of a shared allocation, from its `first` page on; none are left if *pages is
  // empty. invalid: the allocation was freed. The caller closes the descriptors.
  Status export_pages(Address block, std::uint64_t number, std::uint64_t first, std::size_t most,
                      std::vector<SharedPage>* pages);
  bool shared(Index block) const { return numbers_.contains(block); }
  // The block is no longer live. Under the mutex.
  void forget(Index block) { numbers_.erase(block); }
  void clear() { numbers_.clear(); }

 private:
  std::unordered_map<Index, std::uint64_t> numbers_;  // of live blocks
  std::uint64_t last_ = 0;
};

}  // namespace vram
