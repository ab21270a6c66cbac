// Casts of many tensors as one node each (to_each), where a graph on a device casts each by itself, as steps under
// autocast do with weights and their gradients: a kernel for a small tensor costs more than its bytes.
// - Casts of inputs stand together where the first of them stood.
// - Updates read gradients before they are cast.
// - What is cast only to be returned, as those gradients are, is cast together behind the last of some of them.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void join_casts(Graph& graph);

}  // namespace chorale::graph
