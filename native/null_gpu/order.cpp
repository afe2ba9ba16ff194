#include "null_gpu/order.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>

namespace vram::null_gpu {

namespace {

// Longer than a step takes, and shorter than PyTorch waits for a collective.
constexpr std::chrono::seconds kCollectives{20};

// Whether this is the thread by which PyTorch finds out which collectives are complete.
bool watches_collectives() {
  thread_local const bool watches = [] {
    char name[16] = {};
    return prctl(PR_GET_NAME, name) == 0 && std::string_view(name) == "pt_nccl_watchdg";
  }();
  return watches;
}

}  // namespace

Handle new_handle() {
  static std::atomic<std::uint64_t> last{0x1000'0000};
  return reinterpret_cast<Handle>(last.fetch_add(64));
}

Order& Order::get() {
  static auto* const order = new Order;  // used until the process has ended
  return *order;
}

Order::Stream& Order::stream(Handle handle) {
  const auto [found, added] = streams_.try_emplace(handle);
  if (added) found->second.id = ++last_stream_;
  return found->second;
}

Handle Order::stream_create(int priority) {
  const std::lock_guard lock(mutex_);
  const Handle handle = new_handle();
  stream(handle).priority = priority;
  return handle;
}

Result Order::stream_destroy(Handle handle) {
  const std::lock_guard lock(mutex_);
  return streams_.erase(handle) != 0 ? kSuccess : kInvalidHandle;
}

int Order::stream_priority(Handle handle) {
  const std::lock_guard lock(mutex_);
  return stream(handle).priority;
}

std::uint64_t Order::stream_id(Handle handle) {
  const std::lock_guard lock(mutex_);
  return stream(handle).id;
}

Result Order::stream_wait(Handle handle, Handle event) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return kInvalidHandle;
  const Event& awaited = found->second;
  if (awaited.capture == 0 || !captures_.contains(awaited.capture)) return kSuccess;
  Stream& waiting = stream(handle);
  waiting.capture = awaited.capture;
  for (const Handle node : awaited.last)
    if (std::find(waiting.last.begin(), waiting.last.end(), node) == waiting.last.end())
      waiting.last.push_back(node);
  return kSuccess;
}

Result Order::stream_query(Handle handle) {
  const std::lock_guard lock(mutex_);
  return stream(handle).capture == 0 ? kSuccess : kCaptureImplicit;
}

Handle Order::event_create() {
  const std::lock_guard lock(mutex_);
  const Handle handle = new_handle();
  events_.emplace(handle, Event{});
  return handle;
}

Result Order::event_destroy(Handle event) {
  const std::lock_guard lock(mutex_);
  return events_.erase(event) != 0 ? kSuccess : kInvalidHandle;
}

Result Order::event_record(Handle event, Handle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return kInvalidHandle;
  const Stream& on = stream(handle);
  found->second = {on.capture, on.last, on.collectives ? Clock::now() : Clock::time_point{}};
  return kSuccess;
}

Result Order::event_query(Handle event) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return kInvalidHandle;
  const Clock::time_point recorded = found->second.after_collectives;
  if (recorded <= collectives_ended_ || !watches_collectives()) return kSuccess;
  return Clock::now() - recorded < kCollectives ? kNotReady : kSuccess;
}

Result Order::event_synchronize(Handle event) {
  const std::lock_guard lock(mutex_);
  return events_.contains(event) ? kSuccess : kInvalidHandle;
}

void Order::collective(Handle handle) {
  const std::lock_guard lock(mutex_);
  stream(handle).collectives = true;
}

void Order::collectives_end() {
  const std::lock_guard lock(mutex_);
  collectives_ended_ = Clock::now();
}

Result Order::capture_begin(Handle handle) {
  const std::lock_guard lock(mutex_);
  Stream& origin = stream(handle);
  if (origin.capture != 0) return kCaptureImplicit;
  origin.capture = ++last_capture_;
  captures_.emplace(origin.capture, Capture{handle, new_handle()});
  return kSuccess;
}

Result Order::capture_end(Handle handle, Handle* graph) {
  const std::lock_guard lock(mutex_);
  const auto capture = captures_.find(stream(handle).capture);
  if (capture == captures_.end() || capture->second.origin != handle) return kCaptureUnmatched;
  *graph = capture->second.graph;
  for (auto& [each, state] : streams_) {
    if (state.capture != capture->first) continue;
    state.capture = 0;
    state.last.clear();
  }
  captures_.erase(capture);
  if (captures_.empty()) nodes_.clear();
  return kSuccess;
}

std::uint64_t Order::capture_of(Handle handle) {
  const std::lock_guard lock(mutex_);
  return stream(handle).capture;
}

Handle Order::graph_of(std::uint64_t capture) {
  const std::lock_guard lock(mutex_);
  const auto found = captures_.find(capture);
  return found != captures_.end() ? found->second.graph : nullptr;
}

void Order::queued(Handle handle) {
  const std::lock_guard lock(mutex_);
  Stream& on = stream(handle);
  if (on.capture == 0) return;
  const Handle node = new_handle();
  nodes_.emplace(node, std::exchange(on.last, {node}));
}

const std::vector<Handle>& Order::last_nodes(Handle handle) {
  const std::lock_guard lock(mutex_);
  return stream(handle).last;
}

std::vector<Handle> Order::followed_by(Handle node) {
  const std::lock_guard lock(mutex_);
  const auto found = nodes_.find(node);
  return found != nodes_.end() ? found->second : std::vector<Handle>{};
}

}  // namespace vram::null_gpu
