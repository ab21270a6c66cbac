#include "chorale/codegen/tune.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "chorale/base/error.h"
#include "chorale/graph/products.h"

namespace chorale::codegen {
namespace {

using graph::Graph;
using graph::Node;
using kernel::cpu::ProductForm;

constexpr ProductForm kForms[] = {ProductForm::kByShape, ProductForm::kGemm, ProductForm::kPrimitive};
// Each form in turn, so often: the fastest time counts.
constexpr int kTurns = 7;
// Another form than the shape's must be faster by this much: else it is noise.
constexpr double kWorthIt = 0.97;
// Below this much work all forms cost about a call.
constexpr int64_t kLeastWork = int64_t{1} << 18;

// Whatever it is: how long a product takes does not depend on its numbers, as long as they are normal ones.
Tensor operand(const graph::Value& value) {
  const Tensor x = Tensor::empty_strided(value.sizes, value.strides, value.dtype, value.device);
  std::fill_n(static_cast<float*>(x.raw()), x.storage()->bytes() / sizeof(float), 0.5f);
  return x;
}

// A product by itself: the node, or the one that a fused node begins with.
Node alone(const Graph& graph, const Node& node) {
  return node.kind == Node::Kind::kFused ? node : graph::fuse_product(graph, {&node});
}

ProductForm fastest(const Graph& graph, const Node& node) {
  const Node product = alone(graph, node);
  std::vector<Tensor> in, out{operand(graph.values[product.out[0]])};
  in.reserve(product.in.size());
  for (const uint32_t x : product.in) in.push_back(operand(graph.values[x]));
  double best[std::size(kForms)];
  std::fill(std::begin(best), std::end(best), std::numeric_limits<double>::infinity());
  for (int turn = 0; turn <= kTurns; ++turn) {
    for (size_t i = 0; i < std::size(kForms); ++i) {
      const graph::FusedKernel kernel = graph::product_kernel(product, kForms[i]);
      const auto begin = std::chrono::steady_clock::now();
      kernel(in, out);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (turn > 0) best[i] = std::min(best[i], took.count());  // the first one makes primitives
    }
  }
  const auto at = static_cast<size_t>(std::min_element(std::begin(best), std::end(best)) - std::begin(best));
  return best[at] < kWorthIt * best[0] ? kForms[at] : ProductForm::kByShape;
}

}  // namespace

std::vector<size_t> tunable(const Graph& graph) {
  std::vector<size_t> found;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (graph::is_plain_product(graph, node) || graph::is_product(node)) found.push_back(n);
  }
  return found;
}

Tuned tune(const Graph& graph, const comm::Group* ranks, int64_t* measured) {
  const std::vector<size_t> nodes = tunable(graph);
  const int size = ranks ? ranks->size() : 1, rank = ranks ? ranks->rank() : 0;
  if (size > 1) {
    const auto own = static_cast<int64_t>(nodes.size());
    const Tensor bounds = Tensor::from<int64_t>({own, -own}, {2});
    ranks->all_reduce(bounds, Reduce::kMax).wait();
    const std::vector<int64_t> both = bounds.to_vector<int64_t>();
    CHORALE_CHECK_STATE(both[0] == -both[1], "[compile] ranks tune different graphs: this one has ", own,
                        " products, another one ", both[0] == own ? -both[1] : both[0]);
  }
  if (nodes.empty()) return {};
  // Nothing is known of the products of other ranks: each number is told by one rank.
  std::vector<int64_t> told(nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (static_cast<int>(i % static_cast<size_t>(size)) != rank) continue;
    const Node& node = graph.nodes[nodes[i]];
    const graph::Value &a = graph.values[node.in[0]], &c = graph.values[node.out[0]];
    // This rank decides by its own sizes, which others need not have.
    const bool is_worth_it = count_elems(c.sizes) * a.sizes.back() >= kLeastWork;
    told[i] = 1 + static_cast<int64_t>(is_worth_it ? fastest(graph, node) : ProductForm::kByShape);
    if (measured && is_worth_it) ++*measured;
  }
  const Tensor all = Tensor::from<int64_t>(told, {static_cast<int64_t>(told.size())});
  if (size > 1) ranks->all_reduce(all, Reduce::kSum).wait();
  Tuned tuned;
  for (const int64_t number : all.to_vector<int64_t>()) {
    CHORALE_INVARIANT(number >= 1 && number <= static_cast<int64_t>(std::size(kForms)),
                      "[compile] a product was tuned by ", number == 0 ? "no rank" : "several ranks");
    tuned.push_back(static_cast<ProductForm>(number - 1));
  }
  return tuned;
}

}  // namespace chorale::codegen
