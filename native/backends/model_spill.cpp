// Host pages and gates on the model, and stamps in place of contents.
#include <algorithm>

#include "backends/driver_costs.hpp"
#include "backends/model.hpp"

namespace vram {

// ---- host pages -----------------------------------------------------------------------------------

Status ModelBackend::host_page_create(std::uint64_t bytes, PageHandle* out, Address* copies) {
  Lock lock;
  Status status;
  if (!begin(kHostPageCreate, &lock, &status)) return status;
  if (!info_.host_pages) return {Code::unsupported, 0, "host_page_create"};
  charge(kHostPageCreate, prices::host_page(bytes).create);
  if (const Code code = ledger_.may_host_page_create(bytes); code != Code::ok)
    return {code, 0, "host_page_create"};
  const Address address = copies_addresses_.take(bytes);
  if (address == 0) return {Code::out_of_memory, 0, "host_page_create"};
  *copies = address;
  *out = ledger_.host_page_create(bytes, 0, address);
  copies_[address] = *out;
  return {};
}

Status ModelBackend::host_page_release(PageHandle page, std::uint64_t bytes, Address copies) {
  Lock lock;
  Status status;
  if (!begin(kHostPageRelease, &lock, &status)) return status;
  if (const Code code = ledger_.may_host_page_release(page, bytes, copies); code != Code::ok)
    return {code, 0, "host_page_release"};
  if (busy(copies, bytes)) return {Code::invalid, 0, "host_page_release"};
  ledger_.page_release(page);
  cells_.erase(page);
  copies_.erase(copies);
  copies_addresses_.give(copies, bytes);
  return {};
}

// ---- gates ----------------------------------------------------------------------------------------

Status ModelBackend::gate_close(StreamHandle handle, GateHandle* out) {
  Lock lock;
  Status status;
  if (!begin_on(&handle, kGateClose, &lock, &status) || refuse_captured(handle, kGateClose, &status))
    return status;
  if (!info_.host_pages) return {Code::unsupported, 0, "gate_close"};
  Stream* stream = stream_of(handle);
  if (!stream) return {Code::invalid, 0, "gate_close"};
  *out = gates_.add({});
  Operation operation;
  operation.kind = Operation::Kind::gate;
  operation.id = *out;
  enqueue(handle, std::move(operation));
  *gates_.find(*out) = {handle, stream->queued, stream->tail, std::this_thread::get_id()};
  return {};
}

bool ModelBackend::arrived(const Gate& gate) const {
  if (schedule_ == Schedule::lag && gate.arrival > now_us()) return false;
  return streams_[gate.stream]->done + 1 == gate.position;
}

Status ModelBackend::gate_wait(GateHandle handle, double seconds) {
  constexpr double kUsPerSecond = 1e6;
  Lock lock;
  Status status;
  if (!begin(kGateWait, &lock, &status)) return status;
  const Gate* found = gates_.find(handle);
  if (!found) return {Code::invalid, 0, "gate_wait"};
  const Gate gate = *found;
  if (arrived(gate)) return {};
  ++host_waits_;
  if (schedule_ == Schedule::lag) {
    // The stream arrives later than was known if it waits for work behind a gate that is open again.
    const double begun = now_us();
    const double end = begun + seconds * kUsPerSecond;
    while (!arrived(gate) && now_us() < end)
      move_clock(std::min(gate.arrival > now_us() ? gate.arrival : next_completion(), end), lock);
    host_wait_us_ += now_us() - begun;
  } else {
    (void)run_until([&] { return arrived(gate); }, lock);
  }
  if (arrived(gate)) return {};
  const bool work = executing_ && executor_ == std::this_thread::get_id();  // it holds up its own stream
  return {work ? Code::deadlock : Code::not_ready, 0, "gate_wait"};
}

// What is queued behind it has waited since the stream arrived.
void ModelBackend::gate_open(GateHandle handle) {
  if (inherited()) return;
  Lock lock(mutex_);
  const Gate* found = gates_.find(handle);
  if (!found) return;
  const Gate gate = *found;
  gates_.remove(handle);
  Stream& stream = *streams_[gate.stream];
  const double waited = std::max(0.0, now_us() - gate.arrival);
  bool behind = false;
  for (Operation& operation : stream.operations) {
    operation.finish += behind ? waited : 0;
    behind = behind || (operation.kind == Operation::Kind::gate && operation.id == handle);
  }
  if (stream.tail > gate.arrival) stream.tail += waited;
  opened_one_.notify_all();
  move_clock(now_us(), lock);
}

// Waits until a gate that another thread has closed is open. False if there is none.
bool ModelBackend::await_gates(Lock& lock) {
  bool others = false;
  gates_.each(
      [&](GateHandle, const Gate& gate) { others = others || gate.closer != std::this_thread::get_id(); });
  if (!others || (executing_ && executor_ == std::this_thread::get_id())) return false;
  const std::uint64_t closed = gates_.size();
  opened_one_.wait(lock, [&] { return gates_.size() < closed; });
  return true;
}

std::vector<StreamHandle> ModelBackend::held_streams() {
  std::vector<StreamHandle> held;
  if (inherited()) return held;
  const std::lock_guard lock(mutex_);
  std::unordered_set<StreamHandle> foreign;
  for (const auto& [handle, place] : foreign_) foreign.insert(place);
  for (StreamHandle place = 0; place < streams_.size(); ++place)
    if (streams_[place]->alive && !foreign.contains(place)) held.push_back(place);
  held.insert(held.end(), adopted_.begin(), adopted_.end());
  return held;
}

void ModelBackend::hold_for_copy(const Operation& operation) {
  const bool moves =
      is_for_copies(operation.touches[0].address) != is_for_copies(operation.touches[1].address);
  if (operation.copies && moves && gates_.size() > 0)
    held_us_ += prices::host_page_copy(operation.touches[0].bytes);
}

double ModelBackend::held_us() {
  const Lock lock = hold();
  return held_us_;
}

double ModelBackend::host_page_us() {
  const Lock lock = hold();
  return host_page_us_;
}

// ---- what is where ----------------------------------------------------------------------------------

ModelBackend::Location ModelBackend::location(Address address) {
  const Lock lock = hold();
  PageHandle handle = 0;
  const Ledger::Page* page = ledger_.mapped_at(address, &handle);
  if (page == nullptr || ledger_.may_touch(address, 1) != Code::ok) return Location::none;
  return page->host ? Location::host : Location::device;
}

// The stamp of the slot at an address, or null if there is no page.
std::uint64_t* ModelBackend::cell(Address address) {
  PageHandle handle = 0;
  std::uint64_t part = 0;
  if (is_for_copies(address)) {
    const auto next = copies_.upper_bound(address);
    if (next == copies_.begin()) return nullptr;
    handle = std::prev(next)->second;
    part = (address - std::prev(next)->first) / kSlotBytes;
  } else if (ledger_.mapped_at(address, &handle) != nullptr) {
    part = ledger_.part_at(address);
  }
  const Ledger::Page* page = ledger_.page(handle);
  if (page == nullptr || part >= page->bytes / kSlotBytes) return nullptr;
  std::vector<std::uint64_t>& cells = cells_[handle];
  cells.resize(page->bytes / kSlotBytes);
  return &cells[part];
}

std::uint64_t ModelBackend::stamp(Address address) {
  const Lock lock = hold();
  const std::uint64_t* found = cell(address);
  return found != nullptr ? *found : 0;
}

std::uint64_t ModelBackend::faults() {
  const Lock lock = hold();
  return faults_;
}

void ModelBackend::leave_stamps(const Operation& operation) {
  for (const Touch& touch : operation.touches)
    if (touch.bytes > 0 && ledger_.may_touch(touch.address, touch.bytes) != Code::ok) ++faults_;
  const Touch& to = operation.touches[0];
  const Touch& from = operation.touches[1];
  const bool whole = to.address % kSlotBytes == 0 && (!operation.copies || from.address % kSlotBytes == 0);
  for (Address at = to.address / kSlotBytes * kSlotBytes; at < to.address + to.bytes; at += kSlotBytes) {
    const bool overwritten = whole && at + kSlotBytes <= to.address + to.bytes;
    const std::uint64_t* source =
        overwritten && operation.copies ? cell(from.address + (at - to.address)) : nullptr;
    const std::uint64_t copied = source != nullptr ? *source : 0;
    std::uint64_t* target = cell(at);
    if (target == nullptr) continue;
    if (source != nullptr)
      *target = copied;
    else if (overwritten && operation.fills)
      *target = stamped(0, operation.filled);
    else
      *target = stamped(*target, operation.id);
  }
}

}  // namespace vram
