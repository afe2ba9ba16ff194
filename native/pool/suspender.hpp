// Suspend and resume: the pages of live blocks go back to the device while their addresses stay theirs, and
// come back. Defines Suspender. How a page is evicted and restored is in placement/page_stock.cpp; what is
// kept of the contents is in contents.hpp.
//
// One suspend, resume or close runs at a time (Turn). The mutex is held for the pool's state only: waits and
// copies run without it, and the pool keeps serving. What the operation works on does not change meanwhile:
// its pages are set aside, and a suspended block that is freed is performed at the end.
#pragma once

#include "pool/copies.hpp"
#include "pool/report.hpp"
#include "pool/shares.hpp"

namespace vram {

class Suspender : PoolPart {
 public:
  // Which allocations, by their tags; an empty one means all.
  using Wanted = std::function<bool(std::uint32_t)>;

  Suspender(PoolState& state, EventLog& log, Zeroing& zeroing, Caches& caches, Pending& pending,
            StreamLives& lives, const Ladder& ladder, const Report& report, const Shares& shares)
      : PoolPart(state),
        log_(log),
        zeroing_(zeroing),
        caches_(caches),
        pending_(pending),
        lives_(lives),
        ladder_(ladder),
        report_(report),
        shares_(shares) {}

  // See Pool.
  Status suspend(const Wanted& wanted, bool keep, const std::shared_ptr<Allocator>& store,
                 std::uint64_t* given, OutOfMemoryReport* short_of);
  Status resume(const Wanted& wanted, std::uint64_t* taken, OutOfMemoryReport* report);
  // A suspended block was freed; it is in state moving.
  void free(Index block);
  // post: the next call of free() does not allocate.
  void make_room();
  // Destroys what copies need, and drops the contents that are kept. pre: the caller has the turn.
  Status close();

 private:
  struct Saved;
  class OpenStores;
  class Operation;

  void mark_suspended(const Wanted& wanted, bool keep, std::vector<Index>& marked);
  Status wait_for_suspended(bool all, std::unique_lock<std::mutex>& lock);
  Status release_idle();
  std::vector<Index> pages_to_evict(bool all, bool keep) const;
  std::vector<Saved> contents_to_save(const std::vector<Index>& pages) const;
  Status evict_pages(const std::vector<Index>& pages, const std::shared_ptr<Allocator>& store,
                     std::unique_lock<std::mutex>& lock, OutOfMemoryReport* short_of);
  std::vector<Index> pages_to_restore(const std::vector<Index>& blocks, bool all) const;
  std::vector<Saved> contents_to_restore(const std::vector<Index>& blocks) const;
  Status restore(const std::vector<Index>& blocks, bool all, std::unique_lock<std::mutex>& lock,
                 OutOfMemoryReport* report);
  Status restore_page(Index page, std::unique_lock<std::mutex>& lock);
  Status save_and_evict(const std::vector<Index>& pages, std::vector<Saved>& pieces, Copies& copies,
                        const std::shared_ptr<Allocator>& store, std::size_t* safe,
                        std::unique_lock<std::mutex>& lock, OutOfMemoryReport* short_of);
  Status bring_back(const std::vector<Index>& pages, const std::vector<Saved>& pieces, Copies& copies,
                    std::size_t* brought, std::unique_lock<std::mutex>& lock);
  void make_live(const std::vector<Index>& blocks);
  void perform_late() noexcept;
  void forget_contents(const Block& block);
  bool is_graphs(Index page) const;
  Status wait_for(Copies& copies);

  EventLog& log_;
  Zeroing& zeroing_;
  Caches& caches_;
  Pending& pending_;
  StreamLives& lives_;
  const Ladder& ladder_;
  const Report& report_;
  const Shares& shares_;
  bool operating_ = false;   // an Operation is in progress: what it works on stays as it is
  std::vector<Index> late_;  // blocks freed meanwhile, in state moving
};

}  // namespace vram
