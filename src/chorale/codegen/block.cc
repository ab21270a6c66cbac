#include "chorale/codegen/block.h"

#include <algorithm>
#include <iterator>

namespace chorale::codegen {
namespace {

using graph::Graph;
using graph::kNone;
using graph::Node;

constexpr size_t kMostInBlock = 64;       // of one block: compiling takes longer than linearly
constexpr int64_t kMostBytes = 64 << 10;  // of what a block makes: it lies on the stack

class Blocks {
 public:
  explicit Blocks(const Graph& graph) : graph_(graph) {}

  Graph run() {
    Graph joined;
    joined.values = graph_.values;
    joined.inputs = graph_.inputs;
    joined.outputs = graph_.outputs;
    joined.generators = graph_.generators;
    for (size_t begin = 0; begin < graph_.nodes.size();) {
      size_t end = begin, kernels = 0;
      int64_t bytes = 0;
      for (; end < graph_.nodes.size() && end - begin < kMostInBlock; ++end) {
        const Node& node = graph_.nodes[end];
        if (!fits_block(graph_, node)) break;
        if (!is_view(node)) ++kernels;
        for (const uint32_t y : node.out) bytes += is_view(node) ? 0 : bytes_of(graph_.values[y]);
        if (bytes > kMostBytes) break;
      }
      if (kernels < 2 || !add_block(joined, begin, end)) {
        joined.add(graph_.nodes[begin]);
        end = begin + 1;
      }
      begin = end;
    }
    remove_dead_nodes(joined);
    return joined;
  }

 private:
  static bool is_view(const Node& node) { return node.kind == Node::Kind::kRow && node.op->view; }

  // Views stay outside, too: what is read of them there is a view of a result.
  bool add_block(Graph& joined, size_t begin, size_t end) const {
    Node block;
    block.kind = Node::Kind::kBlock;
    block.origin = graph_.nodes[end - 1].origin;
    auto body = std::make_shared<Graph>();
    std::vector<uint32_t> inside(graph_.values.size(), kNone);
    for (size_t n = begin; n < end; ++n) {
      Node node = graph_.nodes[n];
      for (uint32_t& x : node.in) {
        if (x == kNone) continue;
        if (inside[x] == kNone) {
          block.in.push_back(x);
          body->inputs.push_back(inside[x] = body->add_value(graph_.values[x]));
        }
        x = inside[x];
      }
      for (uint32_t& y : node.out) y = inside[y] = body->add_value(graph_.values[y]);
      body->add(std::move(node));
    }
    const std::vector<bool> read = read_outside(begin, end);
    for (size_t n = begin; n < end; ++n) {
      if (is_view(graph_.nodes[n])) continue;
      for (const uint32_t y : graph_.nodes[n].out) {
        if (!read[y]) continue;
        block.out.push_back(y);
        body->outputs.push_back({inside[y]});
      }
    }
    if (block.out.empty() || block.in.size() + block.out.size() > kMostBlockOperands) return false;
    drop_unread(*body, block);
    block.body = std::move(body);
    joined.add(std::move(block));
    for (size_t n = begin; n < end; ++n) {
      if (is_view(graph_.nodes[n])) joined.add(graph_.nodes[n]);
    }
    return true;
  }
  // Drops the inputs of views that nothing in the block reads.
  static void drop_unread(Graph& body, Node& block) {
    std::vector<Node> kept;
    std::vector<bool> needed(body.values.size(), false);
    for (const graph::Output& output : body.outputs) needed[output.value] = true;
    for (auto node = body.nodes.rbegin(); node != body.nodes.rend(); ++node) {
      if (std::none_of(node->out.begin(), node->out.end(), [&](uint32_t y) { return needed[y]; })) continue;
      for (const uint32_t x : node->in) {
        if (x != kNone) needed[x] = true;
      }
      kept.push_back(std::move(*node));
    }
    body.nodes.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
    for (size_t i = body.inputs.size(); i-- > 0;) {
      if (needed[body.inputs[i]]) continue;
      body.inputs.erase(body.inputs.begin() + static_cast<int64_t>(i));
      block.in.erase(block.in.begin() + static_cast<int64_t>(i));
    }
    graph::renumber(body);
  }
  // For each value, whether it is read behind the block, or by a view of the block which is.
  std::vector<bool> read_outside(size_t begin, size_t end) const {
    std::vector<bool> read(graph_.values.size(), false);
    for (const graph::Output& output : graph_.outputs) read[output.value] = true;
    for (size_t n = end; n < graph_.nodes.size(); ++n) {
      for (const uint32_t x : graph_.nodes[n].in) {
        if (x != kNone) read[x] = true;
      }
    }
    for (size_t n = end; n-- > begin;) {
      const Node& node = graph_.nodes[n];
      if (is_view(node) && std::any_of(node.out.begin(), node.out.end(), [&](uint32_t y) { return read[y]; })) {
        read[node.in[0]] = true;
      }
    }
    return read;
  }

  const Graph& graph_;
};

}  // namespace

Graph make_blocks(const Graph& graph) { return Blocks(graph).run(); }

}  // namespace chorale::codegen
