// Norms, variances, log-sum-exp.
#include <array>
#include <cmath>

#include "chorale/kernel/cpu/reduce/statistics.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/reduce_common.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {
namespace {

void infer_norm(const InferArgs& a, std::span<OutSpec> out) {
  const auto& attrs = a.attrs.get<NormAttrs>();
  const Tensor& x = a.in[0];
  infer_reduction<NormAttrs>(a, real_of(x.dtype()), out[0]);
  CHORALE_CHECK(!std::isnan(attrs.p), "[norm] p is not a number");
  // The norm of nothing is 0 where adding a zero changes no norm.
  if (attrs.p < 0 || std::isinf(attrs.p)) {
    check_not_empty(a.op.name, x.sizes(), dim_mask(a.op.name, attrs.dims, x.dims()));
  }
}

// dy / y^power, and 0 where the norm y is 0: the gradient that is chosen there.
Tensor over_norm(const Tensor& dy, const Tensor& y, double power) {
  return masked_fill(dy / (power == 1 ? y : pow(y, power)), eq(y, 0), 0);
}

Tensors norm_grad(const GradArgs& g) {
  const auto& attrs = g.attrs.get<NormAttrs>();
  const double p = attrs.p;
  const Tensor x = g.in[0], y = g.out[0], dy = g.dout[0];
  const DimMask reduced = reduced_dims<NormAttrs>(g);
  const auto widen = [&](const Tensor& results) { return spread(results, x.sizes(), reduced); };
  if (p == 0) return {zeros_like(x)};
  if (p == 1) return {sign(x) * widen(dy)};
  if (p == 2) return {x * widen(over_norm(dy, y, 1))};
  if (std::isinf(p)) {  // shared among the elements of that size
    const Tensor here = to(eq(abs(x), widen(y)), real_of(x.dtype()));
    return {sign(x) * (here * widen(dy / sum(here, attrs.dims, attrs.keepdim)))};
  }
  if (p < 1) return {sign(x) * masked_fill(pow(abs(x), p - 1), eq(x, 0), 0) * widen(dy * pow(y, 1 - p))};
  if (p < 2) return {sign(x) * pow(abs(x), p - 1) * widen(over_norm(dy, y, p - 1))};
  return {x * pow(abs(x), p - 2) * widen(over_norm(dy, y, p - 1))};
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The norm of nothing is 0 where that changes no norm.
void ways_norm(const ShardCall& call, ShardWays& ways) {
  const double p = call.attrs.get<NormAttrs>().p;
  split_reduction<NormAttrs>(call, ways, Partial::norm(p), p < 0 || std::isinf(p) ? Parts::kNotEmpty : Parts::kAny);
}

constexpr OpDef kNorm{
    .name = "norm",
    .inputs = "x",
    .attrs = attrs_of<NormAttrs>,
    .dtypes = kFloats | kComplexes,
    .infer = infer_norm,
    .cpu = kernel::cpu::norm,
    .grad = norm_grad,
    .shard = {.ways = ways_norm},
    .saves = kSavesBoth,
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 3, 4})}, NormAttrs{2, {}, false}},
              {{sample({2, 3, 4}, 1)}, NormAttrs{2, {1}, true}},
              {{sample({3, 4}, 2)}, NormAttrs{1, {0}, false}},
              {{sample({3, 4}, 3)}, NormAttrs{3, {-1}, false}},
              {{sample({3, 4}, 4)}, NormAttrs{1.5, {0, 1}, true}},
              {{sample({4}, 5, 0.5, 2)}, NormAttrs{0.5, {}, false}},
              {{sample({3, 4}, 6)}, NormAttrs{kInfinity, {1}, false}},
              {{sample({3, 4}, 7)}, NormAttrs{-kInfinity, {1}, false}},
              {{sample({3, 4}, 8)}, NormAttrs{0, {1}, false}},
              {{sample_complex({3, 2}, 9)}, NormAttrs{2, {0}, false}}};
    },
    .formula = "(sum of |x|^p over dims)^(1/p)",
};

double divisor(const VarAttrs& attrs, int64_t count) {
  return std::max(0.0, static_cast<double>(count) - attrs.correction);
}

// The gradient of x, given the gradient of its variance.
Tensor var_grad(const GradArgs& g, const Tensor& dy) {
  const auto& attrs = g.attrs.get<VarAttrs>();
  const Tensor x = g.in[0];
  const DimMask reduced = reduced_dims<VarAttrs>(g);
  const double scale = 2 / divisor(attrs, reduced_count(x.sizes(), reduced));
  return spread(dy * scale, x.sizes(), reduced) * (x - mean(x, attrs.dims, true));
}

void infer_var(const InferArgs& a, std::span<OutSpec> out) { infer_reduction<VarAttrs>(a, a.in[0].dtype(), out[0]); }

std::vector<Sample> samples_var() {
  return {{{sample({2, 3, 4})}, VarAttrs{}},
          {{sample({2, 3, 4}, 1)}, VarAttrs{{1}, 0, true}},
          {{sample({3, 2, 4}, 2)}, VarAttrs{{0, -1}, 1, false}},
          {{sample({5}, 3)}, VarAttrs{{0}, 2, false}}};
}

constexpr OpDef kVar{
    .name = "var",
    .inputs = "x",
    .attrs = attrs_of<VarAttrs>,
    .dtypes = kFloats,
    .infer = infer_var,
    .cpu = kernel::cpu::var,
    .grad = [](const GradArgs& g) -> Tensors { return {var_grad(g, g.dout[0])}; },
    .shard = kReducesWhole<VarAttrs>,
    .saves = kSavesInputs,
    .samples = samples_var,
    .formula = "sum of (x - mean)^2 over dims / (count - correction)",
};

constexpr OpDef kStd{
    .name = "std",
    .inputs = "x",
    .attrs = attrs_of<VarAttrs>,
    .dtypes = kFloats,
    .infer = infer_var,
    .cpu = kernel::cpu::stddev,
    .grad = [](const GradArgs& g) -> Tensors { return {var_grad(g, over_norm(g.dout[0] / 2, g.out[0], 1))}; },
    .shard = kReducesWhole<VarAttrs>,
    .saves = kSavesBoth,
    .samples = samples_var,
    .formula = "sqrt(var(x))",
};

constexpr OpDef kLogsumexp{
    .name = "logsumexp",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kFloats,
    .infer = [](const InferArgs& a,
                std::span<OutSpec> out) { infer_reduction<ReduceAttrs>(a, a.in[0].dtype(), out[0]); },
    .cpu = kernel::cpu::logsumexp,
    .grad = [](const GradArgs& g) -> Tensors {
      const DimMask reduced = reduced_dims<ReduceAttrs>(g);
      const Shape& sizes = g.shape(0);
      return {exp(g.in[0] - spread(g.out[0], sizes, reduced)) * spread(g.dout[0], sizes, reduced)};
    },
    .shard = kReducesWhole<ReduceAttrs>,
    .saves = kSavesBoth,
    .autocast = Cast::kF32,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({2, 3, 4})}, ReduceAttrs{}},
              {{sample({2, 3, 4}, 1)}, ReduceAttrs{{1}, true}},
              {{sample({3, 2, 4}, 2)}, ReduceAttrs{{0, -1}, false}}};
    },
    .formula = "log(sum of exp(x) over dims)",
};

bool holds_complex_values(const Tensor& x) { return x.defined() && is_complex(x.dtype()); }

// Functions of real numbers turn integers into f32.
Tensor floating(const Tensor& x) { return is_differentiable(x.dtype()) ? x : to(x, DType::kF32); }

}  // namespace

Rows statistics_rows() {
  static constexpr std::array rows{&kNorm, &kVar, &kStd, &kLogsumexp};
  return rows;
}

}  // namespace op

Tensor norm(const Tensor& x, double p, const IntList& dims, bool keepdim) {
  return op::call(op::kNorm, op::NormAttrs{p, dims, keepdim}, x);
}
Tensor var(const Tensor& x, const IntList& dims, bool keepdim, double correction) {
  if (op::holds_complex_values(x)) {  // the mean of |x - mean|^2
    return var(real(x), dims, keepdim, correction) + var(imag(x), dims, keepdim, correction);
  }
  return op::call(op::kVar, op::VarAttrs{dims, correction, keepdim}, x);
}
Tensor stddev(const Tensor& x, const IntList& dims, bool keepdim, double correction) {
  op::need_defined("stddev", "x", x);
  if (op::holds_complex_values(x)) return sqrt(var(x, dims, keepdim, correction));
  return op::call(op::kStd, op::VarAttrs{dims, correction, keepdim}, x);
}
Tensor logsumexp(const Tensor& x, const IntList& dims, bool keepdim) {
  op::need_defined("logsumexp", "x", x);
  if (op::holds_complex_values(x)) {
    // The largest real part is taken out; it cancels in the gradient.
    Tensor shift = amax(op::call(op::kDetach, {}, real(x)), dims, true);
    shift = where(isfinite(shift), shift, 0);
    const Tensor logs = log(sum(exp(x - shift), dims, true)) + shift;
    return keepdim ? logs : sum(logs, dims, false);  // over dimensions of 1
  }
  return op::call(op::kLogsumexp, op::ReduceAttrs{dims, keepdim}, op::floating(x));
}

}  // namespace chorale
