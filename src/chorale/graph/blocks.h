// Blocks: nodes on small tensors that one kernel runs, one behind the other.
//
// Note [Blocks] Of a step on small tensors the calls cost more than the arithmetic: each kernel is called through
// pointers, checks its operands, and cannot be fitted to their sizes. A block is a node whose body has all of these
// nodes; the backend makes one function of it, with sizes as constants, in which what is not read outside lies on the
// stack. It may overwrite an operand with a result where nothing in the body reads the operand later.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

// Whether a fused node takes lines (the last dimension) through all of its rows one by one, and reduces some: softmax,
// norms and sums of lines, and what is computed element by element.
bool works_line_by_line(const Node& fused);

// Whether result `result` of a block, or of a node that works line by line, may lie over its operand `operand`.
bool may_lie_over(const Node& node, size_t operand, size_t result);

}  // namespace chorale::graph
