#include <algorithm>
#include <cmath>

#include "chorale/kernel/cpu/loss/class_targets.h"
#include "chorale/kernel/cpu/loss/loss.h"
#include "chorale/kernel/cpu/norm/row_arithmetic.h"
#include "chorale/kernel/cpu/support/along_dim.h"

namespace chorale::kernel::cpu {
namespace {

Around lines_of(const Tensor& x) { return around(x.sizes(), x.dims() == 1 ? 0 : 1); }

// Losses of single elements become the result: themselves, their sum or their mean.
template <class S, class C>
void reduce_losses(const C* losses, int64_t count, Reduction reduction, double denominator, const Tensor& out) {
  if (reduction == Reduction::kNone) {
    vec::convert_loop(dtype_of<C>, dtype_of<S>)(losses, out.data<S>(), count);
    return;
  }
  C total = 0;
  vec::reduce_row(vec::ReduceOp::kSum, dtype_of<C>)(losses, count, &total);
  *out.data<S>() = static_cast<S>(static_cast<C>(static_cast<double>(total) / denominator));
}

// The gradient of the loss of element i before its own derivative.
template <class C>
class LossGradient {
 public:
  LossGradient(const Tensor& dloss, Reduction reduction, double denominator)
      : dloss_(contiguous(dloss, dtype_of<C>)),
        values_(dloss_.data<C>()),
        each_(reduction == Reduction::kNone),
        denominator_(denominator) {}
  C operator()(int64_t i) const { return static_cast<C>(static_cast<double>(values_[each_ ? i : 0]) / denominator_); }

 private:
  Tensor dloss_;
  const C* values_;  // data() checks, which a loop over lines should not pay for each time
  bool each_;
  double denominator_;
};

// Note [Exact logsumexp]. exp(x - lse) errs by as much as lse does, which of 8 to 16 in f32 is four units in the last
// place. So logsumexp is f64 for every x. Its nearest C is subtracted from each x, and what that lacks, a small number
// d, is a factor exp(d) of the line, for which three terms of the series do.
template <class C>
struct Shift {
  C shift;
  double factor = 1;

  explicit Shift(double lse) : shift(static_cast<C>(lse)) {
    const double d = static_cast<double>(shift) - lse;
    if (std::isfinite(lse)) factor += d * (1 + d / 2);
  }
  C scaled(C scale) const { return static_cast<C>(static_cast<double>(scale) * factor); }
};

}  // namespace

// With p = softmax(x), target t, class weights w of sum W, smoothing s and K classes, the loss of a line is
//   (1 - s) w_t (lse - x_t) + s / K (W lse - sum_c w_c x_c)
void cross_entropy(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<CrossEntropyAttrs>();
  const Tensor x = contiguous(args.in[0]);
  const Around lines = lines_of(x);
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const int64_t K = lines.length;
    const ClassTargets<C> targets("cross_entropy", args.in[1], args.in[2], K, attrs.ignore_index);
    const C smooth = static_cast<C>(attrs.label_smoothing), share = smooth / static_cast<C>(K);
    const C total_weight = smooth > 0 ? targets.total_class_weight() : C(0);
    double* lse = args.out[1].data<double>();
    const Scratch losses(static_cast<size_t>(targets.count()) * sizeof(C));
    for_lines<S, 1>(lines, {x.data<S>()}, nullptr, [&](const auto& in, auto*, int64_t i) {
      const auto [max, sum] = vec::max_sum_exp(in[0], K);
      lse[i] = static_cast<double>(max) + std::log(static_cast<double>(sum));
      C loss = 0;
      if (targets.counts(i)) {
        const auto distance = lse[i] - static_cast<double>(in[0][targets.of(i)]);
        loss = (1 - smooth) * targets.weight(i) * static_cast<C>(distance);
        if (smooth > 0) {
          C weighted = 0;
          if (targets.class_weights()) {
            vec::dot(dtype_of<C>)(targets.class_weights(), in[0], K, &weighted);
          } else {
            vec::reduce_row(vec::ReduceOp::kSum, dtype_of<C>)(in[0], K, &weighted);
          }
          loss += share * static_cast<C>(static_cast<double>(total_weight) * lse[i] - static_cast<double>(weighted));
        }
      }
      losses.as<C>()[i] = loss;
    });
    reduce_losses<C>(losses.as<C>(), targets.count(), attrs.reduction, targets.denominator(attrs.reduction),
                     args.out[0]);
  });
}

// dx_j = g ((1 - s) w_t + s W / K) p_j - g s / K w_j - [j = t] g (1 - s) w_t
void cross_entropy_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<CrossEntropyAttrs>();
  const Tensor x = contiguous(args.in[1]);
  const Around lines = lines_of(x);
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const int64_t K = lines.length;
    const ClassTargets<C> targets("cross_entropy", args.in[2], args.in[3], K, attrs.ignore_index);
    const LossGradient<C> gradient(args.in[0], attrs.reduction, targets.denominator(attrs.reduction));
    const Tensor lse_of_lines = contiguous(args.in[4], DType::kF64);
    const double* lse = lse_of_lines.data<double>();
    const C smooth = static_cast<C>(attrs.label_smoothing), share = smooth / static_cast<C>(K);
    const C total_weight = smooth > 0 ? targets.total_class_weight() : C(0);
    for_lines<S, 1>(lines, {x.data<S>()}, args.out[0].data<S>(), [&](const auto& in, auto* dx, int64_t i) {
      if (!targets.counts(i)) {
        std::fill(dx, dx + K, C(0));
        return;
      }
      const C g = gradient(i), hit = g * (1 - smooth) * targets.weight(i);
      const C offset = targets.class_weights() ? C(0) : -g * share;
      const Shift<C> by(lse[i]);
      exp_affine_row(in[0], {by.shift, by.scaled(hit + g * share * total_weight), offset}, dx, K);
      if (targets.class_weights() && smooth > 0) vec::axpy(-g * share, targets.class_weights(), dx, K);
      dx[targets.of(i)] -= hit;
    });
  });
}

void nll_loss(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<NllLossAttrs>();
  const Tensor x = contiguous(args.in[0]);
  const Around lines = lines_of(x);
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const ClassTargets<C> targets("nll_loss", args.in[1], args.in[2], lines.length, attrs.ignore_index);
    const Scratch losses(static_cast<size_t>(targets.count()) * sizeof(C));
    const S* values = x.data<S>();
    for (int64_t i = 0; i < targets.count(); ++i) {
      const int64_t line = i / lines.inner * lines.length * lines.inner + i % lines.inner;
      losses.as<C>()[i] =
          targets.counts(i) ? -targets.weight(i) * static_cast<C>(values[line + targets.of(i) * lines.inner]) : C(0);
    }
    reduce_losses<S>(losses.as<C>(), targets.count(), attrs.reduction, targets.denominator(attrs.reduction),
                     args.out[0]);
  });
}

void nll_loss_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<NllLossBackwardAttrs>();
  const Tensor& dx = args.out[0];
  const Around lines = lines_of(dx);
  visit_floating(dx.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const ClassTargets<C> targets("nll_loss", args.in[1], args.in[2], lines.length, attrs.ignore_index);
    const LossGradient<C> gradient(args.in[0], attrs.reduction, targets.denominator(attrs.reduction));
    S* values = dx.data<S>();
    std::fill(values, values + dx.elems(), S());
    for (int64_t i = 0; i < targets.count(); ++i) {
      if (!targets.counts(i)) continue;
      const int64_t line = i / lines.inner * lines.length * lines.inner + i % lines.inner;
      values[line + targets.of(i) * lines.inner] = static_cast<S>(-gradient(i) * targets.weight(i));
    }
  });
}

}  // namespace chorale::kernel::cpu
