#include "chorale/graph/passes/stripe.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "chorale/graph/stripes.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/op/nn.h"
#include "chorale/op/product.h"
#include "chorale/op/view.h"

namespace chorale::graph {
namespace {

// Below this much of what is handed on, the cache keeps it anyway.
constexpr int64_t kWorthStripes = int64_t{1} << 20;

using Members = std::set<uint32_t>;

class Striper {
 public:
  explicit Striper(Graph& graph) : graph_(graph) { link(); }

  void run() {
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!is(n, op::kCrossEntropyBackward)) continue;
      n = hoist_views(n);
      join_loss(n);
    }
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) join_sums(n);
    renumber(graph_);
  }

 private:
  const Node& node(uint32_t n) const { return graph_.nodes[n]; }
  bool is(uint32_t n, const op::OpDef& row) const { return node(n).kind == Node::Kind::kRow && node(n).op == &row; }
  bool is_sum(uint32_t n) const {
    return node(n).kind == Node::Kind::kRow && std::string_view(node(n).op->name) == "sum";
  }
  bool is_view(uint32_t n) const {
    return node(n).kind == Node::Kind::kRow && node(n).op->view && node(n).in.size() == 1 && !is_wait(node(n));
  }

  // Views behind node `at` of what was made before it come before it, so that they are there for what is joined with
  // it. The node's new number.
  uint32_t hoist_views(uint32_t at) {
    std::vector<uint32_t> moved;
    for (uint32_t n = at + 1; n < graph_.nodes.size(); ++n) {
      if (!is_view(n)) continue;
      const uint32_t from = maker_[node(n).in[0]];
      if (from == kNone || from < at || std::find(moved.begin(), moved.end(), from) != moved.end()) moved.push_back(n);
    }
    if (moved.empty()) return at;
    std::vector<Node> nodes;
    nodes.reserve(graph_.nodes.size());
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      if (n == at) {
        for (const uint32_t view : moved) nodes.push_back(graph_.nodes[view]);
      }
      if (std::find(moved.begin(), moved.end(), n) == moved.end()) nodes.push_back(graph_.nodes[n]);
    }
    graph_.nodes = std::move(nodes);
    link();
    return at + static_cast<uint32_t>(moved.size());
  }

  void link() {
    maker_.assign(graph_.values.size(), kNone);
    readers_.assign(graph_.values.size(), {});
    is_result_.assign(graph_.values.size(), false);
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      for (const uint32_t x : node(n).in) {
        if (x != kNone) readers_[x].push_back(n);
      }
      for (const uint32_t y : node(n).out) maker_[y] = n;
    }
    for (const Output& output : graph_.outputs) is_result_[output.value] = true;
  }

  bool stays_inside(uint32_t value, const Members& members) const {
    return !is_result_[value] && std::all_of(readers_[value].begin(), readers_[value].end(),
                                             [&](uint32_t n) { return members.count(n) > 0; });
  }
  // Views through which something outside looks stay outside.
  void drop_open_views(Members& members) const {
    for (bool changed = true; changed;) {
      changed = false;
      for (const uint32_t n : members) {
        if (!is_view(n) || stays_inside(node(n).out[0], members)) continue;
        members.erase(n);
        changed = true;
        break;
      }
    }
  }

  void join_loss(uint32_t backward) {
    const Node& b = node(backward);
    const uint32_t forward = maker_[b.in[4]];
    if (forward == kNone || !is(forward, op::kCrossEntropy)) return;
    const Node& f = node(forward);
    if (f.in[0] != b.in[1] || f.in[1] != b.in[2] || f.in[2] != kNone || b.in[3] != kNone || !(f.attrs == b.attrs))
      return;
    const Shape& sizes = graph_.values[f.in[0]].sizes;
    if (sizes.size() != 2 || bytes_of(graph_.values[f.in[0]]) < kWorthStripes) return;
    Members members{forward, backward};
    add_gradients(b.out[0], members);
    drop_open_views(members);
    Members with_layer = members;
    for (uint32_t x = f.in[0]; stays_inside(x, with_layer) && maker_[x] != kNone; x = node(maker_[x]).in[0]) {
      const uint32_t n = maker_[x];
      if (!is_view(n) && !is(n, op::kLinear)) break;
      with_layer.insert(n);
      if (is(n, op::kLinear)) break;
    }
    drop_open_views(with_layer);
    if (!join(with_layer, backward, sizes[0])) join(members, backward, sizes[0]);
  }

  // Products and sums of a gradient, and the views through which they read it.
  void add_gradients(uint32_t value, Members& members) const {
    for (const uint32_t n : readers_[value]) {
      const bool is_product = is(n, op::kMatmul) && node(n).in[0] == value && node(n).in[1] != value;
      const bool rounds = graph_.values[value].dtype != DType::kF32 && graph_.values[value].dtype != DType::kF64;
      if (is_view(n)) {
        members.insert(n);
        add_gradients(node(n).out[0], members);
      } else if ((is_product && !(rounds && is_turned(value))) || (is_sum(n) && !rounds)) {
        members.insert(n);
      }
    }
  }
  bool is_turned(uint32_t value) const { return maker_[value] != kNone && is(maker_[value], op::kPermute); }

  void join_sums(uint32_t n) {
    const bool is_one = node(n).kind == Node::Kind::kRow && node(n).op->pointwise;
    if (!is_one && !is_elementwise(node(n))) return;
    const Value& out = graph_.values[node(n).out[0]];
    if (out.sizes.empty() || bytes_of(out) < kWorthStripes) return;
    Members members{n};
    for (const uint32_t y : node(n).out) add_sums(y, members);
    drop_open_views(members);
    if (std::none_of(members.begin(), members.end(), [&](uint32_t m) { return is_sum(m); })) return;
    join(members, n, count_elems(out.sizes) / out.sizes.back());
  }
  void add_sums(uint32_t value, Members& members) const {
    for (const uint32_t n : readers_[value]) {
      if (is_sum(n)) members.insert(n);
      if (!is_view(n) || is(n, op::kPermute)) continue;
      members.insert(n);
      add_sums(node(n).out[0], members);
    }
  }

  // Makes one node of them, at the place of node `at`. False, and nothing done, where they do not fit together.
  bool join(const Members& members, uint32_t at, int64_t lines) {
    const auto add_once = [](std::vector<uint32_t>& list, uint32_t v) {
      if (std::find(list.begin(), list.end(), v) == list.end()) list.push_back(v);
    };
    const auto inside = [&](uint32_t v) { return maker_[v] != kNone && members.count(maker_[v]) > 0; };
    std::vector<uint32_t> in, out;
    for (const uint32_t n : members) {
      for (const uint32_t x : node(n).in) {
        if (x == kNone || inside(x)) continue;
        if (maker_[x] != kNone && maker_[x] > at) return false;
        add_once(in, x);
      }
      for (const uint32_t y : node(n).out) {
        const bool is_read = std::any_of(readers_[y].begin(), readers_[y].end(),
                                         [&](uint32_t reader) { return members.count(reader) == 0; });
        const bool too_early = std::any_of(readers_[y].begin(), readers_[y].end(),
                                           [&](uint32_t reader) { return members.count(reader) == 0 && reader < at; });
        if (too_early) return false;
        if (is_read || is_result_[y]) add_once(out, y);
      }
    }
    auto body = std::make_shared<Graph>();
    std::vector<uint32_t> number(graph_.values.size(), kNone);
    for (const uint32_t x : in) body->inputs.push_back(number[x] = body->add_value(graph_.values[x]));
    for (const uint32_t n : members) {
      Node copy = node(n);
      for (uint32_t& x : copy.in) x = x == kNone ? kNone : number[x];
      for (uint32_t& y : copy.out) {
        number[y] = body->add_value(graph_.values[y]);
        y = number[y];
      }
      body->add(std::move(copy));
    }
    for (const uint32_t y : out) body->outputs.push_back({number[y]});
    const std::optional<Stripes> stripes = cut_into_stripes(*body, lines);
    if (!stripes || stripe_height(*stripes) >= lines) return false;
    Node fused;
    fused.kind = Node::Kind::kFused;
    fused.in = std::move(in);
    fused.out = std::move(out);
    fused.body = std::move(body);
    fused.origin = node(at).origin;
    std::vector<Node> nodes;
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      if (n == at) nodes.push_back(std::move(fused));
      if (members.count(n) == 0) nodes.push_back(std::move(graph_.nodes[n]));
    }
    graph_.nodes = std::move(nodes);
    link();
    return true;
  }

  Graph& graph_;
  std::vector<uint32_t> maker_;                 // by value
  std::vector<std::vector<uint32_t>> readers_;  // by value
  std::vector<bool> is_result_;                 // by value
};

}  // namespace

void run_in_stripes(Graph& graph) { Striper(graph).run(); }

}  // namespace chorale::graph
