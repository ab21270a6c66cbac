// Losses of numbers.
#include "chorale/kernel/cpu/loss/loss.h"

#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/norm_rules.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/nn.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::Difference;
using kernel::DifferenceLossAttrs;

void check_pair(const InferArgs& args, const Tensor& x, const Tensor& y) {
  CHORALE_CHECK(x.sizes() == y.sizes() && x.dtype() == y.dtype(), "[", args.op.name,
                "] two tensors alike are wanted, not ", x.dtype(), " ", x.sizes(), " and ", y.dtype(), " ", y.sizes());
}

void infer_difference_loss(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<DifferenceLossAttrs>();
  check_pair(args, x, args.in[1]);
  CHORALE_CHECK(a.bound > 0, "[", args.op.name, "] the bound between quadratic and linear must be positive, not ",
                a.bound);
  describe(out[0], a.reduction == Reduction::kNone ? x.sizes() : Shape{}, x.dtype(), x);
}

void infer_difference_loss_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dloss = args.in[0], &x = args.in[1];
  const auto& a = args.attrs.get<DifferenceLossAttrs>();
  check_pair(args, x, args.in[2]);
  const Shape expected = a.reduction == Reduction::kNone ? x.sizes() : Shape{};
  CHORALE_CHECK(dloss.sizes() == expected && dloss.dtype() == x.dtype(), "[", args.op.name,
                "] the gradient of the loss is ", dloss.dtype(), " ", dloss.sizes(), " instead of ", x.dtype(), " ",
                expected);
  describe(out[0], x.sizes(), x.dtype(), x);
}

// The loss's second derivative by x, times dloss.
Tensor curvature(const GradArgs& g) {
  const Tensor &dloss = g.in[0], &x = g.in[1], &y = g.in[2];
  const auto& a = g.attrs.get<DifferenceLossAttrs>();
  const Tensor slope = a.reduction == Reduction::kMean ? dloss / static_cast<double>(x.elems()) : dloss;
  const auto within = [&](double value) {
    const Tensor distance = abs(x - y);
    return where(a.kind == Difference::kHuber ? le(distance, a.bound) : lt(distance, a.bound), slope * value, 0);
  };
  switch (a.kind) {
    case Difference::kSquare:
      return slope * 2;
    case Difference::kAbsolute:
      return zeros_like(slope);
    case Difference::kSmooth:
      return within(1 / a.bound);
    case Difference::kHuber:
      break;
  }
  return within(1);
}

// Losses that are added up are partial sums, and so are means, whose parts divide by the number of all elements.
void ways_difference(const ShardCall& call, ShardWays& ways) {
  const std::string x = letters(call.dims(0));
  if (call.attrs.get<DifferenceLossAttrs>().reduction == Reduction::kNone) {
    ways.split(join({x, x}, {x}));
  } else {
    ways.split(join({x, x}, {""}), Reduce::kSum);
  }
}
void ways_difference_backward(const ShardCall& call, ShardWays& ways) {
  const std::string x = letters(call.dims(1));
  ways.split(join({letters(call.dims(0)), x, x}, {x}));
}
Attrs local_difference(const ShardCall& call, std::span<const Part>, std::span<const Part>) {
  auto a = call.attrs.get<DifferenceLossAttrs>();
  if (a.count == 0) a.count = call.in.back().elems();
  return a;
}

// Differences of 0.1 to 0.9 and of 1.1 to 3: away from 0 and from a bound of 1.
std::vector<Tensor> samples_apart(const Shape& sizes) {
  const Tensor x = sample(sizes, 1), near = sample(sizes, 2, 0.1, 0.9), far = sample(sizes, 3, -3, -1.1);
  return {x, x + where(sample_bools(sizes, 4), near, far)};
}

}  // namespace

constinit const OpDef kDifferenceLoss{
    .name = "difference_loss",
    .inputs = "x, y",
    .attrs = attrs_of<DifferenceLossAttrs>,
    .dtypes = kFloats,
    .infer = infer_difference_loss,
    .cpu = kernel::cpu::difference_loss,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor dx = call(kDifferenceLossBackward, g.attrs, g.dout[0], g.in[0], g.in[1]);
      return {dx, g.needs(1) ? -dx : Tensor()};
    },
    .shard = {.ways = ways_difference, .local = local_difference},
    .saves = kSavesInputs,
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> samples;
      for (Difference kind : {Difference::kSquare, Difference::kAbsolute, Difference::kSmooth, Difference::kHuber}) {
        samples.push_back({samples_apart({3, 4}), DifferenceLossAttrs{kind, 1, Reduction::kMean}});
        samples.push_back({samples_apart({19}), DifferenceLossAttrs{kind, 1, Reduction::kSum}});
        samples.push_back({samples_apart({2, 3}), DifferenceLossAttrs{kind, 1, Reduction::kNone}});
      }
      return samples;
    },
    .formula = "f(x - y) with f of a kind: square, absolute, smooth, huber",
};

constinit const OpDef kDifferenceLossBackward{
    .name = "difference_loss_backward",
    .inputs = "dloss, x, y",
    .attrs = attrs_of<DifferenceLossAttrs>,
    .dtypes = kFloats,
    .infer = infer_difference_loss_backward,
    .cpu = kernel::cpu::difference_loss_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor& v = g.dout[0];
      Tensors d(3);
      if (g.needs(0)) {
        const Tensor slope = v * call(kDifferenceLossBackward, g.attrs, ones_like(g.in[0]), g.in[1], g.in[2]);
        d[0] = g.attrs.get<DifferenceLossAttrs>().reduction == Reduction::kNone ? slope : sum(slope);
      }
      if (g.needs(1) || g.needs(2)) {
        d[1] = v * curvature(g);
        d[2] = -d[1];
      }
      return d;
    },
    .shard = {.ways = ways_difference_backward, .local = local_difference},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> samples;
      for (Difference kind : {Difference::kSquare, Difference::kAbsolute, Difference::kSmooth, Difference::kHuber}) {
        for (Reduction reduction : {Reduction::kMean, Reduction::kNone}) {
          std::vector<Tensor> in = samples_apart({3, 2});
          in.insert(in.begin(), sample(reduction == Reduction::kNone ? Shape{3, 2} : Shape{}, 5));
          samples.push_back({in, DifferenceLossAttrs{kind, 1, reduction}});
        }
      }
      return samples;
    },
    .formula = "dloss * f'(x - y)",
};

constinit const OpDef kBinaryCrossEntropy{
    .name = "binary_cross_entropy",
    .inputs = "x, y",
    .dtypes = kFloats,
    .infer =
        [](const InferArgs& args, std::span<OutSpec> out) {
          check_pair(args, args.in[0], args.in[1]);
          describe(out[0], args.in[0].sizes(), args.in[0].dtype(), args.in[0]);
        },
    .cpu = kernel::cpu::binary_cross_entropy,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor &x = g.in[0], &y = g.in[1], &v = g.dout[0];
      Tensors d(2);
      // Bounded, unlike the derivatives of the logarithms.
      if (g.needs(0)) d[0] = v * (x - y) / clamp(x * (1 - x), 1e-12);
      if (g.needs(1)) d[1] = v * (clamp(log1p(-x), -100) - clamp(log(x), -100));
      return d;
    },
    .shard = {.labels = "...,...->..."},
    .saves = kSavesInputs,
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 4}, 0, 0.1, 0.9), sample({3, 4}, 1, 0, 1)}},
              {{sample({5}, 2, 0.1, 0.9), sample({5}, 3, 0, 1)}}};
    },
    .formula = "-(y * log(x) + (1 - y) * log(1 - x)), the logarithms being at least -100",
};

Rows loss_rows() {
  static constexpr const OpDef* kRows[] = {&kDifferenceLoss, &kDifferenceLossBackward, &kBinaryCrossEntropy};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {
namespace {

Tensor reduced(const Tensor& losses, Reduction reduction) {
  return reduction == Reduction::kNone ? losses : reduction == Reduction::kMean ? mean(losses) : sum(losses);
}

// Both in one dtype and shape.
struct Pair {
  Tensor x, y;

  Pair(const char* op, const Tensor& a, const Tensor& b) {
    const DType dtype = promote(a.dtype(), b.dtype());
    const Shape sizes = broadcast_shapes(op, a.sizes(), b.sizes());
    x = expand(to(a, dtype), sizes);
    y = expand(to(b, dtype), sizes);
  }
};

Tensor difference(const char* op, const Tensor& x, const Tensor& y, kernel::Difference kind, double bound,
                  Reduction reduction) {
  const kernel::DifferenceLossAttrs attrs{kind, bound, reduction};
  if (x.dtype() == y.dtype() && x.sizes() == y.sizes()) return op::call(op::kDifferenceLoss, attrs, x, y);
  const Pair pair(op, x, y);
  return op::call(op::kDifferenceLoss, attrs, pair.x, pair.y);
}

}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction) {
  op::need_defined("mse_loss", "x", x);
  op::need_defined("mse_loss", "y", y);
  return difference("mse_loss", x, y, kernel::Difference::kSquare, 1, reduction);
}
Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction reduction) {
  op::need_defined("l1_loss", "x", x);
  op::need_defined("l1_loss", "y", y);
  return difference("l1_loss", x, y, kernel::Difference::kAbsolute, 1, reduction);
}
Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, Reduction reduction, double beta) {
  op::need_defined("smooth_l1_loss", "x", x);
  op::need_defined("smooth_l1_loss", "y", y);
  CHORALE_CHECK(beta >= 0, "[smooth_l1_loss] beta must not be negative, but is ", beta);
  if (beta == 0) return l1_loss(x, y, reduction);
  return difference("smooth_l1_loss", x, y, kernel::Difference::kSmooth, beta, reduction);
}
Tensor huber_loss(const Tensor& x, const Tensor& y, Reduction reduction, double delta) {
  op::need_defined("huber_loss", "x", x);
  op::need_defined("huber_loss", "y", y);
  CHORALE_CHECK(delta > 0, "[huber_loss] delta must be positive, but is ", delta);
  return difference("huber_loss", x, y, kernel::Difference::kHuber, delta, reduction);
}

Tensor binary_cross_entropy(const Tensor& x, const Tensor& y, const Tensor& weight, Reduction reduction) {
  op::need_defined("binary_cross_entropy", "x", x);
  op::need_defined("binary_cross_entropy", "y", y);
  CHORALE_CHECK(x.sizes() == y.sizes(), "[binary_cross_entropy] the target has shape ", y.sizes(), ", x has ",
                x.sizes());
  Tensor losses = op::call(op::kBinaryCrossEntropy, Attrs(), x, to(y, x.dtype()));
  if (weight.defined()) losses = losses * weight;
  return reduced(losses, reduction);
}

Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& y, const Tensor& weight, Reduction reduction,
                                        const Tensor& pos_weight) {
  op::need_defined("binary_cross_entropy_with_logits", "x", x);
  op::need_defined("binary_cross_entropy_with_logits", "y", y);
  CHORALE_CHECK(x.sizes() == y.sizes(), "[binary_cross_entropy_with_logits] the target has shape ", y.sizes(),
                ", x has ", x.sizes());
  // softplus(-x) = -log(sigmoid(x)); beyond 40 it differs from -x by less than a rounding error.
  Tensor positive = softplus(-x, 1, 40);
  if (pos_weight.defined()) positive = positive * ((pos_weight - 1) * y + 1);
  Tensor losses = (1 - y) * x + positive;
  if (weight.defined()) losses = losses * weight;
  return reduced(losses, reduction);
}

Tensor kl_div(const Tensor& x, const Tensor& target, KlReduction reduction, bool log_target) {
  op::need_defined("kl_div", "x", x);
  op::need_defined("kl_div", "target", target);
  Tensor losses;
  if (log_target) {
    losses = exp(target) * (target - x);
  } else {
    // 0 log(0) is 0.
    const Tensor safe = where(gt(target, 0), target, 1.0);
    losses = target * (log(safe) - x);
  }
  switch (reduction) {
    case KlReduction::kNone:
      return losses;
    case KlReduction::kMean:
      return mean(losses);
    case KlReduction::kSum:
      return sum(losses);
    case KlReduction::kBatchMean:
      break;
  }
  CHORALE_CHECK(x.dims() > 0, "[kl_div] the mean over a batch needs a dimension of samples, but x is a scalar");
  return sum(losses) / static_cast<double>(losses.size(0));
}

Tensor cosine_similarity(const Tensor& x, const Tensor& y, int64_t dim, double eps) {
  op::need_defined("cosine_similarity", "x", x);
  op::need_defined("cosine_similarity", "y", y);
  const Pair pair("cosine_similarity", x, y);
  dim = normalize_dim("cosine_similarity", dim, pair.x.dims());
  // Cut before the root, which has no derivative at 0.
  const auto length = [&](const Tensor& t) { return sqrt(maximum(sum(square(t), {dim}), eps * eps)); };
  return sum(pair.x * pair.y, {dim}) / (length(pair.x) * length(pair.y));
}

}  // namespace chorale
