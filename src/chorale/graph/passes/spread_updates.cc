#include "chorale/graph/passes/spread_updates.h"

#include <algorithm>
#include <numeric>

namespace chorale::graph {
namespace {

// Parameters of less than this together are updated in one call: a call costs about as much as 4 KiB of work.
constexpr int64_t kUpdateBytes = int64_t{128} << 10;
// A call on a device takes some microseconds until it moves memory at full speed.
constexpr int64_t kDeviceUpdateBytes = int64_t{64} << 20;

class Spreader {
 public:
  explicit Spreader(Graph& graph)
      : graph_(graph), made_(graph.values.size(), -1), readers_(graph.values.size()), root_(graph.values.size()) {
    std::iota(root_.begin(), root_.end(), 0u);
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      const Node& node = graph.nodes[n];
      if (node.kind == Node::Kind::kRow && node.op->view) {
        for (const uint32_t y : node.out) root_[y] = root_[node.in[0]];
      }
      for (const uint32_t y : node.out) made_[y] = static_cast<int64_t>(n);
      for (const uint32_t x : node.in) {
        if (x != kNone) readers_[root_[x]].push_back(n);
      }
    }
  }

  void run() {
    std::vector<std::vector<Node>> behind(graph_.nodes.size() + 1);  // by node: what is put behind it
    std::vector<bool> replaced(graph_.nodes.size(), false);
    for (size_t n = 0; n < graph_.nodes.size(); ++n) replaced[n] = splits(graph_.nodes[n]) && spread(n, behind);
    if (std::find(replaced.begin(), replaced.end(), true) == replaced.end()) return;
    std::vector<Node> nodes;
    for (size_t n = 0; n <= graph_.nodes.size(); ++n) {
      if (n > 0 && !replaced[n - 1]) nodes.push_back(std::move(graph_.nodes[n - 1]));
      for (Node& node : behind[n]) nodes.push_back(std::move(node));
    }
    graph_.nodes = std::move(nodes);
    renumber(graph_);
  }

 private:
  static bool splits(const Node& node) {
    if (node.kind != Node::Kind::kRow || !node.op->lists) return false;
    const op::Lists lists = node.op->lists(node.attrs);
    for (size_t i = 0; i < lists.own; ++i) {
      if (lists.written.has(i)) return false;
    }
    return lists.fresh == 0 && lists.count > 0 && length(node, lists) > 1;
  }
  static size_t length(const Node& node, const op::Lists& lists) { return (node.in.size() - lists.own) / lists.count; }

  bool spread(size_t n, std::vector<std::vector<Node>>& behind) {
    const Node& node = graph_.nodes[n];
    const op::Lists lists = node.op->lists(node.attrs);
    const size_t count = length(node, lists);
    // The node behind which the update of each place can run; 0: before all.
    std::vector<int64_t> ready(count, 0);
    for (size_t i = 0; i < count; ++i) {
      for (size_t k = 0; k < lists.own; ++k)
        ready[i] = std::max(ready[i], node.in[k] == kNone ? 0 : made_[node.in[k]] + 1);
      for (size_t l = 0; l < lists.count; ++l) {
        const uint32_t x = node.in[lists.own + l * count + i];
        ready[i] = std::max(ready[i], made_[x] + 1);
        if (!lists.written.has(lists.own + l)) continue;
        for (const size_t reader : readers_[root_[x]]) {
          if (reader != n) ready[i] = std::max(ready[i], static_cast<int64_t>(reader) + 1);
        }
      }
      if (ready[i] > static_cast<int64_t>(n)) return false;  // something reads old values later: leave it as it is
    }
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ready[a] < ready[b]; });
    std::vector<std::vector<size_t>> groups(1);
    const bool on_host = graph_.values[node.in[lists.own]].device.type == DeviceType::kCpu;
    const int64_t most_bytes = on_host ? kUpdateBytes : kDeviceUpdateBytes;
    int64_t bytes = 0;
    for (const size_t i : order) {
      if (bytes >= most_bytes) {
        groups.emplace_back();
        bytes = 0;
      }
      groups.back().push_back(i);
      bytes += bytes_of(graph_.values[node.in[lists.own + i]]);
    }
    if (groups.size() > 1 && bytes < kUpdateBytes) {  // the rest, with those before it
      groups[groups.size() - 2].insert(groups[groups.size() - 2].end(), groups.back().begin(), groups.back().end());
      groups.pop_back();
    }
    if (groups.size() == 1) return false;
    for (const std::vector<size_t>& group : groups) {
      Node part;
      part.op = node.op;
      part.attrs = node.attrs;
      part.origin = node.origin;
      part.in.assign(node.in.begin(), node.in.begin() + static_cast<int64_t>(lists.own));
      for (size_t l = 0; l < lists.count; ++l) {
        for (const size_t i : group) part.in.push_back(node.in[lists.own + l * count + i]);
      }
      for (size_t l = 0, result = 0; l < lists.count; ++l) {
        if (!lists.written.has(lists.own + l)) continue;
        for (const size_t i : group) part.out.push_back(node.out[result * count + i]);
        ++result;
      }
      behind[static_cast<size_t>(ready[group.back()])].push_back(std::move(part));
    }
    return true;
  }

  Graph& graph_;
  std::vector<int64_t> made_;                 // by value: the node that makes it
  std::vector<std::vector<size_t>> readers_;  // by value: nodes that read it or views of it
  std::vector<uint32_t> root_;                // by value: what it is a view of
};

}  // namespace

void spread_updates(Graph& graph) { Spreader(graph).run(); }

}  // namespace chorale::graph
