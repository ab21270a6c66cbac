// Cuts a graph that holds a forward pass and its backward into graphs that run by themselves: one or more pieces, each
// with a forward and a backward graph. Values that cross a cut become outputs of one and inputs of the other.
//
// A backward graph reads what its forward saved. A view is not saved: it is made again from what it shows, as is what
// is cheaper to compute again than to keep (passes/recompute.h).
#pragma once

#include <vector>

#include "chorale/graph/ir.h"

namespace chorale::graph {

// A graph cut out of another, with the numbers that its inputs and outputs have there.
struct Part {
  Graph graph;
  std::vector<uint32_t> in, out;
};

// The nodes of `whole` for which `belongs` holds. Its outputs are `wanted`, in that order, as far as it makes them, and
// the inputs of `whole` that it overwrites. Views of values from outside are made again inside of it, and so is what
// the nodes for which `again` holds make, each right before it is first read.
Part cut_out(const Graph& whole, const std::vector<bool>& belongs, const std::vector<uint32_t>& wanted,
             const std::vector<Output>& written, const std::vector<bool>& again = {});

}  // namespace chorale::graph
