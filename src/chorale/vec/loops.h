// Vector loops on contiguous memory: one thread, run-time dispatch to the best instruction set (target.h). Shapes,
// strides and threads belong to the callers, which cut work into contiguous pieces.
//
// All loops accept n = 0, need no alignment beyond the element's own, and touch nothing outside [0, n). A result may
// coincide with an input of the same element size (in-place); any other overlap is not allowed.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>

#include "chorale/base/dtype.h"
#include "chorale/vec/scalar_ops.h"

namespace chorale::vec {

// The scalar parameters p0 … p3 of an operation, and which inputs are one element repeated.
struct Params {
  // Floating dtypes read f; integers and bool read i (exact for i64, taken modulo the type); complex dtypes read
  // p0 = (f[0], f[1]) and p1 = (f[2], f[3]).
  double f[4] = {};
  int64_t i[4] = {};
  // Bit k set: in[k] points to one element that stands for n equal ones. Costs no more than a contiguous input.
  uint32_t broadcast = 0;
};

// ---- pointwise

using Loop = void (*)(const void* const* in, void* out, int64_t n, const Params& params);

// The loop of op over elements of `dtype`, or nullptr where it makes no sense (info(op).dtypes). f16 and bf16 are
// computed in f32 and rounded once (kGeluErf of bf16 by a function that is within 2^-12). Integers wrap around; divided
// by zero they give 0: callers that want an error check first.
Loop pointwise_loop(ScalarOp op, DType dtype);

// ---- conversion

using Convert = void (*)(const void* in, void* out, int64_t n);

// Any dtype to any: floating to integer truncates (out of range: x86's "indefinite" value, cut to the type's low bits,
// never undefined), anything to bool is != 0, complex to real drops the imaginary part, f32 to the 16-bit types rounds
// to even.
Convert convert_loop(DType from, DType to);

// ---- moving bytes. `elem` is the size of an element: 1, 2, 4, 8 or 16. Strides are in bytes and may be 0 or negative.

void fill(void* out, const void* value, size_t elem, int64_t n);
void gather_strided(const void* in, int64_t stride_bytes, void* out, int64_t n, size_t elem);
void scatter_strided(const void* in, void* out, int64_t stride_bytes, int64_t n, size_t elem);
// out[c][r] = in[r][c]: rows x cols elements, contiguous within a row of `in` (cols) and within a row of `out` (rows).
void transpose_copy(const void* in, int64_t in_row_stride, void* out, int64_t out_row_stride, int64_t rows,
                    int64_t cols, size_t elem);

// ---- reductions

enum class ReduceOp : uint8_t {
  kSum,
  kProd,
  kMax,         // NaN wins
  kMin,         // NaN wins
  kSumSquares,  // sum of |x|^2: real for complex inputs too
  kSumAbs,
  kMaxAbs,
  kMinAbs,
  kSumNonZero,  // how many elements differ from zero
  kAny,
  kAll,
};
inline constexpr int kReduceOpCount = 11;

// The dtype of the accumulator: bool for kAny and kAll, i64 for kSumNonZero; otherwise f32 for f16 and bf16, the
// input's own dtype for the floating ones, the complex ones (real_of for the sums of squares and absolute values) and
// for kMax and kMin of integers and bool; i64 for all else.
DType accumulator_of(ReduceOp op, DType in);
// Writes the neutral element (0, 1, -inf, the smallest integer, …) to *acc.
void reduce_identity(ReduceOp op, DType in, void* acc);

// acc = acc op in[0] op … op in[n - 1]; acc is one value of accumulator_of(). Start from reduce_identity(), or chain
// pieces. Sums are blocked: the error of a floating sum grows with log n, not with n.
using ReduceRow = void (*)(const void* in, int64_t n, void* acc);
// Pointers are nullptr where the op makes no sense (kMax and the like of complex).
ReduceRow reduce_row(ReduceOp op, DType in);

// acc[j] = acc[j] op in[0][j] op in[1][j] … for j in [0, n): the outer dimension of a matrix is reduced. Rows lie
// row_stride_bytes apart. Blocked over rows, so the error does not grow linearly either.
using ReduceColumns = void (*)(const void* in, int64_t row_stride_bytes, int64_t rows, int64_t n, void* acc);
ReduceColumns reduce_columns(ReduceOp op, DType in);

// Folds partial results into acc: acc[j] = acc[j] op partial[j], both of accumulator_of(). (A sum of squares is
// combined by adding, a sum of sums too.)
using ReduceCombine = void (*)(const void* partial, int64_t n, void* acc);
ReduceCombine reduce_combine(ReduceOp op, DType in);

// The index of the first largest (smallest) element; the first NaN wins. n >= 1. nullptr for complex.
using ArgReduce = int64_t (*)(const void* in, int64_t n);
ArgReduce argmax(DType in);
ArgReduce argmin(DType in);

// sum a[i] * b[i], written to *out in compute_of(dtype) (f32 for f16 and bf16; i64 for integers; complex is not
// conjugated).
using Dot = void (*)(const void* a, const void* b, int64_t n, void* out);
Dot dot(DType dtype);

// y[i] += alpha * x[i]; f32 and f64.
void axpy(float alpha, const float* x, float* y, int64_t n);
void axpy(double alpha, const double* x, double* y, int64_t n);

// ---- rows of softmax and of normalisation; f32 and f64. In-place is allowed (out == in).

template <class T>
struct MaxSumExp {
  T max;  // 0 where the largest element is infinite (or the row is empty), so that log(sum) + max is always right
  T sum;  // of exp(x - max)
};
MaxSumExp<float> max_sum_exp(const float* in, int64_t n);
MaxSumExp<double> max_sum_exp(const double* in, int64_t n);

void softmax_row(const float* in, float* out, int64_t n);
void softmax_row(const double* in, double* out, int64_t n);
void log_softmax_row(const float* in, float* out, int64_t n);
void log_softmax_row(const double* in, double* out, int64_t n);
// dx = y * (dy - sum(dy * y)), and dx = dy - exp(y) * sum(dy).
void softmax_backward_row(const float* dy, const float* y, float* dx, int64_t n);
void softmax_backward_row(const double* dy, const double* y, double* dx, int64_t n);
void log_softmax_backward_row(const float* dy, const float* y, float* dx, int64_t n);
void log_softmax_backward_row(const double* dy, const double* y, double* dx, int64_t n);

template <class T>
struct Moments {
  T mean;
  T variance;  // of the population: divided by n
};
// Two passes over the row, so that a large mean costs no accuracy.
Moments<float> moments(const float* in, int64_t n);
Moments<double> moments(const double* in, int64_t n);

// out = (in - mean) * rstd * weight + bias; weight and bias may be null.
void normalize_row(const float* in, float mean, float rstd, const float* weight, const float* bias, float* out,
                   int64_t n);
void normalize_row(const double* in, double mean, double rstd, const double* weight, const double* bias, double* out,
                   int64_t n);

}  // namespace chorale::vec
