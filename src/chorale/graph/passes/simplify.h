// Drops work that changes nothing. Values are written once, so what is equal may be the same:
// - a copy into the same dtype and layout, and a view that shows all as it lies, are what they are made of;
// - a constant that was made like another tensor does not wait for that tensor;
// - a sum of parts that were each put into zeros, and that together cover everything, is their concatenation
//   (gradients of q, k and v that were cut from one product);
// - a concatenation that is turned and then copied is a concatenation of what is turned.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void simplify(Graph& graph);

}  // namespace chorale::graph
