#include "chorale/graph/ir.h"

#include <algorithm>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/kernel/collective_attrs.h"
#include "chorale/op/prepare.h"

namespace chorale::graph {

int64_t bytes_of(const Value& value) {
  const auto reach = reach_of(value.sizes, value.strides);
  return (reach ? reach->high : 0) * static_cast<int64_t>(size_of(value.dtype));
}

std::string Node::name() const {
  switch (kind) {
    case Kind::kRow:
      return op->name;
    case Kind::kDraw:
      return "draw";
    case Kind::kWrite:
      return "write";
    case Kind::kFused:
      return "fused";
    case Kind::kBlock:
      return "block";
  }
  return {};
}

uint32_t Graph::add_value(Value value) {
  values.push_back(std::move(value));
  return static_cast<uint32_t>(values.size() - 1);
}

Tensor stand_in(const Value& value) {
  return Tensor::without_bytes(value.sizes, value.strides, value.dtype, value.device, nullptr);
}

op::OutSpecs infer(const Graph& graph, const Node& node) {
  Tensors in;
  for (const uint32_t x : node.in) in.push_back(x == kNone ? Tensor{} : stand_in(graph.values[x]));
  return op::prepare(*node.op, in, node.attrs, node.out.size());
}

bool is_collective(const op::OpDef& op) {
  return op.attrs && (&op.attrs() == &op::attrs_of<kernel::CollectiveAttrs>() ||
                      &op.attrs() == &op::attrs_of<kernel::MessageAttrs>());
}
bool is_collective(const Node& node) { return node.kind == Node::Kind::kRow && is_collective(*node.op); }
bool is_start(const Node& node) { return is_collective(node) && std::string_view(node.op->name).ends_with("_start"); }
bool is_wait(const Node& node) { return node.kind == Node::Kind::kRow && node.op->view && node.op->cpu; }

bool copies_first(const Node& node) {
  if (!is_collective(node) || &node.op->attrs() != &op::attrs_of<kernel::CollectiveAttrs>()) return false;
  const kernel::Collective kind = node.attrs.get<kernel::CollectiveAttrs>().kind;
  return kind == kernel::Collective::kAllReduce || kind == kernel::Collective::kBroadcast ||
         kind == kernel::Collective::kReduce;
}

std::vector<uint32_t> count_uses(const Graph& graph) {
  std::vector<uint32_t> uses(graph.values.size(), 0);
  for (const Node& node : graph.nodes) {
    for (const uint32_t x : node.in) {
      if (x != kNone) ++uses[x];
    }
  }
  for (const Output& output : graph.outputs) ++uses[output.value];
  return uses;
}

void remove_dead_nodes(Graph& graph) {
  std::vector<bool> needed(graph.values.size(), false);
  for (const Output& output : graph.outputs) needed[output.value] = true;
  std::vector<Node> kept;
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    const bool is_read = std::any_of(node->out.begin(), node->out.end(), [&](uint32_t y) { return needed[y]; });
    if (!is_read && node->kind != Node::Kind::kDraw && !is_collective(*node)) continue;
    for (const uint32_t x : node->in) {
      if (x != kNone) needed[x] = true;
    }
    kept.push_back(std::move(*node));
  }
  std::reverse(kept.begin(), kept.end());
  graph.nodes = std::move(kept);
  renumber(graph);
}

void renumber(Graph& graph) {
  std::vector<uint32_t> number(graph.values.size(), kNone);
  std::vector<Value> values;
  const auto give = [&](uint32_t& value) {
    if (value == kNone) return;
    if (number[value] == kNone) {
      number[value] = static_cast<uint32_t>(values.size());
      values.push_back(graph.values[value]);
    }
    value = number[value];
  };
  for (uint32_t& input : graph.inputs) give(input);
  for (Node& node : graph.nodes) {
    for (uint32_t& x : node.in) give(x);
    for (uint32_t& y : node.out) give(y);
  }
  for (Output& output : graph.outputs) give(output.value);
  graph.values = std::move(values);
}

void verify(const Graph& graph) {
  std::vector<bool> there(graph.values.size(), false);
  const auto define = [&](uint32_t value, const std::string& by) {
    CHORALE_INVARIANT(value < there.size(), "[verify] ", by, " makes value ", value, ", and there are ", there.size());
    CHORALE_INVARIANT(!there[value], "[verify] ", by, " makes %", value, ", which exists already");
    there[value] = true;
  };
  const auto use = [&](uint32_t value, const std::string& by) {
    CHORALE_INVARIANT(value < there.size() && there[value], "[verify] ", by, " reads %", value, " before it is there");
  };
  for (const uint32_t input : graph.inputs) define(input, "the graph's head");
  for (const Node& node : graph.nodes) {
    const std::string name = node.out.empty() ? node.name() : concat(node.name(), " (%", node.out[0], ")");
    for (const uint32_t x : node.in) {
      if (x != kNone) use(x, name);
    }
    const auto is = [&](const Value& expected) {
      CHORALE_INVARIANT(node.out.size() == 1 && graph.values[node.out[0]] == expected, "[verify] ", name, " makes ",
                        expected.dtype, expected.sizes, " and its value is another");
    };
    switch (node.kind) {
      case Node::Kind::kRow: {
        if (node.op->dynamic) break;  // its data tells
        const op::OutSpecs specs = infer(graph, node);
        for (size_t i = 0; i < node.out.size(); ++i) {
          const Value& value = graph.values[node.out[i]];
          const bool own = specs[i].strided || specs[i].view_of >= 0;
          const Strides strides = own ? specs[i].strides : contiguous_strides(specs[i].sizes);
          CHORALE_INVARIANT(value.sizes == specs[i].sizes && value.dtype == specs[i].dtype &&
                                value.device == specs[i].device && value.strides == strides,
                            "[verify] ", name, " makes ", specs[i].dtype, specs[i].sizes, " with strides ", strides,
                            ", and %", node.out[i], " is ", value.dtype, value.sizes, " with ", value.strides);
        }
        break;
      }
      case Node::Kind::kDraw:
        CHORALE_INVARIANT(node.generator < graph.generators, "[verify] ", name, " reads generator g", node.generator,
                          " of ", graph.generators);
        break;
      case Node::Kind::kWrite:
        CHORALE_INVARIANT(node.in.size() == 2 && graph.values[node.in[1]].sizes == node.region.sizes, "[verify] ", name,
                          " writes ", graph.values[node.in[1]].sizes, " over a part of shape ", node.region.sizes);
        is(graph.values[node.in[0]]);
        break;
      case Node::Kind::kFused:
      case Node::Kind::kBlock:
        CHORALE_INVARIANT(
            node.body && node.body->inputs.size() == node.in.size() && node.body->outputs.size() == node.out.size(),
            "[verify] ", name, " has a body of another number of inputs or outputs");
        verify(*node.body);
        break;
    }
    for (const uint32_t y : node.out) define(y, name);
  }
  std::vector<bool> written(graph.inputs.size(), false);
  for (const Output& output : graph.outputs) {
    use(output.value, "the end of the graph");
    if (output.into == kNone) continue;
    CHORALE_INVARIANT(output.into < written.size() && !written[output.into], "[verify] input ", output.into,
                      " is written twice, or is none");
    written[output.into] = true;
    const Value &from = graph.values[output.value], &to = graph.values[graph.inputs[output.into]];
    CHORALE_INVARIANT(from.sizes == to.sizes && from.dtype == to.dtype, "[verify] ", from.dtype, from.sizes,
                      " is written to an input of ", to.dtype, to.sizes);
  }
}

}  // namespace chorale::graph
