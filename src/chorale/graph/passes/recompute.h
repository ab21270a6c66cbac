// Chooses what a training step keeps from its first half for its second, and what it computes again there, so that less
// memory is needed at the moment when most is: a minimum cut through the values, each as wide as its bytes.
//
// What may be computed again follows from `memory_budget`. At 1: what costs no more than reading and writing its bytes.
// At 0: everything but random numbers, collectives and writes, between the places where a single value leads on (the
// end of a block), which is kept. Between: what costs least for each byte first, until the bytes that are kept have
// come so far down. Values are the same, bit for bit. What is computed again is computed right before it is needed.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void recompute(Graph& graph, double memory_budget);

}  // namespace chorale::graph
