// Streams that come, leave and are waited for.
#include "pool/stream_lives.hpp"

#include <algorithm>
#include <utility>

namespace vram {

namespace {

// The default stream of the calling thread, on devices where threads have one each.
constexpr StreamHandle kThisThread = 2;

// The pool knows at most this many streams of other libraries; before it adds more, it waits for the device.
constexpr std::uint32_t kMostForeign = 256;

}  // namespace

Status StreamLives::name(StreamHandle handle, NamedStream* out) {
  *out = {backend_->canonical(handle)};
  const bool known = streams_.find(out->handle) != nullptr;
  out->foreign = !known && !backend_->lasting(out->handle);
  if (out->foreign)
    if (Status status = backend_->stream_id(out->handle, &out->id); !status.ok()) return status;
  if (out->handle != 0 && backend_->info().captures)
    if (Status status = backend_->capture_of(out->handle, &out->capture); status.code == Code::invalid)
      return status;
  if (out->capture != 0 || known || out->foreign) return {};
  const Status status = backend_->stream_query(out->handle);
  return status.code == Code::invalid ? status : Status{};
}

StreamState* StreamLives::add_lasting(StreamHandle handle, Status* why) {
  const bool of_thread = handle == backend_->canonical(kThisThread);
  if (of_thread) retire_ended_threads();
  StreamState* const made = log_.attach(streams_.add(handle), why);
  if (made != nullptr) backend_->stream_used(handle);
  if (of_thread && made != nullptr) threads_.add(made->number);
  return made;
}

// The state of another library's stream. A stream that had the handle before is over. If there are too many,
// the pool waits for the device, because nothing else tells when streams that are gone have completed.
StreamState* StreamLives::foreign(const NamedStream& named, std::unique_lock<std::mutex>& lock, Status* why) {
  StreamState* known = streams_.find_foreign(named.handle);
  if (known != nullptr && known->id == named.id) return known;
  if (foreign_ >= kMostForeign && !captures_.under_way()) {
    *why = wait_for_device(lock);
    if (why->code == Code::closed) return nullptr;
    complete();
    known = streams_.find_foreign(named.handle);
    if (known != nullptr && known->id == named.id) return known;
  }
  if (known != nullptr) abandon(*known);
  StreamState* const made = log_.attach(streams_.add_foreign(named.handle, named.id), why);
  if (made != nullptr) ++foreign_;
  return made;
}

StreamState* StreamLives::state_for(const NamedStream& named, std::unique_lock<std::mutex>& lock,
                                    Status* why) {
  const Captures::Heap* heap = captures_.heap_for(named.handle);
  if (heap == nullptr && named.capture == 0) return own_state(named, lock, why);
  const CaptureId key = heap != nullptr ? heap->key : named.capture;
  for (StreamNumber number : captures_.graphs()) {
    StreamState& known = streams_[number];
    if (known.capture == key && known.handle == named.handle && known.id == named.id) return &known;
  }
  if (heap != nullptr) return add_heap(named, *heap, why);
  auto over = std::make_shared<std::atomic<bool>>(false);
  *why = backend_->capture_keep(named.handle, [over] { over->store(true, std::memory_order_release); });
  return why->ok() ? add_graph(named, key, std::move(over), why) : nullptr;
}

StreamState* StreamLives::user_for(const NamedStream& named, std::unique_lock<std::mutex>& lock,
                                   Status* why) {
  return named.capture != 0 ? state_for(named, lock, why) : own_state(named, lock, why);
}

// Work that uses the heap's memory may run on the stream, so waits for all streams must include it: it has a
// state of its own, too.
StreamState* StreamLives::add_heap(const NamedStream& named, const Captures::Heap& heap, Status* why) {
  if (!named.foreign && lasting(named.handle, why) == nullptr) return nullptr;
  StreamState* const state = add_graph(named, heap.key, heap.over, why);
  if (state == nullptr) return nullptr;
  state->heap = heap.id;
  state->plain = heap.plain;
  return state;
}

StreamState* StreamLives::add_graph(const NamedStream& named, CaptureId key, Over over, Status* why) {
  StreamState* const graph = log_.attach(streams_.add_hidden(named.handle, named.foreign, named.id), why);
  if (graph == nullptr) return nullptr;
  foreign_ += named.foreign ? 1 : 0;
  graph->capture = key;
  graph->over = std::move(over);
  captures_.graphs().push_back(graph->number);
  return graph;
}

// The program may use what is still live of a graph or heap that is over, in the order of the stream itself.
void StreamLives::use_what_is_live(StreamState& graph) {
  const StreamState* const stream =
      graph.foreign ? streams_.find_foreign(graph.handle) : streams_.find(graph.handle);
  if (stream == nullptr || stream->id != graph.id) return;
  for (Index s = space().first_segment(graph.number); s != 0; s = space().segments()[s].list_after)
    for (Index b = space().segments()[s].head; b != 0; b = blocks()[b].after) {
      Block& block = blocks()[b];
      std::lock_guard guard(owner_of(block).lock);
      if (!block.allocated() || block.owned_by() != graph.number) continue;
      pending_.add_use(b, stream->number);
      block.used_elsewhere = true;
    }
}

// Graphs that are gone leave as streams do. Their memory may still be used by work of the stream itself, such
// as a copy of a graph's result, so a last fence is recorded there.
void StreamLives::release_ended_graphs() {
  std::vector<StreamNumber>& graphs = captures_.graphs();
  for (std::size_t i = 0; i < graphs.size();) {
    StreamState& graph = streams_[graphs[i]];
    if (!graph.over->load(std::memory_order_acquire)) {
      ++i;
      continue;
    }
    const std::vector<Index> lent = stock().lent_to(graph.number);  // before anything changes: it may throw
    use_what_is_live(graph);
    const CaptureId capture = std::exchange(graph.capture, 0);
    const Status status = fences_.record(graph);
    if (!status.ok() && status.code != Code::absent) {
      graph.capture = capture;  // it is captured again, so later
      ++i;
      continue;
    }
    graph.over.reset();
    pending_.forget_past(graph);
    for (const Index page : lent) stock().end_loan(page);
    graphs.erase(graphs.begin() + static_cast<std::ptrdiff_t>(i));
    begin_leaving(graph, status.ok() ? graph.tick - 1 : fences_.mark(graph));
  }
}

// A last fence covers all the work of the stream, which still exists. Its memory stays with it until that
// fence has completed and then goes to the default stream; nothing waits for it.
Status StreamLives::retire_state(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  if (stream.number == 0) return {Code::invalid, 0, "retire_stream"};
  const StreamHandle handle = stream.handle;
  if (!fences_.record(stream).ok()) {
    // Without a fence only a wait tells when its work has completed, and later it cannot be queried.
    const Tick tick = fences_.mark(stream);
    lock.unlock();
    const Status status = backend_->stream_synchronize(handle);
    lock.lock();
    if (closed()) return {};
    if (!status.ok()) return status;
    fences_.pass(stream, tick);
    // Another thread may have retired it meanwhile, and the handle may belong to a new stream.
    if ((stream.foreign ? streams_.find_foreign(handle) : streams_.find(handle)) != &stream) return {};
  }
  // Graphs captured on it continue in the order of the default stream, which waits for what used them.
  for (StreamNumber number : captures_.graphs()) {
    StreamState& graph = streams_[number];
    if (graph.handle != handle || graph.foreign != stream.foreign || graph.id != stream.id) continue;
    (void)fences_.order(streams_[0], stream, stream.tick - 1);
    graph.handle = 0;
    foreign_ -= graph.foreign ? 1 : 0;
    graph.foreign = false;
  }
  streams_.forget(stream);
  begin_leaving(stream, stream.tick - 1);
  return {};
}

// The stream may no longer exist, so its handle is not used any more. It leaves when its fences have
// completed; if they do not cover its work, after a wait for the device.
void StreamLives::abandon(StreamState& stream) {
  streams_.forget(stream);
  caches_.drain(stream);
  stream.lock.lock();
  const bool covered = stream.owed <= stream.covered() && stream.live == 0;
  stream.lock.unlock();
  const bool finished = covered && stream.fences.empty();
  const Tick last = covered && !finished ? stream.fences.back().tick : fences_.mark(stream);
  if (finished) fences_.pass(stream, last);
  begin_leaving(stream, last);
}

// Nothing is queued on the stream after `last`; a fence, or a wait for the device, tells when it has
// completed.
void StreamLives::begin_leaving(StreamState& stream, Tick last) {
  {
    std::lock_guard guard(stream.lock);
    stream.shut_for(StreamState::kLeaving);
  }
  stream.life = StreamState::Life::leaving;
  stream.last = last;
  ++leaving_;
  fences_.watched().add(stream.number);
  caches_.drain(stream);
}

// Streams of threads that have ended leave when another thread brings its own.
void StreamLives::retire_ended_threads() {
  threads_.each([this](StreamNumber number) {
    StreamState& stream = streams_[number];
    if (!stream.gone()) {
      if (stream.capture != 0 || !backend_->ended(stream.handle)) return false;
      if (!fences_.record(stream).ok()) return false;  // next time
      streams_.forget(stream);
      begin_leaving(stream, stream.tick - 1);
    }
    threads_.remove(number);
    return false;
  });
}

// When its last fence has completed, the memory of a leaving stream goes to the default stream. That of a
// heap of plain segments is released when nothing in it is live any more.
void StreamLives::finish_leaving(StreamState& stream) {
  if (keep_) return;
  if (!fences_.finished(stream, stream.last) || !stream.waiting.empty()) return;
  if (stream.plain != nullptr) {
    if (!backend_->info().release_waits) (void)release_plain(stream);
    if (space().first_segment(stream.number) != 0) return;
  }
  streams_.retire(stream);
  --leaving_;
  foreign_ -= stream.foreign ? 1 : 0;
  stream.heap = {};
  if (stream.plain == nullptr) placement_.inherit(stream.number, 0);
  stream.plain.reset();
}

Status StreamLives::release_plain(StreamState& stream) {
  const Status status = placement_.release_plain_of(stream.number, finished_);
  log_.note_reserved(stream);
  return status;
}

Status StreamLives::trim_heap(HeapId id, bool wait, std::unique_lock<std::mutex>& lock) {
  complete();
  std::vector<StreamNumber> over;
  for (const StreamState& stream : streams_)
    if (stream.leaving() && stream.plain != nullptr && stream.heap == id) over.push_back(stream.number);
  const auto each = [&](auto visit) -> Status {
    for (const StreamNumber number : over) {
      StreamState& stream = streams_[number];
      if (!stream.leaving() || stream.plain == nullptr || stream.heap != id) continue;
      if (Status status = visit(stream); !status.ok()) return status;
    }
    return {};
  };
  if (wait) {
    if (Status status = each([&](StreamState& stream) { return wait_for_leaving(stream, lock); });
        !status.ok())
      return status;
    complete();
  }
  if (!wait && backend_->info().release_waits) return {};
  const Status status = each([&](StreamState& stream) { return release_plain(stream); });
  complete();
  return status;
}

// For its own work and for streams that still use blocks of it that were freed.
Status StreamLives::wait_for_leaving(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  const StreamNumber number = stream.number;
  if (Status status = wait_for_stream(stream, lock); !status.ok()) return status;
  std::vector<StreamNumber> users;
  for (const StreamState& user : streams_)
    if (std::any_of(user.waiting.begin(), user.waiting.end(),
                    [&](const auto& each) { return home_of(blocks()[each.second.block]).number == number; }))
      users.push_back(user.number);
  for (const StreamNumber user : users)
    if (!streams_[user].retired())
      if (Status status = wait_for_stream(streams_[user], lock); !status.ok()) return status;
  return {};
}

void StreamLives::complete(bool thorough) {
  release_ended_graphs();
  pending_.complete(thorough, [this](StreamState& stream) {
    if (stream.leaving()) finish_leaving(stream);
    return stream.leaving();
  });
}

Status StreamLives::retire(StreamHandle handle) {
  if (closed()) return {Code::closed, 0, "retire_stream"};
  handle = backend_->canonical(handle);
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("retire_stream", &lock); !status.ok()) return status;
  if (StreamState* const stream = streams_.find_foreign(handle)) {
    StreamId id = 0;
    if (Status status = backend_->stream_id(handle, &id); !status.ok()) return status;
    if (stream->id != id) {
      abandon(*stream);
    } else {
      const Presence presence(*stream);
      if (Status status = retire_state(*stream, lock); !status.ok()) return status;
    }
  }
  StreamState* stream = streams_.find(handle);
  const std::vector<StreamNumber>& graphs = captures_.graphs();
  const bool captured = std::any_of(graphs.begin(), graphs.end(), [&](StreamNumber number) {
    return streams_[number].handle == handle && !streams_[number].foreign;
  });
  Status why;
  if (stream == nullptr && captured) stream = lasting(handle, &why);
  if (!why.ok()) return why;
  if (stream != nullptr)
    if (Status status = retire_state(*stream, lock); !status.ok()) return status;
  if (closed()) return {};
  if (stream != nullptr && stream->leaving()) finish_leaving(*stream);
  complete(false);
  verify();
  return {};
}

// Whether only a wait for the device tells that the stream's work on memory of the pool has completed.
bool StreamLives::needs_device_wait(StreamState& stream) const {
  if (!stream.foreign || stream.retired() || stream.capture != 0) return false;
  if (stream.ended()) return stream.covered() < stream.last;
  if (stream.present()) return false;
  std::lock_guard guard(stream.lock);
  return stream.owed > stream.covered() || stream.live != 0 || stream.cache.count() != 0;
}

Status StreamLives::wait_for_pending(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  EventHandle event = 0;
  const Tick tick = stream.waiting.empty() ? stream.now() : stream.waiting.begin()->first;
  if (Status status = fences_.event_for(stream, tick, &event); !status.ok()) return status;
  if (event == 0) return {};
  const Status status = fences_.wait(event, lock);
  if (closed()) return {Code::closed, 0, "allocate"};
  if (!status.ok()) return status;
  return fences_.poll(stream);
}

Status StreamLives::wait_for_all(std::unique_lock<std::mutex>& lock) {
  Status first;
  bool device = false;
  for (StreamState& stream : streams_) {
    if (stream.retired()) continue;
    if (stream.foreign && !stream.present()) {
      device = device || needs_device_wait(stream);
      continue;
    }
    const Status status = wait_for_stream(stream, lock);
    if (status.code == Code::closed || status.unwaited()) return status;
    if (first.ok()) first = status;
  }
  if (!device) return first;
  const Status status = wait_for_device(lock);
  return first.ok() ? status : first;
}

Status StreamLives::wait_for_device(std::unique_lock<std::mutex>& lock) {
  if (captures_.under_way(false)) return {Code::capturing, 0, "synchronize"};
  std::vector<Use> reached;
  for (StreamState& stream : streams_) {
    if (!stream.foreign || stream.retired() || stream.capture != 0) continue;
    caches_.drain(stream);
    reached.push_back({stream.number, stream.ended() ? stream.last : fences_.mark(stream)});
  }
  lock.unlock();
  const Status status = backend_->synchronize();
  lock.lock();
  if (closed()) return {Code::closed, 0, "synchronize"};
  if (!status.ok()) return status;
  for (const Use& each : reached) {
    StreamState& stream = streams_[each.stream];
    fences_.pass(stream, each.tick);
    // The state may have become another stream's meanwhile.
    if (!stream.foreign || stream.retired() || stream.ended() || stream.capture != 0 || stream.named != 0)
      continue;
    stream.lock.lock();
    const bool idle = stream.live == 0;
    stream.lock.unlock();
    if (idle) abandon(stream);
  }
  return {};
}

// By a fence, or, if the driver refuses that, by synchronizing. Captured work is not running; the memory of
// graphs and of captured streams stays theirs.
Status StreamLives::wait_for_stream(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  EventHandle event = 0;
  Status status = fences_.event_for(stream, stream.now(), &event);
  if (status.ok() && event == 0) return status;
  if (status.code == Code::capturing) return {};
  if (!status.ok() && stream.foreign) return wait_for_device(lock);
  const bool leaving = stream.ended();
  const Tick tick = leaving ? stream.last : status.ok() ? stream.tick - 1 : fences_.mark(stream);
  const StreamHandle handle = stream.handle;
  for (const bool by_event : {true, leaving || stream.foreign}) {
    if (by_event && !status.ok() && event == 0) continue;
    if (by_event) {
      status = fences_.wait(event, lock);
    } else {
      lock.unlock();
      status = backend_->stream_synchronize(handle);
      lock.lock();
    }
    if (closed()) return {Code::closed, 0, "allocate"};
    if (status.ok() || status.unwaited()) break;
  }
  if (status.ok()) fences_.pass(stream, tick);
  return status;
}

Status StreamLives::wait_for_heap(StreamState& heap, std::unique_lock<std::mutex>& lock) {
  if (heap.foreign) return wait_for_device(lock);
  if (backend_->capturing(heap.handle)) return {Code::capturing, 0, "allocate"};
  const StreamHandle handle = heap.handle;
  lock.unlock();
  const Status status = backend_->stream_synchronize(handle);
  lock.lock();
  return closed() ? Status{Code::closed, 0, "allocate"} : status;
}

Status StreamLives::wait_until_idle(std::unique_lock<std::mutex>& lock) {
  release_ended_graphs();
  caches_.drain_all();
  Status status = wait_for_all(lock);
  if (!status.ok()) return status;
  complete();
  if (!zeroing_.on_free()) return status;
  // For blocks that have just been zeroed.
  status = wait_for_all(lock);
  if (status.ok()) complete();
  return status;
}

}  // namespace vram
