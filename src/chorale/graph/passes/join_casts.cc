#include "chorale/graph/passes/join_casts.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "chorale/op/copy.h"
#include "chorale/op/joined.h"
#include "chorale/op/update.h"

namespace chorale::graph {
namespace {

// So many bytes of results are cast together: a kernel of them fills a device, and what it reads need not be kept long.
constexpr int64_t kBytesTogether = int64_t{32} << 20;

class CastJoiner {
 public:
  explicit CastJoiner(Graph& graph) : graph_(graph) {}

  void run() {
    read_gradients_before_casts();
    join_those_of_inputs();
    join_those_of_outputs();
  }

 private:
  // Casts with one of these can be one node.
  using Kind = std::tuple<int16_t, DeviceType, DType, DType>;
  using Members = std::vector<size_t>;  // nodes

  const Value& value(uint32_t v) const { return graph_.values[v]; }
  bool is_in_order(uint32_t v) const { return value(v).strides == contiguous_strides(value(v).sizes); }
  // Whether a node on a device casts a floating tensor as it lies.
  bool is_cast(const Node& node) const {
    if (node.kind != Node::Kind::kRow || node.op != &op::kTo) return false;
    const Value &from = value(node.in[0]), &to = value(node.out[0]);
    const DeviceType type = to.device.type;
    return type != DeviceType::kCpu && type != DeviceType::kNull && from.dtype != to.dtype && is_floating(from.dtype) &&
           is_floating(to.dtype) && is_in_order(node.in[0]) && is_in_order(node.out[0]);
  }
  Kind kind_of(const Node& node) const {
    const Value& to = value(node.out[0]);
    return {to.device.index, to.device.type, value(node.in[0]).dtype, to.dtype};
  }

  void read_gradients_before_casts() {
    std::vector<const Node*> maker(graph_.values.size(), nullptr);
    for (Node& node : graph_.nodes) {
      for (const uint32_t y : node.out) maker[y] = &node;
      if (node.kind != Node::Kind::kRow || !op::reads_gradients(*node.op)) continue;
      const op::Lists lists = node.op->lists(node.attrs);
      const size_t count = (node.in.size() - lists.own) / lists.count;
      for (size_t i = 0; i < count; ++i) {
        uint32_t& gradient = node.in[lists.own + count + i];
        const Node* const made_by = maker[gradient];
        if (made_by && is_cast(*made_by) && is_half(value(made_by->in[0]).dtype)) gradient = made_by->in[0];
      }
    }
    remove_dead_nodes(graph_);
  }

  // Pointwise rows cast what they read by themselves, when they are fused with it.
  static bool reads_memory(const Node& node) {
    return node.kind != Node::Kind::kRow || (!node.op->pointwise && node.op != &op::kTo);
  }
  void join_those_of_inputs() {
    std::vector<bool> is_input(graph_.values.size(), false), is_needed(graph_.values.size(), false);
    for (const uint32_t x : graph_.inputs) is_input[x] = true;
    for (const Output& output : graph_.outputs) is_needed[output.value] = true;
    for (const Node& node : graph_.nodes) {
      for (const uint32_t x : node.in) {
        if (x != kNone && reads_memory(node)) is_needed[x] = true;
      }
    }
    std::map<Kind, Members> found;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (is_cast(node) && is_input[node.in[0]] && is_needed[node.out[0]]) found[kind_of(node)].push_back(n);
    }
    for (const auto& [kind, members] : found) put(members, members.front());
    drop_joined();
  }

  void join_those_of_outputs() {
    std::vector<bool> is_input(graph_.values.size(), false), is_read(graph_.values.size(), false);
    for (const uint32_t x : graph_.inputs) is_input[x] = true;
    for (const Node& node : graph_.nodes) {
      for (const uint32_t x : node.in) {
        if (x != kNone) is_read[x] = true;
      }
    }
    std::map<Kind, std::pair<Members, int64_t>> found;  // and their bytes
    const auto flush = [&](std::pair<Members, int64_t>& some) {
      if (!some.first.empty()) put(some.first, some.first.back());
      some = {};
    };
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (!is_cast(node) || is_read[node.out[0]] || is_input[node.in[0]]) continue;
      std::pair<Members, int64_t>& some = found[kind_of(node)];
      some.first.push_back(n);
      some.second += bytes_of(value(node.out[0]));
      if (some.second >= kBytesTogether) flush(some);
    }
    for (auto& [kind, rest] : found) flush(rest);
    drop_joined();
  }

  // One node, at `place`, instead of these.
  void put(const Members& members, size_t place) {
    if (members.size() < 2) return;
    is_gone_.resize(graph_.nodes.size(), false);
    Node joined;
    joined.op = &op::kToEach;
    joined.attrs = op::CopyAttrs{value(graph_.nodes[members[0]].out[0]).dtype};
    joined.origin = graph_.nodes[place].origin;
    for (const size_t n : members) {
      joined.in.push_back(graph_.nodes[n].in[0]);
      joined.out.push_back(graph_.nodes[n].out[0]);
      is_gone_[n] = true;
    }
    is_gone_[place] = false;
    graph_.nodes[place] = std::move(joined);
  }

  void drop_joined() {
    if (is_gone_.empty()) return;
    std::vector<Node> nodes;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!is_gone_[n]) nodes.push_back(std::move(graph_.nodes[n]));
    }
    graph_.nodes = std::move(nodes);
    is_gone_.clear();
    renumber(graph_);
  }

  Graph& graph_;
  std::vector<bool> is_gone_;  // by node, while some are joined
};

}  // namespace

void join_casts(Graph& graph) { CastJoiner(graph).run(); }

}  // namespace chorale::graph
