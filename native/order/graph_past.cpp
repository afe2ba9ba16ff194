// Walking a graph under capture. See graph_past.hpp.
#include "order/graph_past.hpp"

#include <algorithm>
#include <utility>

namespace vram {

// A program may also change what its stream follows (cudaStreamUpdateCaptureDependencies). If the walk does
// not arrive at every node that the stream followed before, the past is collected again.
Status GraphPast::update(Backend& backend, StreamHandle stream, CaptureId* capture) {
  std::vector<GraphNode> now;
  Status status = backend.capture_position(stream, capture, &now);
  const std::vector<GraphNode> before = std::exchange(last_, {});
  if (!status.ok() || *capture == 0 || std::exchange(capture_, *capture) != *capture) nodes_.clear();
  if (!status.ok() || *capture == 0) return status;
  const bool known = !nodes_.empty();
  std::unordered_set<GraphNode> met;  // of those known before
  std::vector<GraphNode> found = now;
  std::vector<GraphNode> followed;
  while (!found.empty()) {
    const GraphNode node = found.back();
    found.pop_back();
    if (!nodes_.insert(node).second) {
      met.insert(node);
      continue;
    }
    if (status = backend.capture_followed(node, &followed); !status.ok()) {
      nodes_.clear();
      return status;
    }
    found.insert(found.end(), followed.begin(), followed.end());
  }
  if (known &&
      !std::all_of(before.begin(), before.end(), [&](GraphNode each) { return met.contains(each); })) {
    nodes_.clear();
    return update(backend, stream, capture);
  }
  last_ = std::move(now);
  return status;
}

}  // namespace vram
