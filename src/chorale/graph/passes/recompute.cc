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

// The widths of a network, and the side of each place that a narrowest cut leaves with the source. Where there are
// several such cuts, it is the one nearest to the sink, so that less is computed again.
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
    is_closed_.assign(graph.values.size(), false);
    is_kept_.assign(graph.values.size(), false);  // alive to the end, whatever is decided here
    for (const uint32_t x : graph.inputs) is_kept_[x] = true;
    for (const Output& output : graph.outputs) is_kept_[root_[output.value]] = true;
    is_of_loss_.assign(graph.values.size(), false);
    for (const Node& node : graph.nodes) {
      if (node.kind != Node::Kind::kRow) continue;
      if (node.op == &op::kCrossEntropy) {
        is_of_loss_[root_[node.in[0]]] = true;
        for (const uint32_t y : node.out) is_of_loss_[y] = true;
      }
      if (node.op == &op::kCrossEntropyBackward) is_of_loss_[root_[node.out[0]]] = true;
    }
  }

  // The second half begins before the node at which most bytes live that nodes have made.
  void find_turn() { turn_ = most_bytes(false).at; }
  // The most bytes that live at a time, and the node there. Without logits of losses, which in one graph are hardly
  // ever there as a whole (graph/stripes.h).
  struct Most {
    uint32_t at = 0;
    int64_t bytes = 0;
  };
  Most most_bytes(bool without_losses) const {
    std::vector<uint32_t> last(graph_.values.size(), 0);
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      for (const uint32_t n : readers_[v]) last[root_[v]] = std::max(last[root_[v]], n);
    }
    std::vector<int64_t> change(graph_.nodes.size() + 1, 0);
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      if (root_[v] != v || maker_[v] == kNone || is_kept_[v]) continue;
      if (without_losses && is_of_loss_[v]) continue;
      change[maker_[v]] += bytes_of(graph_.values[v]);
      change[std::max(maker_[v], last[v]) + 1] -= bytes_of(graph_.values[v]);
    }
    Most most;
    int64_t now = 0;
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      now += change[n];
      if (now > most.bytes) most = {n, now};
    }
    return most;
  }

  // Where the second half is known, and runs some time after the first.
  void part(uint32_t turn, double budget, std::span<const uint32_t> overwritten) {
    turn_ = turn;
    is_parted_ = true;
    if (budget >= 1) {
      for (const uint32_t v : graph_.inputs) is_closed_[v] = true;
    }
    for (const Output& output : graph_.outputs) is_closed_[root_[output.value]] = true;
    for (const uint32_t v : overwritten) is_closed_[root_[v]] = true;
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      if (is_read_later(v)) is_closed_[root_[v]] = false;
    }
  }

  // For each node of the first half, whether it is computed again.
  std::vector<bool> choose(double budget) const {
    constexpr double kAny = std::numeric_limits<double>::infinity();
    if (turn_ == 0) return {};
    if (budget >= 1) return cut(cheap_limit(), {});
    const std::vector<bool> corners = choose_corners();
    const std::vector<bool> least = cut(kAny, corners);
    if (budget <= 0) return least;
    const int64_t most = kept_bytes(cut(cheap_limit(), {})), low = kept_bytes(least);
    const auto target = low + static_cast<int64_t>(budget * static_cast<double>(most - low));
    std::vector<double> limits{cheap_limit()};
    for (uint32_t n = 0; n < turn_; ++n) {
      if (may_be_repeated(n)) limits.push_back(cost_of(n));
    }
    std::sort(limits.begin(), limits.end());
    limits.erase(std::unique(limits.begin(), limits.end()), limits.end());
    for (const double limit : limits) {
      if (limit < cheap_limit()) continue;
      const std::vector<bool> again = cut(limit, corners);
      if (kept_bytes(again) <= target) return again;
    }
    return least;
  }

  // The graph whose second half makes again what `again` says, each value right before it is first read.
  Graph repeating(const std::vector<bool>& again) const {
    Graph graph = graph_;
    std::vector<uint32_t> now(graph.values.size());  // what later nodes read for a value
    std::iota(now.begin(), now.end(), 0u);
    std::vector<bool> is_done(turn_, false);
    std::vector<Node> nodes(graph.nodes.begin(), graph.nodes.begin() + turn_);
    const auto need = [&](const auto& self, uint32_t v) -> void {
      if (v == kNone || v >= maker_.size() || maker_[v] == kNone || maker_[v] >= turn_) return;
      const uint32_t n = maker_[v];
      if (!again[n] || is_done[n]) return;
      is_done[n] = true;
      Node copy = graph_.nodes[n];
      for (const uint32_t x : copy.in) self(self, x);
      for (uint32_t& x : copy.in) x = x == kNone ? kNone : now[x];
      // A view of what is kept is there already.
      if (is_view(n) && copy.in == graph_.nodes[n].in) return;
      for (uint32_t& y : copy.out) {
        const uint32_t made = graph.add_value(graph.values[y]);
        now[y] = made;
        now.push_back(made);
        y = made;
      }
      nodes.push_back(std::move(copy));
    };
    for (size_t n = turn_; n < graph_.nodes.size(); ++n) {
      Node node = graph_.nodes[n];
      for (const uint32_t x : node.in) need(need, x);
      for (uint32_t& x : node.in) x = x == kNone ? kNone : now[x];
      nodes.push_back(std::move(node));
    }
    graph.nodes = std::move(nodes);
    remove_dead_nodes(graph);
    return graph;
  }
  // Bytes that the first half makes, or finds, and keeps for the second, where that makes some of it again.
  int64_t kept_bytes(const std::vector<bool>& again) const {
    std::vector<bool> crosses(graph_.values.size(), false);
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      if (is_made_later(v)) continue;
      for (const uint32_t n : readers_[v]) crosses[root_[v]] = crosses[root_[v]] || n >= turn_ || again[n];
    }
    int64_t bytes = 0;
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      if (!crosses[v] || is_kept_[v] || (maker_[v] != kNone && again[maker_[v]])) continue;
      bytes += bytes_of(graph_.values[v]);
    }
    return bytes;
  }
  bool is_view(uint32_t n) const {
    const Node& node = graph_.nodes[n];
    return node.kind == Node::Kind::kRow && node.op->view && node.in.size() == 1 && !is_wait(node);
  }

 private:
  static double cheap_limit() { return 1; }
  bool is_made_later(uint32_t v) const { return maker_[v] != kNone && maker_[v] >= turn_; }
  bool is_read_later(uint32_t v) const {
    return !is_made_later(v) &&
           std::any_of(readers_[v].begin(), readers_[v].end(), [&](uint32_t reader) { return reader >= turn_; });
  }

  int64_t most_bytes_with(const std::vector<bool>& again) const {
    const Graph graph = repeating(again);
    return Recomputer(graph).most_bytes(true).bytes;
  }
  bool may_be_repeated(uint32_t n) const {
    const Node& node = graph_.nodes[n];
    return node.kind == Node::Kind::kRow && !is_collective(node) && !is_wait(node) && !node.op->lists;
  }
  // What an element of the result costs, in multiples of reading and writing it.
  double cost_of(uint32_t n) const {
    const Node& node = graph_.nodes[n];
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

  // A value at which the first half is as narrow as that value, and the bytes that are made up to there.
  struct Corner {
    uint32_t value;
    int64_t bytes_before;
  };
  std::vector<Corner> find_corners(int64_t& bytes) const {
    std::vector<uint32_t> last(graph_.values.size(), 0);
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      for (const uint32_t n : readers_[v]) {
        if (n < turn_) last[root_[v]] = std::max(last[root_[v]], n);
      }
    }
    std::vector<Corner> corners;
    std::vector<uint32_t> open;  // large values that are read behind node n; what comes from other graphs leads on, too
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      const bool is_foreign = root_[v] == v && maker_[v] == kNone && !is_kept_[v] && last[v] > 0;
      if (is_foreign && bytes_of(graph_.values[v]) >= kWorthBytes) open.push_back(v);
    }
    bytes = 0;
    for (uint32_t n = 0; n < turn_; ++n) {
      for (const uint32_t y : graph_.nodes[n].out) {
        if (root_[y] != y) continue;
        bytes += bytes_of(graph_.values[y]);
        if (bytes_of(graph_.values[y]) >= kWorthBytes) open.push_back(y);
      }
      std::erase_if(open, [&](uint32_t v) { return last[v] <= n; });
      if (open.size() == 1 && (corners.empty() || corners.back().value != open[0])) corners.push_back({open[0], bytes});
    }
    return corners;
  }

  // The corners that are kept where everything else may be computed again. In a chain every value is one: then those
  // are taken that are so far apart that least memory is needed: between two graphs for them and for all that lies
  // between two of them, and no more kept than with all memory; in one graph at the moment when it needs most.
  std::vector<bool> choose_corners() const {
    int64_t all = 0;
    const std::vector<Corner> corners = find_corners(all);
    const int64_t most = kept_bytes(cut(cheap_limit(), {}));
    constexpr double kAny = std::numeric_limits<double>::infinity();
    std::vector<bool> best(graph_.values.size(), false), before = best;
    const std::vector<bool> at_best = cut(kAny, best);
    int64_t least = is_parted_ ? kept_bytes(at_best) + all : most_bytes_with(at_best);
    for (int64_t apart = 0; apart <= all; apart = std::max(kWorthBytes, apart * 3 / 2)) {
      std::vector<bool> taken(graph_.values.size(), false);
      int64_t from = 0, widest = 0;
      for (const Corner& corner : corners) {
        if (corner.bytes_before - from < apart) continue;
        taken[corner.value] = true;
        widest = std::max(widest, corner.bytes_before - from);
        from = corner.bytes_before;
      }
      if (taken == before) continue;
      before = taken;
      const std::vector<bool> again = cut(kAny, taken);
      const int64_t kept = kept_bytes(again);
      const int64_t bytes = is_parted_ ? kept + std::max(widest, all - from) : most_bytes_with(again);
      if ((is_parted_ && kept > most) || bytes >= least) continue;
      least = bytes;
      best = std::move(taken);
    }
    return best;
  }

  // `corners`: values that are not computed again, or none.
  std::vector<bool> cut(double limit, const std::vector<bool>& corners) const {
    const size_t values = graph_.values.size(), source = 2 * values, sink = source + 1;
    Flow flow(2 * values + 2);
    for (uint32_t v = 0; v < values; ++v) {
      const uint32_t n = maker_[v];
      if (is_made_later(v)) continue;
      const bool is_free = is_kept_[root_[v]];
      flow.add(2 * v, 2 * v + 1,
               root_[v] != v || is_closed_[v] ? kWide
               : is_free                      ? 1
                                              : std::max<int64_t>(2, bytes_of(graph_.values[v])));
      const bool is_corner = !corners.empty() && (corners[v] || (!is_parted_ && is_of_loss_[v]));
      if (n == kNone || !may_be_repeated(n) || cost_of(n) > limit || is_free || is_corner) {
        flow.add(source, 2 * v, kWide);
      }
      if (n != kNone) {
        for (const uint32_t x : graph_.nodes[n].in) {
          if (x != kNone) flow.add(2 * x + 1, 2 * v, kWide);
        }
      }
      if (is_read_later(v)) flow.add(2 * v + 1, sink, kWide);
    }
    const std::vector<bool> with_source = flow.cut(source, sink);
    std::vector<bool> again(turn_, false);
    if (with_source.empty()) return again;
    for (uint32_t v = 0; v < values; ++v) {
      if (maker_[v] == kNone || maker_[v] >= turn_ || is_kept_[root_[v]]) continue;
      // What does not stand with the source at all is made where it is needed.
      if (!with_source[2 * v]) again[maker_[v]] = true;
    }
    return again;
  }

  const Graph& graph_;
  std::vector<uint32_t> maker_, root_;
  std::vector<std::vector<uint32_t>> readers_;
  std::vector<bool> is_kept_;
  std::vector<bool> is_closed_;   // what the second half may not begin to read
  std::vector<bool> is_of_loss_;  // logits of a loss over classes, what is made of them, and their gradient
  uint32_t turn_ = 0;
  bool is_parted_ = false;
};

void check_budget(double memory_budget) {
  CHORALE_CHECK(memory_budget >= 0 && memory_budget <= 1, "[compile] memory_budget must lie between 0 and 1, not be ",
                memory_budget);
}

bool is_on_device(const Graph& graph) {
  return std::any_of(graph.values.begin(), graph.values.end(), [](const Value& value) {
    return value.device.type != DeviceType::kCpu && value.device.type != DeviceType::kNull;
  });
}

}  // namespace

std::vector<bool> choose_again(const Graph& graph, uint32_t turn, double memory_budget,
                               std::span<const uint32_t> overwritten) {
  check_budget(memory_budget);
  const std::vector<bool> none(turn, false);
  if (memory_budget >= 1 && is_on_device(graph)) return none;
  Recomputer recomputer(graph);
  recomputer.part(turn, memory_budget, overwritten);
  const std::vector<bool> again = recomputer.choose(memory_budget);
  if (again.empty()) return none;
  const bool is_worth_it = recomputer.kept_bytes(none) - recomputer.kept_bytes(again) >= kWorthBytes;
  return memory_budget >= 1 && !is_worth_it ? none : again;
}

void recompute(Graph& graph, double memory_budget) {
  check_budget(memory_budget);
  if (memory_budget >= 1 && is_on_device(graph)) return;
  Recomputer recomputer(graph);
  recomputer.find_turn();
  const std::vector<bool> again = recomputer.choose(memory_budget);
  if (std::find(again.begin(), again.end(), true) == again.end()) return;
  graph = recomputer.repeating(again);
}

}  // namespace chorale::graph
