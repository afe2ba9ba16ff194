// The streams of a pool. Defines StreamTable.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "order/stream_state.hpp"

namespace vram {

// The streams of a pool, by number (0 is the default stream) and by handle. Readers need no lock;
// writers hold the pool's mutex. States never move and exist as long as the table. A handle may name a
// lasting stream and a foreign one.
class StreamTable {
 public:
  StreamTable();
  StreamState& operator[](std::uint16_t number) const {
    return *numbers_[number].load(std::memory_order_acquire);
  }
  StreamState* find(StreamHandle handle) const;
  StreamState* find_foreign(StreamHandle handle) const { return find(handle | kForeignBit); }
  // The state for a handle, made if necessary; null if all numbers are in use.
  StreamState* add(StreamHandle handle) { return add(handle, nullptr); }
  // The same for a foreign stream. pre: no foreign stream of that handle is known.
  StreamState* add_foreign(StreamHandle handle, StreamId id) { return add(handle | kForeignBit, &id); }
  // A state that no handle leads to.
  StreamState* add_hidden(StreamHandle handle, bool foreign, StreamId id);
  // Forgets the handle: nothing new is allocated on the stream.
  void forget(StreamState& stream);
  // The number may be used again once `add` finds the state idle. pre: forgotten, all its work has completed.
  void retire(StreamState& stream);
  std::uint32_t size() const { return count_; }  // numbers in use, retired ones included

  static constexpr std::uint32_t kMaxStreams = (1 << 16) - 1;  // at a time
  static constexpr const char* kTooMany = "streams";           // Status::call if there are more

  // All states, in order of their numbers, with those that are added meanwhile.
  struct End {};
  class Iterator {
   public:
    Iterator(const StreamTable& table) : table_(table) {}
    StreamState& operator*() const { return table_[static_cast<std::uint16_t>(number_)]; }
    Iterator& operator++() {
      ++number_;
      return *this;
    }
    bool operator!=(End) const { return number_ < table_.size(); }

   private:
    const StreamTable& table_;
    std::uint32_t number_ = 0;
  };
  Iterator begin() const { return *this; }
  End end() const { return {}; }

 private:
  static constexpr std::uint32_t kPlaces = 1 << 17;
  static constexpr std::size_t kRetiredTried = 8;
  struct Place {
    std::atomic<StreamHandle> handle;
    std::atomic<StreamState*> state;
  };
  // In the keys of foreign streams; no address has it, nor the handle of any backend.
  static constexpr StreamHandle kForeignBit = StreamHandle{1} << 62;
  static StreamHandle key_of(const StreamState& state) {
    return state.foreign ? state.handle | kForeignBit : state.handle;
  }
  std::uint32_t place_of(StreamHandle key) const;
  StreamState* add(StreamHandle key, const StreamId* id);
  StreamState* new_state(StreamHandle handle, bool foreign, StreamId id);
  void sweep();

  LazyArray<std::atomic<StreamState*>> numbers_;
  LazyArray<Place> places_;
  std::vector<std::unique_ptr<StreamState>> states_;
  std::deque<std::uint16_t> retired_;
  std::uint32_t count_ = 0;
  std::uint32_t occupied_ = 0;
};

}  // namespace vram
