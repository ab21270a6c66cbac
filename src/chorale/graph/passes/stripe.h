// Joins nodes that hand large values to each other line by line into fused nodes that run in stripes (graph/stripes.h):
// - a loss over classes, its gradient, and the layer that made the logits, with that layer's own gradients: the logits
//   are never there as a whole;
// - what is computed element by element, and its sums over all dimensions but the last (gradients of biases): what was
//   computed is added up while it is in the cache.
// Sums are then added up stripe by stripe, in the order of lines.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void run_in_stripes(Graph& graph);

}  // namespace chorale::graph
