// Copies between two devices, in the order of a stream of each: directly if the devices can access each
// other's memory, else in chunks through pinned host memory. Whose memory it is, and how long it lives, is
// left to the caller.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "backends/pinned.hpp"

namespace vram {

// One side of a copy. The copy begins after everything queued on the stream so far, and later work on the
// stream begins after the copy.
struct CopyEnd {
  Backend& device;
  Address address;
  StreamHandle stream;
};

// Two pieces of pinned memory between two devices: while one chunk is copied into one of them, the previous
// chunk is copied out of the other. Copies of several threads take turns, chunk by chunk on the devices.
class Relay {
 public:
  static constexpr std::uint64_t kChunkBytes = 4 * kMiB;
  Relay(Backend& from, std::shared_ptr<Backend> to);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  // Queues everything, if the devices' streams can wait for each other. Otherwise the host waits for each
  // chunk. On failure the target's contents are undefined, and nothing is queued anymore.
  Status copy(const CopyEnd& to, const CopyEnd& from, std::uint64_t bytes);
  bool leads_to(const Backend& to) const { return to_.lock().get() == &to; }
  bool ended() const { return to_.expired(); }  // the target is no more

 private:
  struct Piece {
    Address address = 0;
    EventHandle filled = 0;   // of the source: the chunk has arrived
    EventHandle emptied = 0;  // of the target: the chunk has left
  };
  Status prepare(Backend& to);
  Status pass(const CopyEnd& to, const CopyEnd& from, std::uint64_t bytes, Piece& piece);

  std::mutex mutex_;  // guards the members below
  Backend& from_;
  const std::weak_ptr<Backend> to_;
  PinnedBackend memory_;
  Piece pieces_[2];
  unsigned next_ = 0;
};

// The relays that begin at one device. It must not outlive the device.
class Relays {
 public:
  std::shared_ptr<Relay> to(Backend& from, const std::shared_ptr<Backend>& to);
  void clear();

 private:
  std::mutex mutex_;
  std::map<const Backend*, std::shared_ptr<Relay>> by_target_;
};

// Whether one device copies to or from the memory of the other without a detour.
bool copies_directly(const Backend& one, const Backend& other);

// Copies between memory of two devices, in the direction that `from_there` says: through the relay of that
// direction, or directly if it is null. pre: a relay, or copies_directly; the stream of `here` exists.
Status copy_between(const CopyEnd& here, const CopyEnd& there, bool from_there, std::uint64_t bytes,
                    Relay* relay);

}  // namespace vram
