// Capture on the model: work is kept in a graph instead of being queued, and queued when the graph is
// launched.
#include "backends/model.hpp"

namespace vram {

// The graph that work on the stream goes into, or null.
ModelBackend::Graph* ModelBackend::capture_on(StreamHandle stream) {
  for (auto& [id, graph] : graphs_)
    if (graph.stream == stream) return &graph;
  return nullptr;
}

bool ModelBackend::refuse_captured(StreamHandle stream, Call call, Status* status) {
  if (capture_on(stream) == nullptr) return false;
  ++refused_in_capture_;
  *status = {Code::capturing, 0, kCallNames[call]};
  return true;
}

Status ModelBackend::capture_of(StreamHandle stream, CaptureId* out) {
  if (inherited()) return {Code::closed, 0, "capture_of"};
  const std::lock_guard lock(mutex_);
  stream = at(stream);
  *out = 0;
  if (stream_of(stream) == nullptr) return {Code::invalid, 0, "capture_of"};
  for (const auto& [id, graph] : graphs_)
    if (graph.stream == stream) *out = id;
  return {};
}

bool ModelBackend::capturing(StreamHandle stream) {
  if (inherited()) return false;
  const std::lock_guard lock(mutex_);
  stream = at(stream);
  return capture_on(stream) != nullptr;
}

Status ModelBackend::capture_keep(StreamHandle stream, std::function<void()> gone) {
  if (inherited()) return {Code::closed, 0, "capture_keep"};
  const std::lock_guard lock(mutex_);
  stream = at(stream);
  Graph* graph = capture_on(stream);
  if (graph == nullptr) return {Code::invalid, 0, "capture_keep"};
  graph->gone.push_back(std::move(gone));
  return {};
}

Status ModelBackend::capture_begin(StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "capture_begin"};
  const std::lock_guard lock(mutex_);
  stream = at(stream);
  if (stream == 0 || stream_of(stream) == nullptr || capture_on(stream) != nullptr)
    return {Code::invalid, 0, "capture_begin"};
  graphs_[++last_graph_].stream = stream;
  return {};
}

Status ModelBackend::capture_end(StreamHandle stream, std::uint64_t* out) {
  if (inherited()) return {Code::closed, 0, "capture_end"};
  const std::lock_guard lock(mutex_);
  stream = at(stream);
  for (auto& [id, graph] : graphs_) {
    if (graph.stream != stream) continue;
    graph.stream = kNoStream;
    *out = id;
    return {};
  }
  return {Code::invalid, 0, "capture_end"};
}

Status ModelBackend::graph_launch(std::uint64_t id, StreamHandle stream) {
  if (inherited()) return {Code::closed, 0, "graph_launch"};
  Lock lock(mutex_);
  stream = at(stream);
  const auto found = graphs_.find(id);
  if (found == graphs_.end() || found->second.destroyed || found->second.stream != kNoStream ||
      stream_of(stream) == nullptr)
    return {Code::invalid, 0, "graph_launch"};
  Graph& graph = found->second;
  for (const Operation& operation : graph.operations)
    for (const Touch& touch : operation.touches)
      if (ledger_.may_touch(touch.address, touch.bytes) != Code::ok)
        return {Code::invalid, 0, "graph_launch"};
  for (const Operation& operation : graph.operations) enqueue(stream, operation);
  ++graph.running;
  Operation last;
  last.function = [this, id] {
    Lock held(mutex_);
    --graphs_.at(id).running;
    drop_graph(id, held);
  };
  last.id = next_own_id_++;
  enqueue(stream, std::move(last));
  if (lag_us_ == 0) move_clock(now_us(), lock);
  return {};
}

Status ModelBackend::graph_destroy(std::uint64_t id) {
  if (inherited()) return {Code::closed, 0, "graph_destroy"};
  Lock lock(mutex_);
  const auto found = graphs_.find(id);
  if (found == graphs_.end() || found->second.destroyed) return {Code::invalid, 0, "graph_destroy"};
  found->second.destroyed = true;
  drop_graph(id, lock);
  return {};
}

// Forgets a graph that was destroyed and has nothing left to run, and notifies those who asked for it.
void ModelBackend::drop_graph(std::uint64_t id, Lock& lock) {
  Graph& graph = graphs_.at(id);
  if (!graph.destroyed || graph.running != 0) return;
  const std::vector<std::function<void()>> gone = std::move(graph.gone);
  graphs_.erase(id);
  lock.unlock();
  for (const auto& tell : gone) tell();
  lock.lock();
}

std::uint64_t ModelBackend::refused_in_capture() {
  const Lock lock = hold();
  return refused_in_capture_;
}

}  // namespace vram
