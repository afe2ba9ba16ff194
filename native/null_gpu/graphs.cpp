#include "null_gpu/graphs.hpp"

#include <algorithm>

#include "null_gpu/errors.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/properties.hpp"

namespace vram::null_gpu {

Graphs& Graphs::get() {
  static auto* const graphs = new Graphs;  // used until the process has ended
  return *graphs;
}

Handle Graphs::instantiate(Handle graph) {
  const std::lock_guard lock(mutex_);
  const Handle made = new_handle();
  if (const auto kept = kept_.find(graph); kept != kept_.end()) {
    for (const auto& [object, count] : kept->second) objects_.at(object).references += count;
    auto copy = kept->second;
    kept_.emplace(made, std::move(copy));
  }
  return made;
}

Result Graphs::destroy(Handle graph) {
  std::map<Handle, unsigned> kept;
  {
    const std::lock_guard lock(mutex_);
    const auto found = kept_.find(graph);
    if (found == kept_.end()) return kSuccess;
    kept = std::move(found->second);
    kept_.erase(found);
  }
  for (const auto& [object, count] : kept) (void)object_release(object, count);
  return kSuccess;
}

Handle Graphs::object_create(void* object, void (*end)(void*), unsigned count) {
  const std::lock_guard lock(mutex_);
  const Handle handle = new_handle();
  objects_.emplace(handle, Object{object, end, count});
  return handle;
}

Result Graphs::object_release(Handle handle, unsigned count) {
  Object ended{};
  {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end() || found->second.references < count) return kInvalidValue;
    if ((found->second.references -= count) != 0) return kSuccess;
    ended = found->second;
    objects_.erase(found);
  }
  ended.destroy(ended.object);  // without the lock: it may call back
  return kSuccess;
}

Result Graphs::retain(Handle graph, Handle object, unsigned count, unsigned flags) {
  const std::lock_guard lock(mutex_);
  const auto found = objects_.find(object);
  if (found == objects_.end()) return kInvalidValue;
  if ((flags & kMove) == 0) found->second.references += count;
  kept_[graph][object] += count;
  return kSuccess;
}

}  // namespace vram::null_gpu

// ---- the driver's and the runtime's functions -----------------------------------------------------------

using namespace vram::null_gpu;

VRAM_NULL_API Result cuStreamBeginCapture_v2(Handle stream, int) {
  return Order::get().capture_begin(stream);
}
VRAM_NULL_API Result cuStreamEndCapture(Handle stream, Handle* graph) {
  return Order::get().capture_end(stream, graph);
}
VRAM_NULL_API Result cuStreamGetCaptureInfo_v3(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                               const Handle** nodes, const void** edges, std::size_t* count) {
  const std::uint64_t capture = Order::get().capture_of(stream);
  *status = capture != 0 ? kCaptureActive : kCaptureNone;
  if (id != nullptr) *id = capture;
  if (graph != nullptr) *graph = Order::get().graph_of(capture);
  const std::vector<Handle>& last = Order::get().last_nodes(stream);
  if (nodes != nullptr) *nodes = last.data();
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = last.size();
  return kSuccess;
}
VRAM_NULL_API Result cuStreamGetCaptureInfo_v2(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                               const Handle** nodes, std::size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, nullptr, count);
}
VRAM_NULL_API Result cuStreamIsCapturing(Handle stream, int* status) {
  return cuStreamGetCaptureInfo_v3(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
VRAM_NULL_API Result cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }
VRAM_NULL_API Result cuGraphInstantiateWithFlags(Handle* out, Handle graph, unsigned long long) {
  *out = Graphs::get().instantiate(graph);
  return kSuccess;
}
VRAM_NULL_API Result cuGraphLaunch(Handle, Handle) { return kSuccess; }
VRAM_NULL_API Result cuGraphDestroy(Handle graph) { return Graphs::get().destroy(graph); }
VRAM_NULL_API Result cuGraphExecDestroy(Handle graph) { return Graphs::get().destroy(graph); }
VRAM_NULL_API Result cuGraphGetNodes(Handle, Handle*, std::size_t* count) {
  *count = 1;  // PyTorch warns of graphs without any
  return kSuccess;
}
VRAM_NULL_API Result cuGraphNodeGetDependencies_v2(Handle node, Handle* out, void*, std::size_t* count) {
  const std::vector<Handle> nodes = Order::get().followed_by(node);
  if (out != nullptr) std::copy_n(nodes.begin(), std::min(*count, nodes.size()), out);
  *count = out != nullptr ? std::min(*count, nodes.size()) : nodes.size();
  return kSuccess;
}
VRAM_NULL_API Result cuGraphNodeGetDependencies(Handle node, Handle* out, std::size_t* count) {
  return cuGraphNodeGetDependencies_v2(node, out, nullptr, count);
}
VRAM_NULL_API Result cuGraphDebugDotPrint(Handle, const char*, unsigned) { return kSuccess; }
VRAM_NULL_API Result cuUserObjectCreate(Handle* out, void* object, void (*destroy)(void*), unsigned count,
                                        unsigned) {
  *out = Graphs::get().object_create(object, destroy, count);
  return kSuccess;
}
VRAM_NULL_API Result cuUserObjectRelease(Handle object, unsigned count) {
  return Graphs::get().object_release(object, count);
}
VRAM_NULL_API Result cuGraphRetainUserObject(Handle graph, Handle object, unsigned count, unsigned flags) {
  return Graphs::get().retain(graph, object, count, flags);
}

VRAM_NULL_API Result cudaStreamBeginCapture(Handle stream, int mode) {
  return returned(cuStreamBeginCapture_v2(stream, mode));
}
VRAM_NULL_API Result cudaStreamEndCapture(Handle stream, Handle* graph) {
  return returned(cuStreamEndCapture(stream, graph));
}
VRAM_NULL_API Result cudaStreamIsCapturing(Handle stream, int* status) {
  return returned(cuStreamIsCapturing(stream, status));
}
VRAM_NULL_API Result cudaStreamGetCaptureInfo_v3(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                                 const Handle** nodes, const void** edges,
                                                 std::size_t* count) {
  return returned(cuStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count));
}
VRAM_NULL_API Result cudaStreamGetCaptureInfo_v2(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                                 const Handle** nodes, std::size_t* count) {
  return returned(cuStreamGetCaptureInfo_v2(stream, status, id, graph, nodes, count));
}
// In CUDA 12 it has the first three parameters alone.
VRAM_NULL_API Result cudaStreamGetCaptureInfo(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                              const Handle** nodes, const void** edges, std::size_t* count) {
  if (runtime_version() == 12)
    return cudaStreamGetCaptureInfo_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
  return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
}
VRAM_NULL_API Result cudaThreadExchangeStreamCaptureMode(int* mode) {
  return returned(cuThreadExchangeStreamCaptureMode(mode));
}
VRAM_NULL_API Result cudaGraphInstantiateWithFlags(Handle* out, Handle graph, unsigned long long flags) {
  return returned(cuGraphInstantiateWithFlags(out, graph, flags));
}
VRAM_NULL_API Result cudaGraphInstantiate(Handle* out, Handle graph, unsigned long long flags) {
  return returned(cuGraphInstantiateWithFlags(out, graph, flags));
}
VRAM_NULL_API Result cudaGraphLaunch(Handle graph, Handle stream) {
  return returned(cuGraphLaunch(graph, stream));
}
VRAM_NULL_API Result cudaGraphDestroy(Handle graph) { return returned(cuGraphDestroy(graph)); }
VRAM_NULL_API Result cudaGraphExecDestroy(Handle graph) { return returned(cuGraphExecDestroy(graph)); }
VRAM_NULL_API Result cudaGraphGetNodes(Handle graph, Handle* out, std::size_t* count) {
  return returned(cuGraphGetNodes(graph, out, count));
}
VRAM_NULL_API Result cudaGraphNodeGetDependencies_v2(Handle node, Handle* out, void* edges,
                                                     std::size_t* count) {
  return returned(cuGraphNodeGetDependencies_v2(node, out, edges, count));
}
// In CUDA 12 it has no parameter for the edges.
VRAM_NULL_API Result cudaGraphNodeGetDependencies(Handle node, Handle* out, void* edges, std::size_t* count) {
  if (runtime_version() == 12)
    return cudaGraphNodeGetDependencies_v2(node, out, nullptr, static_cast<std::size_t*>(edges));
  return cudaGraphNodeGetDependencies_v2(node, out, edges, count);
}
VRAM_NULL_API Result cudaGraphDebugDotPrint(Handle graph, const char* path, unsigned flags) {
  return returned(cuGraphDebugDotPrint(graph, path, flags));
}
VRAM_NULL_API Result cudaUserObjectCreate(Handle* out, void* object, void (*destroy)(void*), unsigned count,
                                          unsigned flags) {
  return returned(cuUserObjectCreate(out, object, destroy, count, flags));
}
VRAM_NULL_API Result cudaUserObjectRelease(Handle object, unsigned count) {
  return returned(cuUserObjectRelease(object, count));
}
VRAM_NULL_API Result cudaGraphRetainUserObject(Handle graph, Handle object, unsigned count, unsigned flags) {
  return returned(cuGraphRetainUserObject(graph, object, count, flags));
}
