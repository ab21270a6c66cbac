#include "chorale/codegen/fuse.h"

#include <algorithm>
#include <queue>

#include "chorale/codegen/line_kernels.h"
#include "chorale/codegen/render.h"

namespace chorale::codegen {
namespace {

using graph::Graph;
using graph::kNone;
using graph::Node;
using graph::Value;

constexpr size_t kMostNodes = 64;  // in one kernel: registers are few, and compiling takes longer than linearly
constexpr size_t kMostOperands = 24;
// A larger input that does not lie as the results do is better copied into their order first, square by square.
constexpr int64_t kMostScattered = 16 * 1024;

// Elements of a value that is worth being read once for two nodes, which stand at most so many nodes apart.
constexpr int64_t kLeastShared = 16 * 1024;
constexpr uint32_t kMostApart = 16;

class Fuser {
 public:
  explicit Fuser(const Graph& graph)
      : graph_(graph),
        lanes_(graph.nodes.size(), Lanes::kAny),
        can_(graph.nodes.size(), false),
        reduces_(graph.nodes.size(), false),
        space_(graph.nodes.size(), nullptr),
        group_(graph.nodes.size()),
        maker_(graph.values.size(), kNone) {
    for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
      group_[n] = n;
      can_[n] = can_render(graph, graph.nodes[n], lanes_[n]) && reads_along(graph.nodes[n]);
      reduces_[n] = reduces_lines(graph, graph.nodes[n]);
      if (reduces_[n]) lanes_[n] = Lanes::kF32;
      if (can_[n] || reduces_[n]) space_[n] = space_of_lines(graph, graph.nodes[n]);
      can_[n] = can_[n] || reduces_[n];
      for (const uint32_t y : graph.nodes[n].out) maker_[y] = n;
    }
  }

  Graph run() {
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!can_[n]) continue;
      for (const uint32_t x : graph_.nodes[n].in) {
        const uint32_t m = x == kNone ? kNone : maker_[x];
        if (m != kNone && can_[m] && group_[m] != group_[n] && fits(m, n)) join(group_[m], group_[n]);
      }
    }
    join_siblings();
    return build();
  }

 private:
  // Nodes that read the same large value shortly after each other read it once: a gradient, and what is computed again
  // for the next one.
  void join_siblings() {
    std::vector<std::vector<uint32_t>> readers(graph_.values.size());
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!can_[n] || count_elems(out(n).sizes) < kLeastShared) continue;
      for (const uint32_t x : graph_.nodes[n].in) {
        if (x != kNone && graph_.values[x].sizes == out(n).sizes) readers[x].push_back(n);
      }
    }
    for (const std::vector<uint32_t>& all : readers) {
      for (size_t i = 1; i < all.size(); ++i) {
        const uint32_t a = all[i - 1], b = all[i];
        if (b - a <= kMostApart && group_[a] != group_[b] && fits(a, b)) join(group_[a], group_[b]);
      }
    }
  }

  // What a node works on: its result, or what it reduces.
  const Value& out(uint32_t n) const {
    return graph_.values[reduces_[n] ? graph_.nodes[n].in[0] : graph_.nodes[n].out[0]];
  }

  // Whether all operands are read along the results, or are small.
  bool reads_along(const Node& node) const {
    const Value& y = graph_.values[node.out[0]];
    if (count_elems(y.sizes) < kMostScattered) return true;
    size_t inner = y.sizes.size();
    for (size_t d = 0; d < y.sizes.size(); ++d) {
      if (y.sizes[d] > 1 && (inner == y.sizes.size() || y.strides[d] < y.strides[inner])) inner = d;
    }
    return std::all_of(node.in.begin(), node.in.end(), [&](uint32_t x) {
      const Value& value = graph_.values[x];
      const size_t missing = y.sizes.size() - value.sizes.size();
      if (inner < missing || value.sizes[inner - missing] == 1) return true;
      return value.strides[inner - missing] == 1 || value.strides[inner - missing] == 0;
    });
  }

  // Beside a reduction every node works along its lines.
  bool is_along_lines(uint32_t a, uint32_t b) const {
    bool reduces = false, along = true;
    for (uint32_t n = 0; n < group_.size(); ++n) {
      if (group_[n] != group_[a] && group_[n] != group_[b]) continue;
      reduces |= reduces_[n];
      along &= space_[n] != nullptr;
    }
    return !reduces || along;
  }
  bool fits(uint32_t a, uint32_t b) const {
    const Lanes of_a = lanes_of(group_[a]), of_b = lanes_of(group_[b]);
    return out(a).sizes == out(b).sizes && out(a).strides == out(b).strides && is_along_lines(a, b) &&
           (of_a == of_b || of_a == Lanes::kAny || of_b == Lanes::kAny);
  }
  Lanes lanes_of(uint32_t group) const {
    Lanes lanes = Lanes::kAny;
    for (uint32_t n = 0; n < group_.size(); ++n) {
      if (group_[n] == group && lanes_[n] != Lanes::kAny) lanes = lanes_[n];
    }
    return lanes;
  }

  void join(uint32_t a, uint32_t b) {
    const std::vector<uint32_t> before = group_;
    size_t nodes = 0;
    for (uint32_t& group : group_) {
      if (group == b) group = a;
      nodes += group == a ? 1 : 0;
    }
    if (nodes > kMostNodes || operands_of(a) > kMostOperands || sorted().empty()) group_ = before;
  }

  size_t operands_of(uint32_t group) const {
    const Operands all = operands(group);
    return all.in.size() + all.out.size();
  }

  struct Operands {
    std::vector<uint32_t> in, out;
  };
  Operands operands(uint32_t group) const {
    Operands all;
    const auto inside = [&](uint32_t x) { return maker_[x] != kNone && group_[maker_[x]] == group; };
    const auto add = [](std::vector<uint32_t>& list, uint32_t x) {
      if (std::find(list.begin(), list.end(), x) == list.end()) list.push_back(x);
    };
    for (uint32_t n = 0; n < group_.size(); ++n) {
      for (const uint32_t x : graph_.nodes[n].in) {
        if (x == kNone) continue;
        if (group_[n] == group && !inside(x)) add(all.in, x);
        if (group_[n] != group && inside(x)) add(all.out, x);
      }
    }
    for (const graph::Output& output : graph_.outputs) {
      if (inside(output.value)) add(all.out, output.value);
    }
    return all;
  }

  // Groups in an order in which they can run, as near as possible to that of their last nodes. Empty where there is
  // none.
  std::vector<uint32_t> sorted() const {
    std::vector<uint32_t> waits(group_.size(), 0), last(group_.size(), 0);
    std::vector<std::vector<uint32_t>> readers(group_.size());
    size_t groups = 0;
    for (uint32_t n = 0; n < group_.size(); ++n) {
      last[group_[n]] = n;
      groups += is_first(n) ? 1 : 0;
      for (const uint32_t x : graph_.nodes[n].in) {
        const uint32_t m = x == kNone ? kNone : maker_[x];
        if (m == kNone || group_[m] == group_[n]) continue;
        readers[group_[m]].push_back(group_[n]);
        ++waits[group_[n]];
      }
    }
    using Entry = std::pair<uint32_t, uint32_t>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    for (uint32_t n = 0; n < group_.size(); ++n) {
      if (is_first(n) && waits[group_[n]] == 0) ready.emplace(last[group_[n]], group_[n]);
    }
    std::vector<uint32_t> order;
    while (!ready.empty()) {
      const uint32_t group = ready.top().second;
      ready.pop();
      order.push_back(group);
      for (const uint32_t reader : readers[group]) {
        if (--waits[reader] == 0) ready.emplace(last[reader], reader);
      }
    }
    if (order.size() != groups) order.clear();
    return order;
  }
  // The name of a group is the number of one of its nodes.
  bool is_first(uint32_t n) const { return group_[n] == n; }

  Graph build() const {
    Graph fused;
    fused.values = graph_.values;
    fused.inputs = graph_.inputs;
    fused.outputs = graph_.outputs;
    fused.generators = graph_.generators;
    for (const uint32_t group : sorted()) {
      std::vector<uint32_t> members;
      for (uint32_t n = 0; n < group_.size(); ++n) {
        if (group_[n] == group) members.push_back(n);
      }
      fused.add(members.size() == 1 ? graph_.nodes[members[0]] : fused_node(group, members));
    }
    return fused;
  }

  Node fused_node(uint32_t group, const std::vector<uint32_t>& members) const {
    const Operands all = operands(group);
    auto body = std::make_shared<Graph>();
    std::vector<uint32_t> inside(graph_.values.size(), kNone);
    const auto add_value = [&](uint32_t v) { return inside[v] = body->add_value(graph_.values[v]); };
    for (const uint32_t x : all.in) body->inputs.push_back(add_value(x));
    for (const uint32_t n : members) {
      Node node = graph_.nodes[n];
      for (uint32_t& x : node.in) x = x == kNone ? kNone : inside[x];
      for (uint32_t& y : node.out) y = add_value(y);
      body->add(std::move(node));
    }
    for (const uint32_t y : all.out) body->outputs.push_back({inside[y]});
    Node node;
    node.kind = Node::Kind::kFused;
    node.in = all.in;
    node.out = all.out;
    node.body = std::move(body);
    node.origin = graph_.nodes[members.back()].origin;
    return node;
  }

  const Graph& graph_;
  std::vector<Lanes> lanes_;         // by node
  std::vector<bool> can_;            // by node
  std::vector<bool> reduces_;        // by node: over lines
  std::vector<const Value*> space_;  // by node: the lines that it works along
  std::vector<uint32_t> group_;      // by node
  std::vector<uint32_t> maker_;      // by value
};

}  // namespace

Graph fuse(const Graph& graph) { return Fuser(graph).run(); }

}  // namespace chorale::codegen
