// The backend that fuses: what a graph computes element by element becomes loops of generated C, compiled by the
// system's C compiler in one call per graph and kept on disk.
//
//   auto step = compile(train_step, {.whole_graph = true, .backend = codegen::fused()});
//
// Values are those of the ops one by one, bit for bit: the same polynomials, no contraction. (But for sums in stripes,
// for GELU as the last thing of a product, and for products of a form that was measured to be faster.) Where there is
// no compiler, or it fails, the graph runs op by op (joint-eager), and a line of the log says so once.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chorale/codegen/cache.h"
#include "chorale/comm/group.h"
#include "chorale/graph/program.h"

namespace chorale::codegen {

struct FusedOptions {
  std::string compiler{};      // empty: CHORALE_CC, else cc, gcc or clang, as PATH has them
  CodeCache* cache = nullptr;  // null: the process's own
  std::string optimize = "-O3";
  bool blocks = true;  // nodes on small tensors together as one kernel (graph/blocks.h)
  // Measures which form of each product is faster (codegen/tune.h); with a group, ranks share the work and take the
  // same forms. The group is used for nothing else meanwhile, and must outlive the compiled function.
  bool autotune = false;
  const comm::Group* tune_with = nullptr;
};

std::shared_ptr<const graph::Program> fuse_and_compile(graph::Graph graph, const FusedOptions& options = {});

// Makes a CompileOptions::backend.
inline auto fused(FusedOptions options = {}) {
  return [options = std::move(options)](graph::Graph graph, const auto&) {
    return fuse_and_compile(std::move(graph), options);
  };
}

// The two steps of fuse_and_compile(): the graph with fused nodes (and with blocks, which are compiled for these sizes
// alone), and their different kernels in the order of the nodes.
graph::Graph simplify_and_fuse(graph::Graph graph, bool with_blocks = true);
std::vector<KernelText> kernels_of(const graph::Graph& fused);

}  // namespace chorale::codegen
