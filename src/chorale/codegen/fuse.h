// Joins pointwise nodes that work on the same elements, and reductions of the same lines (Note [Lines] in
// codegen/line_kernels.h), into fused nodes, so that what they hand to each other never reaches memory.
//
// Note [Fusing] A node joins the group of what it reads when both have the same elements in the same order and compute
// in the same lanes, and when no value would have to leave the group and come back. So do nodes that read the same
// large value shortly after each other. Groups of one stay rows.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::codegen {

graph::Graph fuse(const graph::Graph& graph);

}  // namespace chorale::codegen
