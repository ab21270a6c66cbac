// Inside vec: the loops of the chosen target, looked up once. Each source file of loops has one function here that adds
// its own, compiled once per target.
#pragma once

#include "chorale/vec/loops.h"

namespace chorale::vec {

template <class T>
struct RowKernels {
  MaxSumExp<T> (*max_sum_exp)(const T* in, int64_t n);
  void (*softmax)(const T* in, T* out, int64_t n);
  void (*log_softmax)(const T* in, T* out, int64_t n);
  void (*softmax_backward)(const T* dy, const T* y, T* dx, int64_t n);
  void (*log_softmax_backward)(const T* dy, const T* y, T* dx, int64_t n);
  Moments<T> (*moments)(const T* in, int64_t n);
  void (*normalize)(const T* in, T mean, T rstd, const T* weight, const T* bias, T* out, int64_t n);
};

struct Kernels {
  Loop pointwise[kScalarOpCount][kDTypeCount] = {};
  Loop pow_general[kDTypeCount] = {};  // kPowScalar for exponents without a shortcut
  Convert convert[kDTypeCount][kDTypeCount] = {};
  ReduceRow reduce_row[kReduceOpCount][kDTypeCount] = {};
  ReduceColumns reduce_columns[kReduceOpCount][kDTypeCount] = {};
  ReduceCombine reduce_combine[kReduceOpCount][kDTypeCount] = {};
  ArgReduce argmax[kDTypeCount] = {};
  ArgReduce argmin[kDTypeCount] = {};
  Dot dot[kDTypeCount] = {};
  RowKernels<float> rows_f32 = {};
  RowKernels<double> rows_f64 = {};

  Loop& loop(ScalarOp op, DType dtype) { return pointwise[static_cast<size_t>(op)][static_cast<size_t>(dtype)]; }
  Loop loop(ScalarOp op, DType dtype) const { return pointwise[static_cast<size_t>(op)][static_cast<size_t>(dtype)]; }
};

const Kernels& kernels();

void add_arithmetic(Kernels& kernels);
void add_functions(Kernels& kernels);
void add_integer(Kernels& kernels);
void add_complex(Kernels& kernels);
void add_convert(Kernels& kernels);
void add_reduce_row(Kernels& kernels);
void add_reduce_columns(Kernels& kernels);
void add_dot_arg(Kernels& kernels);
void add_rows(Kernels& kernels);

}  // namespace chorale::vec
