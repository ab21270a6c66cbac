#include "chorale/graph/plan.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/graph/blocks.h"
#include "chorale/graph/stripes.h"

namespace chorale::graph {
namespace {

constexpr int64_t kAlignment = 64;

class Planner {
 public:
  Planner(const Graph& graph, bool with_rooms)
      : graph_(graph),
        end_(static_cast<int64_t>(graph.nodes.size())),
        root_(graph.values.size()),
        delta_(graph.values.size(), 0),
        first_(graph.values.size(), -1),
        last_(graph.values.size(), -1) {
    std::iota(root_.begin(), root_.end(), 0u);
    plan_.places.resize(graph.values.size());
    plan_.is_view.assign(graph.nodes.size(), false);
    plan_.writes_over.assign(graph.nodes.size(), false);
    plan_.copied.assign(graph.outputs.size(), false);
    plan_.rooms.assign(graph.nodes.size(), Plan::kNoRoom);
    for (uint32_t n = 0; with_rooms && n < graph.nodes.size(); ++n) {
      if (const int64_t bytes = stripe_room_bytes(graph.nodes[n]); bytes > 0) rooms_.push_back({n, bytes});
    }
  }

  Plan run() {
    find_views();
    find_lives();
    place_outputs();
    share_with_outputs();
    share();
    place_rest();
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      const Plan::Place root = plan_.places[root_[v]];
      plan_.places[v] = {root.in, root.index, root.offset + delta_[v]};
    }
    return std::move(plan_);
  }

 private:
  const Value& value(uint32_t v) const { return graph_.values[v]; }
  bool is_root(uint32_t v) const { return root_[v] == v; }

  void find_views() {
    for (uint32_t i = 0; i < graph_.inputs.size(); ++i) plan_.places[graph_.inputs[i]] = {Plan::In::kInput, i, 0};
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (node.kind != Node::Kind::kRow || !node.op->view) continue;
      const op::OutSpecs specs = infer(graph_, node);
      bool all = true;
      for (size_t i = 0; i < specs.size(); ++i) {
        if (specs[i].view_of < 0) {
          all = false;
          continue;
        }
        const uint32_t of = node.in[static_cast<size_t>(specs[i].view_of)];
        root_[node.out[i]] = root_[of];
        delta_[node.out[i]] = delta_[of] + specs[i].offset * static_cast<int64_t>(size_of(value(of).dtype));
      }
      plan_.is_view[n] = all;
    }
  }

  // What a node reads. A wait reads what the collective reads that was begun, unless that has copied it.
  std::vector<uint32_t> reads(const Node& node) const {
    std::vector<uint32_t> all = node.in;
    if (is_wait(node)) {
      for (const Node& other : graph_.nodes) {
        if (!is_start(other) || other.out[0] != node.in[0] || copies_first(other)) continue;
        all.insert(all.end(), other.in.begin(), other.in.end());
      }
    }
    return all;
  }

  void find_lives() {
    for (const uint32_t input : graph_.inputs) first_[input] = -1;
    for (int64_t n = 0; n < end_; ++n) {
      const Node& node = graph_.nodes[static_cast<size_t>(n)];
      for (const uint32_t x : reads(node)) {
        if (x != kNone) last_[root_[x]] = std::max(last_[root_[x]], n);
      }
      for (const uint32_t y : node.out) {
        if (is_root(y)) first_[y] = n;
        last_[root_[y]] = std::max(last_[root_[y]], n);
      }
    }
    for (const Output& output : graph_.outputs) last_[root_[output.value]] = end_;
    // What nobody waits for is on its way until the end.
    for (const Node& node : graph_.nodes) {
      const bool is_awaited = std::any_of(graph_.nodes.begin(), graph_.nodes.end(), [&](const Node& other) {
        return is_wait(other) && is_start(node) && other.in[0] == node.out[0];
      });
      if (!is_start(node) || is_awaited) continue;
      for (const uint32_t x : node.in) last_[root_[x]] = end_;
      last_[root_[node.out[0]]] = end_;
    }
  }

  // Whether memory of `from` may be written with `y`, which node n makes: the node may read it only element by element.
  bool may_overwrite(const Node& node, uint32_t from, uint32_t y) const {
    for (size_t i = 0; i < node.in.size(); ++i) {
      const uint32_t x = node.in[i];
      if (x == kNone || root_[x] != from) continue;
      const bool same = delta_[x] == 0 && value(x) == value(y);
      // A row over lists writes new values of its inputs, each over its own.
      const bool in_place = reads_in_place(node, i, y) || (node.kind == Node::Kind::kRow && node.op->lists);
      if (!same || !in_place) return false;
    }
    return true;
  }

  void place_outputs() {
    for (uint32_t o = 0; o < graph_.outputs.size(); ++o) {
      const Output& output = graph_.outputs[o];
      const uint32_t v = output.value, root = root_[v];
      const bool is_free = is_root(v) && plan_.places[v].in == Plan::In::kNowhere;
      if (output.into == kNone) {
        // A view that shows all of its root, as what is waited for does, has the root in its memory.
        const bool shows_all = plan_.places[root].in == Plan::In::kNowhere && delta_[v] == 0 &&
                               bytes_of(value(v)) == bytes_of(value(root));
        plan_.output_bytes += bytes_of(value(v));
        if (shows_all) plan_.places[root] = {Plan::In::kOutput, o, 0};
        plan_.copied[o] = !shows_all;
      } else if (is_free && may_lie_in(v, output.into)) {
        plan_.places[v] = {Plan::In::kInput, output.into, 0};
      } else {
        plan_.copied[o] = !(root_[v] == graph_.inputs[output.into] && delta_[v] == 0);
      }
    }
  }

  bool may_lie_in(uint32_t v, uint32_t input) const {
    const uint32_t old = graph_.inputs[input];
    if (!(value(v) == value(old))) return false;
    const int64_t made = first_[v];
    for (int64_t n = made + 1; n < end_; ++n) {
      for (const uint32_t x : reads(graph_.nodes[static_cast<size_t>(n)])) {
        if (x != kNone && root_[x] == old) return false;
      }
    }
    for (const Output& output : graph_.outputs) {
      if (root_[output.value] == old) return false;
    }
    const Node& node = graph_.nodes[static_cast<size_t>(made)];
    if (node.kind == Node::Kind::kWrite) {
      return node.in[0] == old && (node.in[1] == kNone || root_[node.in[1]] != old);
    }
    return may_overwrite(node, old, v);
  }

  // Operands that nothing reads later, and over which an output goes, lie in the output's memory from the start.
  void share_with_outputs() {
    for (int64_t n = end_ - 1; n >= 0; --n) {
      const Node& node = graph_.nodes[static_cast<size_t>(n)];
      if (plan_.is_view[static_cast<size_t>(n)]) continue;
      for (const uint32_t y : node.out) {
        if (!is_root(y) || plan_.places[y].in != Plan::In::kOutput) continue;
        for (size_t i = 0; i < node.in.size(); ++i) {
          const uint32_t x = node.in[i];
          if (x == kNone || !is_root(x) || !dies_at(n, x) || !(value(x) == value(y))) continue;
          if (!reads_in_place(node, i, y) || !may_overwrite(node, x, y)) continue;
          plan_.places[x] = plan_.places[y];
          break;
        }
      }
    }
  }
  // Results that take over the memory of an operand which nothing reads later.
  void share() {
    for (int64_t n = 0; n < end_; ++n) {
      const auto at = static_cast<size_t>(n);
      const Node& node = graph_.nodes[at];
      if (node.kind == Node::Kind::kWrite) {
        const uint32_t y = node.out[0], x = root_[node.in[0]];
        const Plan::Place target = plan_.places[y], source = plan_.places[x];
        if (target.in == Plan::In::kInput && source.in == Plan::In::kInput && target.index == source.index) {
          plan_.writes_over[at] = true;
        } else if (takes_over(n, x, y) && root_[node.in[1]] != x && delta_[node.in[0]] == 0) {
          merge(x, y);
          plan_.writes_over[at] = true;
        }
        continue;
      }
      if (plan_.is_view[at]) continue;
      for (const uint32_t y : node.out) {
        for (size_t i = 0; i < node.in.size(); ++i) {
          const uint32_t operand = node.in[i];
          if (operand == kNone || delta_[operand] != 0) continue;
          const uint32_t x = root_[operand];
          if (takes_over(n, x, y) && value(operand) == value(y) && node.kind != Node::Kind::kDraw &&
              may_overwrite(node, x, y) && reads_in_place(node, i, y)) {
            merge(x, y);
            break;
          }
        }
      }
    }
  }
  static bool reads_in_place(const Node& node, size_t operand, uint32_t y) {
    if (node.kind == Node::Kind::kBlock || works_line_by_line(node)) {
      const auto result = std::find(node.out.begin(), node.out.end(), y) - node.out.begin();
      return may_lie_over(node, operand, static_cast<size_t>(result));
    }
    if (node.kind != Node::Kind::kRow) return node.kind == Node::Kind::kFused && may_lie_over(node, operand);
    if (copies_first(node)) return operand == 0;
    // The gradient of logits goes over the logits, line by line: for a large vocabulary they are most of the memory.
    // The kernel does the same with lines that it has gathered (kernel/cpu/support/along_dim.h).
    const std::string_view name = node.op->name;
    return node.op->in_place || name.ends_with("_backward_summed") ||
           (operand == 1 && (name == "cross_entropy_backward" || name == "cross_entropy_with_slopes"));
  }
  bool takes_over(int64_t n, uint32_t x, uint32_t y) const {
    return is_root(y) && is_root(x) && plan_.places[y].in == Plan::In::kNowhere && dies_at(n, x);
  }
  bool dies_at(int64_t n, uint32_t x) const {
    return plan_.places[x].in == Plan::In::kNowhere && last_[x] == n && first_[x] >= 0 && first_[x] < n;
  }
  void merge(uint32_t x, uint32_t y) {
    for (uint32_t v = 0; v < root_.size(); ++v) {
      if (root_[v] == y) root_[v] = x;
    }
    last_[x] = std::max(last_[x], last_[y]);
  }

  // The largest first, each at the lowest place that is free for as long as it lives.
  void place_rest() {
    struct Stay {
      int64_t bytes, first, last;
      int64_t* offset;
    };
    std::vector<Stay> stays;
    for (uint32_t v = 0; v < graph_.values.size(); ++v) {
      Plan::Place& place = plan_.places[v];
      if (!is_root(v) || first_[v] < 0 || place.in != Plan::In::kNowhere) continue;
      place.in = Plan::In::kArena;
      stays.push_back({bytes_of(value(v)), first_[v], last_[v], &place.offset});
    }
    for (const Room& room : rooms_) stays.push_back({room.bytes, room.node, room.node, &plan_.rooms[room.node]});
    for (Stay& stay : stays) stay.bytes = (stay.bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::stable_sort(stays.begin(), stays.end(), [](const Stay& a, const Stay& b) { return a.bytes > b.bytes; });
    std::vector<const Stay*> placed;  // by offset
    for (const Stay& stay : stays) {
      int64_t offset = 0;
      for (const Stay* other : placed) {
        if (other->last < stay.first || stay.last < other->first) continue;
        if (*other->offset >= offset + stay.bytes) break;
        offset = std::max(offset, *other->offset + other->bytes);
      }
      *stay.offset = offset;
      plan_.arena_bytes = std::max(plan_.arena_bytes, offset + stay.bytes);
      plan_.sum_bytes += stay.bytes;
      const auto behind = [&](int64_t at, const Stay* other) { return at < *other->offset; };
      placed.insert(std::upper_bound(placed.begin(), placed.end(), offset, behind), &stay);
    }
  }

  const Graph& graph_;
  int64_t end_;
  std::vector<uint32_t> root_;
  std::vector<int64_t> delta_;         // bytes behind the root's element 0
  std::vector<int64_t> first_, last_;  // of roots: the nodes that make and last read them
  struct Room {
    uint32_t node;
    int64_t bytes;
  };
  std::vector<Room> rooms_;
  Plan plan_;
};

}  // namespace

Plan plan_memory(const Graph& graph, bool with_rooms) { return Planner(graph, with_rooms).run(); }

}  // namespace chorale::graph
