// Reading and restoring what is live in a heap.
#include "pool/checkpoints.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace vram {

// While it exists, frees of blocks of these streams wait for the mutex, which the caller holds.
class Checkpoints::Still {
 public:
  Still(const StreamTable& streams, const std::vector<StreamNumber>& which)
      : streams_(streams), which_(which) {
    for (const StreamNumber number : which_) {
      std::lock_guard guard(streams_[number].lock);
      streams_[number].shut_for(StreamState::kStanding);
    }
  }
  ~Still() {
    for (const StreamNumber number : which_) {
      std::lock_guard guard(streams_[number].lock);
      streams_[number].open_for(StreamState::kStanding);
    }
  }
  Still(const Still&) = delete;
  Still& operator=(const Still&) = delete;

 private:
  const StreamTable& streams_;
  const std::vector<StreamNumber>& which_;
};

std::vector<BlockInfo> Checkpoints::live(HeapId id) const {
  std::vector<BlockInfo> all;
  std::unique_lock<std::mutex> lock;
  if (!enter("heap_live", &lock).ok()) return all;
  const Captures::Heap* const heap = captures_.find(id);
  if (heap == nullptr) return all;
  const std::vector<StreamNumber> states = captures_.states_of(*heap);
  const Still still(streams_, states);
  for (const StreamNumber number : states)
    for (Index s = space().first_segment(number); s != 0; s = space().segments()[s].list_after)
      for (Index b = space().segments()[s].head; b != 0; b = blocks()[b].after)
        if (blocks()[b].allocated() && blocks()[b].owned_by() == number)
          all.push_back(report_.describe(blocks()[b]));
  return all;
}

Status Checkpoints::restore(HeapId id, const std::vector<BlockInfo>& wanted) {
  constexpr Status kInvalid{Code::invalid, 0, "heap_restore"};
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("heap_restore", &lock); !status.ok()) return status;
  lives_.complete();
  const Captures::Heap* const heap = captures_.find(id);
  if (heap == nullptr) return kInvalid;
  const std::vector<StreamNumber> states = captures_.states_of(*heap);
  const Still still(streams_, states);
  for (const StreamNumber number : states) caches_.drain(streams_[number]);
  Plan plan;
  if (!plan_places(*heap, wanted, plan) || !plan_blocks(*heap, plan) || !pages_allow(states, plan))
    return kInvalid;
  if (!space().can_split(3 * plan.places.size())) return {Code::out_of_memory, 0, "blocks"};
  carry_out(plan, lock);
  verify();
  return {};
}

// Every wanted block must be in one segment of the heap, beside the others.
bool Checkpoints::plan_places(const Captures::Heap& heap, const std::vector<BlockInfo>& wanted,
                              Plan& plan) const {
  for (const BlockInfo& info : wanted) {
    const Index block = info.address % kUnit == 0 ? space().containing(info.address) : 0;
    if (block == 0 || info.bytes == 0 || info.bytes % kUnit != 0 || info.requested > info.bytes) return false;
    const Segment& segment = space().segment(blocks()[block]);
    if (streams_[segment.stream].capture != heap.key || info.bytes > bytes_of(segment.units)) return false;
    const auto offset = static_cast<Units>(segment.first + (info.address - segment.base) / kUnit);
    const auto units = static_cast<Units>(info.bytes / kUnit);
    if (segment.end() - offset < units) return false;
    plan.places.push_back({offset, units, segment.stream, &info});
  }
  std::sort(plan.places.begin(), plan.places.end(),
            [](const Plan::Place& a, const Plan::Place& b) { return a.offset < b.offset; });
  for (std::size_t i = 1; i < plan.places.size(); ++i)
    if (plan.places[i - 1].end() > plan.places[i].offset) return false;
  return true;
}

// Whether work that is not the heap's own uses a block, or did so until it was freed.
bool Checkpoints::used_outside(const Captures::Heap& heap, Index i) const {
  const auto outside = [&](StreamNumber number) {
    return !streams_[number].retired() && streams_[number].capture != heap.key;
  };
  if (!blocks()[i].is(BlockState::pending)) {
    const std::vector<StreamNumber>* const uses = pending_.uses_of(i);
    return uses != nullptr && std::any_of(uses->begin(), uses->end(), outside);
  }
  const std::vector<Use>* const uses = pending_.awaited_by(i);
  return uses == nullptr ||
         std::any_of(uses->begin(), uses->end(), [&](const Use& use) { return outside(use.stream); });
}

// What is in use in the heap goes, unless the program, or work outside of the heap, still has it: that must
// not be in the way. A live block that is wanted as it is stays.
bool Checkpoints::plan_blocks(const Captures::Heap& heap, Plan& plan) const {
  for (const StreamNumber number : captures_.states_of(heap))
    for (Index s = space().first_segment(number); s != 0; s = space().segments()[s].list_after)
      for (Index b = space().segments()[s].head; b != 0; b = blocks()[b].after)
        if (!blocks()[b].is(BlockState::free) && !plan_block(heap, number, b, plan)) return false;
  std::erase_if(plan.places, [](const Plan::Place& place) { return place.kept; });
  return true;
}

bool Checkpoints::plan_block(const Captures::Heap& heap, StreamNumber home, Index b, Plan& plan) const {
  const Block& block = blocks()[b];
  const auto place =
      std::lower_bound(plan.places.begin(), plan.places.end(), block.offset,
                       [](const Plan::Place& each, Units offset) { return each.end() <= offset; });
  const bool in_the_way = place != plan.places.end() && place->offset < block.end();
  const bool live = block.is(BlockState::live) && block.owned_by() == home;
  const bool pending = block.is(BlockState::pending) && block.owned_by() == home;
  if (live && in_the_way && place->offset == block.offset && place->units == block.units &&
      place->info->requested == block.requested && place->info->tag == block.tag) {
    place->kept = true;
  } else if ((live || pending) && !used_outside(heap, b)) {
    // Without a place for it, what is to be zeroed on a free takes the usual way.
    const bool waits = !in_the_way && zeroing_.on_free();
    if (live) (waits ? plan.waiting : plan.freed).push_back(b);
    if (pending && !waits) plan.returned.push_back(b);
  } else if (in_the_way || block.is(BlockState::suspended)) {
    return false;
  } else if (live) {
    plan.waiting.push_back(b);
  }
  return true;
}

// Whether the addresses of the places have their pages once the blocks that go are free.
bool Checkpoints::pages_allow(const std::vector<StreamNumber>& states, const Plan& plan) const {
  std::unordered_map<Index, Index> held;  // page → the mapping that holds it, or will
  std::unordered_set<Index> goes(plan.freed.begin(), plan.freed.end());
  goes.insert(plan.returned.begin(), plan.returned.end());
  for (const StreamNumber number : states)
    for (Index s = space().first_segment(number); s != 0; s = space().segments()[s].list_after)
      for (Index b = space().segments()[s].head; b != 0; b = blocks()[b].after)
        if (!blocks()[b].is(BlockState::free) && goes.count(b) == 0)
          stock().each_page(blocks()[b],
                            [&](Index page, Units, Units) { held[page] = stock().pages()[page].holder; });
  for (const Plan::Place& place : plan.places) {
    if (space().segment(blocks()[space().block_at(place.offset)]).plain) continue;
    for (Slot slot = place.offset / kSlotUnits; slot * std::uint64_t{kSlotUnits} < place.end();) {
      const Index m = stock().mapping_at(slot);
      if (m == 0) return false;
      const Mapping& mapping = stock().mappings()[m];
      const Page& page = stock().pages()[mapping.page];
      if (page.suspended || page.owner != place.stream || !mapping.usable) return false;
      if (held.try_emplace(mapping.page, m).first->second != m) return false;
      slot = mapping.slot + page.slots();
    }
  }
  return true;
}

void Checkpoints::carry_out(const Plan& plan, std::unique_lock<std::mutex>& lock) {
  for (const Index b : plan.returned) {
    pending_.withdraw(b);
    placement_.put(b, home_of(blocks()[b]).owe());
  }
  for (const Index b : plan.freed) {
    end(b, Action::free);
    pending_.forget_uses(b);
    blocks()[b].used_elsewhere = false;
    placement_.put(b, home_of(blocks()[b]).owe());
  }
  for (const Index b : plan.waiting) {
    pending_.make_room(b);
    end(b, blocks()[b].used_elsewhere ? Action::free_pending : Action::free);
    pending_.make_pending(b);
  }
  for (const Plan::Place& place : plan.places) {
    const Index block = placement_.take_at({space().block_at(place.offset), place.offset}, place.units);
    const Want want{place.stream, space().segment(blocks()[block]).band, place.units};
    (void)accounts_.make_live(block,
                              {place.info->requested, want, place.info->tag, &streams_[place.stream], &lock});
  }
}

void Checkpoints::end(Index b, Action action) {
  shares_.forget(b);
  StreamState& owner = owner_of(blocks()[b]);
  std::lock_guard guard(owner.lock);
  accounts_.end_live(b, owner, action);
}

}  // namespace vram
