// What the rows of reductions share.
#pragma once

#include <optional>
#include <string>

#include "chorale/kernel/reduce_attrs.h"
#include "chorale/op/shard_ways.h"

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

// Ways of a reduction of one tensor to `call.out.size()` results of one shape. The dimensions that stay may be split;
// the reduced ones too, where `partial` says what the results of the parts are.
void split_reduction(const ShardCall& call, ShardWays& ways, DimMask reduced, bool keepdim, Partial partial = {},
                     Parts parts = Parts::kAny);

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

template <class A>
void split_reduction(const ShardCall& call, ShardWays& ways, Partial partial = {}, Parts parts = Parts::kAny) {
  const A& a = call.attrs.get<A>();
  split_reduction(call, ways, dim_mask("shard", a.dims, call.dims(0)), a.keepdim, partial, parts);
}

// Reduced dimensions may not be split.
template <class A>
inline constexpr ShardRule kReducesWhole{
    .ways = [](const ShardCall& call, ShardWays& ways) { split_reduction<A>(call, ways); }};
// They may; what the parts give is combined in the same manner, and so are parts of elements.
template <Reduce kind, Parts parts = Parts::kAny>
inline constexpr ShardRule kReducesParts{.ways = [](const ShardCall& call, ShardWays& ways) {
  split_reduction<ReduceAttrs>(call, ways, kind, parts);
  const bool bits = kind == Reduce::kBitAnd || kind == Reduce::kBitOr;
  if (!bits || call.in[0].dtype() == DType::kBool) {
    ways.add({Placement::partial(kind)}, {Placement::partial(kind)});
  }
}};

// Throws InvalidArgument when a result would be the extreme of nothing.
void check_not_empty(const char* op, const Shape& sizes, DimMask reduced);

// The dtype of sums and products of x: integers and bool count in i64.
constexpr DType sum_dtype(DType x) { return is_differentiable(x) ? x : DType::kI64; }

// x converted so that nothing is lost when it is summed (multiplied) and the result becomes `wanted`.
Tensor elements_for(const char* op, const Tensor& x, std::optional<DType> wanted);

}  // namespace chorale::op
