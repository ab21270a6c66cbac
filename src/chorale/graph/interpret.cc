#include "chorale/graph/interpret.h"

#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/graph/tracer.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"

namespace chorale::graph {
namespace {

Tensor fresh(const Value& value) {
  return Tensor::empty_strided(value.sizes, value.strides, value.dtype, value.device);
}

// The results of one node.
Tensors run_node(const Graph& graph, const Node& node, const std::vector<Tensor>& values,
                 std::span<Generator* const> generators) {
  Tensors in;
  for (const uint32_t x : node.in) in.push_back(x == kNone ? Tensor{} : values[x]);
  Tensors out(node.out.size());
  switch (node.kind) {
    case Node::Kind::kRow: {
      op::current().call(*node.op, in, node.attrs, out);
      break;
    }
    case Node::Kind::kDraw:
      out[0] = op::current().draw(*generators[node.generator], node.words, graph.values[node.out[0]].device);
      break;
    case Node::Kind::kWrite: {
      out[0] = fresh(graph.values[node.out[0]]);
      copy_(out[0], in[0]);
      copy_(out[0].view_as(node.region.sizes, node.region.strides, out[0].offset() + node.region.offset), in[1]);
      break;
    }
    case Node::Kind::kFused:
    case Node::Kind::kBlock:
      interpret(*node.body, in, generators, out);
      break;
  }
  return out;
}

}  // namespace

void interpret(Graph graph, std::span<const Tensor> in, std::span<Generator* const> generators, std::span<Tensor> out,
               const SizesFrom& sizes_from) {
  CHORALE_INVARIANT(in.size() == graph.inputs.size() && out.size() == graph.outputs.size(), "a graph got ", in.size(),
                    " inputs and ", out.size(), " outputs");
  const RecordingPaused paused;
  const op::Under bottom(op::Stack{&tracer()});
  std::vector<Tensor> values(graph.values.size());
  for (size_t i = 0; i < in.size(); ++i) values[graph.inputs[i]] = in[i];
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Tensors made = run_node(graph, graph.nodes[n], values, generators);
    const std::vector<uint32_t> numbers = graph.nodes[n].out;
    for (size_t i = 0; i < numbers.size(); ++i) {
      values[numbers[i]] = made[i];
      if (!sizes_from) continue;
      if (std::optional<Graph> other = sizes_from(numbers[i], made[i])) graph = std::move(*other);
      CHORALE_CHECK_STATE(made[i].sizes() == graph.values[numbers[i]].sizes, "[compile] ", graph.nodes[n].name(),
                          " made ", made[i].sizes(), ", expected ", graph.values[numbers[i]].sizes,
                          ": the graph does not hold for the number that was read while it ran");
    }
  }
  for (size_t o = 0; o < out.size(); ++o) {
    const Output& output = graph.outputs[o];
    if (output.into != kNone) {
      copy_(in[output.into], values[output.value]);
      continue;
    }
    // An output has memory that nothing else sees.
    Tensor made = fresh(graph.values[output.value]);
    copy_(made, values[output.value]);
    out[o] = made;
  }
}

}  // namespace chorale::graph
