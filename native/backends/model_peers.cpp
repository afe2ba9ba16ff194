// Models as the GPUs of one machine: links of a given speed, access to each other's memory, and copies that
// occupy a copy engine.
#include <algorithm>
#include <iterator>

#include "backends/model.hpp"

namespace vram {

namespace {

constexpr double kBytesPerUs = 1e3;  // at 1 GB/s
constexpr int kUploads = 0;
constexpr int kDownloads = 1;
constexpr int kPeerCopies = 2;

}  // namespace

Status ModelBackend::link(ModelBackend& other, double gb_per_s, bool access) {
  constexpr Status kRefused{Code::invalid, 0, "link"};
  if (inherited()) return {Code::closed, 0, "link"};
  if (&other == this || !(gb_per_s >= 0)) return kRefused;
  const std::lock_guard members(ModelGroup::mutex());
  const std::scoped_lock lock(mutex_, other.mutex_);
  for (const ModelBackend* each : {this, &other}) {
    const auto busy = [each](const auto& stream) { return stream->tail > each->now_us(); };
    if (each->schedule_ == Schedule::manual || each->queued_ > 0 ||
        std::any_of(each->streams_.begin(), each->streams_.end(), busy))
      return kRefused;
  }
  if (base_ - other.base_ < kModelRoom || other.base_ - base_ < kModelRoom) return kRefused;
  if (group_ != other.group_ || !linked_) {
    if (linked_ && other.linked_) return kRefused;
    ModelBackend& joining = other.linked_ ? *this : other;
    const std::shared_ptr<ModelGroup> group = other.linked_ ? other.group_ : group_;
    if (joining.now_us() > group->now_us) group->now_us = joining.now_us();
    joining.group_ = group;
    group->members[base_] = this;
    group->members[other.base_] = &other;
  }
  links_[other.base_] = other.links_[base_] = {gb_per_s, access};
  linked_ = other.linked_ = true;
  return {};
}

void ModelBackend::set_number(int number) {
  const Lock lock = hold();
  number_ = number;
}

std::optional<ModelBackend::Link> ModelBackend::link_to(const Backend& other) const {
  const auto* model = dynamic_cast<const ModelBackend*>(&other);
  if (model == nullptr || !linked_ || inherited()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto found = links_.find(model->base_);
  return found == links_.end() ? std::nullopt : std::optional(found->second);
}

// ---- one clock
// ------------------------------------------------------------------------------------------------

bool ModelBackend::settle_one() {
  Lock lock(mutex_);
  if (!may_execute(lock)) return false;
  Stream* const first = first_ready();
  if (first != nullptr) execute(*first, lock);
  return first != nullptr;
}

// Executes what the clock has passed on all models, in order of completion.
void ModelBackend::settle_group(Lock& lock) {
  const std::shared_ptr<ModelGroup> group = group_;
  lock.unlock();
  for (bool moved = true; moved;) {
    std::shared_ptr<Life> next;
    double earliest = 0;
    {
      const std::lock_guard members(ModelGroup::mutex());
      for (const auto& [base, model] : group->members) {
        const std::lock_guard held(model->mutex_);
        const Stream* const first = model->queued_ > 0 ? model->first_ready() : nullptr;
        if (first == nullptr || (next != nullptr && first->operations.front().finish >= earliest)) continue;
        earliest = first->operations.front().finish;
        next = model->life_;
      }
    }
    if (next == nullptr) break;
    const std::lock_guard alive(next->mutex);
    moved = next->model == nullptr || next->model->settle_one();
  }
  lock.lock();
}

// ---- access
// -------------------------------------------------------------------------------------------------

bool ModelBackend::can_access(const Backend& other) const {
  const std::optional<Link> link = link_to(other);
  return link && link->access;
}

Status ModelBackend::add_peer(int device) {
  Lock lock;
  Status status;
  if (!begin(kAddPeer, &lock, &status)) return status;
  peers_.insert(device);
  return {};
}

Status ModelBackend::open_plain(Backend& other) {
  if (!can_access(other)) return {Code::unsupported, 0, "open_plain"};
  int number = 0;
  {
    Lock lock;
    Status status;
    if (!begin(kOpenPlain, &lock, &status)) return status;
    number = number_;
  }
  auto& model = dynamic_cast<ModelBackend&>(other);
  const std::lock_guard lock(model.mutex_);
  model.opened_plain_.insert(number);
  return {};
}

bool ModelBackend::opened(Address address, std::uint64_t bytes, int device) {
  const Lock lock = hold();
  bool pooled = false;
  bool open = false;
  pools_.each([&](DriverPoolHandle, const ModelPool& pool) {
    auto granule = pool.granules.upper_bound(address);
    if (granule == pool.granules.begin()) return;
    --granule;
    if (address - granule->first >= granule->second) return;
    pooled = true;
    open = pool.opened.contains(device);
  });
  if (pooled) return open;
  if (address - base_ < kModelPlainRoom) return opened_plain_.contains(device);
  for (Address at = address / kSlotBytes * kSlotBytes; at < address + bytes; at += kSlotBytes) {
    const auto page = opened_pages_.find(at);
    if (page == opened_pages_.end() || !page->second.contains(device)) return false;
  }
  return true;
}

bool ModelBackend::may_reach(const Touch* touches, std::size_t count) const {
  if (!linked_ || inherited()) return true;
  std::shared_ptr<ModelGroup> group;
  int number = 0;
  {
    const std::lock_guard lock(mutex_);
    group = group_;
    number = number_;
  }
  return std::all_of(touches, touches + count, [&](const Touch& touch) {
    if (touch.bytes == 0 || mine(touch.address)) return true;
    const std::lock_guard members(ModelGroup::mutex());
    auto after = group->members.upper_bound(touch.address);
    if (after == group->members.begin()) return true;
    ModelBackend& owner = *std::prev(after)->second;
    return !owner.mine(touch.address) ||
           (can_access(owner) && owner.opened(touch.address, touch.bytes, number));
  });
}

// ---- order and copies
// -----------------------------------------------------------------------------------------

bool ModelBackend::waits_for(const Backend& other) const { return link_to(other).has_value(); }

Status ModelBackend::stream_wait_peer(StreamHandle stream, const Backend& other, EventHandle event) {
  if (!waits_for(other)) return {Code::unsupported, 0, "stream_wait_peer"};
  double passes = 0;
  {
    const auto& model = dynamic_cast<const ModelBackend&>(other);
    const std::lock_guard lock(model.mutex_);
    const Event* mark = model.events_.find(event);
    if (mark == nullptr) return {Code::invalid, 0, "stream_wait_peer"};
    passes = mark->passes;
  }
  Lock lock;
  Status status;
  if (!begin_on(&stream, kStreamWaitPeer, &lock, &status) ||
      refuse_captured(stream, kStreamWaitPeer, &status))
    return status;
  Stream* waiting = stream_of(stream);
  if (waiting == nullptr) return {Code::invalid, 0, "stream_wait_peer"};
  waiting->tail = std::max(waiting->tail, passes);
  return {};
}

// Copies inside the device take the lag, as other work.
void ModelBackend::set_engine(Operation& operation, Address to, Address from, std::uint64_t bytes) const {
  const bool to_device = mine(to) && !is_for_copies(to);
  const bool from_device = mine(from) && !is_for_copies(from);
  if (!timed() || to_device == from_device) return;
  operation.duration = static_cast<double>(bytes) / (host_gb_per_s_ * kBytesPerUs);
  operation.engine = std::min(to_device ? kUploads : kDownloads, copy_engines_ - 1);
}

Status ModelBackend::copy_peer(Address to, Address from, std::uint64_t bytes, const Backend& other,
                               bool from_other, StreamHandle stream) {
  const std::optional<Link> link = link_to(other);
  if (!link || !link->access) return {Code::unsupported, 0, "copy_peer"};
  Operation operation;
  operation.touches[0] = {from_other ? to : from, bytes};
  if (link->gb_per_s > 0) operation.duration = static_cast<double>(bytes) / (link->gb_per_s * kBytesPerUs);
  operation.engine = std::min(kPeerCopies, copy_engines_ - 1);
  return enqueue_work(kCopyPeer, stream, std::move(operation));
}

}  // namespace vram
