#include "chorale/graph/passes/epilogues.h"

#include "chorale/graph/products.h"

namespace chorale::graph {

void join_epilogues(Graph& graph) {
  const std::vector<uint32_t> uses = count_uses(graph);
  std::vector<uint32_t> maker(graph.values.size(), kNone);
  for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
    for (const uint32_t y : graph.nodes[n].out) maker[y] = n;
  }
  std::vector<bool> is_joined(graph.nodes.size(), false);
  std::vector<Node> nodes;
  for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const uint32_t m = is_epilogue(node) ? maker[node.in[0]] : kNone;
    if (m == kNone || uses[node.in[0]] != 1 || !is_plain_product(graph, graph.nodes[m]) ||
        !(graph.values[node.in[0]] == graph.values[node.out[0]])) {
      continue;
    }
    Node fused = fuse_product(graph, {&graph.nodes[m], &node});
    graph.nodes[n] = std::move(fused);
    is_joined[m] = true;
  }
  for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
    if (!is_joined[n]) nodes.push_back(std::move(graph.nodes[n]));
  }
  graph.nodes = std::move(nodes);
  renumber(graph);
}

}  // namespace chorale::graph
