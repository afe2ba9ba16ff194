// Freed blocks that wait for streams, and their return.
#include "pool/pending.hpp"

#include <algorithm>
#include <utility>

namespace vram {

namespace {

// With several streams, a fence is recorded after this many freed bytes, so that others learn early what has
// completed.
constexpr std::uint64_t kFenceBytes = 16 * kMiB;

}  // namespace

bool Pending::ordered(StreamState& taker, StreamState& owner, Tick tick, bool by_waiting) {
  if (tick <= owner.passed || owner.retired() || taker.seen_of(owner.number) >= tick) return true;
  if (by_waiting) return fences_.order(taker, owner, tick).ok();
  return fences_.finished(owner, tick);
}

void Pending::return_home(Index i, bool ask) {
  Block& block = blocks()[i];
  StreamState& owner = owner_of(block);
  StreamState& home = home_of(block);
  const std::uint64_t bytes = bytes_of(block);
  const Tick tick = owner.owe();
  if (&owner != &home && !(ask && fences_.finished(owner, tick))) {
    // Lent: it returns when the work of its owner has completed.
    enqueue({i, tick, {{owner.number, tick}}});
    return;
  }
  placement_.put(i, &owner == &home ? tick : 0);
  home.unfenced_bytes += bytes;
  if (ask && streams_.size() > 1 && home.unfenced_bytes >= kFenceBytes && !home.retired())
    (void)fences_.record(home);
}

void Pending::make_pending(Index i) {
  Block& block = blocks()[i];
  const StreamNumber owner = block.owned_by();
  PendingBlock pending{i, streams_[owner].owe(), {}, block.used_elsewhere};
  // What is to be zeroed may be zeroed on another stream than its owner.
  if (space().segment(block).stream != owner || zeroing_.slow_frees()) uses_[i].push_back(owner);
  for (StreamNumber number : uses_[i]) {
    StreamState& stream = streams_[number];
    if (stream.retired()) continue;
    pending.uses.push_back({number, stream.owe()});
    (void)fences_.record(stream);  // if this fails, it is recorded later, on a query
  }
  uses_.erase(i);
  block.used_elsewhere = false;
  enqueue(std::move(pending));
}

void Pending::enqueue(PendingBlock&& pending) {
  Block& block = blocks()[pending.block];
  block.set(BlockState::pending);
  accounts_.pending().add(bytes_of(block));
  ++count_;
  advance(std::move(pending));
}

// Puts a pending block into the queue of the next stream that it waits for, or returns it.
void Pending::advance(PendingBlock&& pending) {
  while (!pending.uses.empty()) {
    const Use use = pending.uses.back();
    StreamState& stream = streams_[use.stream];
    if (!stream.retired() && use.tick > stream.passed) return queue_at(stream, use.tick, std::move(pending));
    pending.uses.pop_back();
  }
  Block& block = blocks()[pending.block];
  StreamState& home = home_of(block);
  StreamState& owner = owner_of(block);
  Tick tick = &owner == &home ? pending.tick : 0;
  if (zeroing_.on_free() && !pending.zeroed) {
    StreamState& zeroing = home.gone() ? streams_[0] : home;
    if (!zeroing_.fill_resident(block, zeroing.handle).ok()) {
      block.link_after = 0;
      unzeroed_.push_back(std::move(pending));
      return;
    }
    tick = home.owe();
    if (&zeroing != &home || space().growing(block)) {
      pending.zeroed = true;
      pending.uses.push_back({zeroing.number, zeroing.owe()});
      return queue_at(zeroing, zeroing.now(), std::move(pending));
    }
  }
  accounts_.pending().subtract(bytes_of(block));
  --count_;
  block.set(BlockState::moving);
  if (pending.awaited) {
    std::lock_guard guard(owner.lock);
    log_.note(owner, Action::free_complete, block);
  }
  placement_.put(pending.block, tick);
}

// The block notes where it waits, for take_back.
void Pending::queue_at(StreamState& stream, Tick tick, PendingBlock&& pending) {
  Block& block = blocks()[pending.block];
  block.tick = tick;
  block.link_after = stream.number + 1u;
  stream.waiting.emplace(tick, std::move(pending));
  fences_.watched().add(stream.number);
}

void Pending::add_use(Index block, StreamNumber stream) {
  std::vector<StreamNumber>& uses = uses_[block];
  if (std::find(uses.begin(), uses.end(), stream) == uses.end()) uses.push_back(stream);
}

const std::vector<StreamNumber>* Pending::uses_of(Index block) const {
  const auto found = uses_.find(block);
  return found == uses_.end() ? nullptr : &found->second;
}

Status Pending::take_back(Index block, Units units, StreamState& home, Index* out) {
  const Block& pending = blocks()[block];
  const bool whole = pending.units <= units;
  if (pending.link_after == 0) {
    // It waits to be zeroed and is no longer in use.
    if (whole) std::erase_if(unzeroed_, [&](const PendingBlock& each) { return each.block == block; });
  } else {
    auto& waiting = streams_[static_cast<StreamNumber>(pending.link_after - 1)].waiting;
    auto found = waiting.lower_bound(pending.tick);
    while (found->second.block != block) ++found;
    for (const Use& use : found->second.uses)
      if (use.stream != home.number && !ordered(home, streams_[use.stream], use.tick, true))
        return {Code::failed, 0, "stream_wait"};
    if (whole) waiting.erase(found);
  }
  *out = whole ? block : space().split_in_use(block, units);  // the rest continues to wait
  accounts_.pending().subtract(bytes_of(blocks()[*out]));
  if (whole) --count_;
  blocks()[*out].set(BlockState::moving);
  return {};
}

void Pending::complete(bool thorough, const std::function<bool(StreamState&)>& visit) {
  const StreamNumber from = thorough ? 0 : std::exchange(continue_from_, 0);
  std::uint32_t asked = 0;
  std::uint32_t past = StreamTable::kMaxStreams;
  // All streams are queried before any block is examined, because a block may wait for several of them.
  fences_.watched().each(
      [&](StreamNumber number) {
        StreamState& stream = streams_[number];
        const Tick before = stream.passed;
        if (stream.waiting.empty()) {
          (void)fences_.poll(stream);
        } else {
          (void)fences_.finished(stream, stream.waiting.begin()->first);
        }
        if (thorough || stream.passed != before || ++asked < kMostAsked) return false;
        past = number + 1u;
        continue_from_ = static_cast<StreamNumber>(past);
        return true;
      },
      from);
  for (PendingBlock& pending : std::exchange(unzeroed_, {})) advance(std::move(pending));
  fences_.watched().each(
      [&](StreamNumber number) {
        if (number >= past) return true;
        StreamState& stream = streams_[number];
        while (!stream.waiting.empty() && stream.waiting.begin()->first <= stream.passed) {
          ++steps_;
          advance(std::move(stream.waiting.extract(stream.waiting.begin()).mapped()));
        }
        const bool stays = visit(stream);
        if (stream.waiting.empty() && stream.fences.empty() && !stays) fences_.watched().remove(number);
        return false;
      },
      from);
}

void Pending::clear() {
  accounts_.pending().current = count_ = 0;
  unzeroed_.clear();
}

}  // namespace vram
