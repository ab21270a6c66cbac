// Running nodes in stripes: tensors of one stripe's shape, whose pointers move on from stripe to stripe.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/graph/blocks.h"
#include "chorale/graph/products.h"
#include "chorale/graph/stripes.h"
#include "chorale/kernel/cpu/loss/class_targets.h"
#include "chorale/kernel/cpu/product/product_engine.h"
#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/kernels.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/product.h"
#include "chorale/vec/loops.h"

namespace chorale::graph {
namespace {

using Role = Stripes::Role;

std::byte* bytes_at(const Tensor& x) { return static_cast<std::byte*>(static_cast<void*>(x.impl()->data)); }

// A tensor that shows memory of its own kind elsewhere; the pointer is set later.
Tensor header(const Shape& sizes, DType dtype) {
  return Tensor::without_bytes(sizes, contiguous_strides(sizes), dtype, kCpu, nullptr);
}

// How many lines the values of a striped body have: as many as what is added up has, or as the loss has targets.
int64_t lines_of(const Graph& body) {
  for (const Node& node : body.nodes) {
    if (node.kind != Node::Kind::kRow) continue;
    const std::string_view name = node.op->name;
    if (name == "cross_entropy") return body.values[node.in[0]].sizes[0];
    if (name != "sum") continue;
    const Shape& sizes = body.values[node.in[0]].sizes;
    return sizes.empty() ? 0 : count_elems(sizes) / std::max<int64_t>(1, sizes.back());
  }
  return 0;
}

bool is_outside(const Graph& body, uint32_t v) {
  return std::find(body.inputs.begin(), body.inputs.end(), v) != body.inputs.end() ||
         std::any_of(body.outputs.begin(), body.outputs.end(), [&](const Output& o) { return o.value == v; });
}

// How a body is cut, and where what is there only in stripes lies in the room of its node.
struct Cut {
  explicit Cut(const Graph& body) : shows(body.values.size()), in_room(body.values.size(), kNowhere) {
    const std::optional<Stripes> found = cut_into_stripes(body, lines_of(body));
    CHORALE_INVARIANT(found, "[stripes] a fused node cannot be cut into lines");
    stripes = *found;
    height = stripe_height(stripes);
    for (uint32_t v = 0; v < shows.size(); ++v) shows[v] = v;
    for (const Node& node : body.nodes) {
      if (node.kind == Node::Kind::kRow && node.op->view) shows[node.out[0]] = shows[node.in[0]];
    }
    for (size_t n = 0; n < body.nodes.size(); ++n) lay_over_logits(body, n);
    for (uint32_t v = 0; v < shows.size(); ++v) {
      const uint32_t from = shows[v];
      if (stripes.roles[v] != Role::kLines || is_outside(body, from) || in_room[from] != kNowhere) continue;
      constexpr int64_t kLine = 64;
      const int64_t bytes = height * (bytes_of(body.values[from]) / stripes.lines);
      in_room[from] = room_bytes;
      room_bytes += (bytes + kLine - 1) / kLine * kLine;
    }
  }
  // The gradient of logits goes over them where nothing reads them later.
  void lay_over_logits(const Graph& body, size_t n) {
    const Node& node = body.nodes[n];
    if (node.kind != Node::Kind::kRow || node.op != &op::kCrossEntropyBackward) return;
    const uint32_t x = shows[node.in[1]], y = node.out[0];
    if (is_outside(body, x) || is_outside(body, y)) return;
    for (size_t m = n + 1; m < body.nodes.size(); ++m) {
      for (const uint32_t v : body.nodes[m].in) {
        if (v != kNone && shows[v] == x) return;
      }
    }
    for (uint32_t& shown : shows) shown = shown == y ? x : shown;
  }

  static constexpr int64_t kNowhere = -1;
  Stripes stripes;
  int64_t height = 0;
  std::vector<uint32_t> shows;   // by value: the value whose bytes it shows
  std::vector<int64_t> in_room;  // by value
  int64_t room_bytes = 0;
};

class StripedKernel {
 public:
  StripedKernel(const Node& node, const FusedKernels& fused)
      : body_(node.body), cut_(*body_), stripes_(cut_.stripes), height_(cut_.height), shows_(cut_.shows) {
    make_whole();
    full_ = make(height_, fused);
    const int64_t rest = stripes_.lines % height_;
    if (rest > 0) last_ = make(rest, fused);
  }

  void operator()(std::span<const Tensor> in, std::span<Tensor> out) {
    for (size_t i = 0; i < in.size(); ++i) bind_whole(body_->inputs[i], in[i]);
    for (size_t o = 0; o < body_->outputs.size(); ++o) bind_whole(body_->outputs[o].value, out[o]);
    if (cut_.room_bytes > 0) lie_in_room(bytes_at(out[body_->outputs.size()]));
    begin_losses();
    for (int64_t line = 0; line < stripes_.lines; line += height_) {
      Stripe& stripe = line + height_ <= stripes_.lines ? full_ : last_;
      for (const Moving& moving : stripe.moving) {
        moving.impl->data = bytes_at(whole_[moving.value]) + line * moving.line_bytes;
      }
      for (Step& step : stripe.steps) run(step, line);
    }
    end_losses();
  }

 private:
  struct Step {
    const Node* node = nullptr;
    kernel::Kernel kernel = nullptr;
    const kernel::Pointwise* pointwise = nullptr;
    FusedKernel fused;
    Attrs attrs;
    std::vector<Tensor> in, out;
    Tensor part;  // of a total
  };
  struct Moving {
    Tensor::Impl* impl;
    uint32_t value;
    int64_t line_bytes;
  };
  struct Stripe {
    std::vector<Step> steps;
    std::vector<Moving> moving, in_room;
    std::vector<Tensor> tensors;  // by value
  };
  struct Loss {  // of one cross_entropy in the body
    const Node* node;
    Tensor of_lines;  // the losses of single lines
    double denominator = 1;
  };

  bool is_outside(uint32_t v) const { return graph::is_outside(*body_, v); }
  int64_t line_bytes(uint32_t v) const { return bytes_of(body_->values[v]) / stripes_.lines; }

  void make_whole() {
    for (uint32_t v = 0; v < body_->values.size(); ++v) whole_.push_back(stand_in(body_->values[v]));
    for (const Node& node : body_->nodes) {
      if (node.kind == Node::Kind::kRow && node.op == &op::kCrossEntropy) {
        const DType dtype = body_->values[node.out[0]].dtype;
        losses_.push_back({&node, Tensor::empty({stripes_.lines}, dtype)});
      }
    }
    // A total that nobody reads has room all the same.
    for (uint32_t v = 0; v < whole_.size(); ++v) {
      if (stripes_.roles[v] == Role::kTotal && !is_outside(v))
        bind_whole(v, keep(body_->values[v].sizes, body_->values[v].dtype));
    }
  }
  void lie_in_room(std::byte* room) {
    for (const Stripe* stripe : {&full_, &last_}) {
      for (const Moving& one : stripe->in_room) one.impl->data = room + cut_.in_room[one.value];
    }
  }
  void bind_whole(uint32_t v, const Tensor& to) { whole_[v].impl()->data = to.impl()->data; }

  // One line of a value lies in a row of two dimensions; what had one dimension keeps it.
  Shape stripe_shape(uint32_t v, int64_t rows) const {
    const Value& value = body_->values[v];
    if (value.sizes.size() == 1) return {rows};
    return {rows, count_elems(value.sizes) / stripes_.lines};
  }

  Stripe make(int64_t rows, const FusedKernels& fused) {
    Stripe stripe;
    for (uint32_t v = 0; v < body_->values.size(); ++v) {
      const Value& value = body_->values[v];
      const uint32_t from = shows_[v];
      if (stripes_.roles[v] != Role::kLines) {
        stripe.tensors.push_back(stripes_.roles[v] == Role::kTurned ? Tensor{} : whole_[v]);
        continue;
      }
      const Tensor x = header(stripe_shape(v, rows), value.dtype);
      stripe.tensors.push_back(x);
      // A view inside of the body that leaves it is an output of its own; the pass does not make such bodies.
      if (is_outside(from)) {
        stripe.moving.push_back({x.impl(), from, line_bytes(from)});
      } else {
        stripe.in_room.push_back({x.impl(), from, 0});
      }
    }
    for (const Node& node : body_->nodes) {
      if (node.kind == Node::Kind::kRow && node.op->view) continue;
      Step step;
      step.node = &node;
      step.attrs = node.attrs;
      for (const uint32_t x : node.in) step.in.push_back(x == kNone ? Tensor{} : stripe.tensors[x]);
      for (const uint32_t y : node.out) step.out.push_back(stripe.tensors[y]);
      if (node.kind == Node::Kind::kFused) {
        step.fused = fused ? fused(node) : FusedKernel{};
        CHORALE_INVARIANT(step.fused, "[stripes] a fused node inside of stripes has no kernel");
      } else {
        step.kernel = op::find_kernel(*node.op, DeviceType::kCpu);
        step.pointwise = node.op->pointwise ? &*node.op->pointwise : nullptr;
        prepare(step, rows);
      }
      stripe.steps.push_back(std::move(step));
    }
    return stripe;
  }
  Tensor keep(const Shape& sizes, DType dtype) { return kept_.emplace_back(Tensor::empty(sizes, dtype)); }

  void prepare(Step& step, int64_t rows) {
    const Node& node = *step.node;
    if (std::string_view(node.op->name) == "sum") {
      step.attrs = kernel::ReduceAttrs{{0}, false};
      step.part = keep({step.in[0].size(1)}, step.in[0].dtype());
      step.out[0] = header({step.in[0].size(1)}, step.in[0].dtype());
    }
    if (node.op != &op::kCrossEntropy && node.op != &op::kCrossEntropyBackward) return;
    // Line by line: what it is divided by, and the sum, belong to all lines.
    auto attrs = node.attrs.get<kernel::CrossEntropyAttrs>();
    attrs.reduction = Reduction::kNone;
    step.attrs = attrs;
    const DType dtype = body_->values[node.op == &op::kCrossEntropy ? node.out[0] : node.in[0]].dtype;
    if (node.op == &op::kCrossEntropy) {
      step.out[0] = header({rows}, dtype);
    } else {
      step.part = keep({rows}, dtype);
      step.in[0] = step.part;
    }
  }

  void begin_losses() {
    for (Loss& loss : losses_) {
      const Node& node = *loss.node;
      const auto& attrs = node.attrs.get<kernel::CrossEntropyAttrs>();
      loss.denominator = kernel::cpu::ClassTargets<double>("cross_entropy", whole_[node.in[1]], {},
                                                           body_->values[node.in[0]].sizes[1], attrs.ignore_index)
                             .denominator(attrs.reduction);
    }
    for (Stripe* stripe : {&full_, &last_}) {
      for (Step& step : stripe->steps) {
        if (step.node->op == &op::kCrossEntropyBackward) spread_gradient(step);
      }
    }
  }
  // The gradient of each line's own loss.
  void spread_gradient(Step& step) {
    const auto& attrs = step.node->attrs.get<kernel::CrossEntropyAttrs>();
    const Tensor& dloss = whole_[step.node->in[0]];
    const double denominator =
        kernel::cpu::ClassTargets<double>("cross_entropy", whole_[step.node->in[2]], {},
                                          body_->values[step.node->in[1]].sizes[1], attrs.ignore_index)
            .denominator(attrs.reduction);
    const auto fill = [&](auto zero) {
      using C = decltype(zero);
      auto* to = reinterpret_cast<C*>(bytes_at(step.part));
      const auto g = static_cast<C>(static_cast<double>(*reinterpret_cast<const C*>(bytes_at(dloss))) / denominator);
      std::fill(to, to + step.part.elems(), g);
    };
    step.part.dtype() == DType::kF64 ? fill(0.0) : fill(0.0f);
  }
  void end_losses() {
    for (const Loss& loss : losses_) {
      const DType dtype = loss.of_lines.dtype();
      const auto finish = [&](auto total) {
        using C = decltype(total);
        vec::reduce_row(vec::ReduceOp::kSum, dtype)(loss.of_lines.raw(), stripes_.lines, &total);
        *reinterpret_cast<C*>(bytes_at(whole_[loss.node->out[0]])) =
            static_cast<C>(static_cast<double>(total) / loss.denominator);
      };
      dtype == DType::kF64 ? finish(0.0) : finish(0.0f);
    }
  }

  // The lines that a product reads as columns.
  uint32_t turned_from(uint32_t v) const {
    const auto maker =
        std::find_if(body_->nodes.begin(), body_->nodes.end(), [&](const Node& node) { return node.out[0] == v; });
    return maker->in[0];
  }
  static void multiply_turned(const Step& step, const Tensor& a, bool is_first) {
    const Tensor &b = step.in[1], &c = step.out[0];
    kernel::cpu::product({.dtype = c.dtype(),
                          .m = c.size(0),
                          .n = c.size(1),
                          .k = b.size(0),
                          .a = a.impl()->data,
                          .b = b.impl()->data,
                          .c = c.impl()->data,
                          .a_row = 1,
                          .a_col = a.size(1),
                          .b_row = b.size(1),
                          .b_col = 1,
                          .c_row = c.size(1),
                          .c_col = 1,
                          .beta = is_first ? 0.0 : 1.0});
  }

  void run(Step& step, int64_t line) {
    const Node& node = *step.node;
    if (step.fused) return step.fused(step.in, step.out);
    const bool is_first = line == 0;
    if (node.op == &op::kMatmul && stripes_.roles[node.in[0]] == Role::kTurned) {
      const Stripe& stripe = line + height_ <= stripes_.lines ? full_ : last_;
      return multiply_turned(step, stripe.tensors[turned_from(node.in[0])], is_first);
    }
    if (node.op == &op::kCrossEntropy) {
      for (const Loss& loss : losses_) {
        if (loss.node != &node) continue;
        step.out[0].impl()->data =
            bytes_at(loss.of_lines) + line * static_cast<int64_t>(size_of(loss.of_lines.dtype()));
      }
    }
    const bool is_total = stripes_.roles[node.out[0]] == Role::kTotal && node.op != &op::kCrossEntropy;
    if (is_total) step.out[0].impl()->data = whole_[node.out[0]].impl()->data;
    if (!is_total || is_first) return call(step, step.out);
    call(step, {&step.part, 1});
    const void* both[] = {step.out[0].impl()->data, step.part.impl()->data};
    vec::pointwise_loop(vec::ScalarOp::kAdd, step.part.dtype())(both, step.out[0].impl()->data, step.part.elems(), {});
  }
  static void call(Step& step, std::span<Tensor> out) {
    step.kernel({step.in, out, step.attrs, Stream{kCpu}, step.pointwise});
  }

  std::shared_ptr<const Graph> body_;
  const Cut cut_;
  const Stripes& stripes_;
  const int64_t height_;
  const std::vector<uint32_t>& shows_;
  std::vector<Tensor> whole_;  // by value: as the body says it is, where it is there as a whole
  std::vector<Tensor> kept_;
  std::vector<Loss> losses_;
  Stripe full_, last_;
};

}  // namespace

int64_t stripe_room_bytes(const Node& node) {
  if (node.kind != Node::Kind::kFused || is_elementwise(node) || works_line_by_line(node) || is_product(node)) return 0;
  return Cut(*node.body).room_bytes;
}

FusedKernel striped_kernel(const Node& node, const FusedKernels& fused) {
  const auto kernel = std::make_shared<StripedKernel>(node, fused);
  return [kernel](std::span<const Tensor> in, std::span<Tensor> out) { (*kernel)(in, out); };
}

}  // namespace chorale::graph
