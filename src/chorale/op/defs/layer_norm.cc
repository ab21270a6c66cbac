#include <limits>

#include "chorale/kernel/cpu/joined.h"
#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/norm_rules.h"
#include "chorale/op/joined.h"
#include "chorale/op/nn.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::LayerNormAttrs;
using kernel::LayerNormBackwardAttrs;

// x's shape with the normalised dimensions, checked, as ones: the shape of the statistics.
Shape statistics_shape(const InferArgs& args, const Tensor& x, const IntList& normalized_shape) {
  const Shape shape = normalized_shape.shape();
  const size_t dims = x.sizes().size(), count = shape.size();
  const bool fits = count >= 1 && count <= dims && Shape(x.sizes().end() - count, x.sizes().end()) == shape;
  CHORALE_CHECK(fits, "[", args.op.name, "] the last dimensions of x, ", x.sizes(), ", must be the normalised shape ",
                shape);
  Shape statistics = x.sizes();
  for (size_t d = dims - count; d < dims; ++d) statistics[d] = 1;
  return statistics;
}

// The normalised dimensions, counted from the end.
IntList dims_of(const IntList& normalized_shape) {
  IntList dims = normalized_shape;
  for (int64_t i = 0; i < dims.count; ++i) dims.values[i] = i - dims.count;
  return dims;
}

// Leading dimensions may be split. x, statistics, and the shape of the parameters, as labels.
struct LayerNormLabels {
  std::string x, statistics, parameter;

  LayerNormLabels(int64_t dims, const IntList& normalized_shape) {
    const auto leading = static_cast<size_t>(dims) - normalized_shape.size();
    x = letters(dims);
    for (size_t d = leading; d < x.size(); ++d) x = keep_whole(x, static_cast<int64_t>(d));
    parameter = x.substr(leading);
    statistics = x.substr(0, leading);
    for (size_t i = 0; i < parameter.size(); ++i) statistics += static_cast<char>('Z' - static_cast<char>(i));
  }
};

// ---- layer_norm

void infer_layer_norm(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& a = args.attrs.get<LayerNormAttrs>();
  const Shape statistics = statistics_shape(args, x, a.normalized_shape);
  check_parameter(args, "weight", args.in[1], a.normalized_shape.shape());
  if (args.in.size() > 2) check_parameter(args, "bias", args.in[2], a.normalized_shape.shape());
  describe(out[0], x.sizes(), x.dtype(), x);
  for (size_t i = 1; i < out.size(); ++i) describe(out[i], statistics, compute_of(x.dtype()), x);
}

void infer_layer_norm_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &x = args.in[1];
  const auto& a = args.attrs.get<LayerNormBackwardAttrs>();
  check_gradient(args, dy, x);
  const Shape statistics = statistics_shape(args, x, a.normalized_shape);
  for (size_t i = 2; i + 1 < args.in.size(); ++i) check_parameter(args, "statistics", args.in[i], statistics);
  check_parameter(args, "weight", args.in.back(), a.normalized_shape.shape());
  describe(out[0], x.sizes(), x.dtype(), x);
  for (size_t i = 1; i < out.size(); ++i) {
    describe(out[i], a.affine ? a.normalized_shape.shape() : Shape{0}, compute_of(x.dtype()), x);
  }
}

Tensors grad_layer_norm(const GradArgs& g) {
  const auto& a = g.attrs.get<LayerNormAttrs>();
  const Tensor &x = g.in[0], &weight = g.in[1], &mean = g.out[1], &rstd = g.out[2];
  Tensors d(3);
  if (g.dout[0].defined()) {
    const bool affine = g.needs(1) || g.needs(2);
    auto [dx, dweight, dbias] =
        call_many<3>(kLayerNormBackward, LayerNormBackwardAttrs{a.normalized_shape, affine, a.eps}, g.dout[0], x, mean,
                     rstd, weight);
    d[0] = dx;
    if (g.needs(1)) d[1] = dweight;
    if (g.needs(2)) d[2] = dbias;
  }
  // The statistics have gradients of their own in second derivatives.
  const auto n = static_cast<double>(count_elems(a.normalized_shape.span()));
  if (g.dout[1].defined()) d[0] = plus(d[0], expand_as(g.dout[1] / n, x));
  if (g.dout[2].defined()) d[0] = plus(d[0], g.dout[2] * pow(rstd, 3) * (mean - x) / n);
  return d;
}

// The ways to split both normalisations, with any number of parameters and statistics.
void ways_layer_norm(const ShardCall& call, ShardWays& ways) {
  const LayerNormLabels l(call.dims(0), call.attrs.get<LayerNormAttrs>().normalized_shape);
  std::vector<std::string> in(call.in.size(), l.parameter), out(call.out.size(), l.statistics);
  in[0] = out[0] = l.x;
  ways.split(join(in, out));
}
void ways_layer_norm_backward(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<LayerNormBackwardAttrs>();
  const LayerNormLabels l(call.dims(0), a.normalized_shape);
  std::vector<std::string> in(call.in.size(), l.statistics), out(call.out.size(), a.affine ? l.parameter : "Z");
  in[0] = in[1] = out[0] = l.x;
  in.back() = l.parameter;
  ways.split(join(in, out), Reduce::kSum);
}

// ---- with the sum before it, or behind it

void infer_add_layer_norm(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &y = args.in[1];
  CHORALE_CHECK(is_floating(y.dtype()) && promote(x.dtype(), y.dtype()) == x.dtype() && y.sizes() == x.sizes(), "[",
                args.op.name, "] y must look like x, ", x.dtype(), " ", x.sizes(),
                ", in that dtype or a narrower one, not be ", y.dtype(), " ", y.sizes());
  const Shape parameter = args.attrs.get<LayerNormAttrs>().normalized_shape.shape();
  const Shape statistics = statistics_shape(args, x, args.attrs.get<LayerNormAttrs>().normalized_shape);
  check_parameter(args, "weight", args.in[2], parameter);
  check_parameter(args, "bias", args.in[3], parameter);
  describe(out[0], x.sizes(), x.dtype(), x);
  describe(out[1], x.sizes(), y.dtype(), x);
  for (size_t i = 2; i < 4; ++i) describe(out[i], statistics, compute_of(x.dtype()), x);
}

void infer_add_layer_norm_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dsum = args.in[0], &dy = args.in[1], &x = args.in[2];
  const auto& a = args.attrs.get<LayerNormBackwardAttrs>();
  if (dsum.defined()) check_gradient(args, dsum, x);
  CHORALE_CHECK(is_floating(dy.dtype()) && promote(x.dtype(), dy.dtype()) == x.dtype() && dy.sizes() == x.sizes(), "[",
                args.op.name, "] dy must look like x, ", x.dtype(), " ", x.sizes(),
                ", in that dtype or a narrower one, not be ", dy.dtype(), " ", dy.sizes());
  const Shape statistics = statistics_shape(args, x, a.normalized_shape);
  for (size_t i = 3; i < 5; ++i) check_parameter(args, "statistics", args.in[i], statistics);
  check_parameter(args, "weight", args.in[5], a.normalized_shape.shape());
  describe(out[0], x.sizes(), x.dtype(), x);
  describe(out[1], x.sizes(), dy.dtype(), x);
  for (size_t i = 2; i < 4; ++i)
    describe(out[i], a.affine ? a.normalized_shape.shape() : Shape{0}, compute_of(x.dtype()), x);
  if (out.size() > 4) describe(out[4], {count_elems(a.normalized_shape.span())}, dy.dtype(), x);
}
std::vector<Sample> samples_add_layer_norm_backward() {
  return {
      {{sample({3, 8}), sample({3, 8}, 1), sample({3, 8}, 2), sample({3, 1}, 3), sample({3, 1}, 4, 0.5, 2),
        sample({8}, 5)},
       LayerNormBackwardAttrs{{8}, true}},
      {{Tensor(), sample({3, 8}, 1), sample({3, 8}, 2), sample({3, 1}, 3), sample({3, 1}, 4, 0.5, 2), sample({8}, 5)},
       LayerNormBackwardAttrs{{8}, true}},
      {{sample({2, 2, 3}, 6), sample({2, 2, 3}, 7), sample({2, 2, 3}, 8), sample({2, 1, 1}, 9),
        sample({2, 1, 1}, 10, 0.5, 2), Tensor()},
       LayerNormBackwardAttrs{{2, 3}, false}}};
}

// ---- rms_norm

Tensors grad_rms_norm(const GradArgs& g) {
  const auto& a = g.attrs.get<LayerNormAttrs>();
  const Tensor &x = g.in[0], &weight = g.in[1], &rstd = g.out[1];
  Tensors d(2);
  if (g.dout[0].defined()) {
    auto [dx, dweight] = call_many<2>(kRmsNormBackward, LayerNormBackwardAttrs{a.normalized_shape, g.needs(1), a.eps},
                                      g.dout[0], x, rstd, weight);
    d[0] = dx;
    if (g.needs(1)) d[1] = dweight;
  }
  const auto n = static_cast<double>(count_elems(a.normalized_shape.span()));
  if (g.dout[1].defined()) d[0] = plus(d[0], g.dout[1] * pow(rstd, 3) * x / -n);
  return d;
}

// The gradient of both gradients.
template <bool kCentered>
Tensors grad_backward(const GradArgs& g) {
  const auto& a = g.attrs.get<LayerNormBackwardAttrs>();
  constexpr size_t kRstd = kCentered ? 3 : 2;
  const NormGradient of{g.in[0],     g.in[1],         kCentered ? g.in[2] : Tensor(),
                        g.in[kRstd], g.in[kRstd + 1], dims_of(a.normalized_shape)};
  const Tensor v_weight = a.affine ? g.dout[1] : Tensor(), v_bias = a.affine && kCentered ? g.dout[2] : Tensor();
  const NormGradient d = differentiate(of, g.dout[0], v_weight, v_bias);
  if constexpr (kCentered) return {d.dy, d.x, d.mean, d.rstd, d.weight};
  return {d.dy, d.x, d.rstd, d.weight};
}

}  // namespace

constinit const OpDef kLayerNorm{
    .name = "layer_norm",
    .inputs = "x, weight?, bias?",
    .outputs = 3,
    .attrs = attrs_of<LayerNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_layer_norm,
    .cpu = kernel::cpu::layer_norm,
    .grad = grad_layer_norm,
    .shard = {.ways = ways_layer_norm},
    .saves = {.in = {0, 1}, .out = {1, 2}},
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 5}), sample({5}, 1), sample({5}, 2)}, LayerNormAttrs{{5}, 1e-5}},
              {{sample({2, 3, 4}, 3), sample({3, 4}, 4), sample({3, 4}, 5)}, LayerNormAttrs{{3, 4}, 1e-2}},
              {{sample({2, 2, 6}, 6), Tensor(), Tensor()}, LayerNormAttrs{{6}, 1e-5}},
              {{sample({70, 3}, 7), sample({3}, 8), Tensor()}, LayerNormAttrs{{3}, 0.1}}};
    },
    .formula = "y = (x - mean) * rstd * weight + bias over the last dimensions",
};

constinit const OpDef kLayerNormBackward{
    .name = "layer_norm_backward",
    .inputs = "dy, x, mean, rstd, weight?",
    .outputs = 3,
    .attrs = attrs_of<LayerNormBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_layer_norm_backward,
    .cpu = kernel::cpu::layer_norm_backward,
    .grad = grad_backward<true>,
    .shard = {.ways = ways_layer_norm_backward},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = []() -> std::vector<Sample> {
      const Tensor weight = sample({5}, 4);
      return {
          {{sample({3, 5}), sample({3, 5}, 1), sample({3, 1}, 2), sample({3, 1}, 3, 0.5, 2), weight},
           LayerNormBackwardAttrs{{5}, true}},
          {{sample({2, 2, 3}, 5), sample({2, 2, 3}, 6), sample({2, 1, 1}, 7), sample({2, 1, 1}, 8, 0.5, 2), Tensor()},
           LayerNormBackwardAttrs{{2, 3}, false}}};
    },
    .formula = "g = dy * weight, z = (x - mean) * rstd, dx = (g - avg(g) - z * avg(g * z)) * rstd",
};

constinit const OpDef kAddLayerNorm{
    .name = "add_layer_norm",
    .inputs = "x, y, weight?, bias?",
    .outputs = 4,
    .attrs = attrs_of<LayerNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_add_layer_norm,
    .cpu = kernel::cpu::add_layer_norm,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 5}), sample({3, 5}, 1), sample({5}, 2), sample({5}, 3)}, LayerNormAttrs{{5}, 1e-5}},
              {{sample({2, 3, 8}, 4), sample({2, 3, 8}, 5), sample({8}, 6), Tensor()}, LayerNormAttrs{{8}, 1e-2}},
              {{sample({70, 6}, 7), sample({70, 6}, 8), Tensor(), Tensor()}, LayerNormAttrs{{6}, 0.1}}};
    },
    .formula = "x + y, and its layer norm in the dtype of y",
};

constinit const OpDef kAddLayerNormBackward{
    .name = "add_layer_norm_backward",
    .inputs = "dsum?, dy, x, mean, rstd, weight?",
    .outputs = 4,
    .attrs = attrs_of<LayerNormBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_add_layer_norm_backward,
    .cpu = kernel::cpu::add_layer_norm_backward,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = samples_add_layer_norm_backward,
    .formula = "dx = dsum, if there is one, + the dx of layer_norm_backward, also in the dtype of dy; dweight, dbias",
};

constinit const OpDef kAddLayerNormBackwardSummed{
    .name = "add_layer_norm_backward_summed",
    .inputs = "dsum?, dy, x, mean, rstd, weight?",
    .outputs = 5,
    .attrs = attrs_of<LayerNormBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_add_layer_norm_backward,
    .cpu = kernel::cpu::add_layer_norm_backward_summed,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = samples_add_layer_norm_backward,
    .formula =
        "dx = dsum, if there is one, + the dx of layer_norm_backward, also in the dtype of dy; dweight, dbias, and the "
        "sums of the second",
};

constinit const OpDef kRmsNorm{
    .name = "rms_norm",
    .inputs = "x, weight?",
    .outputs = 2,
    .attrs = attrs_of<LayerNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_layer_norm,
    .cpu = kernel::cpu::rms_norm,
    .grad = grad_rms_norm,
    .shard = {.ways = ways_layer_norm},
    .saves = {.in = {0, 1}, .out = {1}},
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 5}), sample({5}, 1)}, LayerNormAttrs{{5}, 1e-5}},
              {{sample({2, 3, 4}, 3), sample({3, 4}, 4)}, LayerNormAttrs{{3, 4}, 1e-2}},
              {{sample({2, 2, 6}, 6), Tensor()}, LayerNormAttrs{{6}, 1e-5}}};
    },
    .formula = "y = x * rstd * weight, rstd = 1 / sqrt(avg(x^2) + eps) over the last dimensions",
};

constinit const OpDef kRmsNormBackward{
    .name = "rms_norm_backward",
    .inputs = "dy, x, rstd, weight?",
    .outputs = 2,
    .attrs = attrs_of<LayerNormBackwardAttrs>,
    .dtypes = kFloats,
    .infer = infer_layer_norm_backward,
    .cpu = kernel::cpu::rms_norm_backward,
    .grad = grad_backward<false>,
    .shard = {.ways = ways_layer_norm_backward},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({3, 5}), sample({3, 5}, 1), sample({3, 1}, 3, 0.5, 2), sample({5}, 4)},
               LayerNormBackwardAttrs{{5}, true}},
              {{sample({2, 2, 3}, 5), sample({2, 2, 3}, 6), sample({2, 1, 1}, 8, 0.5, 2), Tensor()},
               LayerNormBackwardAttrs{{2, 3}, false}}};
    },
    .formula = "g = dy * weight, z = x * rstd, dx = (g - z * avg(g * z)) * rstd",
};

Rows layer_norm_rows() {
  static constexpr const OpDef* kRows[] = {
      &kLayerNorm, &kLayerNormBackward, &kAddLayerNorm, &kAddLayerNormBackward, &kAddLayerNormBackwardSummed,
      &kRmsNorm,   &kRmsNormBackward};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {

Tensor layer_norm(const Tensor& x, const IntList& normalized_shape, const Tensor& weight, const Tensor& bias,
                  double eps) {
  return op::call_many<3>(op::kLayerNorm, kernel::LayerNormAttrs{normalized_shape, eps}, x, weight, bias)[0];
}

Tensor rms_norm(const Tensor& x, const IntList& normalized_shape, const Tensor& weight, std::optional<double> eps) {
  // The machine epsilon of the dtype in which it is computed: f32 for f16 and bf16.
  const double usual = x.defined() && x.dtype() == DType::kF64 ? 0x1p-52 : 0x1p-23;
  return op::call_many<2>(op::kRmsNorm, kernel::LayerNormAttrs{normalized_shape, eps.value_or(usual)}, x, weight)[0];
}

}  // namespace chorale
