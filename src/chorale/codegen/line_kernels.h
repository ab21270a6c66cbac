// Reductions of lines as generated code, together with what is computed element by element before and behind them.
//
// Note [Lines] Softmax, its logarithm, their gradients, layer and root-mean-square normalisation and sums, all over the
// last dimension, of f32. A group of nodes that has such a one works on the lines of one large shape (its space): each
// operand is as large as the space, or the same for every line (a weight), or one number for each line (a mean), or one
// number. The kernel takes a line at a time through all of its nodes; what they hand to each other lies on the stack.
// Sums have the order of the eager loops, so the bits are those of the ops.
#pragma once

#include "chorale/codegen/cache.h"
#include "chorale/graph/ir.h"

namespace chorale::codegen {

bool reduces_lines(const graph::Graph& graph, const graph::Node& node);
// The value whose lines a node works on, if it may be in a group with reductions.
const graph::Value* space_of_lines(const graph::Graph& graph, const graph::Node& node);
// `void NAME(char* const* p, const long* a, long begin, long end)`: p are the operands, a[0] is the length of a line;
// [begin, end) are lines.
KernelText render_lines(const graph::Graph& body);
struct LineShape {
  int64_t lines = 0, length = 0;
};
LineShape lines_of(const graph::Graph& body);

}  // namespace chorale::codegen
