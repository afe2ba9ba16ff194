// What comes before a captured stream's next work in its graph. Defines GraphPast.
#pragma once

#include <unordered_set>
#include <vector>

#include "backends/backend.hpp"

namespace vram {

// The nodes that the next work of one stream follows, directly or not. It grows with the capture, so that
// each node is examined once.
class GraphPast {
 public:
  // Brings it up to date; post: *capture is the capture in progress, 0 if there is none.
  Status update(Backend& backend, StreamHandle stream, CaptureId* capture);
  bool contains(GraphNode node) const { return nodes_.contains(node); }

 private:
  CaptureId capture_ = 0;
  std::vector<GraphNode> last_;  // those that the stream followed directly when it was updated
  std::unordered_set<GraphNode> nodes_;
};

}  // namespace vram
