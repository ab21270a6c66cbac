#include "chorale/graph/passes/simplify.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "chorale/kernel/creation_attrs.h"
#include "chorale/kernel/full_like_attrs.h"
#include "chorale/op/copy.h"
#include "chorale/op/shape.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::graph {
namespace {

bool is_row(const Node& node, const op::OpDef& row) { return node.kind == Node::Kind::kRow && node.op == &row; }

bool changes_nothing(const Graph& graph, const Node& node) {
  if (node.kind != Node::Kind::kRow || node.in.size() != 1 || node.out.size() != 1) return false;
  if (!(graph.values[node.in[0]] == graph.values[node.out[0]])) return false;
  if (node.op == &op::kTo) return true;
  if (!node.op->view || is_wait(node)) return false;
  const op::OutSpecs specs = infer(graph, node);
  return specs[0].view_of == 0 && specs[0].offset == 0;
}

void drop_identities(Graph& graph) {
  std::vector<uint32_t> now(graph.values.size());
  std::iota(now.begin(), now.end(), 0u);
  for (Node& node : graph.nodes) {
    for (uint32_t& x : node.in) x = x == kNone ? kNone : now[x];
    if (changes_nothing(graph, node)) now[node.out[0]] = node.in[0];
  }
  for (Output& output : graph.outputs) output.value = now[output.value];
  remove_dead_nodes(graph);
}

void forget_shapes(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (node.kind != Node::Kind::kRow || std::string_view(node.op->name) != "full_like") continue;
    const Value& out = graph.values[node.out[0]];
    if (out.device.type != DeviceType::kCpu) continue;
    const Scalar value = node.attrs.get<kernel::FullLikeAttrs>().value;
    node.op = op::find_op("full");
    node.attrs = kernel::FullAttrs{out.sizes, value, out.dtype, out.device.type, out.device.index};
    node.in.clear();
  }
}

// A graph with the maker and the readers of each value.
struct Links {
  explicit Links(const Graph& graph) : maker(graph.values.size(), kNone), uses(count_uses(graph)) {
    for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
      for (const uint32_t y : graph.nodes[n].out) maker[y] = n;
    }
  }
  std::vector<uint32_t> maker, uses;
};

struct PartOfSum {
  uint32_t value;
  int64_t begin, end;
};

// The parts of a sum of slices in zeros; false where it is anything else.
bool find_parts(const Graph& graph, const Links& links, uint32_t value, bool is_root, int64_t& dim,
                std::vector<PartOfSum>& parts) {
  if (links.maker[value] == kNone || (!is_root && links.uses[value] != 1)) return false;
  const Node& node = graph.nodes[links.maker[value]];
  if (node.kind != Node::Kind::kRow) return false;
  if (std::string_view(node.op->name) == "add" && node.in.size() == 2) {
    return std::all_of(node.in.begin(), node.in.end(),
                       [&](uint32_t x) { return find_parts(graph, links, x, false, dim, parts); });
  }
  if (node.op != &op::kSliceBackward) return false;
  const auto& attrs = node.attrs.get<kernel::SliceBackwardAttrs>();
  const Shape& sizes = graph.values[value].sizes;
  const int64_t own = attrs.dim < 0 ? attrs.dim + static_cast<int64_t>(sizes.size()) : attrs.dim;
  if (attrs.step != 1 || (dim >= 0 && own != dim) || graph.values[node.in[0]].dtype != graph.values[value].dtype) {
    return false;
  }
  dim = own;
  const int64_t size = sizes[static_cast<size_t>(dim)];
  const auto place = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size); };
  parts.push_back({node.in[0], place(attrs.start), place(attrs.end)});
  return true;
}

void join_parts(Graph& graph) {
  const Links links(graph);
  for (Node& node : graph.nodes) {
    if (node.kind != Node::Kind::kRow || std::string_view(node.op->name) != "add" || node.out.size() != 1) continue;
    int64_t dim = -1;
    std::vector<PartOfSum> parts;
    if (!find_parts(graph, links, node.out[0], true, dim, parts)) continue;
    std::sort(parts.begin(), parts.end(), [](const PartOfSum& a, const PartOfSum& b) { return a.begin < b.begin; });
    int64_t at = 0;
    for (const PartOfSum& part : parts) at = part.begin == at ? part.end : -1;
    if (at != graph.values[node.out[0]].sizes[static_cast<size_t>(dim)]) continue;
    Node joined;
    joined.op = &op::kCat;
    joined.attrs = op::DimAttrs{dim};
    joined.out = node.out;
    joined.origin = node.origin;
    for (const PartOfSum& part : parts) joined.in.push_back(part.value);
    // A sum of other layouts than this one stays what it is.
    const Value& out = graph.values[node.out[0]];
    if (out.strides == contiguous_strides(out.sizes)) node = std::move(joined);
  }
  remove_dead_nodes(graph);
}

void turn_before_joining(Graph& graph) {
  const Links links(graph);
  std::vector<Node> nodes;
  nodes.reserve(graph.nodes.size());
  for (const Node& node : graph.nodes) {
    const auto only_reader = [&](uint32_t value, const op::OpDef& row) -> const Node* {
      if (links.maker[value] == kNone || links.uses[value] != 1) return nullptr;
      const Node& from = graph.nodes[links.maker[value]];
      return is_row(from, row) ? &from : nullptr;
    };
    const bool is_copy = is_row(node, op::kTo) && graph.values[node.in[0]].dtype == graph.values[node.out[0]].dtype;
    const Node* turn = is_copy ? only_reader(node.in[0], op::kPermute) : nullptr;
    const Node* join = turn ? only_reader(turn->in[0], op::kCat) : nullptr;
    const Value& out = graph.values[node.out[0]];
    if (!join || out.strides != contiguous_strides(out.sizes)) {
      nodes.push_back(node);
      continue;
    }
    const auto rank = static_cast<int64_t>(out.sizes.size());
    const auto& dims = turn->attrs.get<op::DimsAttrs>().dims;
    const int64_t joined = join->attrs.get<op::DimAttrs>().dim;
    int64_t dim = 0;
    for (int64_t d = 0; d < rank; ++d) {
      const int64_t from = dims[static_cast<size_t>(d)];
      if ((from < 0 ? from + rank : from) == (joined < 0 ? joined + rank : joined)) dim = d;
    }
    Node all;
    all.op = &op::kCat;
    all.attrs = op::DimAttrs{dim};
    all.out = node.out;
    all.origin = node.origin;
    for (const uint32_t x : join->in) {
      Node turned;
      turned.op = &op::kPermute;
      turned.attrs = turn->attrs;
      turned.in = {x};
      turned.origin = node.origin;
      Value value = graph.values[x];
      for (int64_t d = 0; d < rank; ++d) {
        const int64_t from = dims[static_cast<size_t>(d)];
        const auto at = static_cast<size_t>(from < 0 ? from + rank : from);
        value.sizes[static_cast<size_t>(d)] = graph.values[x].sizes[at];
        value.strides[static_cast<size_t>(d)] = graph.values[x].strides[at];
      }
      turned.out = {graph.add_value(std::move(value))};
      all.in.push_back(turned.out[0]);
      nodes.push_back(std::move(turned));
    }
    nodes.push_back(std::move(all));
  }
  graph.nodes = std::move(nodes);
  remove_dead_nodes(graph);
}

}  // namespace

void simplify(Graph& graph) {
  forget_shapes(graph);
  drop_identities(graph);
  join_parts(graph);
  turn_before_joining(graph);
}

}  // namespace chorale::graph
