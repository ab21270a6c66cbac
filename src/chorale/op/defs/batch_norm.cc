#include "chorale/kernel/cpu/joined.h"
#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/defs/norm_rules.h"
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

using kernel::BatchNormAttrs;
using kernel::RunningAverageAttrs;

int64_t count_per_channel(const Shape& sizes) {
  int64_t count = sizes[0];
  for (size_t d = 2; d < sizes.size(); ++d) count *= sizes[d];
  return count;
}

void check_batch(const InferArgs& args, const Tensor& x) {
  CHORALE_CHECK(x.dims() >= 2, "[", args.op.name, "] x must be [N, C, …], not ", x.sizes());
}

// x's shape in row-major or channels-last order, whichever x has.
void describe_like(OutSpec& out, const Tensor& x) {
  describe(out, x.sizes(), x.dtype(), x);
  if (x.is_contiguous() || !x.is_channels_last()) return;
  out.strides = channels_last_strides(x.sizes());
  out.strided = true;
}

// One vector for each channel of x.
void describe_channels(std::span<OutSpec> out, const Tensor& x) {
  for (OutSpec& one : out) describe(one, {x.size(1)}, compute_of(x.dtype()), x);
}

void infer_normalized(const InferArgs& args, size_t weight, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  check_batch(args, x);
  CHORALE_CHECK(count_per_channel(x.sizes()) != 1, "[", args.op.name, "] one value per channel has no variance: x is ",
                x.sizes(), "; train with more samples, or normalise with running statistics");
  check_parameter(args, "weight", args.in[weight], {x.size(1)});
  check_parameter(args, "bias", args.in[weight + 1], {x.size(1)});
  describe_like(out[0], x);
  describe_channels(out.subspan(1), x);
}
void infer_batch_norm(const InferArgs& args, std::span<OutSpec> out) { infer_normalized(args, 1, out); }
void infer_batch_norm_relu(const InferArgs& args, std::span<OutSpec> out) {
  infer_normalized(args, 2, out);
  if (args.in[1].defined()) check_gradient(args, args.in[1], args.in[0]);
}

// x, mean, variance and weight are the inputs from `x_at` on.
void infer_gradients(const InferArgs& args, size_t x_at, std::span<OutSpec> out) {
  const Tensor& x = args.in[x_at];
  check_batch(args, x);
  check_gradient(args, args.in[0], x);
  check_parameter(args, "mean", args.in[x_at + 1], {x.size(1)});
  check_parameter(args, "variance", args.in[x_at + 2], {x.size(1)});
  check_parameter(args, "weight", args.in[x_at + 3], {x.size(1)});
  describe_like(out[0], x);
  describe_channels(out.subspan(1), x);
}
void infer_batch_norm_backward(const InferArgs& args, std::span<OutSpec> out) { infer_gradients(args, 1, out); }
void infer_batch_norm_relu_backward(const InferArgs& args, std::span<OutSpec> out) {
  infer_gradients(args, 1, out);
  check_parameter(args, "bias", args.in[5], {args.in[1].size(1)});
}
void infer_relu_batch_norm_backward(const InferArgs& args, std::span<OutSpec> out) {
  infer_gradients(args, 3, out.subspan(1));
  if (args.in[1].defined()) check_gradient(args, args.in[1], args.in[3]);
  check_gradient(args, args.in[2], args.in[3]);
  describe_like(out[0], args.in[3]);
}

void infer_running_average(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &running = args.in[0], &now = args.in[1];
  CHORALE_CHECK(running.dims() == 1 && now.sizes() == running.sizes() && is_floating(now.dtype()),
                "[running_average] two floating vectors of one length are wanted, not ", running.dtype(), " ",
                running.sizes(), " and ", now.dtype(), " ", now.sizes());
  describe(out[0], running.sizes(), running.dtype(), running);
}

// [C] as [C, 1, …], which broadcasts to x [N, C, …].
Tensor per_channel(const Tensor& p, int64_t count) {
  if (!p.defined()) return p;
  Shape sizes(static_cast<size_t>(count) - 1, 1);
  sizes[0] = p.elems();
  return reshape(p, sizes);
}

// All dimensions but the channels.
IntList places(int64_t count) {
  IntList dims{0};
  for (int64_t d = 2; d < count; ++d) dims.values[dims.count++] = d;
  return dims;
}

Tensors grad_batch_norm(const GradArgs& g) {
  const Tensor &x = g.in[0], &weight = g.in[1], &mean = g.out[1], &variance = g.out[2];
  Tensors d(3);
  if (g.dout[0].defined()) {
    auto [dx, dweight, dbias] = call_many<3>(kBatchNormBackward, g.attrs, g.dout[0], x, mean, variance, weight);
    d[0] = dx;
    if (g.needs(1)) d[1] = dweight;
    if (g.needs(2)) d[2] = dbias;
  }
  // The statistics have gradients of their own in second derivatives.
  const auto n = static_cast<double>(count_per_channel(x.sizes()));
  if (g.dout[1].defined()) d[0] = plus(d[0], expand_as(per_channel(g.dout[1] / n, x.dims()), x));
  if (g.dout[2].defined()) {
    d[0] = plus(d[0], (x - per_channel(mean, x.dims())) * per_channel(g.dout[2] * (2 / n), x.dims()));
  }
  return d;
}

Tensors grad_batch_norm_backward(const GradArgs& g) {
  const Tensor &x = g.in[1], &variance = g.in[3], &weight = g.in[4];
  const int64_t dims = x.dims();
  const Tensor rstd = rsqrt(variance + g.attrs.get<BatchNormAttrs>().eps);
  const NormGradient of{g.in[0],     x, per_channel(g.in[2], dims), per_channel(rstd, dims), per_channel(weight, dims),
                        places(dims)};
  const NormGradient d = differentiate(of, g.dout[0], per_channel(g.dout[1], dims), per_channel(g.dout[2], dims));
  const auto sum_of = [&](const Tensor& t) {
    return t.defined() ? reshape(sum(t, places(dims)), variance.sizes()) : t;
  };
  Tensors result(5);
  if (d.dy.defined()) result[0] = expand_as(d.dy, x);
  result[1] = d.x;
  result[2] = sum_of(d.mean);
  if (d.rstd.defined()) result[3] = sum_of(d.rstd) * pow(rstd, 3) * -0.5;
  if (d.weight.defined()) result[4] = sum_of(d.weight);
  return result;
}

// Channels may be split: nothing is summed over them. Splitting samples would change the statistics.
void ways_batch_norm(const ShardCall& call, ShardWays& ways) {
  const auto labels = [](int64_t dims) {
    return dims < 2 ? std::string(1, 'b') : replaced(keep_whole(letters(dims)), 1, 'b');
  };
  std::vector<std::string> in, out;
  for (size_t i = 0; i < call.in.size(); ++i) in.push_back(labels(call.dims(i)));
  for (const Shape& sizes : call.out) out.push_back(labels(static_cast<int64_t>(sizes.size())));
  ways.split(join(in, out));
}

}  // namespace

constinit const OpDef kBatchNorm{
    .name = "batch_norm",
    .inputs = "x, weight?, bias?",
    .outputs = 3,
    .attrs = attrs_of<BatchNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_batch_norm,
    .cpu = kernel::cpu::batch_norm,
    .grad = grad_batch_norm,
    .shard = {.ways = ways_batch_norm},
    .saves = {.in = {0, 1}, .out = {1, 2}},
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5, 3}), sample({3}, 1), sample({3}, 2)}, BatchNormAttrs{1e-5}},
              {{sample({2, 3, 4}, 3), sample({3}, 4), Tensor()}, BatchNormAttrs{0.1}},
              {{sample({2, 2, 3, 3}, 5), Tensor(), Tensor()}, BatchNormAttrs{1e-5}},
              {{permute(sample({2, 3, 2, 5}, 6), {0, 3, 1, 2}), sample({5}, 7), sample({5}, 8)}, BatchNormAttrs{1e-5}},
              {{sample({2, 2, 2, 1, 3}, 9), sample({2}, 10), sample({2}, 11)}, BatchNormAttrs{1e-3}}};
    },
    .formula = "y = (x - mean) / sqrt(variance + eps) * weight + bias per channel",
};

constinit const OpDef kBatchNormBackward{
    .name = "batch_norm_backward",
    .inputs = "dy, x, mean, variance, weight?",
    .outputs = 3,
    .attrs = attrs_of<BatchNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_batch_norm_backward,
    .cpu = kernel::cpu::batch_norm_backward,
    .grad = grad_batch_norm_backward,
    .shard = {.ways = ways_batch_norm},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4, 3}), sample({4, 3}, 1), sample({3}, 2), sample({3}, 3, 0.5, 2), sample({3}, 4)},
               BatchNormAttrs{0.1}},
              {{sample({2, 2, 3}, 5), sample({2, 2, 3}, 6), sample({2}, 7), sample({2}, 8, 0.5, 2), Tensor()},
               BatchNormAttrs{1e-5}}};
    },
    .formula = "z = (x - mean) * rstd, dx = (dy - avg(dy) - z * avg(dy * z)) * rstd * weight",
};

// Autograd does not record this op: running statistics are no function of the loss.
constinit const OpDef kRunningAverage{
    .name = "running_average",
    .inputs = "running, now",
    .attrs = attrs_of<RunningAverageAttrs>,
    .dtypes = kFloats,
    .infer = infer_running_average,
    .cpu = kernel::cpu::running_average,
    .grad = not_differentiable,
    .shard = {.labels = "b,b->b"},
    .linear = linear_terms({{0}, {1}}),
    .in_place = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5}), sample({5}, 1)}, RunningAverageAttrs{0.1, 1.25}}};
    },
    .formula = "(1 - momentum) * running + momentum * scale * now",
};

constinit const OpDef kBatchNormRelu{
    .name = "batch_norm_relu",
    .inputs = "x, other?, weight?, bias?",
    .outputs = 3,
    .attrs = attrs_of<BatchNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_batch_norm_relu,
    .cpu = kernel::cpu::batch_norm_relu,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({5, 3}), Tensor(), sample({3}, 1), sample({3}, 2)}, BatchNormAttrs{1e-5}},
              {{sample({2, 3, 4}, 3), sample({2, 3, 4}, 4), sample({3}, 5), Tensor()}, BatchNormAttrs{0.1}},
              {{permute(sample({2, 3, 2, 8}, 6), {0, 3, 1, 2}), permute(sample({2, 3, 2, 8}, 7), {0, 3, 1, 2}),
                sample({8}, 8), sample({8}, 9)},
               BatchNormAttrs{1e-5}},
              {{permute(sample({2, 3, 2, 5}, 10), {0, 3, 1, 2}), sample({2, 5, 3, 2}, 11), Tensor(), Tensor()},
               BatchNormAttrs{1e-3}}};
    },
    .formula = "relu(batch_norm(x) + other), each rounded",
};

constinit const OpDef kBatchNormReluBackward{
    .name = "batch_norm_relu_backward",
    .inputs = "dy, x, mean, variance, weight?, bias?",
    .outputs = 3,
    .attrs = attrs_of<BatchNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_batch_norm_relu_backward,
    .cpu = kernel::cpu::batch_norm_relu_backward,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      const auto row = [](const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias) {
        const auto [y, mean, variance] = call_many<3>(kBatchNorm, BatchNormAttrs{0.1}, x, Tensor(), Tensor());
        return Sample{{dy, x, mean, variance, weight, bias}, BatchNormAttrs{0.1}};
      };
      return {row(sample({4, 3}), sample({4, 3}, 1), sample({3}, 4), sample({3}, 5)),
              row(sample({2, 2, 3}, 6), sample({2, 2, 3}, 7), Tensor(), Tensor()),
              row(sample({2, 8, 3, 2}, 8), permute(sample({2, 3, 2, 8}, 9), {0, 3, 1, 2}), sample({8}, 10),
                  sample({8}, 11))};
    },
    .formula = "batch_norm_backward of dy where the ReLU of the norm let something through",
};

constinit const OpDef kReluBatchNormBackward{
    .name = "relu_batch_norm_backward",
    .inputs = "dy, other?, y, x, mean, variance, weight?",
    .outputs = 4,
    .attrs = attrs_of<BatchNormAttrs>,
    .dtypes = kFloats,
    .infer = infer_relu_batch_norm_backward,
    .cpu = kernel::cpu::relu_batch_norm_backward,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4, 3}), Tensor(), sample({4, 3}, 1), sample({4, 3}, 2), sample({3}, 3), sample({3}, 4, 0.5, 2),
                sample({3}, 5)},
               BatchNormAttrs{0.1}},
              {{sample({2, 2, 3}, 6), sample({2, 2, 3}, 7), sample({2, 2, 3}, 8), sample({2, 2, 3}, 9), sample({2}, 10),
                sample({2}, 11, 0.5, 2), Tensor()},
               BatchNormAttrs{1e-5}},
              {{permute(sample({2, 3, 2, 8}, 12), {0, 3, 1, 2}), sample({2, 8, 3, 2}, 13),
                permute(sample({2, 3, 2, 8}, 14), {0, 3, 1, 2}), permute(sample({2, 3, 2, 8}, 15), {0, 3, 1, 2}),
                sample({8}, 16), sample({8}, 17, 0.5, 2), sample({8}, 18)},
               BatchNormAttrs{1e-5}}};
    },
    .formula = "dy + other where y is not zero, and its batch_norm_backward",
};

Rows batch_norm_rows() {
  static constexpr const OpDef* kRows[] = {&kBatchNorm,     &kBatchNormBackward,     &kRunningAverage,
                                           &kBatchNormRelu, &kBatchNormReluBackward, &kReluBatchNormBackward};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {
namespace {

// running = (1 - momentum) * running + momentum * scale * now
void move_towards(const Tensor& running, const Tensor& now, double momentum, double scale) {
  op::call_into(op::kRunningAverage, kernel::RunningAverageAttrs{momentum, scale}, running, running, now);
}

}  // namespace

Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight,
                  const Tensor& bias, bool training, double momentum, double eps) {
  op::need_defined("batch_norm", "x", x);
  CHORALE_CHECK(running_mean.defined() == running_var.defined(),
                "[batch_norm] running mean and variance go together, but only the ",
                running_mean.defined() ? "mean" : "variance", " is given");
  CHORALE_CHECK(x.dims() >= 2, "[batch_norm] x must be [N, C, …], not ", x.sizes());
  for (const Tensor* running : {&running_mean, &running_var}) {
    CHORALE_CHECK(!running->defined() || (running->sizes() == Shape{x.size(1)} && is_floating(running->dtype())),
                  "[batch_norm] running statistics must be floating tensors of shape [", x.size(1), "], not ",
                  running->dtype(), " ", running->sizes());
  }
  if (training) {
    auto [y, mean, variance] = op::call_many<3>(op::kBatchNorm, kernel::BatchNormAttrs{eps}, x, weight, bias);
    if (running_mean.defined()) {
      const auto n = static_cast<double>(op::count_per_channel(x.sizes()));
      move_towards(running_mean, mean, momentum, 1);
      move_towards(running_var, variance, momentum, n / (n - 1));
    }
    return y;
  }
  CHORALE_CHECK(running_mean.defined(), "[batch_norm] without training, running statistics must be given");
  Tensor scale = rsqrt(running_var + eps);
  if (weight.defined()) scale = scale * weight;
  const Tensor offset = running_mean * scale, shift = bias.defined() ? bias - offset : -offset;
  const Tensor y = addcmul(op::per_channel(shift, x.dims()), x, op::per_channel(scale, x.dims()));
  return to(y, x.dtype());
}

Tensor instance_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight,
                     const Tensor& bias, bool use_input_stats, double momentum, double eps) {
  op::need_defined("instance_norm", "x", x);
  CHORALE_CHECK(x.dims() >= 3, "[instance_norm] x must be [N, C, …] with places behind the channels, not ", x.sizes());
  CHORALE_CHECK(!use_input_stats || count_elems(std::span(x.sizes().begin() + 2, x.sizes().end())) != 1,
                "[instance_norm] one value per channel has no variance: x is ", x.sizes());
  if (!use_input_stats) return batch_norm(x, running_mean, running_var, weight, bias, false, momentum, eps);
  if (!running_mean.defined() && !running_var.defined()) return group_norm(x, x.size(1), weight, bias, eps);
  // Samples become channels; running statistics move towards the average over samples.
  const int64_t N = x.size(0), C = x.size(1);
  const auto repeated = [&](const Tensor& p) { return p.defined() ? reshape(expand(p, {N, C}), {N * C}) : p; };
  Shape sizes = x.sizes();
  sizes[0] = 1;
  sizes[1] = N * C;
  const Tensor mean = clone(repeated(running_mean)), variance = clone(repeated(running_var));
  const Tensor y = batch_norm(reshape(x, sizes), mean, variance, repeated(weight), repeated(bias), true, momentum, eps);
  const auto average = [&](const Tensor& p) { return chorale::mean(view(p, {N, C}), {0}); };
  if (running_mean.defined()) copy_(running_mean, average(mean));
  if (running_var.defined()) copy_(running_var, average(variance));
  return reshape(y, x.sizes());
}

}  // namespace chorale
