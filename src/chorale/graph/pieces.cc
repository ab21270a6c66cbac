#include "chorale/graph/pieces.h"

#include <algorithm>

#include "chorale/base/error.h"

namespace chorale::graph {

Part cut_out(const Graph& whole, const std::vector<bool>& belongs, const std::vector<uint32_t>& wanted,
             const std::vector<Output>& written, const std::vector<bool>& again) {
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
  const auto is_made_inside = [&](uint32_t v) {
    if (maker[v] == kNone) return false;
    const Node& from = whole.nodes[maker[v]];
    const bool is_view = from.kind == Node::Kind::kRow && from.op->view && from.in.size() == 1 && !is_wait(from);
    return is_view || (!again.empty() && again[maker[v]]);
  };
  // Makes value v known inside, and first what it is made of there.
  const auto need = [&](uint32_t v) {
    std::vector<uint32_t> open{v};
    while (!open.empty()) {
      const uint32_t at = open.back();
      if (number[at] == kNone && is_made_inside(at)) {
        const Node& from = whole.nodes[maker[at]];
        const size_t before = open.size();
        for (auto x = from.in.rbegin(); x != from.in.rend(); ++x) {
          if (*x != kNone && number[*x] == kNone) open.push_back(*x);
        }
        if (open.size() > before) continue;
        add_node(from);
      } else if (number[at] == kNone) {
        number[at] = part.graph.add_value(whole.values[at]);
        part.graph.inputs.push_back(number[at]);
        part.in.push_back(at);
      }
      open.pop_back();
    }
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
