// Joins a product with the activation that alone reads it, so that the product is never stored without it. An
// activation that is part of a longer chain is left there: the chain is read and written once in any case.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void join_epilogues(Graph& graph);

}  // namespace chorale::graph
