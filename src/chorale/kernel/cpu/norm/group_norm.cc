// Group normalisation of row-major tensors: a group is a row of memory, each of its channels a stretch of it.
#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/kernel/cpu/norm/norm_parts.h"
#include "chorale/kernel/cpu/norm/row_arithmetic.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {
namespace {

// N samples of C channels of `area` elements; K channels make a group.
struct GroupExtent {
  int64_t N, C, area, groups, K;

  GroupExtent(const Tensor& x, int64_t group_count)
      : N(x.size(0)), C(x.size(1)), area(1), groups(group_count), K(C / group_count) {
    for (int64_t d = 2; d < x.dims(); ++d) area *= x.size(d);
  }
};

}  // namespace

void group_norm(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<GroupNormAttrs>();
  const Tensor x = contiguous(args.in[0]);
  const GroupExtent e(x, attrs.groups);
  const int64_t row = e.K * e.area;
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    const Parameter<T> weight(args.in[1]), bias(args.in[2]);
    T* means = args.out[1].data<T>();
    T* rstds = args.out[2].data<T>();
    parallel_for(e.N * e.groups, row_grain(row), [&](int64_t begin, int64_t end) {
      const Row<S> from(row), to(row);
      for (int64_t r = begin; r < end; ++r) {
        const T* in = from.load(x.data<S>() + r * row, row);
        S* y = args.out[0].data<S>() + r * row;
        T* out = to.target(y);
        const auto [mean, variance] = vec::moments(in, row);
        const T rstd = reciprocal_root(variance, attrs.eps);
        means[r] = mean;
        rstds[r] = rstd;
        for (int64_t k = 0; k < e.K; ++k) {
          const int64_t channel = r % e.groups * e.K + k;
          const T w = weight.data() ? weight.data()[channel] : T(1), b = bias.data() ? bias.data()[channel] : T(0);
          standardize_row(in + k * e.area, {mean, rstd * w, b}, out + k * e.area, e.area);
        }
        to.store(y, row);
      }
    });
  });
}

void group_norm_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<GroupNormBackwardAttrs>();
  const Tensor dy = contiguous(args.in[0]), x = contiguous(args.in[1]);
  const GroupExtent e(x, attrs.groups);
  const int64_t row = e.K * e.area;
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    const Parameter<T> mean(args.in[2]), rstd(args.in[3]), weight(args.in[4]);
    // What each sample and channel adds to dbias and to dweight.
    const Scratch memory(static_cast<size_t>(e.N * e.C) * sizeof(NormSums<T>));
    NormSums<T>* sums = memory.as<NormSums<T>>();
    parallel_for(e.N * e.groups, row_grain(row), [&](int64_t begin, int64_t end) {
      const Row<S> dy_row(row), x_row(row), dx_row(row);
      for (int64_t r = begin; r < end; ++r) {
        const T* g = dy_row.load(dy.data<S>() + r * row, row);
        const T* in = x_row.load(x.data<S>() + r * row, row);
        const T center = mean.data()[r], scale = rstd.data()[r];
        const T* w = weight.data() ? weight.data() + r % e.groups * e.K : nullptr;
        T a = 0, b = 0;
        for (int64_t k = 0; k < e.K; ++k) {
          NormSums<T>& sum = sums[r * e.K + k];
          sum = norm_sums(g + k * e.area, in + k * e.area, nullptr, center, scale, e.area);
          a += (w ? w[k] : T(1)) * sum.g;
          b += (w ? w[k] : T(1)) * sum.gz;
        }
        a /= static_cast<T>(row);
        b /= static_cast<T>(row);
        S* dx = args.out[0].data<S>() + r * row;
        T* out = dx_row.target(dx);
        for (int64_t k = 0; k < e.K; ++k) {
          // (w g - a - z b) * rstd
          const LinearBackward<T> by{center, scale * (w ? w[k] : T(1)), -scale * scale * b, -scale * a};
          linear_backward_row(g + k * e.area, in + k * e.area, by, out + k * e.area, e.area);
        }
        dx_row.store(dx, row);
      }
    });
    if (!attrs.affine) return;
    for (int64_t c = 0; c < e.C; ++c) {
      double dweight = 0, dbias = 0;
      for (int64_t n = 0; n < e.N; ++n) {
        dweight += static_cast<double>(sums[n * e.C + c].gz);
        dbias += static_cast<double>(sums[n * e.C + c].g);
      }
      args.out[1].data<T>()[c] = static_cast<T>(dweight);
      args.out[2].data<T>()[c] = static_cast<T>(dbias);
    }
  });
}

}  // namespace chorale::kernel::cpu
