// A repeated step served from a plan: the first step is recorded, its lifetimes are planned (planner.hpp),
// and from then on each allocation gets its offset in a region, one block of the pool for each stream of the
// step. What a step does differently is left to the pool. When work may use memory is decided by the pool
// (pool_planned.cpp), which calls in here.
//
// Order. A region serves one stream, so that memory goes from one slot to the next in that stream's order, as
// in the stream's cache. A slot that other streams used, too, is blocked after its free until the pool has
// ordered whoever comes next behind those uses.
//
// Time is counted in allocations of the step: what is freed between the allocations i - 1 and i ends at i.
//
// Threads. Every call may come from any thread, and all of a step's allocations are one sequence. One spin
// lock guards everything; calls that say so want the pool's mutex held, which comes first.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "allocator.hpp"

namespace vram {

struct PlannedReport {
  std::uint64_t steps = 0;          // finished
  std::uint64_t plans = 0;          // made
  std::uint64_t hits = 0;           // allocations served from their offsets
  std::uint64_t left = 0;           // left to the pool as planned: they live longer than a step
  std::uint64_t fallbacks = 0;      // served by the pool because the step differed from the plan
  std::uint64_t refused = 0;        // served by the pool because there was no memory for the region
  std::uint64_t planned_bytes = 0;  // of regions held now
  // Of the step under way, or the last one; what it allocated, in bytes.
  std::uint64_t lower_bound = 0;  // the most that was live at one time
  std::uint64_t peak = 0;         // regions, and the most that was live at one time beside them
};

// What was planned for one stream of the step.
struct PlannedLayout {
  StreamHandle stream = 0;
  std::vector<std::int64_t> lower;  // in allocations, from the moment the layout begins
  std::vector<std::int64_t> upper;
  std::vector<std::uint64_t> size;  // bytes
  std::vector<std::uint64_t> offset;
  std::vector<std::uint64_t> index;  // which allocation of the step
  std::uint64_t peak = 0;
  std::uint64_t lower_bound = 0;
  std::string method;
  bool proven = false;
  double seconds = 0;
};

class Planned {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  struct Request {
    Units units;
    std::uint64_t size;
    StreamHandle stream;
    std::uint32_t tag;
  };
  // A region's block of the pool, to be given back, and the streams that may still use it beside its own.
  struct Block {
    Address address;
    std::vector<std::uint16_t> uses;
  };

  // ---- without the pool's mutex -------------------------------------------------------------------------
  // Inside a step.
  bool open() const { return open_.load(std::memory_order_acquire); }
  // The next allocation of the plan, if the request is that one and its slot is free. Else nothing has
  // changed.
  bool serve(const Request& request, Address* out);
  enum class Freed { done, elsewhere, slow };  // elsewhere: not a slot; slow: free_slot must do it
  Freed free(Address address);
  // The live slot that begins at the address, or holds it.
  bool find(Address address, bool inside, BlockInfo* out) const;

  // ---- with the pool's mutex ------------------------------------------------------------------------------
  enum class Choice { slot, pool, order };  // order: `uses()` must come first, then `ordered`
  // *entry: which allocation of the plan the request is, kNone for none.
  Choice choose(const Request& request, bool may_order, Address* out, std::uint32_t* entry);
  const std::vector<Use>& uses() const { return uses_to_order_; }
  void ordered();
  // The pool has served a request that `choose` left to it.
  void note(const Request& request, Address address, std::uint32_t entry);
  // Another stream uses the slot that holds the address. False: no slot does.
  bool use(Address address, std::uint16_t stream, bool own, StreamHandle handle);
  // The streams that use a live slot; null: not a slot.
  const std::vector<std::uint16_t>* users(Address address) const;
  // Frees a slot; it stays blocked behind `uses`. *gone gets a block when it was the last slot of a region
  // that serves no more.
  void free_slot(Address address, std::vector<Use> uses, std::vector<Block>* gone);
  bool is_region(Address address) const;  // a region's block begins there
  bool holds_regions() const;

  // ---- steps ----------------------------------------------------------------------------------------------
  // Each step is begun and ended by one thread, and a pool has one at a time. Code::invalid with these calls:
  static constexpr const char* kOpenAlready = "begin a step inside a step";
  static constexpr const char* kNotOpen = "end a step that was not begun";
  static constexpr const char* kOtherThread = "end a step that another thread began";
  static constexpr const char* kCloseInside = "close the plan inside a step";
  static bool refuses(const Status& status) {
    return status.call == kOpenAlready || status.call == kNotOpen || status.call == kOtherThread ||
           status.call == kCloseInside;
  }
  // Between claim and start no step is open, and none can be claimed. What the last one did is turned into a
  // new plan where that is due, without any lock; `install` (with the mutex) makes it the plan in force.
  Status claim();
  bool make_plan(double time_limit);
  void install(std::vector<Block>* gone);
  // Regions of the plan in force that have no memory.
  struct Wanted {
    StreamHandle stream;
    Units units;
  };
  std::vector<Wanted> wanted() const;
  // The pool's block for it, one unit longer than was wanted. False: it is not wanted any more.
  bool found(StreamHandle stream, Address block);
  void start();
  void abandon() { claimed_.store(false); }  // instead of start
  Status end();
  // The stream goes: its region serves no more.
  void forget_stream(StreamHandle stream, std::vector<Block>* gone);
  // Regions without a live slot lose their memory until the next step begins.
  void give_up_idle(std::vector<Block>* gone);
  // Forgets the plan and what was recorded; live slots stay valid.
  void reset(std::vector<Block>* gone);

  // ---- looking --------------------------------------------------------------------------------------------
  PlannedReport report() const;
  std::vector<PlannedLayout> layouts() const;
  bool check(std::string* why) const;

 private:
  // An allocation of a step. `freed`: the moment in that step, kNone while it lives; `freed_next`: the
  // moment in the step after.
  struct Recorded {
    StreamHandle stream = 0;
    Units units = 0;
    std::uint32_t freed = kNone;
    std::uint32_t freed_next = kNone;
  };
  // Memory of a region that is not free though the plan says so: a slot that lives too long, or (entry kNone)
  // one whose uses elsewhere nobody is ordered behind yet.
  struct Blocked {
    Units offset;
    Units end;
    std::uint32_t entry;
    std::vector<Use> uses;
  };
  struct Region {
    StreamHandle stream = 0;
    Units units = 0;
    Address base = 0;  // of offset 0, one unit behind the pool's block; 0: no memory
    std::uint32_t live = 0;
    bool dropped = false;  // serves no more
    std::vector<Blocked> blocked;
  };
  // An allocation of the plan. due: the moment by which it must be free, of this step or, where that is not
  // behind its own, of the next.
  struct Entry {
    StreamHandle stream = 0;
    Units units = 0;
    Units offset = 0;
    Region* region = nullptr;  // null: left to the pool
    std::uint32_t next_due = kNone;
    bool known = false;  // when it ends; what is known and yet left to the pool lives too long
    enum class State : std::uint8_t { free, live, late } state = State::free;
  };
  // A live allocation that a step made.
  struct Live {
    Address address = 0;
    std::uint64_t requested = 0;
    Region* region = nullptr;  // null: the pool's
    std::uint32_t entry = kNone;
    std::uint32_t step = 0;
    std::uint32_t index = 0;  // in the record of that step
    std::uint32_t tag = 0;
    Units units = 0;
    bool used_elsewhere = false;
  };
  // By address; open addressing, at most half full.
  class Table {
   public:
    Live* find(Address address);
    const Live* find(Address address) const { return const_cast<Table*>(this)->find(address); }
    void add(const Live& live);
    void remove(Live* live);
    template <typename Visit>
    void each(Visit visit) const {
      for (const Live& live : places_)
        if (live.address != 0) visit(live);
    }
    std::size_t size() const { return count_; }
    template <typename Keep>
    void retain(Keep keep);

   private:
    std::size_t home(Address address) const {
      return (address / kUnit * 0x9E3779B97F4A7C15u) >> (64 - bits_);
    }
    std::vector<Live> places_ = std::vector<Live>(1 << 10);
    int bits_ = 10;
    std::size_t count_ = 0;
  };
  struct Span;
  struct Draft {
    std::vector<Entry> entries;
    std::vector<std::uint32_t> due;
    std::list<Region> regions;
    std::vector<PlannedLayout> layouts;
  };

  std::uint32_t match(const Request& request) const;
  void advance(std::uint32_t to);
  bool blocked(const Entry& entry, bool gather);
  void hand_out(std::uint32_t entry, const Request& request, Address* out);
  std::uint32_t log(const Request& request);
  void count_in(Units units, bool in_region);
  void count_out(Units units, bool in_region);
  void note_free(const Live& live);
  void remove_slot(Live* live, std::vector<Use> uses);
  const Live* holder(Address address) const;
  bool plan_is_due();
  std::uint64_t newly_known() const;
  bool worth(std::uint64_t units) const;
  std::uint32_t end_of(std::uint32_t index) const;
  void draft_stream(StreamHandle stream, const std::vector<Span>& spans, std::uint32_t moments,
                    double time_limit, Draft* draft);
  void drop(Region& region, std::vector<Block>* gone);
  void release(Region& region, std::vector<Block>* gone);

  mutable SpinLock lock_;
  std::atomic<bool> open_{false};
  std::atomic<bool> claimed_{false};
  std::thread::id owner_;
  std::uint32_t step_ = 0;
  // What the step under way did so far, or the last one; and the one before it.
  std::vector<Recorded> record_;
  std::vector<Recorded> previous_;
  bool overflown_ = false;         // the record has no room for all of it
  bool same_ = false;              // the last step was the plan, allocation for allocation
  bool previous_same_ = false;     // and so was the one before it
  std::uint64_t differences_ = 0;  // fallbacks of this step
  // Units that the plan left to the pool, not knowing that they end inside the step.
  std::uint64_t missed_ = 0;
  std::uint32_t waited_ = 0;    // steps that differed since the last plan …
  std::uint32_t patience_ = 1;  // … and how many it takes for the next
  Table table_;
  std::unordered_map<Address, std::vector<std::uint16_t>> users_;
  // The plan in force.
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> due_;  // due_[t]: the first of the entries due at t
  std::list<Region> regions_;       // dropped ones with live slots as well
  std::vector<PlannedLayout> layouts_;
  std::uint32_t cursor_ = 0;   // the next entry
  std::uint32_t reached_ = 0;  // moments before this one have been looked at
  std::unique_ptr<Draft> draft_;
  std::vector<Use> uses_to_order_;
  std::vector<std::pair<Region*, Units>> blocks_to_order_;  // by region and offset
  // Counted in units.
  std::uint64_t live_ = 0;
  std::uint64_t most_live_ = 0;
  std::uint64_t beside_ = 0;  // served by the pool
  std::uint64_t most_beside_ = 0;
  PlannedReport counts_;
};

}  // namespace vram
