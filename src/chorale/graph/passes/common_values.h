// Computes a value once that several nodes would compute: the same row, attributes and operands give the same value. A
// draw never is the same as another.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void merge_common_values(Graph& graph);

}  // namespace chorale::graph
