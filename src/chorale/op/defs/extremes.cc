// Reductions along one dimension that say where they found their value.
#include <array>

#include "chorale/kernel/cpu/reduce/extremes.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/reduce_common.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace op {
namespace {

DimMask picked_dim(const char* op, int64_t dim, int64_t dims) { return DimMask{1} << normalize_dim(op, dim, dims); }

// What is searched stays whole.
void ways_pick(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<PickAttrs>();
  split_reduction(call, ways, picked_dim("shard", a.dim, call.dims(0)), a.keepdim);
}
void ways_arg(const ShardCall& call, ShardWays& ways) {
  const auto& a = call.attrs.get<ArgAttrs>();
  const DimMask all = dim_mask("shard", {}, call.dims(0));
  split_reduction(call, ways, a.flat ? all : picked_dim("shard", a.dim, call.dims(0)), a.keepdim);
}

void infer_pick(const InferArgs& args, std::span<OutSpec> out) {
  const auto& attrs = args.attrs.get<PickAttrs>();
  const Tensor& x = args.in[0];
  const DimMask reduced = picked_dim(args.op.name, attrs.dim, x.dims());
  check_not_empty(args.op.name, x.sizes(), reduced);
  out[0] = {{.sizes = reduced_shape(x.sizes(), reduced, attrs.keepdim), .dtype = x.dtype(), .device = x.device()}};
  out[1] = {{.sizes = out[0].sizes, .dtype = DType::kI64, .device = x.device()}};
}

void infer_arg(const InferArgs& args, std::span<OutSpec> out) {
  const auto& attrs = args.attrs.get<ArgAttrs>();
  const Tensor& x = args.in[0];
  const DimMask reduced =
      attrs.flat ? dim_mask(args.op.name, {}, x.dims()) : picked_dim(args.op.name, attrs.dim, x.dims());
  check_not_empty(args.op.name, x.sizes(), reduced);
  out[0] = {{.sizes = reduced_shape(x.sizes(), reduced, attrs.keepdim), .dtype = DType::kI64, .device = x.device()}};
}

Tensors pick_grad(const GradArgs& g) {
  const auto& attrs = g.attrs.get<PickAttrs>();
  const Shape& to = g.shape(0);
  const Shape kept = reduced_shape(to, picked_dim("gradient", attrs.dim, static_cast<int64_t>(to.size())), true);
  return {place(view(g.dout[0], kept), view(g.out[1], kept), to, attrs.dim)};
}

std::vector<Sample> samples_pick() {
  return {{{sample({2, 3, 4})}, PickAttrs{-1, false}},
          {{sample({2, 3, 4}, 1)}, PickAttrs{1, true}},
          {{sample({5, 2}, 2)}, PickAttrs{0, false}},
          {{sample({}, 3)}, PickAttrs{0, false}}};
}

std::vector<Sample> samples_arg() {
  return {{{sample({2, 3, 4})}, ArgAttrs{-1, false, false}},
          {{sample({2, 3, 4}, 1)}, ArgAttrs{0, true, false}},
          {{sample({5, 2}, 2)}, ArgAttrs{0, false, true}},
          {{sample_ints({5, 2}, -3, 3)}, ArgAttrs{0, true, true}}};
}

constexpr Saves kSavesIndices{.out = {1}};

constexpr OpDef kMax{
    .name = "max",
    .inputs = "x",
    .outputs = 2,
    .attrs = attrs_of<PickAttrs>,
    .dtypes = kReals,
    .infer = infer_pick,
    .cpu = kernel::cpu::max_with_index,
    .grad = pick_grad,
    .shard = {.ways = ways_pick},
    .saves = kSavesIndices,
    .samples = samples_pick,
    .formula = "max of x along dim, and where it is",
};

constexpr OpDef kMin{
    .name = "min",
    .inputs = "x",
    .outputs = 2,
    .attrs = attrs_of<PickAttrs>,
    .dtypes = kReals,
    .infer = infer_pick,
    .cpu = kernel::cpu::min_with_index,
    .grad = pick_grad,
    .shard = {.ways = ways_pick},
    .saves = kSavesIndices,
    .samples = samples_pick,
    .formula = "min of x along dim, and where it is",
};

constexpr OpDef kArgmax{
    .name = "argmax",
    .inputs = "x",
    .attrs = attrs_of<ArgAttrs>,
    .dtypes = kReals,
    .infer = infer_arg,
    .cpu = kernel::cpu::argmax,
    .grad = not_differentiable,
    .shard = {.ways = ways_arg},
    .samples = samples_arg,
    .formula = "where the first max of x is",
};

constexpr OpDef kArgmin{
    .name = "argmin",
    .inputs = "x",
    .attrs = attrs_of<ArgAttrs>,
    .dtypes = kReals,
    .infer = infer_arg,
    .cpu = kernel::cpu::argmin,
    .grad = not_differentiable,
    .shard = {.ways = ways_arg},
    .samples = samples_arg,
    .formula = "where the first min of x is",
};

ValuesIndices pick(const OpDef& row, const Tensor& x, int64_t dim, bool keepdim) {
  auto [values, indices] = call_many<2>(row, PickAttrs{dim, keepdim}, x);
  return {std::move(values), std::move(indices)};
}

}  // namespace

Rows pick_rows() {
  static constexpr std::array rows{&kMax, &kMin, &kArgmax, &kArgmin};
  return rows;
}

}  // namespace op

ValuesIndices max(const Tensor& x, int64_t dim, bool keepdim) {
  op::need_defined("max", "x", x);
  return op::pick(op::kMax, x, dim, keepdim);
}
ValuesIndices min(const Tensor& x, int64_t dim, bool keepdim) {
  op::need_defined("min", "x", x);
  return op::pick(op::kMin, x, dim, keepdim);
}
Tensor argmax(const Tensor& x, std::optional<int64_t> dim, bool keepdim) {
  return op::call(op::kArgmax, op::ArgAttrs{dim.value_or(0), !dim, keepdim}, x);
}
Tensor argmin(const Tensor& x, std::optional<int64_t> dim, bool keepdim) {
  return op::call(op::kArgmin, op::ArgAttrs{dim.value_or(0), !dim, keepdim}, x);
}

}  // namespace chorale
