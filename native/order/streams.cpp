// Fences and the stream cache. The decisions that use them are in pool.cpp.
#include "order/streams.hpp"

namespace vram {

void StreamCache::drain(Blocks& blocks, const Sizes& sizes, std::vector<Index>& out) {
  const auto empty = [&](Index& head) {
    for (Index i = head; i != 0; i = blocks[i].link_after) {
      out.push_back(i);
      count_one(blocks[i].units, -1);
      blocks[i].set(BlockState::moving);
    }
    head = 0;
  };
  const auto each = [](auto& words, auto visit) {
    std::size_t at = 0;
    for (std::uint64_t& word : words) {
      for (std::uint64_t left = word; left != 0; left &= left - 1)
        if (visit(at + static_cast<std::size_t>(std::countr_zero(left)))) word ^= left & -left;
      at += 64;
    }
  };
  const bool any_small = has_small();
  if (sizes.most > kSmallUnits && has_large())
    each(places_used_, [&](std::size_t i) {
      const bool asked = sizes.contain(places_[i].units);
      if (asked) empty(places_[i].head);
      return asked;
    });
  if (sizes.least <= kSmallUnits && any_small)
    each(small_used_, [&](std::size_t i) {
      empty(small_[i]);
      return true;
    });
}

void StreamCache::forget() {
  std::fill(std::begin(small_), std::end(small_), Index{0});
  std::fill(std::begin(places_), std::end(places_), Place{});
  std::fill(std::begin(small_used_), std::end(small_used_), std::uint64_t{0});
  std::fill(std::begin(places_used_), std::end(places_used_), std::uint64_t{0});
  count_ = 0;
  bytes_ = 0;
  large_count_.store(0, std::memory_order_relaxed);
}

StreamTable::StreamTable() : numbers_(kMaxStreams), places_(kPlaces) { add(0); }

// Where the handle stands, or the empty place where it would.
std::uint32_t StreamTable::place_of(StreamHandle key) const {
  auto i = static_cast<std::uint32_t>((key * 0x9E3779B97F4A7C15u) >> 47);
  for (;; i = (i + 1) % kPlaces) {
    const StreamHandle there = places_[i].handle.load(std::memory_order_relaxed);
    if (there == key || there == 0) return i;
  }
}

StreamState* StreamTable::find(StreamHandle handle) const {
  if (handle == 0) return numbers_[0].load(std::memory_order_acquire);
  const Place& place = places_[place_of(handle)];
  StreamState* const state = place.state.load(std::memory_order_acquire);
  // sweep() may have given the place to another handle meanwhile.
  return place.handle.load(std::memory_order_relaxed) == handle ? state : nullptr;
}

// `id`: of a foreign stream.
StreamState* StreamTable::add(StreamHandle key, const StreamId* id) {
  if (count_ != 0)
    if (StreamState* known = find(key); known != nullptr) return known;
  if (occupied_ > kPlaces / 2) sweep();
  const std::uint32_t place = place_of(key);
  const bool new_place = key != 0 && places_[place].handle.load(std::memory_order_relaxed) == 0;
  StreamState* state = id != nullptr ? new_state(key & ~kForeignBit, true, *id) : new_state(key, false, 0);
  if (state == nullptr || key == 0) return state;
  if (new_place) {
    ++occupied_;
    places_[place].handle.store(key, std::memory_order_relaxed);
  }
  places_[place].state.store(state, std::memory_order_release);
  return state;
}

StreamState* StreamTable::add_hidden(StreamHandle handle, bool foreign, StreamId id) {
  return new_state(handle, foreign, id);
}

// One that is retired and idle, or a new one; null when all numbers are in use.
StreamState* StreamTable::new_state(StreamHandle handle, bool foreign, StreamId id) {
  StreamState* state = nullptr;
  for (std::size_t i = 0; i < kRetiredTried && !retired_.empty() && state == nullptr; ++i) {
    StreamState& old = (*this)[retired_.front()];
    retired_.pop_front();
    std::lock_guard guard(old.lock);
    if (old.live != 0 || old.cache.count() != 0 || !old.waiting.empty()) {
      retired_.push_back(old.number);
    } else {
      state = &old;
    }
  }
  if (state == nullptr) {
    if (count_ >= kMaxStreams) return nullptr;
    states_.push_back(std::make_unique<StreamState>());
    state = states_.back().get();
    state->number = static_cast<std::uint16_t>(count_);
    numbers_[count_].store(state, std::memory_order_release);
    ++count_;
  }
  {
    std::lock_guard guard(state->lock);
    state->handle = handle;
    state->foreign = foreign;
    state->id = id;
    state->open_for(StreamState::kLeaving);
  }
  state->seen.clear();
  state->life = StreamState::Life::active;
  state->last = 0;
  if (state->passed >= state->tick) state->tick = state->passed + 1;
  return state;
}

// Clears the places of forgotten handles. A reader that misses a stream meanwhile takes the mutex and looks
// again.
void StreamTable::sweep() {
  std::vector<StreamState*> kept;
  for (std::uint32_t i = 0; i < kPlaces; ++i) {
    if (StreamState* state = places_[i].state.load(std::memory_order_relaxed)) kept.push_back(state);
    places_[i].state.store(nullptr, std::memory_order_release);
    places_[i].handle.store(0, std::memory_order_relaxed);
  }
  for (StreamState* state : kept) {
    const StreamHandle key = key_of(*state);
    Place& place = places_[place_of(key)];
    place.handle.store(key, std::memory_order_relaxed);
    place.state.store(state, std::memory_order_release);
  }
  occupied_ = static_cast<std::uint32_t>(kept.size());
}

void StreamTable::forget(StreamState& stream) {
  {
    std::lock_guard guard(stream.lock);
    stream.shut_for(StreamState::kLeaving);
  }
  Place& place = places_[place_of(key_of(stream))];
  if (place.state.load(std::memory_order_relaxed) == &stream)
    place.state.store(nullptr, std::memory_order_release);
}

void StreamTable::retire(StreamState& stream) {
  stream.life = StreamState::Life::retired;
  retired_.push_back(stream.number);
}

Status EventPool::take(EventHandle* out) {
  if (idle_.empty()) return backend_.event_create(out);
  *out = idle_.back();
  idle_.pop_back();
  return {};
}

std::vector<EventPool::Awaited>::iterator EventPool::awaited(EventHandle event) {
  return std::find_if(awaited_.begin(), awaited_.end(),
                      [event](const Awaited& each) { return each.event == event; });
}

void EventPool::give(EventHandle event) {
  if (const auto found = awaited(event); found != awaited_.end()) {
    found->given = true;  // wait() gives it
  } else if (closed_) {
    (void)backend_.event_destroy(event);
  } else {
    idle_.push_back(event);
  }
}

Status EventPool::wait(EventHandle event, std::unique_lock<std::mutex>& lock) {
  if (const auto found = awaited(event); found != awaited_.end()) {
    ++found->waits;
  } else {
    awaited_.push_back({event, 1, false});
  }
  lock.unlock();
  const Status status = backend_.event_synchronize(event);
  lock.lock();
  const auto found = awaited(event);
  if (--found->waits != 0) return status;
  const bool given = found->given;
  awaited_.erase(found);
  if (given) give(event);
  return status;
}

Status EventPool::destroy_all() {
  closed_ = true;
  Status first;
  for (EventHandle event : idle_) {
    const Status status = backend_.event_destroy(event);
    if (first.ok()) first = status;
  }
  idle_.clear();
  return first;
}

Status Fences::record(StreamState& stream) {
  constexpr Status kAbsent{Code::absent, 0, "event_record"};
  if (stream.ended()) return stream.covered() >= stream.last ? Status{} : kAbsent;
  if (stream.capture == 0 && !stream.present()) return kAbsent;
  if (stream.capture != 0 || backend_.capturing(stream.handle)) return {Code::capturing, 0, "event_record"};
  if (stream.fences.size() >= kMostFences) make_room(stream);
  EventHandle event = 0;
  if (Status status = events_.take(&event); !status.ok()) return status;
  if (Status status = backend_.event_record(event, stream.handle); !status.ok()) {
    events_.give(event);
    return status;
  }
  stream.fences.push_back({stream.tick, event});
  watched_.add(stream.number);
  ++stream.tick;
  stream.unfenced_bytes = 0;
  return {};
}

// Asks first: a stream whose blocks serve itself is not polled otherwise.
void Fences::make_room(StreamState& stream) {
  (void)poll(stream);
  std::deque<Fence>& fences = stream.fences;
  if (fences.size() < kMostFences) return;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < fences.size(); ++i) {
    if (i % 2 == 0 || i + 1 == fences.size()) {
      fences[kept++] = fences[i];
    } else {
      events_.give(fences[i].event);
    }
  }
  fences.resize(kept);
}

Status Fences::poll(StreamState& stream) {
  while (!stream.fences.empty()) {
    const Fence fence = stream.fences.front();
    const Status status = backend_.event_query(fence.event);
    if (status.code == Code::not_ready) return {};
    if (!status.ok()) return status;
    pass(stream, fence.tick);
  }
  return {};
}

bool Fences::finished(StreamState& stream, Tick tick) {
  if (stream.ended()) tick = std::min(tick, stream.last);
  if (tick <= stream.passed || stream.retired()) return true;
  if (stream.covered() < tick) (void)record(stream);
  (void)poll(stream);
  return tick <= stream.passed;
}

Status Fences::order(StreamState& waiter, StreamState& stream, Tick tick) {
  EventHandle event = 0;
  if (!waiter.present()) return {Code::absent, 0, "stream_wait"};
  if (Status status = event_for(stream, tick, &event, &tick); !status.ok()) return status;
  if (event != 0)
    if (Status status = backend_.stream_wait(waiter.handle, event); !status.ok()) return status;
  waiter.saw(stream.number, tick);
  return {};
}

Status Fences::event_for(StreamState& stream, Tick tick, EventHandle* out, Tick* covers) {
  *out = 0;
  if (stream.ended()) tick = std::min(tick, stream.last);
  if (tick <= stream.passed || stream.retired()) return {};
  if (stream.covered() < tick)
    if (Status status = record(stream); !status.ok()) return status;
  for (const Fence& fence : stream.fences)
    if (fence.tick >= tick) {
      *out = fence.event;
      if (covers != nullptr) *covers = fence.tick;
      break;
    }
  return {};
}

void Fences::cover(StreamState& stream) {
  if (!stream.foreign || stream.owed <= stream.covered()) return;
  (void)poll(stream);
  (void)record(stream);
}

void Fences::clear(StreamState& stream) { pass(stream, mark(stream)); }

void Fences::pass(StreamState& stream, Tick tick) {
  stream.passed = std::max(stream.passed, tick);
  while (!stream.fences.empty() && stream.fences.front().tick <= stream.passed) {
    events_.give(stream.fences.front().event);
    stream.fences.pop_front();
  }
}

}  // namespace vram
