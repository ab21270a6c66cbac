#include "chorale/api/tape_cut.h"

#include <algorithm>
#include <tuple>
#include <unordered_set>

namespace chorale::compiled {
namespace {

using autograd::Edge;
using autograd::Node;

bool same_target(const Edge& a, const Edge& b) {
  return a.node.get() == b.node.get() && (a.node ? a.index == b.index : a.leaf.impl() == b.leaf.impl());
}

}  // namespace

TapeCut cut_tape(const std::vector<Edge>& results, uint64_t begin, const std::vector<uint64_t>& ends) {
  TapeCut cut;
  cut.pieces.resize(ends.size());
  const auto piece_of = [&](const Node& node) {
    const auto at = std::lower_bound(ends.begin(), ends.end(), node.number);
    return std::min(static_cast<size_t>(at - ends.begin()), ends.size() - 1);
  };
  const auto add_root = [&](const Edge& edge) {
    const size_t piece = piece_of(*edge.node);
    std::vector<Edge>& roots = cut.pieces[piece].roots;
    const auto at =
        std::find_if(roots.begin(), roots.end(), [&](const Edge& known) { return same_target(known, edge); });
    const auto place = static_cast<size_t>(at - roots.begin());
    if (at == roots.end()) roots.push_back(edge);
    return std::pair(piece, place);
  };
  std::vector<Node*> inside;
  std::unordered_set<const Node*> seen;
  const auto visit = [&](const Edge& edge) {
    if (edge.node && edge.node->number > begin && seen.insert(edge.node.get()).second)
      inside.push_back(edge.node.get());
  };
  for (const Edge& result : results) {
    cut.place.push_back(add_root(result));
    visit(result);
  }
  for (size_t i = 0; i < inside.size(); ++i) {
    for (const Edge& edge : inside[i]->edges) visit(edge);
  }
  std::sort(inside.begin(), inside.end(), [](const Node* a, const Node* b) { return a->number > b->number; });
  for (Node* node : inside) {
    cut.has_hooks |= node->hooks != nullptr;
    const size_t piece = piece_of(*node);
    for (size_t e = 0; e < node->edges.size(); ++e) {
      const Edge& edge = node->edges[e];
      if (!edge.wanted()) continue;
      const bool is_inside = edge.node && edge.node->number > begin;
      if (is_inside && piece_of(*edge.node) == piece) continue;
      std::vector<TapePiece::Exit>& exits = cut.pieces[piece].exits;
      const auto known = std::find_if(exits.begin(), exits.end(),
                                      [&](const TapePiece::Exit& exit) { return same_target(exit.edge, edge); });
      cut.pieces[piece].crossings.push_back({node, e, static_cast<size_t>(known - exits.begin())});
      if (known != exits.end()) continue;
      TapePiece::Exit exit{edge};
      if (is_inside) std::tie(exit.piece, exit.root) = add_root(edge);
      exits.push_back(std::move(exit));
    }
  }
  return cut;
}

ShutPiece::ShutPiece(const TapePiece& piece) : piece_(piece) {
  for (const TapePiece::Exit& exit : piece.exits) {
    const Edge& edge = exit.edge;
    const TensorSpec spec = edge.node ? edge.node->outputs[edge.index] : op::spec_of(edge.leaf);
    leaves_.push_back(
        Tensor::without_bytes(spec.sizes, contiguous_strides(spec.sizes), spec.dtype, spec.device, nullptr));
    autograd::slot_for_writing(leaves_.back()).requires_grad = true;
  }
  for (const TapePiece::Crossing& crossing : piece.crossings) {
    crossing.node->edges[crossing.edge] = Edge{{}, 0, leaves_[crossing.exit]};
  }
}

ShutPiece::~ShutPiece() {
  for (const TapePiece::Crossing& crossing : piece_.crossings) {
    crossing.node->edges[crossing.edge] = piece_.exits[crossing.exit].edge;
  }
}

}  // namespace chorale::compiled
