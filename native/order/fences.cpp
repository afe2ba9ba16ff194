// Recording, querying and waiting for fences.
#include "order/fences.hpp"

#include <algorithm>
#include <new>

#include "placement/room.hpp"

namespace vram {

Status EventPool::take(EventHandle* out) {
  if (idle_.empty()) {
    vram::make_room(idle_, created_ + 1);  // so that put() does not allocate
    const Status status = backend_.event_create(out);
    created_ += status.ok();
    return status;
  }
  *out = idle_.back();
  idle_.pop_back();
  return {};
}

std::vector<EventPool::Awaited>::iterator EventPool::awaited(EventHandle event) {
  return std::find_if(awaited_.begin(), awaited_.end(),
                      [event](const Awaited& each) { return each.event == event; });
}

void EventPool::put(EventHandle event) {
  if (const auto found = awaited(event); found != awaited_.end()) {
    found->put_back = true;  // wait() puts it back
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
  const bool put_back = found->put_back;
  awaited_.erase(found);
  if (put_back) put(event);
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
  try {
    stream.fences.push_back({stream.tick, event});
  } catch (const std::bad_alloc&) {
    events_.put(event);
    throw;
  }
  if (Status status = backend_.event_record(event, stream.handle); !status.ok()) {
    stream.fences.pop_back();
    events_.put(event);
    return status;
  }
  watched_.add(stream.number);
  ++stream.tick;
  stream.unfenced_bytes = 0;
  return {};
}

void Fences::try_record(StreamState& stream) noexcept {
  try {
    (void)record(stream);
  } catch (const std::bad_alloc&) {
  }
}

// Queries first: a stream whose blocks serve only itself is not polled otherwise.
void Fences::make_room(StreamState& stream) {
  (void)poll(stream);
  std::deque<Fence>& fences = stream.fences;
  if (fences.size() < kMostFences) return;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < fences.size(); ++i) {
    if (i % 2 == 0 || i + 1 == fences.size()) {
      fences[kept++] = fences[i];
    } else {
      events_.put(fences[i].event);
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
  if (stream.covered() < tick) try_record(stream);
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

void Fences::clear(StreamState& stream) { pass(stream, mark(stream)); }

void Fences::pass(StreamState& stream, Tick tick) {
  stream.passed = std::max(stream.passed, tick);
  while (!stream.fences.empty() && stream.fences.front().tick <= stream.passed) {
    events_.put(stream.fences.front().event);
    stream.fences.pop_front();
  }
}

}  // namespace vram
