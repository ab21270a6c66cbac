// Inside vec: the loops of the chosen target, looked up once. Each source file of loops has one function here that adds
// its own, compiled once per target.
#pragma once

#include "chorale/vec/loops.h"

namespace chorale::vec {

struct Kernels {
  Loop pointwise[kScalarOpCount][kDTypeCount] = {};
  Loop pow_general[kDTypeCount] = {};  // kPowScalar for exponents without a shortcut
  Convert convert[kDTypeCount][kDTypeCount] = {};
  ReduceRow reduce_row[kReduceOpCount][kDTypeCount] = {};
  ReduceColumns reduce_columns[kReduceOpCount][kDTypeCount] = {};
  ReduceCombine reduce_combine[kReduceOpCount][kDTypeCount] = {};

  Loop& loop(ScalarOp op, DType dtype) { return pointwise[static_cast<size_t>(op)][static_cast<size_t>(dtype)]; }
  Loop loop(ScalarOp op, DType dtype) const { return pointwise[static_cast<size_t>(op)][static_cast<size_t>(dtype)]; }
};

const Kernels& kernels();

void add_arithmetic(Kernels& kernels);
void add_math(Kernels& kernels);
void add_activation(Kernels& kernels);
void add_compare(Kernels& kernels);
void add_convert(Kernels& kernels);
void add_reduce_row(Kernels& kernels);
void add_reduce_columns(Kernels& kernels);

}  // namespace chorale::vec
