// Freed blocks that wait for streams, and their return.
#include "pool/pending.hpp"

#include <algorithm>
#include <utility>

#include "placement/room.hpp"

namespace vram {

namespace {

// With several streams, a fence is recorded after this many freed bytes, so that others learn early what has
// completed.
constexpr std::uint64_t kFenceBytes = 16 * kMiB;

// Nodes that are kept for later blocks.
constexpr std::size_t kSpareNodes = 64;

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
    Node node = new_node(i, tick, 1);
    node.mapped().uses.push_back({owner.number, tick});
    enqueue(std::move(node));
    return;
  }
  placement_.put(i, tick_at_home(home, owner, tick));
  home.unfenced_bytes += bytes;
  if (ask && streams_.size() > 1 && home.unfenced_bytes >= kFenceBytes && !home.retired())
    fences_.try_record(home);
}

// The last use of a block in the order of its segment's stream. Uses on other streams have completed; but
// what a heap lent was part of it before.
Tick Pending::tick_at_home(StreamState& home, const StreamState& owner, Tick tick) {
  if (&owner == &home) return tick;
  return home.capture != 0 ? home.owe() : 0;
}

void Pending::make_room(Index block) {
  const std::vector<StreamNumber>* uses = uses_of(block);
  (void)spare(uses == nullptr ? 0 : uses->size());
}

// A node that has room for so many uses, and for those of its owner, of its segment's stream and of zeroing.
Pending::Node& Pending::spare(std::size_t uses) {
  if (spare_.empty()) {
    vram::make_room(spare_, kSpareNodes);
    Queue made;
    made.emplace(0, PendingBlock{});
    spare_.push_back(made.extract(made.begin()));
  }
  vram::make_room(spare_.back().mapped().uses, uses + 3);
  return spare_.back();
}

Pending::Node Pending::new_node(Index block, Tick tick, std::size_t uses) {
  Node node = std::move(spare(uses));
  spare_.pop_back();
  node.mapped().block = block;
  node.mapped().tick = tick;
  return node;
}

void Pending::recycle(Node&& node) {
  if (spare_.size() == spare_.capacity()) return;
  PendingBlock& pending = node.mapped();
  pending.uses.clear();
  pending.awaited = pending.zeroed = false;
  pending.capture = 0;
  pending.nodes.clear();
  spare_.push_back(std::move(node));
}

void Pending::make_pending(Index i, bool own, Index heir) {
  Block& block = blocks()[i];
  const StreamNumber owner = block.owned_by();
  const StreamNumber home = space().segment(block).stream;
  const auto known = uses_.find(i);
  Node node = new_node(i, streams_[owner].owe(), known == uses_.end() ? 0 : known->second.size());
  PendingBlock& pending = node.mapped();
  pending.awaited = block.used_elsewhere;
  const auto wait_for = [&](StreamNumber number) {
    StreamState& stream = streams_[number];
    const auto listed = [&](const Use& use) { return use.stream == number; };
    if (stream.retired() || std::any_of(pending.uses.begin(), pending.uses.end(), listed)) return;
    pending.uses.push_back({number, stream.owe()});
    fences_.try_record(stream);  // if this fails, it is recorded later, on a query
  };
  if (known != uses_.end()) std::for_each(known->second.begin(), known->second.end(), wait_for);
  if (own) wait_for(home);
  // What is to be zeroed may be zeroed on another stream than its owner.
  if (home != owner || zeroing_.slow_frees()) wait_for(owner);
  if (known != uses_.end()) {
    auto uses = uses_.extract(known);
    uses.key() = heir;
    if (heir != 0) uses_.insert(std::move(uses));
  }
  block.used_elsewhere = false;
  if (streams_[home].capture != 0 && !pending.uses.empty()) note_nodes(pending);
  enqueue(std::move(node));
}

// If everything that uses the block is in one capture, it may serve later work of that capture.
void Pending::note_nodes(PendingBlock& pending) const {
  if (zeroing_.slow_frees()) return;
  const auto note = [&](const StreamState& stream) {
    std::vector<GraphNode> nodes;
    CaptureId capture = 0;
    if (stream.capture == 0 || stream.foreign) return false;
    if (!backend_->capture_position(stream.handle, &capture, &nodes).ok() || capture == 0) return false;
    if (pending.capture != 0 && pending.capture != capture) return false;
    pending.capture = capture;
    pending.nodes.insert(pending.nodes.end(), nodes.begin(), nodes.end());
    return true;
  };
  bool all = false;
  try {
    all = note(home_of(blocks()[pending.block])) &&
          std::all_of(pending.uses.begin(), pending.uses.end(),
                      [&](const Use& use) { return note(streams_[use.stream]); });
  } catch (const std::bad_alloc&) {  // it only waits longer
  }
  if (all) return;
  pending.capture = 0;
  pending.nodes.clear();
}

void Pending::return_joined(StreamState& home, const std::vector<StreamNumber>& graphs) {
  const auto candidate = [&](const PendingBlock& pending) {
    return pending.capture != 0 && &home_of(blocks()[pending.block]) == &home;
  };
  const auto each_queue = [&](auto visit) {
    for (const StreamNumber number : graphs)
      if (streams_[number].capture == home.capture) visit(streams_[number].waiting);
  };
  bool any = false;
  each_queue([&](const Queue& queue) {
    any = any || std::any_of(queue.begin(), queue.end(), [&](auto& each) { return candidate(each.second); });
  });
  CaptureId capture = 0;
  if (!any) return;
  GraphPast& past = pasts_[home.number];
  if (!past.update(*backend_, home.handle, &capture).ok() || capture == 0) return;
  each_queue([&](Queue& queue) {
    for (auto at = queue.begin(); at != queue.end();) {
      const auto each = at++;
      const PendingBlock& pending = each->second;
      if (!candidate(pending) || pending.capture != capture ||
          !std::all_of(pending.nodes.begin(), pending.nodes.end(),
                       [&](GraphNode node) { return past.contains(node); }))
        continue;
      Node node = queue.extract(each);
      node.mapped().uses.clear();
      advance(std::move(node));
    }
  });
}

void Pending::enqueue(Node&& node) {
  Block& block = blocks()[node.mapped().block];
  block.set(BlockState::pending);
  accounts_.pending().add(bytes_of(block));
  ++count_;
  advance(std::move(node));
}

// Puts a pending block into the queue of the next stream that it waits for, or returns it.
void Pending::advance(Node&& node) {
  PendingBlock& pending = node.mapped();
  while (!pending.uses.empty()) {
    const Use use = pending.uses.back();
    StreamState& stream = streams_[use.stream];
    if (!stream.retired() && use.tick > stream.passed) return queue_at(stream, use.tick, std::move(node));
    pending.uses.pop_back();
  }
  Block& block = blocks()[pending.block];
  StreamState& home = home_of(block);
  StreamState& owner = owner_of(block);
  Tick tick = tick_at_home(home, owner, pending.tick);
  if (zeroing_.on_free() && !pending.zeroed) {
    StreamState& zeroing = home.gone() ? streams_[0] : home;
    if (!zeroing_.fill_resident(block, zeroing.handle).ok()) {
      block.link_after = 0;
      node.key() = 0;  // behind those that are in this queue already
      unzeroed_.insert(std::move(node));
      return;
    }
    tick = home.owe();
    if (&zeroing != &home || space().growing(block)) {
      pending.zeroed = true;
      pending.uses.push_back({zeroing.number, zeroing.owe()});
      return queue_at(zeroing, zeroing.now(), std::move(node));
    }
  }
  accounts_.pending().subtract(bytes_of(block));
  --count_;
  block.set(BlockState::moving);
  if (pending.awaited) {
    std::lock_guard guard(owner.lock);
    log_.note(owner, Action::free_complete, block);
    log_.tell_completed(owner, block);
  }
  placement_.put(pending.block, tick);
  recycle(std::move(node));
}

// The block notes where it waits, for take_back.
void Pending::queue_at(StreamState& stream, Tick tick, Node&& node) {
  Block& block = blocks()[node.mapped().block];
  block.tick = tick;
  block.link_after = stream.number + 1u;
  node.key() = tick;
  stream.waiting.insert(std::move(node));
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

Pending::Queue::iterator Pending::find_in(Queue& queue, Index block, Tick tick) {
  auto found = queue.lower_bound(tick);
  while (found->second.block != block) ++found;
  return found;
}

const std::vector<Use>* Pending::awaited_by(Index i) {
  const Block& block = blocks()[i];
  return block.link_after == 0 ? nullptr : &find_in(queue_of(block), i, block.tick)->second.uses;
}

void Pending::withdraw(Index i) {
  Block& block = blocks()[i];
  Queue& queue = queue_of(block);
  recycle(queue.extract(find_in(queue, i, block.tick)));
  accounts_.pending().subtract(bytes_of(block));
  --count_;
  block.set(BlockState::moving);
}

Status Pending::take_back(Index block, Units units, StreamState& home, Index* out) {
  const Block& pending = blocks()[block];
  const bool whole = pending.units <= units;
  if (pending.link_after == 0) {
    // It waits to be zeroed and is no longer in use.
    if (whole) std::erase_if(unzeroed_, [&](const auto& each) { return each.second.block == block; });
  } else {
    Queue& waiting = queue_of(pending);
    const auto found = find_in(waiting, block, pending.tick);
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
  for (std::size_t left = unzeroed_.size(); left != 0; --left)
    advance(unzeroed_.extract(unzeroed_.begin()));  // to the end of the queue where it fails again
  fences_.watched().each(
      [&](StreamNumber number) {
        if (number >= past) return true;
        StreamState& stream = streams_[number];
        while (!stream.waiting.empty() && stream.waiting.begin()->first <= stream.passed) {
          ++steps_;
          advance(stream.waiting.extract(stream.waiting.begin()));
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
