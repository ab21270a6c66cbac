#include "chorale/graph/passes/join_rows.h"

#include <algorithm>

#include "chorale/kernel/full_like_attrs.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/kernel/view.h"
#include "chorale/op/copy.h"
#include "chorale/op/joined.h"
#include "chorale/op/nn.h"
#include "chorale/op/shape.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::graph {
namespace {

bool is_of(const Node& node, const op::OpDef& row) { return node.kind == Node::Kind::kRow && node.op == &row; }

class Joiner {
 public:
  explicit Joiner(Graph& graph)
      : graph_(graph),
        add_(*op::find_op("add")),
        relu_(*op::find_op("relu")),
        relu_backward_(*op::find_op("relu_backward")),
        cross_entropy_(*op::find_op("cross_entropy")),
        cross_entropy_backward_(*op::find_op("cross_entropy_backward")),
        full_like_(*op::find_op("full_like")),
        gelu_erf_backward_(*op::find_op("gelu_erf_backward")),
        gelu_tanh_backward_(*op::find_op("gelu_tanh_backward")),
        sum_(*op::find_op("sum")),
        maker_(graph.values.size(), kNone),
        readers_(graph.values.size()),
        uses_(count_uses(graph)),
        is_gone_(graph.nodes.size(), false) {
    for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
      for (const uint32_t x : graph.nodes[n].in) {
        if (x != kNone) readers_[x].push_back(n);
      }
      for (const uint32_t y : graph.nodes[n].out) maker_[y] = n;
    }
  }

  void run() {
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (node.kind != Node::Kind::kRow || node.out.empty() || !is_on_device(node.out[0])) continue;
      if (node.op == &op::kLayerNorm) join_forward(n);
      if (node.op == &op::kLayerNormBackward) join_backward(n);
      if (node.op == &op::kCat) join_attention(n);
      if (node.op == &cross_entropy_) join_loss(n);
      if (node.op == &gelu_erf_backward_) join_sums(n, op::kGeluErfBackwardSummed);
      if (node.op == &gelu_tanh_backward_) join_sums(n, op::kGeluTanhBackwardSummed);
      if (node.op == &op::kBatchNorm) join_relu(n);
      if (node.op == &op::kBatchNormBackward) join_relu_backward(n);
    }
    std::vector<Node> nodes;
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!is_gone_[n]) nodes.push_back(std::move(graph_.nodes[n]));
    }
    graph_.nodes = std::move(nodes);
    remove_dead_nodes(graph_);
  }

 private:
  const Value& value(uint32_t v) const { return graph_.values[v]; }
  bool is_on_device(uint32_t v) const {
    return value(v).device.type != DeviceType::kCpu && value(v).device.type != DeviceType::kNull;
  }
  bool is_in_order(uint32_t v) const { return value(v).strides == contiguous_strides(value(v).sizes); }
  // Nodes before it have made this value, or it is an input.
  bool is_there(uint32_t v, uint32_t node) const { return v == kNone || maker_[v] == kNone || maker_[v] < node; }
  // Whether the value is made by this row, in a node that was not joined yet.
  const Node* made_by(uint32_t v, const op::OpDef& row) const {
    const uint32_t m = maker_[v];
    return m != kNone && !is_gone_[m] && is_of(graph_.nodes[m], row) ? &graph_.nodes[m] : nullptr;
  }
  // A node that shows all elements of its input in their order.
  bool is_reshape(uint32_t n) const {
    const Node& node = graph_.nodes[n];
    return node.kind == Node::Kind::kRow && node.op->view && node.in.size() == 1 && !is_wait(node) &&
           is_in_order(node.in[0]) && is_in_order(node.out[0]) &&
           count_elems(value(node.in[0]).sizes) == count_elems(value(node.out[0]).sizes);
  }
  // What was cast into this value from this dtype, or the value itself; kNone where it is anything else.
  uint32_t before_cast(uint32_t v, DType dtype) const {
    if (value(v).dtype == dtype) return v;
    const Node* const cast = made_by(v, op::kTo);
    return cast && value(cast->in[0]).dtype == dtype ? cast->in[0] : kNone;
  }
  // A node that casts this value into another floating dtype; kNone: there is none.
  uint32_t cast_of(uint32_t v) const {
    for (const uint32_t n : readers_[v]) {
      const Node& node = graph_.nodes[n];
      if (!is_gone_[n] && is_of(node, op::kTo) && is_half(value(node.out[0]).dtype) && is_in_order(node.out[0]))
        return n;
    }
    return kNone;
  }
  // The value in another dtype, which nobody has made yet.
  uint32_t add_value_like(uint32_t v, DType dtype) {
    Value made = value(v);
    made.dtype = dtype;
    maker_.push_back(kNone);
    readers_.emplace_back();
    uses_.push_back(1);
    return graph_.add_value(std::move(made));
  }
  bool are_alike(uint32_t a, uint32_t b) const {
    return value(a).sizes == value(b).sizes && is_in_order(a) && is_in_order(b);
  }

  // sum = x + (cast of) y, n = layer_norm(sum), and a cast of n, or of n in another shape, into y's dtype.
  void join_forward(uint32_t at) {
    const Node norm = graph_.nodes[at];
    const uint32_t sum = norm.in[0], wide = norm.out[0];
    const Node* const add = made_by(sum, add_);
    if (!add || !is_in_order(sum) || !is_in_order(wide)) return;
    const auto sole_reader = [&](uint32_t v) {
      return uses_[v] == 1 && readers_[v].size() == 1 ? readers_[v][0] : kNone;
    };
    const uint32_t next = sole_reader(wide), reshape = next != kNone && is_reshape(next) ? next : kNone;
    const uint32_t shown = reshape == kNone ? wide : graph_.nodes[reshape].out[0];
    const uint32_t cast = sole_reader(shown) == kNone ? kNone : cast_of(shown);
    const DType narrow = value(cast == kNone ? wide : graph_.nodes[cast].out[0]).dtype;
    for (const size_t which : {size_t{1}, size_t{0}}) {
      const uint32_t x = add->in[1 - which], y = before_cast(add->in[which], narrow);
      if (y == kNone || value(x).dtype != value(sum).dtype || !are_alike(x, sum) || !are_alike(y, sum) ||
          !is_there(norm.in[1], maker_[sum]) || !is_there(norm.in[2], maker_[sum]))
        continue;
      Node joined;
      joined.op = &op::kAddLayerNorm;
      joined.attrs = norm.attrs;
      joined.in = {x, y, norm.in[1], norm.in[2]};
      uint32_t result = wide;
      if (cast != kNone && reshape == kNone) result = graph_.nodes[cast].out[0];
      if (cast != kNone && reshape != kNone) {
        result = add_value_like(wide, narrow);
        Node shows = graph_.nodes[reshape];
        shows.in = {result};
        shows.out = graph_.nodes[cast].out;
        put(std::move(shows), cast, {reshape});
      }
      joined.out = {sum, result, norm.out[1], norm.out[2]};
      put(std::move(joined), maker_[sum], {at, reshape == kNone ? cast : kNone});
      return;
    }
  }

  // dx = dsum + layer_norm_backward(cast of dy, which may be shown in another shape), and a cast of dx into dy's dtype.
  // There may be no sum, and no cast of it.
  void join_backward(uint32_t at) {
    const Node norm = graph_.nodes[at];
    const uint32_t gradient = norm.out[0], made = maker_[norm.in[0]];
    const uint32_t reshape = made != kNone && !is_gone_[made] && is_reshape(made) ? made : kNone;
    const Node* const before = made_by(reshape == kNone ? norm.in[0] : graph_.nodes[reshape].in[0], op::kTo);
    if (!before || (reshape != kNone && uses_[norm.in[0]] != 1)) return;
    const uint32_t dy = before->in[0], after = sole_reader(gradient, add_);
    uint32_t dsum = kNone, dx = gradient;
    if (after != kNone) {
      const Node& add = graph_.nodes[after];
      dsum = add.in[add.in[0] == gradient ? 1 : 0];
      dx = add.out[0];
      if (dsum == gradient || value(dsum).dtype != value(gradient).dtype || !are_alike(dsum, dx)) return;
    }
    if (!is_in_order(dy) || !are_alike(norm.in[0], dx) || !are_alike(gradient, dx)) return;
    uint32_t cast = cast_of(dx);
    if (cast != kNone && value(graph_.nodes[cast].out[0]).dtype != value(dy).dtype) cast = kNone;
    const uint32_t lower = cast == kNone ? add_value_like(dx, value(dy).dtype) : graph_.nodes[cast].out[0];
    // Where the norm stood, or else where the sum stood, if nobody asks for the other results before.
    uint32_t place = at;
    if (!is_there(dsum, at)) {  // there is one, then
      place = after;
      for (size_t i = 1; i < norm.out.size(); ++i) {
        for (const uint32_t reader : readers_[norm.out[i]]) {
          if (reader < after) return;
        }
      }
    }
    Node joined;
    joined.op = &op::kAddLayerNormBackward;
    joined.attrs = norm.attrs;
    joined.in = {dsum, dy, norm.in[1], norm.in[2], norm.in[3], norm.in[4]};
    joined.out = {dx, lower, norm.out[1], norm.out[2]};
    const auto normalized = norm.attrs.get<kernel::LayerNormBackwardAttrs>().normalized_shape;
    const uint32_t sums = normalized.size() == 1 ? sums_of_columns(lower) : kNone;
    if (sums != kNone) {
      joined.op = &op::kAddLayerNormBackwardSummed;
      joined.out.push_back(take_sums(sums));
    }
    if (reshape != kNone) {
      joined.in[1] = add_value_like(norm.in[0], value(dy).dtype);
      Node shows = graph_.nodes[reshape];
      shows.in = {dy};
      shows.out = {joined.in[1]};
      put(std::move(shows), reshape, {});
    }
    put(std::move(joined), place, {at, after, cast});
  }

  // cat(views of dq, dk and dv) along the third of five dimensions.
  void join_attention(uint32_t at) {
    const Node join = graph_.nodes[at];
    const Shape& sizes = value(join.out[0]).sizes;
    const int64_t dim = join.attrs.get<kernel::DimAttrs>().dim;
    if (join.in.size() != 3 || sizes.size() != 5 || (dim != 2 && dim != -3) || !is_in_order(join.out[0])) return;
    uint32_t place = kNone;
    for (size_t i = 0; i < 3; ++i) {
      uint32_t from = join.in[i];
      while (uses_[from] == 1 && maker_[from] != kNone && graph_.nodes[maker_[from]].kind == Node::Kind::kRow &&
             graph_.nodes[maker_[from]].op->view && graph_.nodes[maker_[from]].in.size() == 1)
        from = graph_.nodes[maker_[from]].in[0];
      const Node* const made = made_by(from, op::kAttentionBackward);
      if (!made || uses_[from] != 1 || made->out[i] != from || (i > 0 && maker_[from] != place)) return;
      place = maker_[from];
      const Value &part = value(join.in[i]), &own = value(from);
      if (own.sizes.size() != 4 || part.sizes != Shape{own.sizes[0], own.sizes[2], 1, own.sizes[1], own.sizes[3]})
        return;
      for (const auto& [here, there] : {std::pair{0, 0}, {1, 2}, {3, 1}, {4, 3}}) {
        const auto h = static_cast<size_t>(here), t = static_cast<size_t>(there);
        if (part.sizes[h] > 1 && part.strides[h] != own.strides[t]) return;
      }
    }
    const Node& apart = graph_.nodes[place];
    const Shape& q = value(apart.in[2]).sizes;
    if (value(apart.in[3]).sizes != q || value(apart.in[4]).sizes != q) return;
    Node joined;
    joined.op = &op::kAttentionBackwardJoined;
    joined.attrs = apart.attrs;
    joined.in = apart.in;
    joined.out = join.out;
    put(std::move(joined), place, {at});
  }

  // The node that sums a value over all but its last dimension, which may be shown as a matrix before; kNone: there is
  // none.
  uint32_t sums_of_columns(uint32_t x) const {
    const int64_t columns = value(x).sizes.back();
    const auto sums_of = [&](uint32_t v) {
      for (const uint32_t n : readers_[v]) {
        const Node& node = graph_.nodes[n];
        if (is_gone_[n] || !is_of(node, sum_) || value(v).sizes.size() != 2 || value(v).sizes[1] != columns) continue;
        const auto& attrs = node.attrs.get<kernel::ReduceAttrs>();
        if (attrs.dims.size() == 1 && (attrs.dims[0] == 0 || attrs.dims[0] == -2) &&
            value(node.out[0]).dtype == value(x).dtype)
          return n;
      }
      return kNone;
    };
    uint32_t sums = sums_of(x);
    for (const uint32_t n : readers_[x]) {
      if (sums == kNone && !is_gone_[n] && is_reshape(n)) sums = sums_of(graph_.nodes[n].out[0]);
    }
    return sums;
  }
  // The vector of sums that is made instead of by this node, which shows it as a row where it kept the dimension, and
  // is gone otherwise.
  uint32_t take_sums(uint32_t sums) {
    const Node node = graph_.nodes[sums];
    is_gone_[sums] = true;
    if (!node.attrs.get<kernel::ReduceAttrs>().keepdim) return node.out[0];
    const uint32_t made = add_value_like(node.out[0], value(node.out[0]).dtype);
    graph_.values[made].sizes.erase(size_t{0});
    graph_.values[made].strides.erase(size_t{0});
    Node shows;
    shows.op = &op::kView;
    shows.attrs = op::SizesAttrs{IntList(value(node.out[0]).sizes)};
    shows.in = {made};
    shows.out = node.out;
    put(std::move(shows), sums, {});
    return made;
  }
  // The gradient of an activation, and its sums over all but the last dimension, which may be asked of it as a matrix.
  void join_sums(uint32_t at, const op::OpDef& row) {
    const Node slopes = graph_.nodes[at];
    const uint32_t dx = slopes.out[0];
    const Value& x = value(dx);
    if (x.sizes.empty() || value(slopes.in[0]) != x || value(slopes.in[1]) != x || !is_in_order(dx)) return;
    const uint32_t sums = sums_of_columns(dx);
    if (sums == kNone) return;
    Node joined;
    joined.op = &row;
    joined.attrs = slopes.attrs;
    joined.in = slopes.in;
    joined.out = {dx, take_sums(sums)};
    put(std::move(joined), at, {});
  }

  // Whether all elements of a value are ones that a node fills in.
  bool is_ones(uint32_t v) const {
    const Node* const made = made_by(v, full_like_);
    return made && made->attrs.get<kernel::FullLikeAttrs>().value == Scalar(1);
  }
  // cross_entropy(x, target, weight), and its gradient by ones or by what is known before.
  void join_loss(uint32_t at) {
    const Node loss = graph_.nodes[at];
    uint32_t slopes = kNone;
    for (const uint32_t n : readers_[loss.out[1]]) {
      if (!is_gone_[n] && is_of(graph_.nodes[n], cross_entropy_backward_)) slopes = n;
    }
    if (slopes == kNone) return;
    const Node& backward = graph_.nodes[slopes];
    const uint32_t dloss = backward.in[0];
    if (backward.in[1] != loss.in[0] || backward.in[2] != loss.in[1] || backward.in[3] != loss.in[2] ||
        backward.in[4] != loss.out[1] || !(backward.attrs == loss.attrs) || (!is_ones(dloss) && !is_there(dloss, at)))
      return;
    Node joined;
    joined.op = &op::kCrossEntropyWithSlopes;
    joined.attrs = loss.attrs;
    joined.in = {is_ones(dloss) ? kNone : dloss, loss.in[0], loss.in[1], loss.in[2]};
    joined.out = {loss.out[0], loss.out[1], backward.out[0]};
    put(std::move(joined), at, {slopes});
  }

  // Whether a value is a matrix with one column per channel, as kernels of joined rows want it.
  bool has_columns(uint32_t v) const {
    const Value& x = value(v);
    return x.sizes.size() == 2 ? is_in_order(v) : !is_in_order(v) && is_channels_last(x.sizes, x.strides);
  }
  bool lie_alike(uint32_t a, uint32_t b) const {
    return value(a).sizes == value(b).sizes && value(a).strides == value(b).strides && value(a).dtype == value(b).dtype;
  }
  // The one node that reads this value, if it is of that row.
  uint32_t sole_reader(uint32_t v, const op::OpDef& row) const {
    if (uses_[v] != 1 || readers_[v].size() != 1) return kNone;
    const uint32_t n = readers_[v][0];
    return !is_gone_[n] && is_of(graph_.nodes[n], row) ? n : kNone;
  }

  // relu(batch_norm(x)), or relu(batch_norm(x) + other).
  void join_relu(uint32_t at) {
    const Node norm = graph_.nodes[at];
    const uint32_t normal = norm.out[0], sum = sole_reader(normal, add_);
    uint32_t last = normal, other = kNone;
    if (sum != kNone) {
      const Node& add = graph_.nodes[sum];
      other = add.in[add.in[0] == normal ? 1 : 0];
      last = add.out[0];
      if (!is_there(other, at) || !lie_alike(other, normal)) return;
    }
    const uint32_t relu = sole_reader(last, relu_);
    if (relu == kNone || !has_columns(norm.in[0])) return;
    const uint32_t result = graph_.nodes[relu].out[0];
    if (!lie_alike(normal, norm.in[0]) || !lie_alike(last, normal) || !lie_alike(result, normal)) return;
    Node joined;
    joined.op = &op::kBatchNormRelu;
    joined.attrs = norm.attrs;
    joined.in = {norm.in[0], other, norm.in[1], norm.in[2]};
    joined.out = {result, norm.out[1], norm.out[2]};
    put(std::move(joined), at, {sum, relu});
  }

  // batch_norm_backward(relu_backward(g, y)), where y is that of the join above, or g may be a sum.
  void join_relu_backward(uint32_t at) {
    const Node norm = graph_.nodes[at];
    const uint32_t through = norm.in[0], x = norm.in[1];
    const Node* const relu = made_by(through, relu_backward_);
    if (!relu || !has_columns(x) || !lie_alike(through, x) || !lie_alike(norm.out[0], x)) return;
    const uint32_t place = maker_[through], slope = relu->in[0], y = relu->in[1];
    if (!lie_alike(slope, x) || !lie_alike(y, x)) return;
    Node joined;
    joined.attrs = norm.attrs;
    const Node* const forward = made_by(y, op::kBatchNormRelu);
    if (forward && uses_[through] == 1 && forward->in[1] == kNone && forward->in[0] == x &&
        forward->out[1] == norm.in[2] && forward->out[2] == norm.in[3] && forward->in[2] == norm.in[4] &&
        forward->attrs == norm.attrs) {
      joined.op = &op::kBatchNormReluBackward;
      joined.in = {slope, x, norm.in[2], norm.in[3], norm.in[4], forward->in[3]};
      joined.out = norm.out;
      return put(std::move(joined), place, {at});
    }
    for (size_t i = 1; i < norm.in.size(); ++i) {
      if (!is_there(norm.in[i], place)) return;
    }
    joined.op = &op::kReluBatchNormBackward;
    joined.in = {slope, kNone, y, x, norm.in[2], norm.in[3], norm.in[4]};
    joined.out = {through, norm.out[0], norm.out[1], norm.out[2]};
    uint32_t sum = kNone;
    if (const Node* const add = made_by(slope, add_);
        add && uses_[slope] == 1 && lie_alike(add->in[0], x) && lie_alike(add->in[1], x)) {
      sum = maker_[slope];
      joined.in[0] = add->in[0];
      joined.in[1] = add->in[1];
    }
    put(std::move(joined), place, {at, sum});
  }

  // The node stands at `place`, and those are gone.
  void put(Node node, uint32_t place, std::initializer_list<uint32_t> gone) {
    for (const uint32_t n : gone) {
      if (n != kNone) is_gone_[n] = true;
    }
    node.origin = graph_.nodes[place].origin;
    is_gone_[place] = false;
    for (const uint32_t y : node.out) maker_[y] = place;
    graph_.nodes[place] = std::move(node);
  }

  Graph& graph_;
  const op::OpDef &add_, &relu_, &relu_backward_, &cross_entropy_, &cross_entropy_backward_, &full_like_,
      &gelu_erf_backward_, &gelu_tanh_backward_, &sum_;
  std::vector<uint32_t> maker_;                 // by value
  std::vector<std::vector<uint32_t>> readers_;  // by value
  std::vector<uint32_t> uses_;                  // by value
  std::vector<bool> is_gone_;                   // by node
};

}  // namespace

void join_rows(Graph& graph) { Joiner(graph).run(); }

}  // namespace chorale::graph
