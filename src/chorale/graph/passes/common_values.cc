#include "chorale/graph/passes/common_values.h"

#include <numeric>
#include <unordered_map>

namespace chorale::graph {
namespace {

size_t hash_of(const Node& node) {
  size_t seed = static_cast<size_t>(node.op->facts.number) * 31 + node.attrs.hash();
  for (const uint32_t x : node.in) seed = seed * 1'000'003 + x;
  return seed;
}

bool is_same(const Graph& graph, const Node& a, const Node& b) {
  if (a.op != b.op || a.in != b.in || a.out.size() != b.out.size() || !(a.attrs == b.attrs)) return false;
  for (size_t i = 0; i < a.out.size(); ++i) {
    if (!(graph.values[a.out[i]] == graph.values[b.out[i]])) return false;
  }
  return true;
}

}  // namespace

void merge_common_values(Graph& graph) {
  std::vector<uint32_t> now(graph.values.size());  // what stands for each value
  std::iota(now.begin(), now.end(), 0u);
  std::unordered_multimap<size_t, const Node*> known;
  for (Node& node : graph.nodes) {
    for (uint32_t& x : node.in) x = x == kNone ? kNone : now[x];
    if (node.kind != Node::Kind::kRow || is_collective(node)) continue;
    const size_t hash = hash_of(node);
    const Node* same = nullptr;
    for (auto [at, end] = known.equal_range(hash); at != end && !same; ++at) {
      if (is_same(graph, *at->second, node)) same = at->second;
    }
    if (!same) {
      known.emplace(hash, &node);
      continue;
    }
    for (size_t i = 0; i < node.out.size(); ++i) now[node.out[i]] = same->out[i];
  }
  for (Output& output : graph.outputs) output.value = now[output.value];
  remove_dead_nodes(graph);
}

}  // namespace chorale::graph
