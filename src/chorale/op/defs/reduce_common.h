// What the rows of reductions share.
#pragma once

#include <optional>
#include <string>

#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/op_def.h"

namespace chorale::op {

using kernel::ArgAttrs;
using kernel::dim_mask;
using kernel::DimMask;
using kernel::NormAttrs;
using kernel::PickAttrs;
using kernel::ReduceAttrs;
using kernel::reduced_count;
using kernel::reduced_shape;
using kernel::ScanAttrs;
using kernel::VarAttrs;

// One value for each result of a reduction, seen with the shape of what was reduced.
Tensor spread(const Tensor& results, const Shape& to, DimMask reduced);

// Zeros of shape `to` with values[…] put where indices say along `dim`, of which values have one or more elements.
Tensor place(const Tensor& values, const Tensor& indices, const Shape& to, int64_t dim);

// Labels of a reduction of one tensor: "abc->ac". `whole` keeps the reduced dimensions on one rank (capital letters).
std::string reduction_labels(int64_t rank, DimMask reduced, bool keepdim, bool whole);

template <class A>
void infer_reduction(const InferArgs& args, DType dtype, OutSpec& out) {
  const A& attrs = args.attrs.get<A>();
  const Tensor& x = args.in[0];
  out.sizes = reduced_shape(x.sizes(), dim_mask(args.op.name, attrs.dims, x.dims()), attrs.keepdim);
  out.dtype = dtype;
  out.device = x.device();
}

template <class A>
DimMask reduced_dims(const GradArgs& g) {
  return dim_mask("gradient", g.attrs.get<A>().dims, static_cast<int64_t>(g.shape(0).size()));
}

template <class A, bool kWhole>
std::string labels_of_reduction(const Attrs& attrs, std::span<const int64_t> ranks) {
  const A& a = attrs.get<A>();
  return reduction_labels(ranks[0], dim_mask("shard", a.dims, ranks[0]), a.keepdim, kWhole);
}

// Reduced dimensions may be split, and the parts are then combined; or they may not.
template <class A>
constexpr ShardRule splits_into(Reduce partial) {
  return {.partial = partial, .labels_of = labels_of_reduction<A, false>};
}
template <class A>
inline constexpr ShardRule kReducesWhole{.labels_of = labels_of_reduction<A, true>};

// Throws InvalidArgument when a result would be the extreme of nothing.
void check_not_empty(const char* op, const Shape& sizes, DimMask reduced);

// The dtype of sums and products of x: integers and bool count in i64.
constexpr DType sum_dtype(DType x) { return is_differentiable(x) ? x : DType::kI64; }

// x converted so that nothing is lost when it is summed (multiplied) and the result becomes `wanted`.
Tensor elements_for(const char* op, const Tensor& x, std::optional<DType> wanted);

}  // namespace chorale::op
