// Freed blocks on their way back: each returns to its segment's stream as soon as no other stream uses it.
// Defines Pending. A block waits in the queue of one stream after the other (StreamState::waiting).
#pragma once

#include <unordered_map>

#include "order/graph_past.hpp"
#include "pool/accounts.hpp"
#include "pool/zeroing.hpp"

namespace vram {

class Pending : PoolPart {
 public:
  Pending(PoolState& state, EventLog& log, Accounts& accounts, Zeroing& zeroing)
      : PoolPart(state), log_(log), accounts_(accounts), zeroing_(zeroing) {}

  // ---- uses on other streams (record_stream) ----------------------------------------------------
  void add_use(Index block, StreamNumber stream);
  void forget_uses(Index block) { uses_.erase(block); }
  // The streams that use a block, or null.
  const std::vector<StreamNumber>* uses_of(Index block) const;

  // ---- blocks in state moving -------------------------------------------------------------------
  // post: the next call of return_home or make_pending does not allocate, the latter for this block. Without
  // it they throw std::bad_alloc before they change anything.
  void make_room(Index block);
  // Returns a block that is used only in its owner's order to its segment's stream. Unless `ask` is set, the
  // device is not called, and a lent block counts as still in use.
  void return_home(Index block, bool ask);
  // Freed while streams may still use it: it waits for one fence on each of them, and with `own` for the
  // stream of its segment, too. The uses are passed on to `heir`, if given: a part of it that stays in use.
  void make_pending(Index block, bool own = false, Index heir = 0);
  // Takes a block out of its queue, or its first `units`, and returns that part in state moving: work of
  // `home` queued from now on comes after all of its uses.
  Status take_back(Index block, Units units, StreamState& home, Index* out);
  // What a pending block waits for; null: to be zeroed.
  const std::vector<Use>* awaited_by(Index block);
  // Takes a pending block out of its queue, in state moving, without regard to its uses.
  void withdraw(Index block);

  // Returns every pending block whose uses have completed; queries each stream once and never waits. Unless
  // `thorough`, stops when kMostAsked streams have made no progress; the next call continues from there.
  // Calls visit(stream) for each watched stream whose blocks were examined; true: it stays watched.
  void complete(bool thorough, const std::function<bool(StreamState&)>& visit);
  // Returns the pending blocks of a captured state whose uses all come before its next work in the graph.
  // `graphs`: the states among which those uses are.
  void return_joined(StreamState& home, const std::vector<StreamNumber>& graphs);
  void forget_past(const StreamState& graph) { pasts_.erase(graph.number); }
  // Whether memory of `owner`, last used there at `tick`, may serve `taker` now; with by_waiting it is made
  // so.
  bool ordered(StreamState& taker, StreamState& owner, Tick tick, bool by_waiting);

  std::uint64_t blocks_waiting() const { return count_; }
  std::uint64_t steps() const { return steps_; }  // pending blocks examined so far
  void clear();                                   // the pool is closed

 private:
  using Queue = std::multimap<Tick, PendingBlock>;
  using Node = Queue::node_type;  // a pending block moves from queue to queue without allocations

  static Tick tick_at_home(StreamState& home, const StreamState& owner, Tick tick);
  Node& spare(std::size_t uses);
  Node new_node(Index block, Tick tick, std::size_t uses);
  void recycle(Node&& node);
  void note_nodes(PendingBlock& pending) const;
  void enqueue(Node&& node);
  void advance(Node&& node);
  void queue_at(StreamState& stream, Tick tick, Node&& node);
  Queue& queue_of(const Block& block) {
    return streams_[static_cast<StreamNumber>(block.link_after - 1)].waiting;
  }
  static Queue::iterator find_in(Queue& queue, Index block, Tick tick);

  EventLog& log_;
  Accounts& accounts_;
  Zeroing& zeroing_;
  std::unordered_map<Index, std::vector<StreamNumber>> uses_;
  std::unordered_map<StreamNumber, GraphPast> pasts_;  // of captured states
  std::uint64_t count_ = 0;
  std::uint64_t steps_ = 0;
  Queue unzeroed_;                  // pending, because the device failed to zero them
  std::vector<Node> spare_;         // nodes without a block
  StreamNumber continue_from_ = 0;  // where complete() stopped
};

}  // namespace vram
