// Measures which form of the library is faster for each product of a graph, in turns over ranks.
//
// Note [Tuning] Products are counted in the order of the graph; of n ranks, rank r measures numbers r, r + n, …, and
// then all tell each other. So every rank takes the same forms, and replicas stay equal bit for bit, which they would
// not if each measured for itself. Ranks must come with the same graph, but for its sizes.
#pragma once

#include <vector>

#include "chorale/comm/group.h"
#include "chorale/graph/ir.h"
#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::codegen {

// An entry for each product that has a choice.
using Tuned = std::vector<kernel::cpu::ProductForm>;

// The nodes that have one: the same at all sizes.
std::vector<size_t> tunable(const graph::Graph& graph);
// `ranks`: null for a process alone. Throws StateError where ranks have other numbers of products. `measured`, if
// given, counts the products that this rank has measured.
Tuned tune(const graph::Graph& graph, const comm::Group* ranks, int64_t* measured = nullptr);

}  // namespace chorale::codegen
