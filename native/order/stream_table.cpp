// Finding, adding and reusing the states of streams.
#include "order/stream_table.hpp"

#include <mutex>

namespace vram {

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

}  // namespace vram
