#include "chorale/graph/pieces.h"

#include <algorithm>
#include <functional>

#include "chorale/base/error.h"

namespace chorale::graph {

Part cut_out(const Graph& whole, const std::vector<bool>& belongs, const std::vector<uint32_t>& wanted,
             const std::vector<Output>& written, bool views) {
  Part part;
  std::vector<uint32_t> number(whole.values.size(), kNone);  // of a value, inside
  std::vector<uint32_t> maker(whole.values.size(), kNone);   // the node that makes it
  for (uint32_t n = 0; n < whole.nodes.size(); ++n) {
    for (const uint32_t y : whole.nodes[n].out) maker[y] = n;
  }
  part.graph.generators = whole.generators;
  const auto add_node = [&](const Node& from) {
    Node node = from;
    for (uint32_t& x : node.in) x = x == kNone ? kNone : number[x];
    for (uint32_t& y : node.out) y = number[y] = part.graph.add_value(whole.values[y]);
    part.graph.add(std::move(node));
  };
  // Makes value v known inside.
  const std::function<void(uint32_t)> need = [&](uint32_t v) {
    if (number[v] != kNone) return;
    const Node* from = maker[v] == kNone ? nullptr : &whole.nodes[maker[v]];
    if (views && from && from->kind == Node::Kind::kRow && from->op->view && from->in.size() == 1 && !is_wait(*from)) {
      need(from->in[0]);
      add_node(*from);
      return;
    }
    number[v] = part.graph.add_value(whole.values[v]);
    part.graph.inputs.push_back(number[v]);
    part.in.push_back(v);
  };
  for (uint32_t n = 0; n < whole.nodes.size(); ++n) {
    if (!belongs[n]) continue;
    for (const uint32_t x : whole.nodes[n].in) {
      if (x != kNone) need(x);
    }
    add_node(whole.nodes[n]);
  }
  for (const uint32_t v : wanted) {
    need(v);
    part.graph.outputs.push_back({number[v]});
    part.out.push_back(v);
  }
  for (const Output& output : written) {
    const uint32_t target = whole.inputs[output.into];
    if (number[target] == kNone) {
      number[target] = part.graph.add_value(whole.values[target]);
      part.graph.inputs.push_back(number[target]);
      part.in.push_back(target);
    }
    need(output.value);
    const auto at = std::find(part.graph.inputs.begin(), part.graph.inputs.end(), number[target]);
    part.graph.outputs.push_back({number[output.value], static_cast<uint32_t>(at - part.graph.inputs.begin())});
    part.out.push_back(output.value);
  }
  remove_dead_nodes(part.graph);
  return part;
}

}  // namespace chorale::graph
