// Fused nodes that are one product: of a form that was measured, or with the activation that follows it, which is then
// applied to each result before it is stored.
#pragma once

#include "chorale/graph/program.h"
#include "chorale/kernel/cpu/product/product_engine.h"

namespace chorale::graph {

// Whether a row is a product of f32 matrices on the CPU whose operands lie so that nothing is copied.
bool is_plain_product(const Graph& graph, const Node& node);
// Whether a pointwise row can be the last thing that a product does.
bool is_epilogue(const Node& node);

// Whether a fused node is such a product.
bool is_product(const Node& fused);
FusedKernel product_kernel(const Node& fused, kernel::cpu::ProductForm form);

// A fused node of the members, in this order, of which the last makes the result.
Node fuse_product(const Graph& graph, const std::vector<const Node*>& members);

}  // namespace chorale::graph
