// The journal and the recording of a pool.
#include "pool/event_log.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace vram {

namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace

StreamState* EventLog::attach(StreamState* stream, Status* why) {
  if (stream == nullptr) *why = {Code::unsupported, 0, StreamTable::kTooMany};
  if (stream == nullptr || (config_.journal == 0 && recording_ == nullptr)) return stream;
  auto ring = config_.journal != 0 ? std::make_unique<JournalTape>(config_.journal) : nullptr;
  auto tape = recording_ != nullptr ? recording_->tape() : nullptr;
  std::lock_guard guard(stream->lock);
  stream->journal.swap(ring);
  // A state that had another handle before may have events that were not taken yet.
  if (stream->tape == nullptr) stream->tape.swap(tape);
  stream->journaling = true;
  return stream;
}

void EventLog::note_reserved(StreamState& stream) {
  const auto follow = [](Meter& meter, std::uint64_t value) {
    if (value > meter.current) {
      meter.add(value - meter.current);
    } else {
      meter.subtract(meter.current - value);
    }
  };
  const std::uint64_t before = reserved_.current;
  const std::uint64_t now = placement_.reserved_bytes();
  follow(reserved_, now);
  follow(pieces_, placement_.pieces());
  if (now == before) return;
  std::lock_guard guard(stream.lock);
  note(stream, now > before ? Action::grow : Action::shrink, 0, now > before ? now - before : before - now, 0,
       0);
}

void EventLog::listen(std::function<void(const PoolEvent&)> listener) {
  {
    std::unique_lock<std::mutex> lock;
    if (!look(&lock)) return;
    listener_.swap(listener);
    space().listen(nullptr);
    if (listener_)
      space().listen([this](bool there, Index segment, Address address, std::uint64_t bytes) {
        tell(there ? PoolEvent::Kind::reserved : PoolEvent::Kind::released, segment, address, bytes,
             streams_[space().segments()[segment].stream].handle);
      });
  }  // the old listener is destroyed without the lock
}

void EventLog::tell(PoolEvent::Kind kind, Index segment, Address address, std::uint64_t bytes,
                    StreamHandle stream) const {
  const Segment& in = space().segments()[segment];
  listener_({kind, in.plain, address, bytes, stream, streams_[in.stream].heap});
}

void EventLog::tell_completed(const StreamState& owner, const Block& block) const {
  if (listener_)
    tell(PoolEvent::Kind::completed, block.segment, space().address_of(block), bytes_of(block), owner.handle);
}

void EventLog::write(StreamState& stream, Action action, Address address, std::uint64_t bytes,
                     std::uint32_t tag, std::uint32_t serial) {
  const JournalEntry event = entry(stream, action, address, bytes, tag, serial);
  if (stream.journal != nullptr) stream.journal->add(event);
  if (stream.tape != nullptr) stream.tape->add(event);
}

JournalEntry EventLog::entry(const StreamState& stream, Action action, Address address, std::uint64_t bytes,
                             std::uint32_t tag, std::uint32_t serial) {
  JournalEntry event;
  event.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  event.time_ns = now_ns();
  event.address = address;
  event.bytes = bytes;
  event.tag = tag;
  event.serial = serial;
  event.stream = stream.handle;
  event.action = action;
  return event;
}

Status EventLog::start_journal(std::uint32_t entries) {
  if (entries > kMostJournaled) return {Code::invalid, 0, "journal"};
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("journal", &lock); !status.ok()) return status;
  std::vector<std::unique_ptr<JournalTape>> rings(streams_.size());  // all of them or none
  for (auto& ring : rings) ring = entries != 0 ? std::make_unique<JournalTape>(entries) : nullptr;
  config_.journal = entries;
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    stream.journal.swap(rings[stream.number]);
    stream.journaling = stream.journal != nullptr || stream.tape != nullptr;
  }
  return {};
}

void EventLog::start_recording(std::uint64_t most) {
  std::vector<std::unique_ptr<JournalTape>> tapes;  // the new ones, then the old ones
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return;
  recording_ = most == 0 ? nullptr : std::make_shared<Recording>(most);
  for (std::uint32_t n = 0; n < streams_.size(); ++n)
    tapes.push_back(recording_ == nullptr ? nullptr : recording_->tape());
  const Standstill still(streams_);  // so that what is there and what comes after add up
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    stream.tape.swap(tapes[stream.number]);
    stream.journaling = stream.journal != nullptr || stream.tape != nullptr;
  }
  if (recording_ != nullptr) record_existing();
}

void EventLog::record_existing() {
  // Under the stream's lock: a mark may come at any time.
  const auto add = [this](StreamState& stream, Action action, Address address, std::uint64_t bytes,
                          std::uint32_t tag, std::uint32_t serial) {
    std::lock_guard guard(stream.lock);
    stream.tape->add(entry(stream, action, address, bytes, tag, serial));
  };
  const auto record = [&](Action action, const Block& block) {
    add(owner_of(block), action, space().address_of(block), block.requested, block.tag, block.serial);
  };
  if (reserved_.current != 0) add(streams_[0], Action::grow, 0, reserved_.current, 0, 0);
  for (Index i = 1; i < blocks().end(); ++i)
    if (const Block& block = blocks()[i]; block.allocated()) record(Action::allocate, block);
  for (const StreamState& stream : streams_)
    for (const auto& [tick, pending] : stream.waiting)
      if (pending.awaited)
        for (const Action action : {Action::allocate, Action::free_pending})
          record(action, blocks()[pending.block]);
}

void EventLog::mark(std::uint64_t number) {
  if (closed()) return;
  StreamState& stream = streams_[0];
  std::lock_guard guard(stream.lock);
  if (stream.tape != nullptr) stream.tape->add(entry(stream, Action::mark, 0, number, 0, 0));
}

std::uint64_t EventLog::take_recorded(std::vector<JournalEntry>& out) {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock) || recording_ == nullptr) return 0;
  const std::shared_ptr<Recording> recording = recording_;
  std::vector<JournalTape::Taken> taken(streams_.size());
  // Relaxed is enough. An event takes its number under its stream's lock. If it does so after we have had
  // that lock, this load happens before it, and the number is not below what was loaded; else it is on the
  // tape.
  const std::uint64_t complete = sequence_.load(std::memory_order_relaxed);
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    if (stream.tape != nullptr) taken[stream.number] = stream.tape->take();
  }
  lock.unlock();
  return recording->merge(taken, complete, out);
}

void EventLog::copy_journal(std::vector<JournalEntry>& out, std::uint64_t* dropped) const {
  *dropped = 0;
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return;
  {
    const Standstill still(streams_);
    for (const StreamState& stream : streams_) {
      if (stream.journal == nullptr) continue;
      stream.journal->copy_to(out);
      *dropped += stream.journal->dropped();
    }
  }
  lock.unlock();
  std::sort(out.begin(), out.end(),
            [](const JournalEntry& a, const JournalEntry& b) { return a.sequence < b.sequence; });
}

Standstill::Standstill(const StreamTable& streams) : streams_(streams) {
  ceilings_.reserve(streams.size());
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    ceilings_.push_back(std::exchange(stream.ceiling, 0));
    stream.shut_for(StreamState::kStanding);
  }
}

Standstill::~Standstill() {
  for (StreamState& stream : streams_) {
    std::lock_guard guard(stream.lock);
    stream.ceiling = ceilings_[stream.number];
    stream.open_for(StreamState::kStanding);
  }
}

}  // namespace vram
