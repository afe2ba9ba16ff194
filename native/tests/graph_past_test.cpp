// What comes before a captured stream's next work, in graphs that the test draws.
#include "order/graph_past.hpp"

#include <map>

#include "backends/host.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

class Drawn : public HostBackend {
 public:
  Status capture_position(StreamHandle, CaptureId* id, std::vector<GraphNode>* out) override {
    *id = capture;
    *out = last;
    return {};
  }
  Status capture_followed(GraphNode node, std::vector<GraphNode>* out) override {
    ++asked;
    if (node == unknown) return {Code::failed, 0, "capture_followed"};
    *out = edges[node];
    return {};
  }

  CaptureId capture = 1;
  std::vector<GraphNode> last;
  std::map<GraphNode, std::vector<GraphNode>> edges;
  GraphNode unknown = 0;
  int asked = 0;
};

struct Past {
  Status update() { return past.update(graph, 0, &capture); }
  bool has(std::vector<GraphNode> nodes) const {
    for (const GraphNode node : nodes)
      if (!past.contains(node)) return false;
    return true;
  }
  Drawn graph;
  GraphPast past;
  CaptureId capture = 0;
};

}  // namespace

TEST(the_past_of_a_stream_has_what_was_joined) {
  Past past;
  past.graph.edges = {{2, {1}}, {3, {1}}, {4, {2}}, {5, {4, 3}}};
  past.graph.last = {4};
  REQUIRE(past.update().ok() && past.capture == 1);
  CHECK(past.has({1, 2, 4}) && !past.has({3}) && !past.has({5}));
  past.graph.last = {5};
  REQUIRE(past.update().ok());
  CHECK(past.has({1, 2, 3, 4, 5}));
}

TEST(each_node_is_examined_once) {
  Past past;
  for (GraphNode node = 1; node <= 1000; ++node) {
    past.graph.edges[node] = node > 1 ? std::vector<GraphNode>{node - 1} : std::vector<GraphNode>{};
    past.graph.last = {node};
    REQUIRE(past.update().ok());
  }
  CHECK(past.has({1, 500, 1000}) && past.graph.asked == 1000);
}

TEST(a_stream_that_follows_less_than_before_has_a_new_past) {
  Past past;
  past.graph.edges = {{2, {1}}, {3, {1}}};
  past.graph.last = {2};
  REQUIRE(past.update().ok() && past.has({1, 2}));
  past.graph.last = {3};  // no longer behind 2
  REQUIRE(past.update().ok());
  CHECK(past.has({1, 3}) && !past.has({2}));
  past.graph.last = {};
  REQUIRE(past.update().ok());
  CHECK(!past.has({1}) && !past.has({3}));
}

TEST(captures_have_nothing_in_common) {
  Past past;
  past.graph.edges = {{2, {1}}};
  past.graph.last = {2};
  REQUIRE(past.update().ok() && past.has({1, 2}));
  past.graph.capture = 2;
  past.graph.last = {7};
  REQUIRE(past.update().ok() && past.capture == 2);
  CHECK(past.has({7}) && !past.has({1}) && !past.has({2}));
  past.graph.capture = 0;
  REQUIRE(past.update().ok() && past.capture == 0);
  CHECK(!past.has({7}));
}

TEST(after_a_failure_nothing_is_known) {
  Past past;
  past.graph.edges = {{2, {1}}};
  past.graph.last = {2};
  past.graph.unknown = 1;
  CHECK(!past.update().ok() && !past.has({2}));
  past.graph.unknown = 0;
  CHECK(past.update().ok() && past.has({1, 2}));
}

TEST_MAIN()
