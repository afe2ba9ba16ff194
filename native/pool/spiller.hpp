// Spilling: the contents of pages move to host pages under the same addresses, and return. Defines Spiller.
// Which pages go is decided by a SpillPolicy; what a page is and how it is exchanged is in
// placement/page_stock.cpp.
//
// One swap, in either direction:
//
//   set the pages aside, get pages on the other side      with the mutex
//   close the gates, wait until all streams have arrived
//   copy the contents                                     on streams of the pool's own
//   exchange the pages under the addresses                with the mutex
//   open the gates
//
// Host pages have a second address for copies, and device pages get one for the time of a return. So the
// contents are complete under the addresses of the program at every moment: a swap that fails, or whose gates
// must be opened before the exchange, leaves everything as it was. Swaps take turns
// with suspend, resume and close (Turn). The mutex is released while the host waits, copies or creates pages.
// What a swap works on stays set aside meanwhile; a page whose blocks are freed in the middle becomes free at
// the end.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <unordered_map>

#include "pool/copies.hpp"
#include "pool/shares.hpp"
#include "pool/spill_policy.hpp"
#include "pool/stream_lives.hpp"

namespace vram {

class Spiller : PoolPart {
 public:
  // Which allocations, by their tags; an empty one means all.
  using Wanted = std::function<bool(std::uint32_t)>;
  // The call in a status says what is lacking if it is out_of_memory: what the option allows, host memory, or
  // pages that may move.
  static constexpr const char* kBudget = "spill";
  static constexpr const char* kHostPage = "host_page_create";
  static constexpr const char* kNothing = "spill_nothing";
  static constexpr const char* kLimit = "limit";  // of device memory, on the way back
  // not_ready: another operation had the turn for too long.
  static constexpr const char* kTurn = "spill_turn";

  Spiller(PoolState& state, EventLog& log, Caches& caches, Pending& pending, StreamLives& lives,
          const Shares& shares)
      : PoolPart(state), log_(log), caches_(caches), pending_(pending), lives_(lives), shares_(shares) {}

  // Moves pages to the host until the stream has at least `bytes` more of free device pages, and `wished` if
  // there are so many. Nothing moves if there are not enough. pre: the lock is held; it is released
  // meanwhile. not_ready: a stream did not arrive.
  Status make_room(std::uint64_t bytes, std::uint64_t wished, const StreamState& taker,
                   std::unique_lock<std::mutex>& lock) {
    return make_room(bytes, wished, &taker, lock);
  }
  // Lends host pages to a stream under capture, while nothing may move: at least `bytes`, as its free pages.
  // `request`: the bytes of the request, which their sizes depend on; 0: small ones. pre: the lock is held;
  // it is released meanwhile.
  Status lend(std::uint64_t bytes, std::uint64_t request, const StreamState& taker,
              std::unique_lock<std::mutex>& lock);
  // The capture of these states has ended, and its graph has not been launched. What was lent to them gets
  // device memory, for which other pages move to the host. What cannot, and all if not `movable`, stays in
  // host memory, because nothing tells when a graph is launched.
  void settle(const std::vector<StreamNumber>& states, bool movable);
  // Returns at most `most` bytes to free device pages, unless less than the margin would stay
  // free. What was freed counts as free only if its last use has completed; with `wait`, that is awaited.
  // *returned: how many.
  Status bring_back(std::uint64_t most, std::uint64_t* returned, bool wait = false);
  // The same by hand, for the pages of one allocation. A page stays where it is if it cannot move.
  // out_of_memory: there is not enough memory on the other side for all of them.
  Status spill(Address address, std::uint64_t* moved);
  Status prefetch(Address address, std::uint64_t* moved);
  // The same for all pages whose live blocks have wanted tags only (spill_tags.cpp). They stay on the host
  // until unpark() or prefetch(). On failure nothing moves to the host; to the device, what fits moves.
  Status park(const Wanted& wanted, std::uint64_t* moved);
  Status unpark(const Wanted& wanted, std::uint64_t* moved);

  // Creates host pages ahead of need until `spare` bytes of them are spare, of the sizes that would go next;
  // at most `most` bytes. Other operations get their turn between two pages. *created: how many bytes.
  Status create_ahead(std::uint64_t spare, std::uint64_t most, std::uint64_t* created);

  // Host memory of the budget for somebody else's copies of device memory. Spare pages make room for it.
  // out_of_memory: there is not so much left. What is given back counts as kept for the next time until
  // release_host_bytes().
  Status take_host_bytes(std::uint64_t bytes);
  void give_host_bytes(std::uint64_t bytes);
  Status release_host_bytes();
  // Releases spare pages beyond a budget that has shrunk. Under the mutex.
  void keep_budget();
  // What more pages may take of the budget. Under the mutex.
  std::uint64_t left() const;

  // hook(needed, moved): called with no lock held before pages are chosen for a request, with 0, and once
  // after the first ones have moved. Others may take their memory meanwhile, so not each time.
  void around(std::function<void(std::uint64_t, std::uint64_t)> hook);
  // How tags wish to be treated; called under the mutex.
  void steer(std::function<SpillWish(std::uint32_t)> wish);
  // How allocations wish to be treated, by address; replaces what was said before. They must be live.
  void steer_allocations(std::unordered_map<Address, SpillWish> wishes);
  void set_policy(SpillPolicy policy);
  const SpillCounts& counts() const { return counts_; }
  std::uint64_t parked_bytes() const;  // under the mutex
  // Bytes of the block that are on host pages; of its units from `from` up to `to` only. Under the mutex.
  std::uint64_t spilled_bytes(const Block& block, Units from = 0, Units to = ~Units{0}) const;
  // What was moved, by the labels of the allocations.
  std::unordered_map<std::uint32_t, SpillOfLabel> by_label() const;
  // Of the allocation that contains the address; with a size, of so many of its bytes from there.
  Status spilled(Address address, std::uint64_t* bytes, std::uint64_t size = 0) const;

 private:
  struct Move {
    Index from = 0;  // held, when the swap begins
    Index to = 0;    // not held
    Address address = 0;
    std::uint64_t bytes = 0;
    bool exchanged = false;
  };
  class Swap;
  using SpareBytes = std::array<std::uint64_t, kPageSizes>;

  Status begin(const char* call, std::unique_lock<std::mutex>& lock) const;
  // The most bytes of host pages. Under the mutex.
  std::uint64_t budget() const { return config_.spill - std::min(config_.spill, counts_.taken_bytes); }
  std::vector<SpillCandidate> candidates(Index only) const;
  bool stays(Index block) const;
  SpillWish wish_of(Index block) const;
  void learn();
  std::size_t choose(std::uint64_t bytes, std::uint64_t wished,
                     std::vector<SpillCandidate>& candidates) const;
  Status to_host(const std::vector<SpillCandidate>& victims, const StreamState* taker,
                 std::unique_lock<std::mutex>& lock, std::uint64_t* moved);
  Status make_room(std::uint64_t bytes, std::uint64_t wished, const StreamState* taker,
                   std::unique_lock<std::mutex>& lock);
  Status move_out(std::uint64_t bytes, std::uint64_t wished, const StreamState* taker, double patience,
                  std::unique_lock<std::mutex>& lock, std::uint64_t* moved);
  int size_to_lend(std::uint64_t bytes, std::uint64_t request) const;
  std::vector<Index> unsettled(const std::vector<StreamNumber>& states) const;
  std::uint64_t replace_lent(const std::vector<StreamNumber>& states, std::unique_lock<std::mutex>& lock);
  // Moves by hand: if there is too little memory on the other side, it waits for work that still uses freed
  // memory and calls `move` again, which adds to *moved.
  Status by_hand(const std::function<Status(std::uint64_t* moved)>& move, std::unique_lock<std::mutex>& lock,
                 std::uint64_t* moved);
  Status to_device(const std::vector<Index>& pages, std::unique_lock<std::mutex>& lock, std::uint64_t* moved);
  Status get_host_page(int size, std::unique_lock<std::mutex>& lock, Index* out);
  Status create_host_page(int size, std::unique_lock<std::mutex>& lock, Index* out);
  SpareBytes next_sizes(std::uint64_t bytes) const;
  Status get_device_page(int size, StreamNumber stream, Index* out);
  bool freed_in_use() const;
  void mark_blocks(Index page);
  void unmark_blocks(Index page);
  void note_moves(const std::vector<Move>& moves, double seconds, Action action);
  std::vector<bool> pages_of(const Wanted& wanted, bool others) const;
  std::vector<Index> spilled_pages(Index only) const;
  std::uint64_t room() const;

  EventLog& log_;
  Caches& caches_;
  Pending& pending_;
  StreamLives& lives_;
  const Shares& shares_;
  std::function<SpillWish(std::uint32_t)> wish_;
  std::unordered_map<Address, SpillWish> wishes_;
  SpillOrder order_;
  SpillPolicy policy_;  // instead of the order
  std::function<void(std::uint64_t, std::uint64_t)> hook_;
  bool hook_knows_ = false;  // that pages have moved
  SpillCounts counts_;
  std::unordered_map<std::uint32_t, SpillOfLabel> moved_;  // by label, without what is there now
  std::atomic<std::uint64_t> used_by_others_{0};           // at most counts_.taken_bytes
};

}  // namespace vram
