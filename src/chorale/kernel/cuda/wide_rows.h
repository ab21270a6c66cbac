// Faster kernels for rows that lie one behind the other (wide_rows.cu, wide_losses.cu). Each returns false, with
// nothing done, where it is not for this call. Tensors are contiguous.
#pragma once

#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cuda {

// Rows of a matrix, which begin `stride` elements apart.
struct MatrixRows {
  int64_t rows = 0, columns = 0, stride = 0;
};
// out [columns] = the sums of x's columns, divided.
bool sum_columns(const void* x, DType dtype, const MatrixRows& of, double divisor, const Tensor& out, Stream stream);

// How columns are summed: blocks of 256 threads for each of `tiles` of 32 packs, and `chunks` of them, whose 8 warps
// take rows in turn. Their sums, partial[chunk][column], are put together by join_columns.
struct ColumnChunks {
  int64_t tiles = 0, chunks = 0;
};
// No chunks: not for this matrix.
ColumnChunks column_chunks(const void* x, DType dtype, const MatrixRows& of, DType out, Device device);
void join_columns(const Tensor& partial, int64_t columns, double divisor, const Tensor& out, Stream stream);

// A layer norm or, without `means`, a norm by root mean squares. Null: there is no weight, no bias.
struct RowNorm {
  int64_t rows = 0, n = 0;
  void* weight = nullptr;
  void* bias = nullptr;
  void* means = nullptr;
  void* rstds = nullptr;
  double eps = 0;
};
// Where `more` is given, x + more is normalised, and goes to `sum`. y may have another dtype than x: that of `more`.
bool normalize_wide(const Tensor& x, const RowNorm& norm, const Tensor& y, Stream stream, const Tensor& more = {},
                    const Tensor& sum = {});
// dweight and dbias may be undefined. Where `more` is given, dx is added to it. Where `lower` is given, it gets the
// same in dy's dtype, and `sums` the sums of its columns.
bool normalize_backward_wide(const Tensor& dy, const Tensor& x, const RowNorm& norm, const Tensor& dx,
                             const Tensor& dweight, const Tensor& dbias, Stream stream, const Tensor& more = {},
                             const Tensor& lower = {}, const Tensor& sums = {});
// sum = x + more, for every size.
void add_narrow(const Tensor& x, const Tensor& more, const Tensor& sum, Stream stream);

// Cross entropy of rows of classes without class weights and smoothing.
struct RowLoss {
  int64_t rows = 0, classes = 0, ignore_index = 0;
  int64_t x_row = 0, dx_row = 0;  // from one row to the next
  const void* target = nullptr;
  int64_t op = 0;  // its number, for faults
};
void cross_entropy_wide(const Tensor& x, const RowLoss& loss, const Tensor& lse, const Tensor& losses, Stream stream);
// And the gradient, by dloss (undefined: 1), which may go over x.
void cross_entropy_both_ways(const Tensor& dloss, const Tensor& x, const RowLoss& loss, const void* divisor,
                             Reduction reduction, const Tensor& lse, const Tensor& losses, const Tensor& dx,
                             Stream stream);
// A few rows of a few classes cost a launch each: whether one kernel does all of it, and counts targets itself.
bool is_small(int64_t rows, int64_t classes);
// The whole of it; out is the row's result. With dx the gradient by dloss (undefined: 1), too.
void cross_entropy_small(const Tensor& x, const RowLoss& loss, Reduction reduction, const Tensor& lse,
                         const Tensor& out, Stream stream, const Tensor& dloss = {}, const Tensor& dx = {});
// dloss: one number, or one for each row. divisor: f64 in memory of the device; null: 1, or for a mean what the kernel
// counts.
void cross_entropy_backward_wide(const Tensor& dloss, const Tensor& x, const RowLoss& loss, const Tensor& lse,
                                 const void* divisor, Reduction reduction, const Tensor& dx, Stream stream);

}  // namespace chorale::kernel::cuda
