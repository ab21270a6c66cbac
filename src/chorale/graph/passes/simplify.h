// Drops nodes whose result another value has already. No value is written twice, so two that are equal can be one:
// - a copy into the same dtype and layout, or a view of all elements in the same order, becomes its input;
// - a constant that is made like another tensor gets that tensor's shape written down, and no longer waits for it;
// - a sum of tensors that are zero outside of one part each, where the parts cover everything, becomes a concatenation
//   of the parts (gradients of q, k and v that were cut from one product);
// - a concatenation that is transposed and then copied becomes a concatenation of transposed inputs.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void simplify(Graph& graph);

}  // namespace chorale::graph
