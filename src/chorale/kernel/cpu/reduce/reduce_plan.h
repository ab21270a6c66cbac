// Which elements a reduction folds into which result: the dimensions of a strided tensor, sorted by stride and merged
// where they lie one behind the other, so that most layouts become one or two long dimensions.
#pragma once

#include <algorithm>

#include "chorale/kernel/reduce_attrs.h"
#include "chorale/tensor/tensor.h"

namespace chorale::kernel::cpu {

struct PlanDim {
  int64_t size;
  int64_t in_bytes;   // from one element to the next
  int64_t out_elems;  // likewise in the contiguous result; unused for reduced dimensions
};

// Largest stride first.
struct PlanDims {
  PlanDim items[kMaxDims];
  size_t count = 0;

  size_t size() const { return count; }
  const PlanDim& operator[](size_t d) const { return items[d]; }
  const PlanDim& back() const { return items[count - 1]; }
};

struct ReducePlan {
  PlanDims kept, reduced;  // never empty: a dimension of size 1 stands for none
  int64_t kept_count = 1, reduced_count = 1;
  bool in_order = true;  // results in the order of `kept` are contiguous
};

ReducePlan plan_reduce(const Tensor& x, DimMask reduced);

// Positions [begin, end) of the row-major order of dims, as runs along the innermost one: f(byte offset in the input,
// element offset in the result, length).
template <class F>
void for_runs(const PlanDims& dims, int64_t begin, int64_t end, F&& f) {
  if (begin >= end) return;
  const PlanDim& inner = dims.back();
  if (dims.size() == 1) {
    f(begin * inner.in_bytes, begin * inner.out_elems, end - begin);
    return;
  }
  const size_t outer = dims.size() - 1;
  int64_t index[kMaxDims];
  int64_t in = 0, out = 0;
  int64_t rest = begin / inner.size;
  for (size_t d = outer; d-- > 0; rest /= dims[d].size) {
    index[d] = rest % dims[d].size;
    in += index[d] * dims[d].in_bytes;
    out += index[d] * dims[d].out_elems;
  }
  int64_t start = begin % inner.size;
  while (true) {
    const int64_t length = std::min(inner.size - start, end - begin);
    f(in + start * inner.in_bytes, out + start * inner.out_elems, length);
    begin += length;
    if (begin == end) return;
    start = 0;
    for (size_t d = outer; d-- > 0;) {
      in += dims[d].in_bytes;
      out += dims[d].out_elems;
      if (++index[d] < dims[d].size) break;
      in -= dims[d].in_bytes * dims[d].size;
      out -= dims[d].out_elems * dims[d].size;
      index[d] = 0;
    }
  }
}

}  // namespace chorale::kernel::cpu
