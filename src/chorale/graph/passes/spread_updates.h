// Takes an update of many parameters apart, into one for every few of them, and puts each behind the last gradient that
// it reads: gradients are then in the cache, and a collective that brings some of them is waited for as late as can be.
// What the update overwrites is not read any more where it is put.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void spread_updates(Graph& graph);

}  // namespace chorale::graph
