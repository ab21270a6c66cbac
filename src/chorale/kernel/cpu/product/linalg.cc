#include "chorale/kernel/cpu/product/linalg.h"

#include <algorithm>
#include <cmath>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/product/product_engine.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/vec/loops.h"

namespace chorale::kernel::cpu {
namespace {

constexpr int64_t kBlock = 64;  // columns that are worked on one by one; the rest is matrix products
constexpr int64_t kGrainOps = 64 * 1024;

template <class F>
void visit_real(DType dtype, F&& f) {
  if (dtype == DType::kF64) {
    f(base::TypeTag<double>{});
  } else {
    f(base::TypeTag<float>{});
  }
}

template <class T>
T dot(const T* a, const T* b, int64_t n) {
  T result;
  vec::dot(dtype_of<T>)(a, b, n, &result);
  return result;
}

// A matrix in memory; strides count elements.
template <class T>
struct Matrix {
  T* data;
  int64_t rows, cols, row, col;

  T& operator()(int64_t i, int64_t j) const { return data[i * row + j * col]; }
  Matrix block(int64_t i, int64_t j, int64_t block_rows, int64_t block_cols) const {
    return {data + i * row + j * col, block_rows, block_cols, row, col};
  }
  Matrix transposed() const { return {data, cols, rows, col, row}; }
  operator Matrix<const T>() const { return {data, rows, cols, row, col}; }  // NOLINT(google-explicit-constructor)
};

// Matrix `index` of a batch: the last two dimensions of x.
template <class T>
Matrix<T> matrix_of(const Tensor& x, int64_t index) {
  const auto dims = x.sizes().size();
  T* data = x.data<std::remove_const_t<T>>();
  for (size_t d = dims - 2; d-- > 0; index /= x.sizes()[d]) data += index % x.sizes()[d] * x.strides()[d];
  return {data, x.sizes()[dims - 2], x.sizes()[dims - 1], x.strides()[dims - 2], x.strides()[dims - 1]};
}

int64_t batch_of(const Tensor& x) { return count_elems({x.sizes().data(), x.sizes().size() - 2}); }

// Matrices that are worth a thread: each costs about as much as a product of its size.
int64_t grain_of(const Tensor& x) {
  const int64_t rows = x.size(-2), cols = x.size(-1);
  return kGrainOps / std::max<int64_t>(1, rows * cols * std::min(rows, cols));
}

// c -= a b
template <class T>
void subtract_product(Matrix<const T> a, Matrix<const T> b, Matrix<T> c) {
  if (c.rows == 0 || c.cols == 0 || a.cols == 0) return;
  product({.dtype = dtype_of<T>,
           .m = c.rows,
           .n = c.cols,
           .k = a.cols,
           .a = a.data,
           .b = b.data,
           .c = c.data,
           .a_row = a.row,
           .a_col = a.col,
           .b_row = b.row,
           .b_col = b.col,
           .c_row = c.row,
           .c_col = c.col,
           .alpha = -1,
           .beta = 1});
}

// Overwrites the lower triangle of a (rows contiguous) with its factor. Returns 0, or the order of the first leading
// minor that is not positive.
template <class T>
int64_t factor_cholesky(Matrix<T> a) {
  const int64_t n = a.rows;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t width = std::min(kBlock, n - start);
    const auto block = a.block(start, start, n - start, width);
    subtract_product<T>(a.block(start, 0, n - start, start), a.block(start, 0, width, start).transposed(), block);
    for (int64_t i = 0; i < block.rows; ++i) {
      for (int64_t j = 0; j < std::min(i, width); ++j) {
        block(i, j) = (block(i, j) - dot(&block(i, 0), &block(j, 0), j)) / block(j, j);
      }
      if (i >= width) continue;
      const T pivot = block(i, i) - dot(&block(i, 0), &block(i, 0), i);
      if (!(pivot > 0)) return start + i + 1;
      block(i, i) = std::sqrt(pivot);
    }
  }
  return 0;
}

// Overwrites x (rows contiguous) with the solution of a y = x.
template <class T>
void solve_in_place(Matrix<const T> a, Matrix<T> x, const TriangularAttrs& attrs) {
  const int64_t n = a.rows, blocks = (n + kBlock - 1) / kBlock;
  for (int64_t step = 0; step < blocks; ++step) {
    const int64_t start = (attrs.upper ? blocks - 1 - step : step) * kBlock;
    const int64_t width = std::min(kBlock, n - start);
    const auto now = x.block(start, 0, width, x.cols);
    // What is solved already: above a lower triangle's block, below an upper one's.
    const int64_t first = attrs.upper ? start + width : 0, solved = attrs.upper ? n - first : start;
    subtract_product<T>(a.block(start, first, width, solved), x.block(first, 0, solved, x.cols), now);
    const auto diagonal = a.block(start, start, width, width);
    for (int64_t k = 0; k < width; ++k) {
      const int64_t i = attrs.upper ? width - 1 - k : k;
      T* row = &now(i, 0);
      for (int64_t l = 0; l < k; ++l) {
        const int64_t j = attrs.upper ? width - 1 - l : l;
        const T factor = diagonal(i, j);
        const T* other = &now(j, 0);
        for (int64_t c = 0; c < x.cols; ++c) row[c] -= factor * other[c];
      }
      if (attrs.unit) continue;
      const T divisor = diagonal(i, i);
      for (int64_t c = 0; c < x.cols; ++c) row[c] /= divisor;
    }
  }
}

// ---- Householder reflections: I - tau v v^T with v[0] = 1, which turn a column into a multiple of the first unit
// vector.

template <class T>
T length_of(const T* x, int64_t n) {
  T squares = 0;
  vec::reduce_row(vec::ReduceOp::kSumSquares, dtype_of<T>)(x, n, &squares);
  if (std::isfinite(squares) && squares > std::numeric_limits<T>::min()) return std::sqrt(squares);
  // Squares overflowed or vanished: measure in units of the largest element.
  T largest = 0;
  vec::reduce_row(vec::ReduceOp::kMaxAbs, dtype_of<T>)(x, n, &largest);
  if (largest == 0 || !std::isfinite(largest)) return largest;
  double scaled = 0;
  for (int64_t i = 0; i < n; ++i) scaled += std::pow(static_cast<double>(x[i] / largest), 2);
  return largest * static_cast<T>(std::sqrt(scaled));
}

// x becomes (beta, v[1], v[2], …); returns tau.
template <class T>
T make_reflection(T* x, int64_t n) {
  const T below = length_of(x + 1, n - 1);
  if (below == 0) return 0;
  const T beta = -std::copysign(std::hypot(x[0], below), x[0]);
  const T tau = (beta - x[0]) / beta;
  const T scale = x[0] - beta;
  for (int64_t i = 1; i < n; ++i) x[i] /= scale;
  x[0] = beta;
  return tau;
}

template <class T>
void reflect(const T* v, T tau, T* x, int64_t n) {
  const T amount = tau * (x[0] + dot(v + 1, x + 1, n - 1));
  x[0] -= amount;
  vec::axpy(-amount, v + 1, x + 1, n - 1);
}

template <class T>
void factor_qr(Matrix<const T> a, Matrix<T> q, Matrix<T> r) {
  const int64_t m = a.rows, n = a.cols, k = std::min(m, n);
  // Columns one behind the other.
  const Tensor columns = Tensor::empty({n, m}, dtype_of<T>), basis = Tensor::empty({k, m}, dtype_of<T>);
  const Tensor taus = Tensor::empty({k}, dtype_of<T>);
  T* column = columns.data<T>();
  T* tau = taus.data<T>();
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) column[j * m + i] = a(i, j);
  }
  const auto reflect_all = [&](int64_t j, T* to, int64_t first, int64_t last) {
    parallel_for(last - first, kGrainOps / std::max<int64_t>(1, m - j), [&](int64_t begin, int64_t end) {
      for (int64_t c = first + begin; c < first + end; ++c) reflect(column + j * m + j, tau[j], to + c * m + j, m - j);
    });
  };
  for (int64_t j = 0; j < k; ++j) {
    tau[j] = make_reflection(column + j * m + j, m - j);
    reflect_all(j, column, j + 1, n);
  }
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) r(i, j) = i <= j ? column[j * m + i] : T(0);
  }
  T* unit = basis.data<T>();
  std::fill_n(unit, k * m, T(0));
  for (int64_t j = k; j-- > 0;) {
    unit[j * m + j] = 1;
    reflect_all(j, unit, j, k);
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < k; ++j) q(i, j) = unit[j * m + i];
  }
}

}  // namespace

void cholesky(const KernelArgs& args) {
  const bool upper = args.attrs.get<CholeskyAttrs>().upper;
  const Tensor &a = args.in[0], &out = args.out[0];
  const int64_t batch = batch_of(a);
  visit_real(a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(batch, grain_of(a), [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const auto from = matrix_of<const T>(a, index);
        const auto lower = upper ? from.transposed() : from;
        const auto factor = matrix_of<T>(out, index);
        const int64_t n = factor.rows;
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < n; ++j) factor(i, j) = j <= i ? lower(i, j) : T(0);
        }
        const int64_t failed = factor_cholesky(factor);
        CHORALE_CHECK(failed == 0, "[cholesky] matrix ", index, " of ", batch,
                      " is not positive definite: its leading minor of order ", failed, " is not positive");
        for (int64_t i = 0; i < n; ++i) {  // blocks reach above the diagonal
          for (int64_t j = i + 1; j < n; ++j) factor(i, j) = 0;
        }
        for (int64_t i = 0; upper && i < n; ++i) {
          for (int64_t j = 0; j < i; ++j) std::swap(factor(i, j), factor(j, i));
        }
      }
    });
  });
}

void solve_triangular(const KernelArgs& args) {
  const auto& attrs = args.attrs.get<TriangularAttrs>();
  const Tensor &a = args.in[0], &x = args.out[0];
  copy_into(args.in[1], x);
  if (x.elems() == 0) return;
  visit_real(a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(batch_of(x), grain_of(x), [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        solve_in_place<T>(matrix_of<const T>(a, index), matrix_of<T>(x, index), attrs);
      }
    });
  });
}

void qr(const KernelArgs& args) {
  const Tensor& a = args.in[0];
  visit_real(a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(batch_of(a), grain_of(a), [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        factor_qr<T>(matrix_of<const T>(a, index), matrix_of<T>(args.out[0], index), matrix_of<T>(args.out[1], index));
      }
    });
  });
}

}  // namespace chorale::kernel::cpu
