#include "chorale/graph/kernel_list.h"

#include <algorithm>

#include "chorale/op/product.h"

namespace chorale::graph {
namespace {

constexpr double kBytesPerMicrosecond = 1e4, kOperationsPerMicrosecond = 1e5;

std::string rows_in(const Node& node) {
  std::string names;
  for (const Node& part : node.body->nodes) {
    names += (names.empty() ? "" : ", ") + (part.body ? "(" + rows_in(part) + ")" : part.name());
  }
  return names;
}

// Multiplications and additions of products.
double operations_of(const Graph& graph, const Node& node) {
  if (node.body) {
    double all = 0;
    for (const Node& part : node.body->nodes) all += operations_of(*node.body, part);
    return all;
  }
  if (node.kind != Node::Kind::kRow || (node.op != &op::kLinear && node.op != &op::kMatmul)) return 0;
  const Shape& a = graph.values[node.in[0]].sizes;
  return a.empty() ? 0 : 2.0 * static_cast<double>(count_elems(graph.values[node.out[0]].sizes) * a.back());
}

}  // namespace

std::string describe(const Node& node) { return node.body ? node.name() + ": " + rows_in(node) : node.name(); }

std::vector<ListedKernel> list_kernels(const Program& program) {
  const Graph& graph = program.graph();
  std::vector<ListedKernel> kernels;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (program.plan().is_view[n] && !is_wait(node)) continue;
    ListedKernel kernel{n, describe(node)};
    for (const uint32_t x : node.in) kernel.bytes += x == kNone ? 0 : bytes_of(graph.values[x]);
    for (const uint32_t y : node.out) kernel.bytes += bytes_of(graph.values[y]);
    kernel.microseconds = std::max(static_cast<double>(kernel.bytes) / kBytesPerMicrosecond,
                                   operations_of(graph, node) / kOperationsPerMicrosecond);
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

}  // namespace chorale::graph
