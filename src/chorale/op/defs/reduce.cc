// Reductions that keep nothing but a value: sums, extremes, logic.
#include "chorale/op/reduce.h"

#include <array>

#include "chorale/kernel/cpu/reduce/reduce.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/defs/reduce_common.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce_numbers.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {
namespace {

std::vector<Sample> samples_reduce() {
  return {{{sample({2, 3, 4})}, ReduceAttrs{}},
          {{sample({2, 3, 4}, 1)}, ReduceAttrs{{1}, true}},
          {{sample({3, 2, 4}, 2)}, ReduceAttrs{{0, -1}, false}},
          {{sample({5}, 3)}, ReduceAttrs{{0}, false}},
          {{sample({}, 4)}, ReduceAttrs{}}};
}

std::vector<Sample> samples_logic() {
  return {{{sample_bools({2, 3, 4})}, ReduceAttrs{}},
          {{sample_bools({2, 3, 4}, 1)}, ReduceAttrs{{1}, true}},
          {{sample({3, 2, 4}, 2)}, ReduceAttrs{{0, -1}, false}},
          {{sample_ints({3, 5}, 0, 2)}, ReduceAttrs{{0}, false}}};
}

void ways_sum(const ShardCall& call, ShardWays& ways) { split_reduction<ReduceAttrs>(call, ways, Reduce::kSum); }
// The average of averages is the average only where all are of equally many.
void ways_mean(const ShardCall& call, ShardWays& ways) {
  split_reduction<ReduceAttrs>(call, ways, Reduce::kAverage, Parts::kEqual);
}

constexpr OpDef kSum{
    .name = "sum",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kAll,
    .infer = [](const InferArgs& a,
                std::span<OutSpec> out) { infer_reduction<ReduceAttrs>(a, sum_dtype(a.in[0].dtype()), out[0]); },
    .cpu = kernel::cpu::sum,
    .grad = [](const GradArgs& g) -> Tensors { return {spread(g.dout[0], g.shape(0), reduced_dims<ReduceAttrs>(g))}; },
    .shard = {.ways = ways_sum},
    .linear = linear_in({0}),
    .saves = kSavesNothing,
    .autocast = Cast::kF32,
    .samples = samples_reduce,
    .formula = "sum of x over dims",
};

constexpr OpDef kMean{
    .name = "mean",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kFloats | kComplexes,
    .infer = [](const InferArgs& a,
                std::span<OutSpec> out) { infer_reduction<ReduceAttrs>(a, a.in[0].dtype(), out[0]); },
    .cpu = kernel::cpu::mean,
    .grad = [](const GradArgs& g) -> Tensors {
      const DimMask reduced = reduced_dims<ReduceAttrs>(g);
      return {spread(g.dout[0] / reduced_count(g.shape(0), reduced), g.shape(0), reduced)};
    },
    .shard = {.ways = ways_mean},
    .linear = linear_in({0}),
    .saves = kSavesNothing,
    .samples = samples_reduce,
    .formula = "sum of x over dims / count",
};

void infer_extreme(const InferArgs& a, std::span<OutSpec> out) {
  infer_reduction<ReduceAttrs>(a, a.in[0].dtype(), out[0]);
  const Tensor& x = a.in[0];
  check_not_empty(a.op.name, x.sizes(), dim_mask(a.op.name, a.attrs.get<ReduceAttrs>().dims, x.dims()));
}

// Equal extremes share the gradient.
Tensors extreme_grad(const GradArgs& g) {
  const auto& attrs = g.attrs.get<ReduceAttrs>();
  const DimMask reduced = reduced_dims<ReduceAttrs>(g);
  const Tensor x = g.in[0];
  const Tensor here = to(eq(x, spread(g.out[0], x.sizes(), reduced)), x.dtype());
  return {here * spread(g.dout[0] / sum(here, attrs.dims, attrs.keepdim), x.sizes(), reduced)};
}

constexpr OpDef kAmax{
    .name = "amax",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kReals,
    .infer = infer_extreme,
    .cpu = kernel::cpu::amax,
    .grad = extreme_grad,
    .shard = kReducesParts<Reduce::kMax, Parts::kNotEmpty>,
    .saves = kSavesBoth,
    .samples = samples_reduce,
    .formula = "max of x over dims",
};

constexpr OpDef kAmin{
    .name = "amin",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kReals,
    .infer = infer_extreme,
    .cpu = kernel::cpu::amin,
    .grad = extreme_grad,
    .shard = kReducesParts<Reduce::kMin, Parts::kNotEmpty>,
    .saves = kSavesBoth,
    .samples = samples_reduce,
    .formula = "min of x over dims",
};

void infer_logic(const InferArgs& a, std::span<OutSpec> out) { infer_reduction<ReduceAttrs>(a, DType::kBool, out[0]); }

constexpr OpDef kAny{
    .name = "any",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kAll,
    .infer = infer_logic,
    .cpu = kernel::cpu::any,
    .grad = not_differentiable,
    .shard = kReducesParts<Reduce::kBitOr>,
    .samples = samples_logic,
    .formula = "some x over dims is not 0",
};

constexpr OpDef kAllOf{
    .name = "all",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kAll,
    .infer = infer_logic,
    .cpu = kernel::cpu::all,
    .grad = not_differentiable,
    .shard = kReducesParts<Reduce::kBitAnd>,
    .samples = samples_logic,
    .formula = "no x over dims is 0",
};

constexpr OpDef kCountNonzero{
    .name = "count_nonzero",
    .inputs = "x",
    .attrs = attrs_of<ReduceAttrs>,
    .dtypes = kAll,
    .infer = [](const InferArgs& a, std::span<OutSpec> out) { infer_reduction<ReduceAttrs>(a, DType::kI64, out[0]); },
    .cpu = kernel::cpu::count_nonzero,
    .grad = not_differentiable,
    .shard = {.ways = ways_sum},
    .samples = samples_logic,
    .formula = "how many x over dims are not 0",
};

// A row over dims, in another dtype where the caller wants one.
Tensor reduce_as(const OpDef& row, const Tensor& x, const IntList& dims, bool keepdim, std::optional<DType> dtype) {
  const ReduceAttrs attrs{dims, keepdim};
  if (!dtype) return call(row, attrs, x);
  return to(call(row, attrs, elements_for(row.name, x, dtype)), *dtype);
}

}  // namespace

Rows reduce_rows() {
  static constexpr std::array rows{&kSum, &kMean, &kAmax, &kAmin, &kAny, &kAllOf, &kCountNonzero};
  return rows;
}

}  // namespace op

Tensor sum(const Tensor& x, const IntList& dims, bool keepdim, std::optional<DType> dtype) {
  return op::reduce_as(op::kSum, x, dims, keepdim, dtype);
}

Tensor nansum(const Tensor& x, const IntList& dims, bool keepdim, std::optional<DType> dtype) {
  return sum(is_floating(x.dtype()) ? masked_fill(x, isnan(x), 0) : x, dims, keepdim, dtype);
}

Tensor mean(const Tensor& x, const IntList& dims, bool keepdim, std::optional<DType> dtype) {
  op::need_defined("mean", "x", x);
  CHORALE_CHECK(is_differentiable(dtype.value_or(x.dtype())), "[mean] of ", x.dtype(), " elements as ",
                dtype.value_or(x.dtype()), ": the result must be floating; pass such a dtype");
  return op::reduce_as(op::kMean, x, dims, keepdim, dtype);
}

Tensor amax(const Tensor& x, const IntList& dims, bool keepdim) {
  return op::call(op::kAmax, op::ReduceAttrs{dims, keepdim}, x);
}
Tensor amin(const Tensor& x, const IntList& dims, bool keepdim) {
  return op::call(op::kAmin, op::ReduceAttrs{dims, keepdim}, x);
}
Tensor max(const Tensor& x) {
  op::need_defined("max", "x", x);
  return amax(x);
}
Tensor min(const Tensor& x) {
  op::need_defined("min", "x", x);
  return amin(x);
}

Tensor any(const Tensor& x, const IntList& dims, bool keepdim) {
  return op::call(op::kAny, op::ReduceAttrs{dims, keepdim}, x);
}
Tensor all(const Tensor& x, const IntList& dims, bool keepdim) {
  return op::call(op::kAllOf, op::ReduceAttrs{dims, keepdim}, x);
}
Tensor count_nonzero(const Tensor& x, const IntList& dims) {
  return op::call(op::kCountNonzero, op::ReduceAttrs{dims, false}, x);
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  op::need_defined("sum_to", "x", x);
  if (x.sizes() == shape) return x;
  const size_t all = x.sizes().size();
  CHORALE_CHECK(shape.size() <= all, "[sum_to] ", shape, " does not broadcast to ", x.sizes());
  const size_t added = all - shape.size();
  IntList dims;
  for (size_t d = 0; d < all; ++d) {
    const bool stays = d >= added && shape[d - added] == x.sizes()[d];
    CHORALE_CHECK(stays || d < added || shape[d - added] == 1, "[sum_to] ", shape, " does not broadcast to ",
                  x.sizes());
    if (!stays) dims.values[dims.count++] = static_cast<int64_t>(d);
  }
  const Tensor summed = sum(x, dims, true);
  return added == 0 ? summed : view(summed, shape);
}

}  // namespace chorale
