#include "null_gpu/graphs.hpp"

#include "null_gpu/order.hpp"

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
