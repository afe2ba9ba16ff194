// The oracle: a device that watches a pool. It passes every call on to a model device and keeps what
// the pool ought to know: which physical bytes lie under which addresses, who uses them, and which uses
// are ordered before which, by vector clocks over streams, events and the host. It judges the pool by
// two promises alone, whatever rung served:
//   - no physical byte is allocated twice at a time, at whatever addresses;
//   - every use of a byte is ordered before the next allocation that gets it, and has finished, as far as
//     the host can know, before its memory is unmapped or given back.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "world.hpp"

namespace vram::testing {

// A clock: how far each stream had come. clock[s] == n: the first n operations of s lie before.
class Clock {
 public:
  std::uint64_t of(StreamHandle stream) const { return stream < at_.size() ? at_[stream] : 0; }
  void raise(StreamHandle stream, std::uint64_t to) {
    if (at_.size() <= stream) at_.resize(stream + 1, 0);
    at_[stream] = std::max(at_[stream], to);
  }
  void join(const Clock& other) {
    for (StreamHandle s = 0; s < other.at_.size(); ++s) raise(s, other.at_[s]);
  }
  // The first stream in which this lies further than the other, or -1.
  std::int64_t beyond(const Clock& other) const {
    for (StreamHandle s = 0; s < at_.size(); ++s)
      if (at_[s] > other.of(s)) return static_cast<std::int64_t>(s);
    return -1;
  }

 private:
  std::vector<std::uint64_t> at_;
};

class Oracle : public Backend {
 public:
  explicit Oracle(std::shared_ptr<ModelBackend> device) : device_(std::move(device)) {}
  ModelBackend& device() { return *device_; }

  // ---- what the program does with its memory ------------------------------------------------------
  // The pool has allocated the range on the stream.
  void allocated(Address address, std::uint64_t bytes, StreamHandle stream) {
    each_piece(address, bytes, [&](std::uint64_t from, std::uint64_t to) {
      if (from == 0) return fault("allocated without memory", address, stream);
      cut(from, to);
      const Clock& now = clock_of(stream);
      for (auto it = memory_.lower_bound(from); it != memory_.end() && it->first < to; ++it) {
        if (it->second.live != 0) fault("allocated twice", address, stream);
        if (it->second.uses.beyond(now) >= 0)
          fault("allocated before stream " + std::to_string(it->second.uses.beyond(now)) + " is done with it",
                address, stream);
      }
    });
    // From here on the allocation stands for all that lies before it.
    const Clock& point = advance(stream);
    const StreamHandle which = number(stream);
    Clock own;
    own.raise(which, point.of(which));
    each_piece(address, bytes, [&](std::uint64_t from, std::uint64_t to) {
      memory_.erase(memory_.lower_bound(from), memory_.lower_bound(to));
      memory_[from] = {to, address, own};
    });
    touch_slots(address, bytes, which, point.of(which));
    live_[address] = bytes;
  }
  // The program is about to give it back.
  void freed(Address address) {
    each_piece(address, live_[address], [&](std::uint64_t from, std::uint64_t to) {
      for (auto it = memory_.lower_bound(from); it != memory_.end() && it->first < to; ++it)
        it->second.live = 0;
    });
    live_.erase(address);
  }
  // The pool refused: it stays live after all.
  void kept(Address address, std::uint64_t bytes) {
    each_piece(address, bytes, [&](std::uint64_t from, std::uint64_t to) {
      for (auto it = memory_.lower_bound(from); it != memory_.end() && it->first < to; ++it)
        it->second.live = address;
    });
    live_[address] = bytes;
  }
  // Work on the stream touches a part of a live allocation; it is queued on the device.
  void used(Address address, std::uint64_t bytes, StreamHandle stream) {
    if (bytes == 0) return;
    const StreamHandle which = number(stream);
    const std::uint64_t point = advance(stream).of(which);
    note_use(address, bytes, which, point);
    if (!device_->work(stream, ++work_, address, bytes).ok()) fault("not usable", address, stream);
  }
  std::vector<std::string> faults;
  bool closing = false;  // a pool that closes may give back what is live

  // ---- the contract, watched ------------------------------------------------------------------------
  const DeviceInfo& info() const override { return device_->info(); }
  Status memory_info(std::uint64_t* free, std::uint64_t* total) override {
    return device_->memory_info(free, total);
  }
  Status reserve(std::uint64_t bytes, Address* out) override {
    const Status status = device_->reserve(bytes, out);
    if (status.ok()) plain_[*out] = bytes;
    return status;
  }
  Status release(Address address, std::uint64_t bytes) override {
    expect_finished(kPlain | address, (kPlain | address) + bytes, "released while in use", address);
    const Status status = device_->release(address, bytes);
    if (status.ok()) {
      forget(kPlain | address, (kPlain | address) + bytes);
      plain_.erase(address);
    }
    return status;
  }
  Status space_reserve(std::uint64_t bytes, Address* out) override {
    return device_->space_reserve(bytes, out);
  }
  Status space_release(Address address, std::uint64_t bytes) override {
    return device_->space_release(address, bytes);
  }
  Status page_create(std::uint64_t bytes, PageHandle* out) override {
    const Status status = device_->page_create(bytes, out);
    if (status.ok()) pages_[*out] = ++serial_ << kPageShift;
    return status;
  }
  Status page_release(PageHandle page, std::uint64_t bytes) override {
    const std::uint64_t base = pages_[page];
    expect_finished(base, base + bytes, "page released while in use", base);
    const Status status = device_->page_release(page, bytes);
    if (status.ok()) {
      forget(base, base + bytes);
      pages_.erase(page);
    }
    return status;
  }
  Status map(Address address, std::uint64_t bytes, PageHandle page) override {
    const Status status = device_->map(address, bytes, page);
    for (std::uint64_t at = 0; status.ok() && at < bytes; at += kSlotBytes)
      slots_[address + at] = {pages_[page] + at, {}};
    return status;
  }
  Status set_access(Address address, std::uint64_t bytes) override {
    return device_->set_access(address, bytes);
  }
  Status unmap(Address address, std::uint64_t bytes) override {
    for (std::uint64_t at = 0; at < bytes; at += kSlotBytes)
      if (slots_[address + at].uses.beyond(host_) >= 0) fault("unmapped while in use", address, 0);
    const Status status = device_->unmap(address, bytes);
    if (status.ok()) slots_.erase(slots_.lower_bound(address), slots_.lower_bound(address + bytes));
    return status;
  }

  Status stream_create(StreamHandle* out) override { return device_->stream_create(out); }
  Status stream_destroy(StreamHandle stream) override { return device_->stream_destroy(stream); }
  Status stream_synchronize(StreamHandle stream) override {
    const Status status = device_->stream_synchronize(stream);
    if (status.ok()) host_.join(clock_of(stream));
    return status;
  }
  Status stream_query(StreamHandle stream) override {
    const Status status = device_->stream_query(stream);
    if (status.ok()) host_.join(clock_of(stream));
    return status;
  }
  Status stream_wait(StreamHandle stream, EventHandle event) override {
    const Status status = device_->stream_wait(stream, event);
    if (status.ok()) clock_of(stream).join(events_[event]);
    return status;
  }
  Status event_create(EventHandle* out) override { return device_->event_create(out); }
  Status event_destroy(EventHandle event) override {
    const Status status = device_->event_destroy(event);
    if (status.ok()) events_.erase(event);
    return status;
  }
  Status event_record(EventHandle event, StreamHandle stream) override {
    const Status status = device_->event_record(event, stream);
    if (status.ok()) events_[event] = clock_of(stream);
    return status;
  }
  Status event_query(EventHandle event) override {
    const Status status = device_->event_query(event);
    if (status.ok()) host_.join(events_[event]);
    return status;
  }
  Status event_synchronize(EventHandle event) override {
    const Clock mark = events_[event];
    const Status status = device_->event_synchronize(event);
    if (status.ok()) host_.join(mark);
    return status;
  }
  Status synchronize() override {
    const Status status = device_->synchronize();
    for (const Clock& clock : clocks_)
      if (status.ok()) host_.join(clock);
    return status;
  }

  bool lasting(StreamHandle stream) const override { return device_->lasting(stream); }
  Status stream_adopt(StreamHandle stream) override { return device_->stream_adopt(stream); }
  Status stream_disown(StreamHandle stream) override { return device_->stream_disown(stream); }
  Status stream_id(StreamHandle stream, StreamId* out) override { return device_->stream_id(stream, out); }

  Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) override {
    return device_->copy(to, from, bytes, stream);
  }
  // The pool fills when it zeroes: nobody else may be at work there.
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) override {
    const Status status = device_->fill(to, value, bytes, stream);
    if (!status.ok()) return status;
    const Clock& now = advance(stream);
    each_piece(to, bytes, [&](std::uint64_t from, std::uint64_t end) {
      for (auto it = first_at(from); it != memory_.end() && it->first < end; ++it)
        if (it->second.uses.beyond(now) >= 0) fault("zeroed while in use", to, stream);
    });
    note_use(to, bytes, number(stream), now.of(number(stream)));
    return status;
  }
  Status launch(StreamHandle stream, std::function<void()> work) override {
    return device_->launch(stream, std::move(work));
  }

 private:
  // Physical memory is numbered: pages by the order of their creation, plain memory by its address.
  static constexpr int kPageShift = 28;
  static constexpr std::uint64_t kPlain = std::uint64_t{1} << 63;
  struct Piece {
    std::uint64_t end = 0;
    Address live = 0;  // the allocation that has it, or 0
    Clock uses;        // by stream, the last use
  };
  struct Slot {
    std::uint64_t physical = 0;
    Clock uses;  // through these addresses
  };

  void fault(const std::string& what, Address address, StreamHandle stream) {
    faults.push_back(what + ": address " + std::to_string(address) + ", stream " + std::to_string(stream));
  }
  // The number of a stream in clocks, which no other one gets.
  StreamHandle number(StreamHandle stream) {
    StreamId id = stream;
    if (!device_->lasting(stream)) (void)device_->stream_id(stream, &id);
    return id;
  }
  // What is queued next on the stream lies behind this.
  Clock& clock_of(StreamHandle handle) {
    const StreamHandle stream = number(handle);
    if (clocks_.size() <= stream) clocks_.resize(stream + 1);
    clocks_[stream].join(host_);
    return clocks_[stream];
  }
  Clock& advance(StreamHandle handle) {
    const StreamHandle stream = number(handle);
    Clock& clock = clock_of(handle);
    clock.raise(stream, clock.of(stream) + 1);
    return clock;
  }

  // Calls visit(from, to) for each physically contiguous piece of a range; from == 0: no memory.
  template <class Visit>
  void each_piece(Address address, std::uint64_t bytes, Visit visit) {
    auto plain = plain_.upper_bound(address);
    if (plain != plain_.begin() && address < std::prev(plain)->first + std::prev(plain)->second)
      return visit(kPlain | address, (kPlain | address) + bytes);
    for (Address at = address; at < address + bytes;) {
      const Address slot = at / kSlotBytes * kSlotBytes;
      const Address end = std::min(address + bytes, slot + kSlotBytes);
      const auto found = slots_.find(slot);
      if (found == slots_.end()) return visit(0, 0);
      const std::uint64_t physical = found->second.physical + (at - slot);
      visit(physical, physical + (end - at));
      at = end;
    }
  }
  void touch_slots(Address address, std::uint64_t bytes, StreamHandle stream, std::uint64_t point) {
    for (Address slot = address / kSlotBytes * kSlotBytes; slot < address + bytes; slot += kSlotBytes)
      if (const auto found = slots_.find(slot); found != slots_.end())
        found->second.uses.raise(stream, point);
  }
  void note_use(Address address, std::uint64_t bytes, StreamHandle stream, std::uint64_t point) {
    each_piece(address, bytes, [&](std::uint64_t from, std::uint64_t to) {
      cut(from, to);
      for (auto it = memory_.lower_bound(from); it != memory_.end() && it->first < to; ++it)
        it->second.uses.raise(stream, point);
    });
    touch_slots(address, bytes, stream, point);
  }

  std::map<std::uint64_t, Piece>::iterator first_at(std::uint64_t from) {
    auto it = memory_.upper_bound(from);
    if (it != memory_.begin() && std::prev(it)->second.end > from) --it;
    return it;
  }
  // Makes pieces begin at `from` and end at `to`.
  void cut(std::uint64_t from, std::uint64_t to) {
    for (const std::uint64_t at : {from, to}) {
      auto it = memory_.lower_bound(at);
      if (it == memory_.begin() || (--it)->second.end <= at) continue;
      Piece rest = it->second;
      it->second.end = at;
      memory_[at] = std::move(rest);
    }
  }
  void forget(std::uint64_t from, std::uint64_t to) {
    memory_.erase(memory_.lower_bound(from), memory_.lower_bound(to));
  }
  void expect_finished(std::uint64_t from, std::uint64_t to, const char* what, Address address) {
    for (auto it = first_at(from); it != memory_.end() && it->first < to; ++it)
      if (it->second.uses.beyond(host_) >= 0 || (it->second.live != 0 && !closing)) fault(what, address, 0);
  }

  std::shared_ptr<ModelBackend> device_;
  std::vector<Clock> clocks_;  // by stream
  Clock host_;                 // what the host knows to be done
  std::map<EventHandle, Clock> events_;
  std::map<Address, std::uint64_t> plain_;
  std::map<PageHandle, std::uint64_t> pages_;  // their physical numbers
  std::map<Address, Slot> slots_;
  std::map<std::uint64_t, Piece> memory_;
  std::map<Address, std::uint64_t> live_;
  std::uint64_t serial_ = 0;
  std::uint64_t work_ = 0;
};

// A pool on a watched device, and the program that uses it.
struct Watched {
  struct Held {
    Address address;
    std::uint64_t size;
    StreamHandle stream;
    std::vector<StreamHandle> users;  // record_stream was called for these
  };

  Watched(std::uint64_t capacity, const PoolConfig& config, const ModelOptions& options)
      : device(std::make_shared<ModelBackend>(capacity, options)),
        oracle(std::make_shared<Oracle>(device)),
        pool(std::make_shared<Pool>(oracle, config)) {}
  ~Watched() { oracle->closing = true; }

  static std::uint64_t bytes_of(std::uint64_t size) { return std::uint64_t{units_of(size)} * kUnit; }

  Status allocate(std::uint64_t size, StreamHandle stream, std::uint64_t align = 0) {
    Address address = 0;
    const Status status = pool->allocate(size, stream, align, 0, &address);
    if (!status.ok()) return status;
    if (address == 0 || address % std::max(align, kUnit) != 0) oracle->faults.push_back("alignment");
    oracle->allocated(address, bytes_of(size), stream);
    held.push_back({address, size, stream, {}});
    return status;
  }
  Status free(std::size_t i) {
    const Held gone = held[i];
    oracle->freed(gone.address);
    const Status status = pool->free(gone.address);
    if (status.ok()) {
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      oracle->kept(gone.address, bytes_of(gone.size));
    }
    return status;
  }
  // Work on the block's own stream.
  void use(std::size_t i) { oracle->used(held[i].address, bytes_of(held[i].size), held[i].stream); }
  // Work on another stream, as the rules are: it waits for the block's, and the pool is told.
  Status use_on(std::size_t i, StreamHandle stream, std::uint64_t interior = 0) {
    if (Status status = pool->record_stream(held[i].address + interior, stream); !status.ok()) return status;
    EventHandle event = 0;
    if (Status status = device->event_create(&event); !status.ok()) return status;
    (void)oracle->event_record(event, held[i].stream);
    (void)oracle->stream_wait(stream, event);
    while (!oracle->event_destroy(event).ok()) {
    }
    oracle->used(held[i].address, bytes_of(held[i].size), stream);
    if (stream != held[i].stream) held[i].users.push_back(stream);
    return {};
  }
  // The stream goes; its work need not be done.
  Status retire(StreamHandle stream) {
    if (Status status = pool->retire_stream(stream); !status.ok()) return status;
    return oracle->stream_destroy(stream);
  }
  bool good(std::string* why) const {
    if (!oracle->faults.empty()) {
      *why = oracle->faults.front();
      return false;
    }
    return pool->check(why);
  }

  std::shared_ptr<ModelBackend> device;
  std::shared_ptr<Oracle> oracle;
  std::shared_ptr<Pool> pool;
  std::vector<Held> held;
};

// A small generator, so that a seed means the same run everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  bool chance(unsigned percent) { return below(100) < percent; }
  template <class T>
  const T& of(const std::vector<T>& all) {
    return all[below(all.size())];
  }

 private:
  std::uint64_t state_;
};

}  // namespace vram::testing
