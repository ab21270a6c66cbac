// Runs a graph node by node, with memory of its own for every value: for graphs with sizes that only running them tells
// (a number that is read from a tensor, a shape that depends on data).
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "chorale/graph/ir.h"

namespace chorale::graph {

// Told every value that a node has made; gives the same graph at other sizes where the value says what they are.
using SizesFrom = std::function<std::optional<Graph>(uint32_t value, const Tensor& made)>;

// Like Program::run. Rows whose shapes depend on data run too.
void interpret(Graph graph, std::span<const Tensor> in, std::span<Generator* const> generators, std::span<Tensor> out,
               const SizesFrom& sizes_from = {});

}  // namespace chorale::graph
