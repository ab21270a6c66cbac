// Puts rows that do the work of several (op/joined.h) where a graph on a device has those several, so that values which
// pass from one to the next are not written and read again:
// - a sum, its layer norm, and casts before and behind them (a residual stream under autocast); and the same in
// backward;
// - the gradient of attention, where those of q, k and v are then put together as [B, T, 3, H, D];
// - cross entropy and its gradient, whose rows of logits are then read once, and written over;
// - the gradient of GELU and the sums of its columns, which are the gradient of the bias before it;
// - a batch norm with the ReLU behind it, and with the sum between them; and the same in backward, where images have
//   their channels last.
// The CPU keeps them apart: there what they hand to each other is in the cache.
#pragma once

#include "chorale/graph/ir.h"

namespace chorale::graph {

void join_rows(Graph& graph);

}  // namespace chorale::graph
