#include "chorale/kernel/cpu/reduce/reduce_plan.h"

#include <cstdlib>

namespace chorale::kernel::cpu {
namespace {

// Repeated elements (stride 0) go to the outside: they are never worth a vector.
bool is_outside(const PlanDim& a, const PlanDim& b) {
  if (a.in_bytes == 0 || b.in_bytes == 0) return a.in_bytes == 0 && b.in_bytes != 0;
  return std::abs(a.in_bytes) > std::abs(b.in_bytes);
}

void insert_sorted(PlanDims& dims, PlanDim dim) {
  size_t at = dims.count++;
  for (; at > 0 && is_outside(dim, dims[at - 1]); --at) dims.items[at] = dims[at - 1];
  dims.items[at] = dim;
}

// Joins neighbours that together are one dimension, in the input and in the result.
void merge(PlanDims& dims, int64_t elem_bytes) {
  if (dims.count == 0) {
    dims.items[dims.count++] = {1, elem_bytes, 1};
    return;
  }
  size_t last = 0;
  for (size_t d = 1; d < dims.count; ++d) {
    const PlanDim& inner = dims[d];
    PlanDim& outer = dims.items[last];
    if (outer.in_bytes == inner.in_bytes * inner.size && outer.out_elems == inner.out_elems * inner.size) {
      outer = {outer.size * inner.size, inner.in_bytes, inner.out_elems};
    } else {
      dims.items[++last] = inner;
    }
  }
  dims.count = last + 1;
}

}  // namespace

ReducePlan plan_reduce(const Tensor& x, DimMask reduced) {
  ReducePlan plan;
  const auto elem = static_cast<int64_t>(x.elem_bytes());
  for (size_t d = x.sizes().size(); d-- > 0;) {
    const int64_t size = x.sizes()[d];
    const bool is_reduced = reduced >> d & 1u;
    if (size != 1) {
      insert_sorted(is_reduced ? plan.reduced : plan.kept,
                    {size, x.strides()[d] * elem, is_reduced ? 0 : plan.kept_count});
    }
    (is_reduced ? plan.reduced_count : plan.kept_count) *= size;
  }
  merge(plan.kept, elem);
  merge(plan.reduced, elem);
  int64_t expected = 1;
  for (size_t d = plan.kept.size(); d-- > 0; expected *= plan.kept[d].size) {
    plan.in_order &= plan.kept[d].out_elems == expected;
  }
  return plan;
}

}  // namespace chorale::kernel::cpu
