#include "chorale/graph/blocks.h"

#include <algorithm>
#include <string_view>

#include "chorale/graph/stripes.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/copy.h"
#include "chorale/op/nn.h"

namespace chorale::graph {
namespace {

// A row that makes one number of each line, or that reads a line as a whole before it writes it.
bool is_of_lines(const Graph& body, const Node& node) {
  if (node.kind != Node::Kind::kRow) return false;
  for (const op::OpDef* row : {&op::kSoftmax, &op::kLogSoftmax, &op::kSoftmaxBackward, &op::kLogSoftmaxBackward,
                               &op::kLayerNorm, &op::kRmsNorm}) {
    if (node.op == row) return true;
  }
  if (std::string_view(node.op->name) != "sum") return false;
  const auto dims = static_cast<int64_t>(body.values[node.in[0]].sizes.size());
  return dims > 1 && kernel::dim_mask("sum", node.attrs.get<kernel::ReduceAttrs>().dims, dims) == kernel::DimMask{1}
                                                                                                      << (dims - 1);
}

// Whether a node of a block writes `y` over `x` element by element: what it reads of x is read before it is written.
bool writes_over(const Graph& body, const Node& node, uint32_t x, uint32_t y) {
  if (!(body.values[x] == body.values[y])) return false;
  if (node.kind == Node::Kind::kFused) return is_elementwise(node);
  if (node.kind != Node::Kind::kRow) return false;
  if (node.op->pointwise || is_of_lines(body, node)) return true;
  if (!node.op->lists || std::count(node.in.begin(), node.in.end(), x) != 1) return false;
  // A row over lists writes new values of its inputs: each over its own.
  const op::Lists lists = node.op->lists(node.attrs);
  const size_t length = (node.in.size() - lists.own) / lists.count;
  size_t result = 0;
  for (size_t l = 0; l < lists.count; ++l) {
    if (!lists.written.has(lists.own + l)) continue;
    for (size_t i = 0; i < length; ++i, ++result) {
      if (result < node.out.size() && node.out[result] == y && node.in[lists.own + l * length + i] == x) return true;
    }
  }
  return false;
}

}  // namespace

bool works_line_by_line(const Node& fused) {
  if (fused.kind != Node::Kind::kFused) return false;
  bool reduces = false;
  for (const Node& node : fused.body->nodes) {
    const bool is_reduction = is_of_lines(*fused.body, node);
    if (!is_reduction && !(node.kind == Node::Kind::kRow && (node.op->pointwise || node.op == &op::kTo))) return false;
    reduces |= is_reduction;
  }
  return reduces;
}

bool may_lie_over(const Node& of, size_t operand, size_t result) {
  const Graph& body = *of.body;
  const uint32_t x = body.inputs[operand], y = body.outputs[result].value;
  std::vector<bool> shows(body.values.size(), false);  // x and views of it
  shows[x] = true;
  bool is_written = false;
  for (const Node& node : body.nodes) {
    const auto reads =
        std::count_if(node.in.begin(), node.in.end(), [&](uint32_t v) { return v != kNone && shows[v]; });
    const bool makes = std::find(node.out.begin(), node.out.end(), y) != node.out.end();
    if (reads > 0 && is_written) return false;
    if (makes) {
      is_written = true;
      if (reads > 0 && !(std::count(node.in.begin(), node.in.end(), x) == reads && writes_over(body, node, x, y))) {
        return false;
      }
    }
    if (node.kind == Node::Kind::kRow && node.op->view && reads > 0) {
      for (const uint32_t v : node.out) shows[v] = true;
    }
  }
  return is_written;
}

}  // namespace chorale::graph
