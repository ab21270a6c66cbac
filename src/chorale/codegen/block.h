// Blocks (Note [Blocks] in graph/blocks.h): which nodes they take, and their text.
//
// A block holds elementwise nodes, products, sums of columns and of everything, losses over classes, and updates of
// parameters, of f32; it takes no node whose arithmetic is worth more than a call, and sums are added up as the ops add
// them up.
#pragma once

#include "chorale/codegen/cache.h"
#include "chorale/graph/ir.h"

namespace chorale::codegen {

inline constexpr size_t kMostBlockOperands = 128;

// Whether a block may hold a node. Views are held as what they show.
bool fits_block(const graph::Graph& graph, const graph::Node& node);
// Joins runs of such nodes. `graph` has its elementwise nodes fused already.
graph::Graph make_blocks(const graph::Graph& graph);

// `long NAME(char* const* p)`: p are the operands. Gives 0, or 1 where operands are not what the ops take, before
// anything is written: then the nodes of the body say what is wrong.
KernelText render_block(const graph::Graph& body);

}  // namespace chorale::codegen
