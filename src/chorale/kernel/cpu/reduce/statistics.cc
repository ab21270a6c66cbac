#include "chorale/kernel/cpu/reduce/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "chorale/kernel/cpu/reduce/reduce.h"
#include "chorale/kernel/cpu/support/scratch.h"

namespace chorale::kernel::cpu {
namespace {

using vec::Params;
using vec::ReduceOp;
using vec::ScalarOp;

constexpr int64_t kChunk = 2048;  // elements worked on at a time: they stay in the first-level cache

template <class T>
constexpr int64_t bytes_of(int64_t n) {
  return n * static_cast<int64_t>(sizeof(T));
}

// Rows of a matrix so that they hold about kChunk elements.
int64_t rows_per_chunk(int64_t columns) { return std::max<int64_t>(1, kChunk / columns); }

// ---- norms

class NormFold final : public VecFold {
 public:
  NormFold(ReduceOp op, DType x, bool root) : VecFold(op, x, real_of(x)), root_(root) {}

  void finish(void* acc, int64_t n, void* results) const override {
    if (root_) vec::pointwise_loop(ScalarOp::kSqrt, acc_dtype_)(&acc, acc, n, {});
    VecFold::finish(acc, n, results);
  }

 private:
  bool root_;  // sum of squares -> norm
};

// Sum of |x|^p for any p, in T.
template <class T>
class PowerFold final : public Fold {
 public:
  PowerFold(double p, DType x) : Fold(compute_of(x), real_of(x), sizeof(T)), p_{.f = {p}}, root_{.f = {1 / p}} {}

  void identity(void* acc, int64_t n) const override { std::fill_n(static_cast<T*>(acc), n, T(0)); }
  void row(const void* data, int64_t n, void* acc) const override {
    alignas(64) T powers[kChunk];
    const auto add = vec::reduce_row(ReduceOp::kSum, dtype_of<T>);
    const auto* elements = static_cast<const std::byte*>(data);
    for (int64_t start = 0; start < n; start += kChunk) {
      const int64_t count = std::min(kChunk, n - start);
      raise(elements + start * static_cast<int64_t>(size_of(in)), count, powers);
      add(powers, count, acc);
    }
  }
  void columns(const void* data, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc) const override {
    alignas(64) T powers[kChunk];
    const auto* row = static_cast<const std::byte*>(data);
    const auto add = vec::reduce_combine(ReduceOp::kSum, dtype_of<T>);
    for (int64_t r = 0; r < rows; ++r, row += row_stride_bytes) {
      for (int64_t start = 0; start < n; start += kChunk) {
        const int64_t count = std::min(kChunk, n - start);
        raise(row + start * static_cast<int64_t>(size_of(in)), count, powers);
        add(powers, count, static_cast<T*>(acc) + start);
      }
    }
  }
  void combine(const void* partial, int64_t n, void* acc) const override {
    vec::reduce_combine(ReduceOp::kSum, dtype_of<T>)(partial, n, acc);
  }
  void finish(void* acc, int64_t n, void* results) const override {
    vec::pointwise_loop(ScalarOp::kPowScalar, dtype_of<T>)(&acc, acc, n, root_);
    vec::convert_loop(dtype_of<T>, out)(acc, results, n);
  }

 private:
  void raise(const void* elements, int64_t n, T* powers) const {
    vec::pointwise_loop(is_complex(in) ? ScalarOp::kComplexAbs : ScalarOp::kAbs, in)(&elements, powers, n, {});
    const void* absolute = powers;
    vec::pointwise_loop(ScalarOp::kPowScalar, dtype_of<T>)(&absolute, powers, n, p_);
  }

  Params p_, root_;
};

// ---- variance

// What is known of some elements: how many, their mean, the sum of squared deviations from it.
struct Deviations {
  double count = 0, mean = 0, squares = 0;

  // Chan's formula.
  void add(const Deviations& other) {
    if (other.count == 0) return;
    const double total = count + other.count, distance = other.mean - mean;
    mean += distance * (other.count / total);
    squares += other.squares + distance * distance * (count * (other.count / total));
    count = total;
  }
};

// Elements are read as T. Each chunk is seen relative to its mean, rounded to T, where differences are nearly exact;
// what the rounding left over is put right in double.
template <class T>
class VarFold final : public Fold {
 public:
  VarFold(DType x, int64_t count, double correction, bool root)
      : Fold(dtype_of<T>, x, sizeof(Deviations)),
        divisor_(std::max(0.0, static_cast<double>(count) - correction)),
        root_(root) {}

  void identity(void* acc, int64_t n) const override { std::fill_n(static_cast<Deviations*>(acc), n, Deviations{}); }
  void row(const void* data, int64_t n, void* acc) const override {
    alignas(64) T differences[kChunk];
    const auto* x = static_cast<const T*>(data);
    for (int64_t start = 0; start < n; start += kChunk) {
      const int64_t count = std::min(kChunk, n - start);
      const void* chunk = x + start;
      T shift = 0, sum = 0, squares = 0;
      vec::reduce_row(ReduceOp::kSum, in)(chunk, count, &shift);
      shift /= static_cast<T>(count);
      vec::pointwise_loop(ScalarOp::kSubScalar, in)(&chunk, differences, count, {.f = {static_cast<double>(shift)}});
      vec::reduce_row(ReduceOp::kSum, in)(differences, count, &sum);
      vec::reduce_row(ReduceOp::kSumSquares, in)(differences, count, &squares);
      static_cast<Deviations*>(acc)->add(deviations(count, shift, sum, squares));
    }
  }
  void columns(const void* data, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc) const override {
    const int64_t step = rows_per_chunk(n);
    const Scratch scratch(static_cast<size_t>(bytes_of<T>((step + 3) * n)));
    T* shifts = scratch.as<T>();
    T* sums = shifts + n;
    T* squares = sums + n;
    T* differences = squares + n;
    const auto* row = static_cast<const std::byte*>(data);
    for (int64_t start = 0; start < rows; start += step) {
      const int64_t count = std::min(step, rows - start);
      std::fill_n(shifts, 3 * n, T(0));
      vec::reduce_columns(ReduceOp::kSum, in)(row, row_stride_bytes, count, n, shifts);
      for (int64_t j = 0; j < n; ++j) shifts[j] /= static_cast<T>(count);
      for (int64_t r = 0; r < count; ++r, row += row_stride_bytes) {
        const void* operands[] = {row, shifts};
        vec::pointwise_loop(ScalarOp::kSub, in)(operands, differences + r * n, n, {});
      }
      vec::reduce_columns(ReduceOp::kSum, in)(differences, bytes_of<T>(n), count, n, sums);
      vec::reduce_columns(ReduceOp::kSumSquares, in)(differences, bytes_of<T>(n), count, n, squares);
      for (int64_t j = 0; j < n; ++j) {
        static_cast<Deviations*>(acc)[j].add(deviations(count, shifts[j], sums[j], squares[j]));
      }
    }
  }
  void combine(const void* partial, int64_t n, void* acc) const override {
    for (int64_t j = 0; j < n; ++j) static_cast<Deviations*>(acc)[j].add(static_cast<const Deviations*>(partial)[j]);
  }
  void finish(void* acc, int64_t n, void* results) const override {
    auto* from = static_cast<const Deviations*>(acc);
    auto* to = static_cast<double*>(acc);  // smaller, so never ahead of what is read
    for (int64_t j = 0; j < n; ++j) {
      const double variance = from[j].squares / divisor_;
      to[j] = root_ ? std::sqrt(variance) : variance;
    }
    vec::convert_loop(DType::kF64, out)(acc, results, n);
  }

 private:
  static Deviations deviations(int64_t count, T shift, T sum, T squares) {
    const auto n = static_cast<double>(count), rest = static_cast<double>(sum);
    const double around_mean = static_cast<double>(squares) - rest * rest / n;
    return {n, static_cast<double>(shift) + rest / n, around_mean < 0 ? 0 : around_mean};  // NaN stays
  }

  double divisor_;
  bool root_;
};

// ---- log-sum-exp

struct ExpSum {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;  // of exp(x - max); without meaning while max is not finite

  void add(double other_max, double other_sum) {
    if (std::isnan(max) || other_max == -std::numeric_limits<double>::infinity()) return;
    if (other_max > max || std::isnan(other_max)) {
      const double scaled = max > -std::numeric_limits<double>::infinity() ? sum * std::exp(max - other_max) : 0;
      *this = {other_max, other_sum + scaled};
    } else {
      sum += other_sum * std::exp(other_max - max);
    }
  }
  double result() const { return std::isfinite(max) ? max + std::log(sum) : max; }
};

template <class T>
class LogSumExpFold final : public Fold {
 public:
  explicit LogSumExpFold(DType x) : Fold(dtype_of<T>, x, sizeof(ExpSum)) {}

  void identity(void* acc, int64_t n) const override { std::fill_n(static_cast<ExpSum*>(acc), n, ExpSum{}); }
  void row(const void* data, int64_t n, void* acc) const override {
    const auto* x = static_cast<const T*>(data);
    for (int64_t start = 0; start < n; start += kChunk) {
      const int64_t count = std::min(kChunk, n - start);
      const auto [max, sum] = vec::max_sum_exp(x + start, count);
      if (std::isfinite(max) && std::isfinite(sum)) {
        static_cast<ExpSum*>(acc)->add(static_cast<double>(max), static_cast<double>(sum));
      } else {
        T extreme = -std::numeric_limits<T>::infinity();  // NaN wins here
        vec::reduce_row(ReduceOp::kMax, in)(x + start, count, &extreme);
        static_cast<ExpSum*>(acc)->add(static_cast<double>(extreme), 0);
      }
    }
  }
  void columns(const void* data, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc) const override {
    const int64_t step = rows_per_chunk(n);
    const Scratch scratch(static_cast<size_t>(bytes_of<T>((step + 2) * n)));
    T* maxima = scratch.as<T>();
    T* sums = maxima + n;
    T* powers = sums + n;
    const auto* row = static_cast<const std::byte*>(data);
    for (int64_t start = 0; start < rows; start += step) {
      const int64_t count = std::min(step, rows - start);
      std::fill_n(maxima, n, -std::numeric_limits<T>::infinity());
      std::fill_n(sums, n, T(0));
      vec::reduce_columns(ReduceOp::kMax, in)(row, row_stride_bytes, count, n, maxima);
      for (int64_t r = 0; r < count; ++r, row += row_stride_bytes) {
        const void* operands[] = {row, maxima};
        vec::pointwise_loop(ScalarOp::kSub, in)(operands, powers + r * n, n, {});
      }
      const void* differences = powers;
      vec::pointwise_loop(ScalarOp::kExp, in)(&differences, powers, count * n, {});
      vec::reduce_columns(ReduceOp::kSum, in)(powers, bytes_of<T>(n), count, n, sums);
      for (int64_t j = 0; j < n; ++j) {
        static_cast<ExpSum*>(acc)[j].add(static_cast<double>(maxima[j]), static_cast<double>(sums[j]));
      }
    }
  }
  void combine(const void* partial, int64_t n, void* acc) const override {
    const auto* other = static_cast<const ExpSum*>(partial);
    for (int64_t j = 0; j < n; ++j) static_cast<ExpSum*>(acc)[j].add(other[j].max, other[j].sum);
  }
  void finish(void* acc, int64_t n, void* results) const override {
    auto* from = static_cast<const ExpSum*>(acc);
    auto* to = static_cast<double*>(acc);  // smaller, so never ahead of what is read
    for (int64_t j = 0; j < n; ++j) to[j] = from[j].result();
    vec::convert_loop(DType::kF64, out)(acc, results, n);
  }
};

void reduce_variance(const char* op, const KernelArgs& args, bool root) {
  const Tensor& x = args.in[0];
  const auto& attrs = args.attrs.get<VarAttrs>();
  const DimMask reduced = dim_mask(op, attrs.dims, x.dims());
  const int64_t count = reduced_count(x.sizes(), reduced);
  if (x.dtype() == DType::kF64) {
    reduce(x, reduced, VarFold<double>(x.dtype(), count, attrs.correction, root), args.out[0]);
  } else {
    reduce(x, reduced, VarFold<float>(x.dtype(), count, attrs.correction, root), args.out[0]);
  }
}

}  // namespace

void norm(const KernelArgs& args) {
  const Tensor& x = args.in[0];
  const Tensor& out = args.out[0];
  const auto& attrs = args.attrs.get<NormAttrs>();
  const double p = attrs.p;
  const DimMask reduced = dim_mask("norm", attrs.dims, x.dims());
  if (p == 2) {
    reduce(x, reduced, NormFold(ReduceOp::kSumSquares, x.dtype(), true), out);
  } else if (p == 1) {
    reduce(x, reduced, NormFold(ReduceOp::kSumAbs, x.dtype(), false), out);
  } else if (p == 0) {
    reduce(x, reduced, NormFold(ReduceOp::kSumNonZero, x.dtype(), false), out);
  } else if (std::isinf(p)) {
    reduce(x, reduced, NormFold(p > 0 ? ReduceOp::kMaxAbs : ReduceOp::kMinAbs, x.dtype(), false), out);
  } else if (real_of(x.dtype()) == DType::kF64) {
    reduce(x, reduced, PowerFold<double>(p, x.dtype()), out);
  } else {
    reduce(x, reduced, PowerFold<float>(p, x.dtype()), out);
  }
}

void var(const KernelArgs& args) { reduce_variance("var", args, false); }
void stddev(const KernelArgs& args) { reduce_variance("std", args, true); }

void logsumexp(const KernelArgs& args) {
  const Tensor& x = args.in[0];
  const DimMask reduced = dim_mask("logsumexp", args.attrs.get<ReduceAttrs>().dims, x.dims());
  if (x.dtype() == DType::kF64) {
    reduce(x, reduced, LogSumExpFold<double>(x.dtype()), args.out[0]);
  } else {
    reduce(x, reduced, LogSumExpFold<float>(x.dtype()), args.out[0]);
  }
}

}  // namespace chorale::kernel::cpu
