// Losses of classes.
#include <limits>

#include "chorale/kernel/cpu/joined.h"
#include "chorale/kernel/cpu/loss/loss.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/norm_rules.h"
#include "chorale/op/defs/padded_rows.h"
#include "chorale/op/joined.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/nn.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::CrossEntropyAttrs;
using kernel::NllLossAttrs;
using kernel::NllLossBackwardAttrs;

int64_t class_dim(size_t dims) { return dims == 1 ? 0 : 1; }

// The shape of the target: that of the logits without the classes.
Shape target_shape(Shape sizes) {
  sizes.erase(static_cast<size_t>(class_dim(sizes.size())));
  return sizes;
}

void check_classes(const InferArgs& args, const Shape& sizes, const Tensor& target, const Tensor& weight) {
  CHORALE_CHECK(!sizes.empty(), "[", args.op.name, "] x must have a dimension of classes, not be a scalar");
  const Shape expected = target_shape(sizes);
  CHORALE_CHECK(is_integral(target.dtype()) && target.sizes() == expected, "[", args.op.name, "] for x of shape ",
                sizes, " the target must hold classes, integers of shape ", expected, ", not ", target.dtype(), " ",
                target.sizes());
  check_parameter(args, "weight", weight, {sizes[static_cast<size_t>(class_dim(sizes.size()))]});
}

Shape loss_shape(const Shape& sizes, Reduction reduction) {
  return reduction == Reduction::kNone ? target_shape(sizes) : Shape{};
}

void check_dloss(const InferArgs& args, const Tensor& dloss, const Shape& sizes, Reduction reduction) {
  CHORALE_CHECK(dloss.sizes() == loss_shape(sizes, reduction), "[", args.op.name,
                "] the gradient of the loss has shape ", dloss.sizes(), " instead of ", loss_shape(sizes, reduction));
}

// ---- cross_entropy

void infer_cross_entropy(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<CrossEntropyAttrs>();
  check_classes(args, x.sizes(), args.in[1], args.in[2]);
  CHORALE_CHECK(a.label_smoothing >= 0 && a.label_smoothing <= 1,
                "[cross_entropy] label_smoothing must lie between 0 and 1, not be ", a.label_smoothing);
  // f16 and bf16 logits are not cast, which would cost as much as the loss: the loss itself is f32.
  describe(out[0], loss_shape(x.sizes(), a.reduction), compute_of(x.dtype()), x);
  describe(out[1], target_shape(x.sizes()), DType::kF64, x);  // Note [Exact logsumexp]
}

void infer_cross_entropy_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dloss = args.in[0], &x = args.in[1], &lse = args.in[4];
  check_classes(args, x.sizes(), args.in[2], args.in[3]);
  check_dloss(args, dloss, x.sizes(), args.attrs.get<CrossEntropyAttrs>().reduction);
  check_parameter(args, "logsumexp", lse, target_shape(x.sizes()));
  describe(out[0], x.sizes(), x.dtype(), x);
  if (has_padded_rows(x)) pad_rows(out[0]);
}

void infer_cross_entropy_with_slopes(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dloss = args.in[0], &x = args.in[1];
  const Reduction reduction = args.attrs.get<CrossEntropyAttrs>().reduction;
  check_classes(args, x.sizes(), args.in[2], args.in[3]);
  if (dloss.defined()) check_dloss(args, dloss, x.sizes(), reduction);
  describe(out[0], loss_shape(x.sizes(), reduction), compute_of(x.dtype()), x);
  describe(out[1], target_shape(x.sizes()), DType::kF64, x);
  describe(out[2], x.sizes(), x.dtype(), x);
  if (has_padded_rows(x)) pad_rows(out[2]);
}

void no_gradient_of_weights(const GradArgs& g, size_t weight) {
  CHORALE_CHECK(!g.needs(weight), "class weights of a loss have no gradient; detach() them");
}

Tensors grad_cross_entropy(const GradArgs& g) {
  const Tensor &x = g.in[0], &target = g.in[1], &weight = g.in[2], &lse = g.out[1];
  no_gradient_of_weights(g, 2);
  Tensor dx;
  if (g.dout[0].defined()) dx = call(kCrossEntropyBackward, g.attrs, g.dout[0], x, target, weight, lse);
  // logsumexp has a gradient of its own in second derivatives.
  if (g.dout[1].defined()) {
    const int64_t dim = class_dim(x.sizes().size());
    dx = plus(dx, to(unsqueeze(g.dout[1], dim) * exp(x - unsqueeze(lse, dim)), x.dtype()));
  }
  return {dx, Tensor(), Tensor()};
}

Tensors grad_cross_entropy_backward(const GradArgs& g) {
  const Tensor &dloss = g.in[0], &x = g.in[1], &target = g.in[2], &weight = g.in[3], &lse = g.in[4], &v = g.dout[0];
  no_gradient_of_weights(g, 3);
  const int64_t dim = class_dim(x.sizes().size());
  Tensors d(5);
  if (g.needs(0)) {
    const Tensor slope = v * call(kCrossEntropyBackward, g.attrs, ones_like(dloss), x, target, weight, lse);
    d[0] = g.attrs.get<CrossEntropyAttrs>().reduction == Reduction::kNone ? sum(slope, {dim}) : sum(slope);
  }
  if (g.needs(1) || g.needs(4)) {
    // dx is the softmax, scaled, minus what the target wants; with an infinite logsumexp only the latter remains.
    const Tensor all = call(kCrossEntropyBackward, g.attrs, dloss, x, target, weight, lse);
    const Tensor wanted = call(kCrossEntropyBackward, g.attrs, dloss, x, target, weight,
                               full_like(lse, std::numeric_limits<double>::infinity()));
    d[1] = v * (all - wanted);
    d[4] = to(-sum(d[1], {dim}), lse.dtype());
  }
  return d;
}

// Everything but the classes may be split; losses that are summed up are then partial sums. Their mean needs the whole:
// it is divided by the weights of all targets that count, which only the data tell.
struct LossLabels {
  std::string x, target, loss, weight = "Z";

  LossLabels(int64_t dims, Reduction reduction) {
    x = letters(dims);
    if (reduction == Reduction::kMean) x = keep_whole(x);
    const int64_t classes = class_dim(x.size());
    x = keep_whole(x, classes);
    target = without(x, classes);
    if (reduction == Reduction::kNone) loss = target;
  }
};
void ways_cross_entropy(const ShardCall& call, ShardWays& ways) {
  const LossLabels l(call.dims(0), call.attrs.get<CrossEntropyAttrs>().reduction);
  ways.split(join({l.x, l.target, l.weight}, {l.loss, l.target}), Reduce::kSum);
}
void ways_cross_entropy_backward(const ShardCall& call, ShardWays& ways) {
  const LossLabels l(call.dims(1), call.attrs.get<CrossEntropyAttrs>().reduction);
  ways.split(join({l.loss, l.x, l.target, l.weight, l.target}, {l.x}));
}

// ---- nll_loss

void infer_nll_loss(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  check_classes(args, x.sizes(), args.in[1], args.in[2]);
  describe(out[0], loss_shape(x.sizes(), args.attrs.get<NllLossAttrs>().reduction), x.dtype(), x);
}

void infer_nll_loss_backward(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<NllLossBackwardAttrs>();
  check_classes(args, a.sizes.shape(), args.in[1], args.in[2]);
  check_dloss(args, args.in[0], a.sizes.shape(), a.reduction);
  describe(out[0], a.sizes.shape(), args.in[0].dtype(), args.in[0]);
}

void ways_nll_loss(const ShardCall& call, ShardWays& ways) {
  const LossLabels l(call.dims(0), call.attrs.get<NllLossAttrs>().reduction);
  ways.split(join({l.x, l.target, l.weight}, {l.loss}), Reduce::kSum);
}
void ways_nll_loss_backward(const ShardCall& call, ShardWays& ways) {
  const LossLabels l(static_cast<int64_t>(call.out[0].size()), call.attrs.get<NllLossBackwardAttrs>().reduction);
  ways.split(join({l.loss, l.target, l.weight}, {l.x}));
}

std::vector<Sample> samples_cross_entropy() {
  const auto logits = [](const Shape& sizes, int seed) { return sample(sizes, seed); };
  return {
      {{logits({4, 3}, 1), Tensor::from<int64_t>({0, 2, 1, 2}, {4}), Tensor()}, CrossEntropyAttrs{}},
      {.in = {logits({4, 3}, 2), Tensor::from<int64_t>({0, -100, 1, 2}, {4}), sample({3}, 3, 0.5, 2)},
       .attrs = CrossEntropyAttrs{-100, 0.2, Reduction::kMean},
       .constant = {2}},
      {{logits({2, 3, 4}, 4), sample_ints({2, 4}, 0, 3, 5), Tensor()}, CrossEntropyAttrs{1, 0, Reduction::kNone}},
      {.in = {logits({2, 3, 2, 2}, 6), sample_ints({2, 2, 2}, 0, 3, 7), sample({3}, 8, 0.5, 2)},
       .attrs = CrossEntropyAttrs{-1, 0.1, Reduction::kSum},
       .constant = {2}},
      {{logits({5}, 9), Tensor::from<int64_t>({3}, {}), Tensor()}, CrossEntropyAttrs{-100, 0.3, Reduction::kNone}},
  };
}

}  // namespace

constinit const OpDef kCrossEntropy{
    .name = "cross_entropy",
    .inputs = "x, target, weight?",
    .outputs = 2,
    .attrs = attrs_of<CrossEntropyAttrs>,
    .dtypes = kFloats,
    .infer = infer_cross_entropy,
    .cpu = kernel::cpu::cross_entropy,
    .grad = grad_cross_entropy,
    .shard = {.ways = ways_cross_entropy},
    .saves = {.in = {0, 1, 2}, .out = {1}},
    .samples = samples_cross_entropy,
    .formula = "logsumexp(x) - x[target], weighted and smoothed",
};

constinit const OpDef kCrossEntropyBackward{
    .name = "cross_entropy_backward",
    .inputs = "dloss, x, target, weight?, logsumexp",
    .attrs = attrs_of<CrossEntropyAttrs>,
    .dtypes = kFloats,
    .infer = infer_cross_entropy_backward,
    .cpu = kernel::cpu::cross_entropy_backward,
    .grad = grad_cross_entropy_backward,
    .shard = {.ways = ways_cross_entropy_backward},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> samples;
      int seed = 20;
      for (const Sample& forward : samples_cross_entropy()) {
        const Shape& sizes = forward.in[0].sizes();
        const Shape loss = loss_shape(sizes, forward.attrs.get<CrossEntropyAttrs>().reduction);
        samples.push_back({.in = {sample(loss, ++seed), forward.in[0], forward.in[1], forward.in[2],
                                  sample(target_shape(sizes), ++seed, 1, 3)},
                           .attrs = forward.attrs,
                           .constant = {3}});
      }
      return samples;
    },
    .formula = "dloss * (softmax(x) - one_hot(target)), weighted and smoothed",
};

constinit const OpDef kCrossEntropyWithSlopes{
    .name = "cross_entropy_with_slopes",
    .inputs = "dloss?, x, target, weight?",
    .outputs = 3,
    .attrs = attrs_of<CrossEntropyAttrs>,
    .dtypes = kFloats,
    .infer = infer_cross_entropy_with_slopes,
    .cpu = kernel::cpu::cross_entropy_with_slopes,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> samples;
      for (const Sample& forward : samples_cross_entropy()) {
        const Shape loss = loss_shape(forward.in[0].sizes(), forward.attrs.get<CrossEntropyAttrs>().reduction);
        const int seed = static_cast<int>(samples.size());
        samples.push_back(
            {.in = {seed % 2 == 0 ? sample(loss, 40 + seed) : Tensor(), forward.in[0], forward.in[1], forward.in[2]},
             .attrs = forward.attrs,
             .constant = {3}});
      }
      return samples;
    },
    .formula = "cross_entropy, and its gradient by dloss",
};

constinit const OpDef kNllLoss{
    .name = "nll_loss",
    .inputs = "x, target, weight?",
    .attrs = attrs_of<NllLossAttrs>,
    .dtypes = kFloats,
    .infer = infer_nll_loss,
    .cpu = kernel::cpu::nll_loss,
    .grad = [](const GradArgs& g) -> Tensors {
      no_gradient_of_weights(g, 2);
      const auto& a = g.attrs.get<NllLossAttrs>();
      return {call(kNllLossBackward, NllLossBackwardAttrs{g.shape(0), a.ignore_index, a.reduction}, g.dout[0], g.in[1],
                   g.in[2]),
              Tensor(), Tensor()};
    },
    .shard = {.ways = ways_nll_loss},
    .linear = linear_in({0}),
    .saves = saves_in({1, 2}),
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4, 3}), sample_ints({4}, 0, 3, 1), Tensor()}, NllLossAttrs{}},
              {.in = {sample({4, 3}), Tensor::from<int64_t>({0, 1, 1, 2}, {4}), sample({3}, 2, 0.5, 2)},
               .attrs = NllLossAttrs{1, Reduction::kMean},
               .constant = {2}},
              {{sample({2, 3, 4}), sample_ints({2, 4}, 0, 3, 3), Tensor()}, NllLossAttrs{-100, Reduction::kNone}},
              {{sample({3}), Tensor::from<int64_t>({2}, {}), Tensor()}, NllLossAttrs{-100, Reduction::kSum}}};
    },
    .formula = "-x[target], weighted",
};

constinit const OpDef kNllLossBackward{
    .name = "nll_loss_backward",
    .inputs = "dloss, target, weight?",
    .attrs = attrs_of<NllLossBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_nll_loss_backward,
    .cpu = kernel::cpu::nll_loss_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      no_gradient_of_weights(g, 2);
      const auto& a = g.attrs.get<NllLossBackwardAttrs>();
      return {call(kNllLoss, NllLossAttrs{a.ignore_index, a.reduction}, g.dout[0], g.in[1], g.in[2]), Tensor(),
              Tensor()};
    },
    .shard = {.ways = ways_nll_loss_backward, .local = with_result_sizes<NllLossBackwardAttrs>},
    .linear = linear_in({0}),
    .saves = saves_in({1, 2}),
    .samples = []() -> std::vector<Sample> {
      return {{.in = {sample({}), sample_ints({4}, 0, 3, 1), sample({3}, 2, 0.5, 2)},
               .attrs = NllLossBackwardAttrs{{4, 3}, -100, Reduction::kMean},
               .constant = {2}},
              {{sample({2, 2}), sample_ints({2, 2}, 0, 3, 3), Tensor()},
               NllLossBackwardAttrs{{2, 3, 2}, 1, Reduction::kNone}}};
    },
    .formula = "-dloss at the targets, 0 elsewhere",
};

Rows cross_entropy_rows() {
  static constexpr const OpDef* kRows[] = {&kCrossEntropy, &kCrossEntropyBackward, &kCrossEntropyWithSlopes, &kNllLoss,
                                           &kNllLossBackward};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {
namespace {

// -sum(target * log_softmax(x)) over the classes.
Tensor soft_cross_entropy(const Tensor& x, Tensor target, const Tensor& weight, Reduction reduction,
                          double label_smoothing) {
  CHORALE_CHECK(target.sizes() == x.sizes(),
                "[cross_entropy] targets that are probabilities must have the shape of x, ", x.sizes(), ", not ",
                target.sizes(), "; targets that are classes are integers");
  CHORALE_CHECK(label_smoothing >= 0 && label_smoothing <= 1,
                "[cross_entropy] label_smoothing must lie between 0 and 1, not be ", label_smoothing);
  const int64_t dim = op::class_dim(x.sizes().size()), classes = x.size(dim);
  if (label_smoothing > 0) target = target * (1 - label_smoothing) + label_smoothing / static_cast<double>(classes);
  Tensor terms = log_softmax(x, dim) * target;
  if (weight.defined()) {
    CHORALE_CHECK(weight.sizes() == Shape{classes}, "[cross_entropy] weight must have shape [", classes, "], not ",
                  weight.sizes());
    Shape sizes(x.sizes().size() - static_cast<size_t>(dim), 1);
    sizes[0] = classes;
    terms = terms * reshape(weight, sizes);
  }
  if (reduction == Reduction::kNone) return -sum(terms, {dim});
  const Tensor total = -sum(terms);
  return reduction == Reduction::kSum ? total : total / (static_cast<double>(x.elems()) / static_cast<double>(classes));
}

}  // namespace

Tensor cross_entropy(const Tensor& x, const Tensor& target, const Tensor& weight, Reduction reduction,
                     int64_t ignore_index, double label_smoothing) {
  op::need_defined("cross_entropy", "x", x);
  op::need_defined("cross_entropy", "target", target);
  CHORALE_CHECK(x.dims() > 0, "[cross_entropy] x must have a dimension of classes, not be a scalar");
  if (is_floating(target.dtype())) return soft_cross_entropy(x, target, weight, reduction, label_smoothing);
  const kernel::CrossEntropyAttrs attrs{ignore_index, label_smoothing, reduction};
  return op::call_many<2>(op::kCrossEntropy, attrs, x, target, weight)[0];
}

Tensor nll_loss(const Tensor& x, const Tensor& target, const Tensor& weight, Reduction reduction,
                int64_t ignore_index) {
  return op::call(op::kNllLoss, kernel::NllLossAttrs{ignore_index, reduction}, x, target, weight);
}

}  // namespace chorale
