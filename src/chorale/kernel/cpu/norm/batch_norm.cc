// Batch normalisation: statistics of each channel over samples and places. Two memory layouts:
//   planes   row-major: a channel is a stretch of `area` elements per sample
//   columns  channels last, and [N, C]: a matrix with one column per channel
#include <algorithm>
#include <vector>

#include "chorale/kernel/cpu/norm/norm.h"
#include "chorale/kernel/cpu/norm/norm_parts.h"
#include "chorale/kernel/cpu/norm/row_arithmetic.h"
#include "chorale/kernel/cpu/reduce/partial_sums.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cpu {
namespace {

struct Extent {
  int64_t N, C, area = 1;
  bool columns;

  Extent(const Tensor& x, const Tensor& y) : N(x.size(0)), C(x.size(1)) {
    for (int64_t d = 2; d < x.dims(); ++d) area *= x.size(d);
    columns = area == 1 || !y.is_contiguous();
  }
  int64_t count() const { return N * area; }  // elements of a channel
};

// x in the layout of y.
Tensor like(const Tensor& x, const Tensor& y) {
  if (x.strides() == y.strides()) return x;
  if (y.is_contiguous()) return contiguous(x);
  if (x.is_channels_last()) return x;
  const Tensor copy = Tensor::empty_strided(x.sizes(), y.strides(), x.dtype(), x.device());
  copy_into(x, copy);
  return copy;
}

// Mean and sum of squared distances from it, of `count` numbers; merged by Chan's formula, which loses no accuracy to a
// large mean.
struct Statistics {
  double count = 0, mean = 0, squares = 0;

  void add(double other_count, double other_mean, double other_squares) {
    const double delta = other_mean - mean, total = count + other_count;
    mean += delta * other_count / total;
    squares += other_squares + delta * delta * count * other_count / total;
    count = total;
  }
};

// Narrow rows of a matrix with few columns are taken several at a time, as one row of `wide` elements, or vector loops
// would hardly start. A value per column is repeated `fold` times for them, and sums per wide column are folded back.
struct Folding {
  int64_t C, fold, wide, elems, rows;

  explicit Folding(const Extent& e)
      : C(e.C), fold(std::max<int64_t>(1, 512 / std::max<int64_t>(1, e.C))), wide(fold * C), elems(e.count() * e.C) {
    rows = wide == 0 ? 0 : (elems + wide - 1) / wide;
  }
  int64_t length(int64_t row) const { return std::min(wide, elems - row * wide); }
  template <class T>
  void repeat(T* values) const {
    for (int64_t i = C; i < wide; ++i) values[i] = values[i - C];
  }
  template <class T>
  void fold_sums(T* sums) const {
    for (int64_t i = C; i < wide; ++i) sums[i % C] += sums[i];
  }
};

template <class S, class T = Compute<S>>
void plane_statistics(const Tensor& x, const Extent& e, T* means, T* variances) {
  parallel_for(e.C, row_grain(e.count()), [&](int64_t begin, int64_t end) {
    const Row<S> row(e.area);
    for (int64_t c = begin; c < end; ++c) {
      Statistics total;
      for (int64_t n = 0; n < e.N; ++n) {
        const auto [mean, variance] = vec::moments(row.load(x.data<S>() + (n * e.C + c) * e.area, e.area), e.area);
        const auto area = static_cast<double>(e.area);
        total.add(area, static_cast<double>(mean), static_cast<double>(variance) * area);
      }
      means[c] = static_cast<T>(total.mean);
      variances[c] = static_cast<T>(total.squares / total.count);
    }
  });
}

template <class S, class T = Compute<S>>
void column_statistics(const Tensor& x, const Extent& e, T* means, T* variances) {
  const Folding f(e);
  // Each block of rows has its means, then its sums of squares, both folded.
  PartialSums<T> blocks(f.rows, 2 * f.wide);
  const auto block_count = [&](int64_t begin, int64_t end) {
    return (std::min(end * f.wide, f.elems) - begin * f.wide) / f.C;
  };
  blocks.for_blocks(f.wide, [&](int64_t begin, int64_t end, T* sums) {
    const Row<S> row(f.wide);
    T* mean = sums;
    T* squares = sums + f.wide;
    const auto each_row = [&](auto&& body) {
      for (int64_t r = begin; r < end; ++r) body(row.load(x.data<S>() + r * f.wide, f.length(r)), f.length(r));
    };
    each_row([&](const T* in, int64_t n) { vec::axpy(T(1), in, mean, n); });
    f.fold_sums(mean);
    const auto count = static_cast<T>(block_count(begin, end));
    for (int64_t c = 0; c < f.C; ++c) mean[c] /= count;
    f.repeat(mean);
    each_row([&](const T* in, int64_t n) { add_column_squares(in, mean, squares, n); });
    f.fold_sums(squares);
  });
  std::vector<Statistics> total(static_cast<size_t>(e.C));
  for (int64_t b = 0; b < blocks.blocks(); ++b) {
    const int64_t begin = b * PartialSums<T>::kBlockRows;
    const auto count = static_cast<double>(block_count(begin, begin + PartialSums<T>::kBlockRows));
    for (int64_t c = 0; c < e.C; ++c) {
      total[static_cast<size_t>(c)].add(count, static_cast<double>(blocks.sums(b)[c]),
                                        static_cast<double>(blocks.sums(b)[f.wide + c]));
    }
  }
  for (int64_t c = 0; c < e.C; ++c) {
    means[c] = static_cast<T>(total[static_cast<size_t>(c)].mean);
    variances[c] = static_cast<T>(total[static_cast<size_t>(c)].squares / total[static_cast<size_t>(c)].count);
  }
}

// Calls body(offset, n, channel) for every stretch of memory; `channel` is -1 for a wide row of all channels.
template <class F>
void for_stretches(const Extent& e, F&& body) {
  if (e.columns) {
    const Folding f(e);
    parallel_for(f.rows, row_grain(f.wide), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) body(r * f.wide, f.length(r), int64_t{-1});
    });
  } else {
    parallel_for(e.N * e.C, row_grain(e.area), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) body(r * e.area, e.area, r % e.C);
    });
  }
}

// Numbers per channel, repeated for wide rows.
template <class T>
class PerChannel {
 public:
  template <class F>
  PerChannel(const Extent& e, F&& value_of) : memory_(static_cast<size_t>(Folding(e).wide) * sizeof(T)) {
    T* values = memory_.template as<T>();
    for (int64_t c = 0; c < e.C; ++c) values[c] = value_of(c);
    Folding(e).repeat(values);
  }
  const T* data() const { return memory_.template as<T>(); }
  Factor<T> of(int64_t channel) const { return channel < 0 ? Factor<T>(data()) : Factor<T>(data()[channel]); }

 private:
  Scratch memory_;
};

// Sums of dy and of dy * z over each channel, with z = (x - mean) * rstd.
template <class S, class T = Compute<S>>
void plane_sums(const Tensor& dy, const Tensor& x, const Extent& e, const T* mean, const T* rstd, NormSums<T>* sums) {
  parallel_for(e.C, row_grain(e.count()), [&](int64_t begin, int64_t end) {
    const Row<S> dy_row(e.area), x_row(e.area);
    for (int64_t c = begin; c < end; ++c) {
      double g = 0, gz = 0;
      for (int64_t n = 0; n < e.N; ++n) {
        const int64_t at = (n * e.C + c) * e.area;
        const T* weight = nullptr;
        const NormSums<T> sum = norm_sums(dy_row.load(dy.data<S>() + at, e.area), x_row.load(x.data<S>() + at, e.area),
                                          weight, mean[c], rstd[c], e.area);
        g += static_cast<double>(sum.g);
        gz += static_cast<double>(sum.gz);
      }
      sums[c] = {static_cast<T>(g), static_cast<T>(gz)};
    }
  });
}

template <class S, class T = Compute<S>>
void column_sums(const Tensor& dy, const Tensor& x, const Extent& e, const T* mean, const T* rstd, NormSums<T>* sums) {
  const Folding f(e);
  PartialSums<T> blocks(f.rows, 2 * f.wide);
  blocks.for_blocks(f.wide, [&](int64_t begin, int64_t end, T* sum) {
    const Row<S> dy_row(f.wide), x_row(f.wide);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = f.length(r);
      add_column_sums(dy_row.load(dy.data<S>() + r * f.wide, n), x_row.load(x.data<S>() + r * f.wide, n), mean, rstd,
                      sum, sum + f.wide, n);
    }
    f.fold_sums(sum);
    f.fold_sums(sum + f.wide);
  });
  const T* total = blocks.total();
  for (int64_t c = 0; c < e.C; ++c) sums[c] = total ? NormSums<T>{total[c], total[f.wide + c]} : NormSums<T>{};
}

}  // namespace

void standardize_channels(const StandardChannels& of, double eps, const Tensor& y) {
  const Tensor x = like(of.x, y);
  const Extent e(x, y);
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    const Parameter<T> means(of.mean), variances(of.variance), weight(of.weight), bias(of.bias);
    const PerChannel<T> mean(e, [&](int64_t c) { return means.data()[c]; });
    const PerChannel<T> scale(e, [&](int64_t c) {
      return reciprocal_root(variances.data()[c], eps) * (weight.data() ? weight.data()[c] : T(1));
    });
    const PerChannel<T> shift(e, [&](int64_t c) { return bias.data() ? bias.data()[c] : T(0); });
    for_stretches(e, [&](int64_t at, int64_t n, int64_t c) {
      const Row<S> from(n), to(n);
      S* result = y.data<S>() + at;
      standardize_row(from.load(x.data<S>() + at, n), {mean.of(c), scale.of(c), shift.of(c)}, to.target(result), n);
      to.store(result, n);
    });
  });
}

void batch_norm(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<BatchNormAttrs>();
  const Tensor x = like(args.in[0], args.out[0]);
  const Extent e(x, args.out[0]);
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    T* means = args.out[1].data<T>();
    T* variances = args.out[2].data<T>();
    e.columns ? column_statistics<S>(x, e, means, variances) : plane_statistics<S>(x, e, means, variances);
  });
  standardize_channels({x, args.out[1], args.out[2], args.in[1], args.in[2]}, attrs.eps, args.out[0]);
}

void batch_norm_backward(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<BatchNormAttrs>();
  const Tensor dy = like(args.in[0], args.out[0]), x = like(args.in[1], args.out[0]);
  const Extent e(x, args.out[0]);
  visit_floating(x.dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    const Parameter<T> means(args.in[2]), variances(args.in[3]), weight(args.in[4]);
    const PerChannel<T> mean(e, [&](int64_t c) { return means.data()[c]; });
    const PerChannel<T> rstd(e, [&](int64_t c) { return reciprocal_root(variances.data()[c], attrs.eps); });
    const Scratch memory(static_cast<size_t>(e.C) * sizeof(NormSums<T>));
    NormSums<T>* sums = memory.as<NormSums<T>>();
    e.columns ? column_sums<S>(dy, x, e, mean.data(), rstd.data(), sums)
              : plane_sums<S>(dy, x, e, mean.data(), rstd.data(), sums);
    // dx = (dy - sum(dy) / count - z * sum(dy z) / count) * rstd * weight
    const auto scale = [&](int64_t c) { return rstd.data()[c] * (weight.data() ? weight.data()[c] : T(1)); };
    const auto count = static_cast<T>(e.count());
    const PerChannel<T> p(e, scale);
    const PerChannel<T> q(e, [&](int64_t c) { return -scale(c) * rstd.data()[c] * sums[c].gz / count; });
    const PerChannel<T> r(e, [&](int64_t c) { return -scale(c) * sums[c].g / count; });
    for_stretches(e, [&](int64_t at, int64_t n, int64_t c) {
      const Row<S> dy_row(n), x_row(n), dx_row(n);
      S* dx = args.out[0].data<S>() + at;
      linear_backward_row(dy_row.load(dy.data<S>() + at, n), x_row.load(x.data<S>() + at, n),
                          {mean.of(c), p.of(c), q.of(c), r.of(c)}, dx_row.target(dx), n);
      dx_row.store(dx, n);
    });
    for (int64_t c = 0; c < e.C; ++c) {
      args.out[1].data<T>()[c] = sums[c].gz;
      args.out[2].data<T>()[c] = sums[c].g;
    }
  });
}

void running_average(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<RunningAverageAttrs>();
  const Tensor running = contiguous(args.in[0], DType::kF64), now = contiguous(args.in[1], DType::kF64);
  const Tensor result = Tensor::empty(running.sizes(), DType::kF64);
  for (int64_t i = 0; i < running.elems(); ++i) {
    result.data<double>()[i] =
        (1 - attrs.momentum) * running.data<double>()[i] + attrs.momentum * attrs.scale * now.data<double>()[i];
  }
  copy_into(result, args.out[0]);
}

}  // namespace chorale::kernel::cpu
