// Layer and root-mean-square normalisation. A row is in the cache when it is read for the second time.
#include <algorithm>

#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/kernel/cpu/norm/norm_parts.h"
#include "chorale/kernel/cpu/norm/row_arithmetic.h"
#include "chorale/kernel/cpu/reduce/partial_sums.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {
namespace {

// Over one element the terms of dx cancel, and what is left of them is rounding errors beside a large rstd. Without
// them: y is the bias, or x rstd, whose derivative is eps rstd^3.
template <class S, class C = Compute<S>>
void backward_of_single(const Tensor& dy_any, const Tensor& x_any, bool centered, const Compute<S>* rstds,
                        const Compute<S>* weight, double eps, const Tensor& dx, Compute<S>* dweight,
                        Compute<S>* dbias) {
  const Tensor dy = contiguous(dy_any), x = contiguous(x_any);
  C weight_sum = 0, bias_sum = 0;
  for (int64_t row = 0; row < x.elems(); ++row) {
    const auto g = static_cast<C>(dy.data<S>()[row]);
    const C rstd = rstds[row], slope = centered ? C(0) : static_cast<C>(eps) * rstd * rstd * rstd;
    dx.data<S>()[row] = static_cast<S>(g * (weight ? weight[0] : C(1)) * slope);
    if (!centered) weight_sum += g * static_cast<C>(x.data<S>()[row]) * rstd;
    bias_sum += g;
  }
  if (dweight) dweight[0] = weight_sum;
  if (dbias) dbias[0] = bias_sum;
}

// The gradients of both: `means` is null for root mean squares, whose dbias nobody asks for.
template <class S, class C = Compute<S>>
void backward(const Tensor& dy_any, const Tensor& x_any, const Compute<S>* means, const Compute<S>* rstds,
              const Compute<S>* weight, const LayerNormBackwardAttrs& attrs, const Tensor& dx, Compute<S>* dweight,
              Compute<S>* dbias) {
  const int64_t n = count_elems(attrs.normalized_shape.span());
  if (n == 1) return backward_of_single<S>(dy_any, x_any, means, rstds, weight, attrs.eps, dx, dweight, dbias);
  const Tensor dy = contiguous(dy_any), x = contiguous(x_any);
  const int64_t rows = n == 0 ? 0 : x.elems() / n;
  // Each block of rows has its dweight, then its dbias.
  PartialSums<C> sums(rows, dweight ? 2 * n : 0);
  sums.for_blocks(n, [&](int64_t begin, int64_t end, C* sum) {
    const Row<S> dy_row(n), x_row(n), dx_row(n);
    for (int64_t row = begin; row < end; ++row) {
      const C* g = dy_row.load(dy.data<S>() + row * n, n);
      const C* in = x_row.load(x.data<S>() + row * n, n);
      const C mean = means ? means[row] : C(0), rstd = rstds[row];
      const auto total = norm_sums(g, in, weight, mean, rstd, n);
      const auto count = static_cast<C>(n);
      const NormBackward<C> by{
          weight, mean, rstd, means ? total.g / count : C(0), total.gz / count, dweight ? sum : nullptr, sum + n};
      S* to = dx.data<S>() + row * n;
      norm_backward_row(g, in, by, dx_row.target(to), n);
      dx_row.store(to, n);
    }
  });
  if (!dweight) return;
  const C* total = sums.total();
  for (int64_t i = 0; i < n; ++i) {
    dweight[i] = total ? total[i] : C(0);
    if (dbias) dbias[i] = total ? total[n + i] : C(0);
  }
}

}  // namespace

void layer_norm(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<LayerNormAttrs>();
  const Tensor x = contiguous(args.in[0]);
  const int64_t n = count_elems(attrs.normalized_shape.span()), rows = args.out[1].elems();
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const Parameter<C> weight(args.in[1]), bias(args.in[2]);
    S* y = args.out[0].data<S>();
    C* means = args.out[1].data<C>();
    C* rstds = args.out[2].data<C>();
    parallel_for(rows, row_grain(n), [&](int64_t begin, int64_t end) {
      const Row<S> from(n), to(n);
      for (int64_t row = begin; row < end; ++row) {
        const C* in = from.load(x.data<S>() + row * n, n);
        const auto [mean, variance] = vec::moments(in, n);
        means[row] = mean;
        rstds[row] = reciprocal_root(variance, attrs.eps);
        vec::normalize_row(in, mean, rstds[row], weight.data(), bias.data(), to.target(y + row * n), n);
        to.store(y + row * n, n);
      }
    });
  });
}

void layer_norm_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<LayerNormBackwardAttrs>();
  visit_floating(args.in[1].dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const Parameter<C> mean(args.in[2]), rstd(args.in[3]), weight(args.in[4]);
    backward<S>(args.in[0], args.in[1], mean.data(), rstd.data(), weight.data(), attrs, args.out[0],
                attrs.affine ? args.out[1].data<C>() : nullptr, attrs.affine ? args.out[2].data<C>() : nullptr);
  });
}

void rms_norm(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<LayerNormAttrs>();
  const Tensor x = contiguous(args.in[0]);
  const int64_t n = count_elems(attrs.normalized_shape.span()), rows = args.out[1].elems();
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const Parameter<C> weight(args.in[1]);
    const vec::ReduceRow sum_squares = vec::reduce_row(vec::ReduceOp::kSumSquares, dtype_of<C>);
    S* y = args.out[0].data<S>();
    C* rstds = args.out[1].data<C>();
    parallel_for(rows, row_grain(n), [&](int64_t begin, int64_t end) {
      const Row<S> from(n), to(n);
      for (int64_t row = begin; row < end; ++row) {
        const C* in = from.load(x.data<S>() + row * n, n);
        C squares = 0;
        sum_squares(in, n, &squares);
        rstds[row] = reciprocal_root(squares / static_cast<C>(n), attrs.eps);
        vec::normalize_row(in, C(0), rstds[row], weight.data(), nullptr, to.target(y + row * n), n);
        to.store(y + row * n, n);
      }
    });
  });
}

void rms_norm_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<LayerNormBackwardAttrs>();
  visit_floating(args.in[1].dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = Compute<S>;
    const Parameter<C> rstd(args.in[2]), weight(args.in[3]);
    backward<S>(args.in[0], args.in[1], nullptr, rstd.data(), weight.data(), attrs, args.out[0],
                attrs.affine ? args.out[1].data<C>() : nullptr, nullptr);
  });
}

}  // namespace chorale::kernel::cpu
