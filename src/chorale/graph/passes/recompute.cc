#include "chorale/graph/passes/recompute.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/op/copy.h"
#include "chorale/op/nn.h"
#include "chorale/op/product.h"

namespace chorale::graph {
namespace {

constexpr int64_t kWide = int64_t{1} << 60;
// Less is not worth a node.
constexpr int64_t kWorthBytes = int64_t{64} << 10;

// The widths of a network, and the side of each place that a narrowest cut leaves with the source. Of several such cuts
// the one nearest to the sink: less is computed again.
class Flow {
 public:
  explicit Flow(size_t places) : edges_of_(places) {}
  void add(size_t from, size_t to, int64_t width) {
    if (width == 0) return;
    edges_of_[from].push_back(edges_.size());
    edges_.push_back({to, width});
    edges_of_[to].push_back(edges_.size());
    edges_.push_back({from, 0});
  }
  // Each search finds a shortest way that has room left.
  std::vector<bool> cut(size_t source, size_t sink) {
    while (true) {
      std::vector<size_t> by(edges_of_.size(), SIZE_MAX);
      std::vector<bool> seen(edges_of_.size(), false);
      std::queue<size_t> open;
      open.push(source);
      seen[source] = true;
      while (!open.empty() && !seen[sink]) {
        const size_t at = open.front();
        open.pop();
        for (const size_t e : edges_of_[at]) {
          if (edges_[e].room == 0 || seen[edges_[e].to]) continue;
          seen[edges_[e].to] = true;
          by[edges_[e].to] = e;
          open.push(edges_[e].to);
        }
      }
      if (!seen[sink]) return before_last_cut(sink);
      int64_t room = kWide;
      for (size_t at = sink; at != source; at = edges_[by[at] ^ 1].to) room = std::min(room, edges_[by[at]].room);
      if (room >= kWide) return {};  // something must be kept and may not be: nothing is cut
      for (size_t at = sink; at != source; at = edges_[by[at] ^ 1].to) {
        edges_[by[at]].room -= room;
        edges_[by[at] ^ 1].room += room;
      }
    }
  }

 private:
  struct Edge {
    size_t to;
    int64_t room;
  };
  // The places from which nothing more can flow to the sink.
  std::vector<bool> before_last_cut(size_t sink) const {
    std::vector<bool> before(edges_of_.size(), true);
    std::queue<size_t> open;
    open.push(sink);
    before[sink] = false;
    while (!open.empty()) {
      const size_t at = open.front();
      open.pop();
      for (const size_t e : edges_of_[at]) {
        const size_t from = edges_[e].to;
        if (edges_[e ^ 1].room == 0 || !before[from]) continue;
        before[from] = false;
        open.push(from);
      }
    }
    return before;
  }
  std::vector<Edge> edges_;
  std::vector<std::vector<size_t>> edges_of_;
};

class Recomputer {
 public:
  explicit Recomputer(const Graph& graph)
      : graph_(graph), maker_(graph.values.size(), kNone), root_(graph.values.size()), readers_(graph.values.size()) {
    std::iota(root_.begin(), root_.end(), 0u);
    for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
      const Node& node = graph.nodes[n];
      for (const uint32_t x : node.in) {
        if (x != kNone) readers_[x].push_back(n);
      }
      for (const uint32_t y : node.out) maker_[y] = n;
      if (is_view(n)) root_[node.out[0]] = root_[node.in[0]];
    }
    is_kept_.assign(graph.values.size(), false);  // alive to the end, whatever is decided here
    for (const uint32_t x : graph.inputs) is_kept_[x] = true;
    for (const Output& output : graph.outputs) is_kept_[root_[output.value]] = true;
    find_turn();
  }

  // By node of the first half: whether it is computed again.
  std::vector<bool> choose(double budget) {
    if (turn_ == 0) return {};
    if (budget >= 1) return cut(cheap_limit(), false);
    const int64_t most = kept_bytes(cut(cheap_limit(), false));
    const std::vector<bool> least = cut(std::numeric_limits<double>::infinity(), true);
    if (budget <= 0) return least;
    const int64_t low = kept_bytes(least);
    const auto target = low + static_cast<int64_t>(budget * static_cast<double>(most - low));
    std::vector<double> limits{cheap_limit()};
    for (uint32_t n = 0; n < turn_; ++n) limits.push_back(cost_of(n));
    std::sort(limits.begin(), limits.end());
    for (const double limit : limits) {
      if (limit < cheap_limit()) continue;
      const std::vector<bool> again = cut(limit, true);
      if (kept_bytes(again) <= target) return again;
    }
    return least;
  }

  uint32_t turn() const { return turn_; }
  bool is_view(uint32_t n) const {
    const Node& node = graph_.nodes[n];
    return node.kind == Node::Kind::kRow && node.op->view && node.in.size() == 1 && !is_wait(node);
  }

 private:
  static double cheap_limit() { return 1; }

  // The node before which most bytes live that nodes have made.
  void find_turn() {
    std::vector<int64_t> change(graph_.nodes.size() + 1, 0);
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      if (root_[v] != v || maker_[v] == kNone || is_kept_[v]) continue;
      uint32_t last = maker_[v];
      for (uint32_t x = 0; x < graph_.values.size(); ++x) {
        if (root_[x] != v) continue;
        for (const uint32_t n : readers_[x]) last = std::max(last, n);
      }
      change[maker_[v]] += bytes_of(graph_.values[v]);
      change[last + 1] -= bytes_of(graph_.values[v]);
    }
    int64_t now = 0, most = 0;
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      now += change[n];
      if (now > most) {
        most = now;
        turn_ = n;
      }
    }
  }

  // What an element of the result costs, in multiples of reading and writing it; infinite where it may not be done
  // twice.
  double cost_of(uint32_t n) const {
    constexpr double kNever = std::numeric_limits<double>::infinity();
    const Node& node = graph_.nodes[n];
    if (node.kind != Node::Kind::kRow || is_collective(node) || is_wait(node) || node.op->lists) return kNever;
    // A cast into fewer bytes, as of a parameter for a product, reads more than it saves.
    if (node.op == &op::kTo && bytes_of(graph_.values[node.in[0]]) > bytes_of(graph_.values[node.out[0]])) return 4;
    if (node.op->view || node.op->pointwise || node.op == &op::kTo || node.in.empty()) return 0;
    const auto inner = [&](uint32_t x) { return static_cast<double>(graph_.values[x].sizes.back()); };
    if (node.op == &op::kLinear || node.op == &op::kMatmul) return 1 + inner(node.in[0]) / 8;
    if (node.op == &op::kLayerNorm || node.op == &op::kRmsNorm) return 2;
    double bytes = 0, made = 1;
    for (const uint32_t x : node.in) bytes += x == kNone ? 0 : static_cast<double>(bytes_of(graph_.values[x]));
    for (const uint32_t y : node.out) made += static_cast<double>(bytes_of(graph_.values[y]));
    return 16 + bytes / made * 8;
  }

  // The values at which the first half is as narrow as one value.
  std::vector<bool> narrow_places() const {
    std::vector<bool> narrow(graph_.values.size(), false);
    std::vector<uint32_t> last(graph_.values.size(), 0);
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      for (const uint32_t n : readers_[v]) {
        if (n < turn_) last[root_[v]] = std::max(last[root_[v]], n);
      }
    }
    for (uint32_t n = 0; n < turn_; ++n) {
      uint32_t crossing = kNone;
      bool is_one = true;
      for (uint32_t v = 0; v < graph_.values.size() && is_one; ++v) {
        if (root_[v] != v || maker_[v] == kNone || maker_[v] > n || last[v] <= n) continue;
        if (bytes_of(graph_.values[v]) < kWorthBytes) continue;
        is_one = crossing == kNone;
        crossing = v;
      }
      if (is_one && crossing != kNone) narrow[crossing] = true;
    }
    return narrow;
  }

  std::vector<bool> cut(double limit, bool keeps_narrow) const {
    const std::vector<bool> narrow = keeps_narrow ? narrow_places() : std::vector<bool>(graph_.values.size(), false);
    const size_t values = graph_.values.size(), source = 2 * values, sink = source + 1;
    Flow flow(2 * values + 2);
    for (uint32_t v = 0; v < values; ++v) {
      const uint32_t n = maker_[v];
      if (n != kNone && n >= turn_) continue;
      const bool is_free = is_kept_[root_[v]];
      flow.add(2 * v, 2 * v + 1,
               root_[v] != v ? kWide
               : is_free     ? 1
                             : std::max<int64_t>(2, bytes_of(graph_.values[v])));
      if (n == kNone || cost_of(n) > limit || is_free || narrow[v]) flow.add(source, 2 * v, kWide);
      if (n != kNone) {
        for (const uint32_t x : graph_.nodes[n].in) {
          if (x != kNone) flow.add(2 * x + 1, 2 * v, kWide);
        }
      }
      if (std::any_of(readers_[v].begin(), readers_[v].end(), [&](uint32_t reader) { return reader >= turn_; })) {
        flow.add(2 * v + 1, sink, kWide);
      }
    }
    const std::vector<bool> with_source = flow.cut(source, sink);
    std::vector<bool> again(turn_, false);
    if (with_source.empty()) return again;
    for (uint32_t v = 0; v < values; ++v) {
      if (maker_[v] == kNone || maker_[v] >= turn_ || is_kept_[root_[v]]) continue;
      // Not with the source at all: it is made where it is needed.
      if (!with_source[2 * v]) again[maker_[v]] = true;
    }
    return again;
  }

  int64_t kept_bytes(const std::vector<bool>& again) const {
    int64_t bytes = 0;
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      if (root_[v] != v || maker_[v] == kNone || maker_[v] >= turn_ || is_kept_[v] || again[maker_[v]]) continue;
      bool crosses = false;
      for (uint32_t x = 0; x < graph_.values.size(); ++x) {
        if (root_[x] != v) continue;
        for (const uint32_t n : readers_[x]) crosses |= n >= turn_ || again[n];
      }
      bytes += crosses ? bytes_of(graph_.values[v]) : 0;
    }
    return bytes;
  }

  const Graph& graph_;
  std::vector<uint32_t> maker_, root_;
  std::vector<std::vector<uint32_t>> readers_;
  std::vector<bool> is_kept_;
  uint32_t turn_ = 0;
};

}  // namespace

void recompute(Graph& graph, double memory_budget) {
  CHORALE_CHECK(memory_budget >= 0 && memory_budget <= 1, "[compile] memory_budget must lie between 0 and 1, not be ",
                memory_budget);
  Recomputer recomputer(graph);
  const std::vector<bool> again = recomputer.choose(memory_budget);
  if (std::find(again.begin(), again.end(), true) == again.end()) return;
  const uint32_t turn = recomputer.turn();
  std::vector<uint32_t> maker(graph.values.size(), kNone);
  for (uint32_t n = 0; n < turn; ++n) {
    for (const uint32_t y : graph.nodes[n].out) maker[y] = n;
  }
  std::vector<uint32_t> now(graph.values.size());  // what later nodes read for a value
  std::iota(now.begin(), now.end(), 0u);
  std::vector<bool> is_done(turn, false);
  std::vector<Node> nodes(graph.nodes.begin(), graph.nodes.begin() + turn);
  const auto need = [&](const auto& self, uint32_t v) -> void {
    if (v == kNone || v >= maker.size() || maker[v] == kNone || !again[maker[v]] || is_done[maker[v]]) return;
    const uint32_t n = maker[v];
    is_done[n] = true;
    Node copy = graph.nodes[n];
    for (const uint32_t x : copy.in) self(self, x);
    for (uint32_t& x : copy.in) x = x == kNone ? kNone : now[x];
    // A view of what is kept is there already.
    if (recomputer.is_view(n) && copy.in == graph.nodes[n].in) return;
    for (uint32_t& y : copy.out) {
      const uint32_t made = graph.add_value(graph.values[y]);
      now[y] = made;
      now.push_back(made);
      y = made;
    }
    nodes.push_back(std::move(copy));
  };
  for (size_t n = turn; n < graph.nodes.size(); ++n) {
    Node node = graph.nodes[n];
    for (const uint32_t x : node.in) need(need, x);
    for (uint32_t& x : node.in) x = x == kNone ? kNone : now[x];
    nodes.push_back(std::move(node));
  }
  graph.nodes = std::move(nodes);
  remove_dead_nodes(graph);
}

}  // namespace chorale::graph
