// Direct and relayed copies between devices. See transfers.hpp.
#include "backends/transfers.hpp"

#include <algorithm>

#include "base/waits.hpp"

namespace vram {

namespace {

// An event of one copy.
class OwnEvent {
 public:
  explicit OwnEvent(Backend& device) : device_(device), status_(device.event_create(&event_)) {}
  ~OwnEvent() {
    if (status_.ok()) (void)device_.event_destroy(event_);
  }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;
  const Status& status() const { return status_; }
  EventHandle get() const { return event_; }

 private:
  Backend& device_;
  EventHandle event_ = 0;
  Status status_;
};

// Makes a stream wait for everything queued on a stream of another device.
Status follow(const CopyEnd& after, const CopyEnd& before, EventHandle event) {
  const Status status = before.device.event_record(event, before.stream);
  return status.ok() ? after.device.stream_wait_peer(after.stream, before.device, event) : status;
}

// Makes a stream wait for an event that another device has recorded, or else the host.
Status await(const CopyEnd& after, Backend& before, EventHandle event) {
  if (after.device.waits_for(before)) return after.device.stream_wait_peer(after.stream, before, event);
  return before.event_synchronize(event);
}

// What is queued must complete, although the caller was asked to stop.
Status finish(const CopyEnd& end) {
  const InterruptScope quiet(nullptr);
  return end.device.stream_synchronize(end.stream);
}

}  // namespace

// ---- direct
// -------------------------------------------------------------------------------------------------

bool copies_directly(const Backend& one, const Backend& other) {
  return one.can_access(other) && one.waits_for(other) && other.waits_for(one);
}

namespace {

// Runs on the stream of `here`.
Status copy_directly(const CopyEnd& here, const CopyEnd& there, bool from_there, std::uint64_t bytes) {
  const OwnEvent begun(there.device);
  const OwnEvent done(here.device);
  if (!begun.status().ok()) return begun.status();
  if (!done.status().ok()) return done.status();
  Status status = follow(here, there, begun.get());
  if (status.ok())
    status = here.device.copy_peer(from_there ? here.address : there.address,
                                   from_there ? there.address : here.address, bytes, there.device, from_there,
                                   here.stream);
  if (!status.ok()) return status;
  // If their stream cannot be made to wait for the copy, the host waits.
  return follow(there, here, done.get()).ok() ? Status{} : finish(here);
}

Status copy_in_order(const CopyEnd& here, const CopyEnd& there, bool from_there, std::uint64_t bytes,
                     Relay* relay) {
  if (relay == nullptr) return copy_directly(here, there, from_there, bytes);
  return from_there ? relay->copy(here, there, bytes) : relay->copy(there, here, bytes);
}

}  // namespace

Status copy_between(const CopyEnd& here, const CopyEnd& there, bool from_there, std::uint64_t bytes,
                    Relay* relay) {
  if (here.device.capturing(here.stream) || there.device.capturing(there.stream))
    return {Code::capturing, 0, "copy between devices"};
  if (there.device.lasting(there.stream)) return copy_in_order(here, there, from_there, bytes, relay);
  // A stream of another library may be gone, so the host waits in its place.
  const CopyEnd instead{there.device, there.address, 0};
  Status status = there.device.synchronize();
  if (status.ok()) status = copy_in_order(here, instead, from_there, bytes, relay);
  return status.ok() ? finish(instead) : status;
}

// ---- relayed
// ------------------------------------------------------------------------------------------------

// The device owns the relay, so the relay must not own the device.
Relay::Relay(Backend& from, std::shared_ptr<Backend> to)
    : from_(from), to_(std::move(to)), memory_(std::shared_ptr<Backend>(std::shared_ptr<void>(), &from)) {}

// A copy that still runs uses the memory, so both devices finish first.
Relay::~Relay() {
  const InterruptScope quiet(nullptr);
  const std::shared_ptr<Backend> to = to_.lock();
  for (const Piece& piece : pieces_) {
    if (piece.filled != 0) {
      (void)from_.event_synchronize(piece.filled);
      (void)from_.event_destroy(piece.filled);
    }
    if (piece.emptied != 0 && to != nullptr) {
      (void)to->event_synchronize(piece.emptied);
      (void)to->event_destroy(piece.emptied);
    }
  }
}

// What was created stays if a later call fails, and the next copy continues there.
Status Relay::prepare(Backend& to) {
  for (Piece& piece : pieces_) {
    Status status;
    if (piece.address == 0) status = memory_.reserve(kChunkBytes, &piece.address);
    if (status.ok() && piece.filled == 0) status = from_.event_create(&piece.filled);
    if (status.ok() && piece.emptied == 0) status = to.event_create(&piece.emptied);
    if (!status.ok()) return status;
  }
  return {};
}

// One chunk, through one piece.
Status Relay::pass(const CopyEnd& to, const CopyEnd& from, std::uint64_t bytes, Piece& piece) {
  Status status = await(from, to.device, piece.emptied);
  if (status.ok()) status = from.device.copy(piece.address, from.address, bytes, from.stream);
  if (status.ok()) status = from.device.event_record(piece.filled, from.stream);
  if (status.ok()) status = await(to, from.device, piece.filled);
  if (status.ok()) status = to.device.copy(to.address, piece.address, bytes, to.stream);
  if (status.ok()) status = to.device.event_record(piece.emptied, to.stream);
  return status;
}

Status Relay::copy(const CopyEnd& to, const CopyEnd& from, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Status status = prepare(to.device);
  if (!status.ok()) return status;
  const InterruptScope quiet(nullptr);  // a wait for a chunk is short
  for (std::uint64_t at = 0; status.ok() && at < bytes; at += kChunkBytes) {
    status = pass({to.device, to.address + at, to.stream}, {from.device, from.address + at, from.stream},
                  std::min(kChunkBytes, bytes - at), pieces_[next_++ % 2]);
  }
  if (status.ok()) return status;
  // An event may not mark the last use of its piece, so nothing may be left under way.
  if (!finish(from).ok() || !finish(to).ok())
    for (Piece& piece : pieces_) piece.address = 0;  // in use for an unknown time: its memory stays reserved
  return status;
}

std::shared_ptr<Relay> Relays::to(Backend& from, const std::shared_ptr<Backend>& to) {
  std::vector<std::shared_ptr<Relay>> gone;  // to devices that are no more; destroyed after the lock
  const std::lock_guard lock(mutex_);
  for (auto each = by_target_.begin(); each != by_target_.end();) {
    if (each->second != nullptr && each->second->ended()) {
      gone.push_back(std::move(each->second));
      each = by_target_.erase(each);
    } else {
      ++each;
    }
  }
  std::shared_ptr<Relay>& found = by_target_[to.get()];
  if (found == nullptr || !found->leads_to(*to)) found = std::make_shared<Relay>(from, to);
  return found;
}

void Relays::clear() {
  std::map<const Backend*, std::shared_ptr<Relay>> gone;  // destroyed after the lock
  const std::lock_guard lock(mutex_);
  gone.swap(by_target_);
}

}  // namespace vram
