#include "chorale/op/creation.h"

#include <cmath>

#include "chorale/kernel/cpu/creation.h"
#include "chorale/kernel/creation_attrs.h"
#include "chorale/kernel/full_like_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/device_scope.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale {
namespace op {
namespace {

using kernel::EyeAttrs;
using kernel::FullAttrs;
using kernel::LinspaceAttrs;
using kernel::RangeAttrs;

template <class A>
Device device_of(const A& attrs) {
  return {attrs.device, static_cast<int16_t>(attrs.device_index)};
}

void infer_full(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<FullAttrs>();
  check_held(args.op.name, a.dtype, a.value);
  out[0].sizes = a.sizes.shape();
  out[0].dtype = a.dtype;
  out[0].device = device_of(a);
}
template <class A>
void infer_count(const InferArgs& args, std::span<OutSpec> out) {
  const A& a = args.attrs.get<A>();
  CHORALE_CHECK(a.count >= 0, "[", args.op.name, "] a count cannot be negative: ", a.count);
  CHORALE_CHECK(a.dtype != DType::kBool, "[", args.op.name, "] is not defined for bool");
  out[0].sizes = {a.count};
  out[0].dtype = a.dtype;
  out[0].device = device_of(a);
}
void infer_eye(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<EyeAttrs>();
  CHORALE_CHECK(a.rows >= 0 && a.cols >= 0, "[eye] sizes cannot be negative: ", a.rows, " x ", a.cols);
  out[0].sizes = {a.rows, a.cols};
  out[0].dtype = a.dtype;
  out[0].device = device_of(a);
}

void ways_full(const ShardCall& call, ShardWays& ways) {
  ways.split(join({}, {letters(static_cast<int64_t>(call.out[0].size()))}));
}

bool counts_in_integers(const RangeAttrs& a) {
  return a.start.kind() <= Scalar::Kind::kInt && a.step.kind() <= Scalar::Kind::kInt;
}
// Only integers: start + i * step of a later start would round differently.
void ways_arange(const ShardCall& call, ShardWays& ways) {
  if (counts_in_integers(call.attrs.get<RangeAttrs>())) ways.split("->a");
}
Attrs local_arange(const ShardCall& call, std::span<const Part>, std::span<const Part> out) {
  RangeAttrs a = call.attrs.get<RangeAttrs>();
  if (!counts_in_integers(a)) return a;
  a.start = a.start.integer() + out[0].first[0] * a.step.integer();
  a.count = out[0].sizes[0];
  return a;
}

constexpr OpDef kFull{
    .name = "full",
    .inputs = "",
    .attrs = attrs_of<FullAttrs>,
    .dtypes = kAll,
    .infer = infer_full,
    .cpu = kernel::cpu::full,
    .grad = not_differentiable,
    .shard = {.ways = ways_full, .local = with_result_sizes<FullAttrs>},
    .in_place = true,
    .samples =
        [] {
          return std::vector<Sample>{{.in = {}, .attrs = FullAttrs{.sizes = {2, 3}, .value = 1.5}},
                                     {.in = {}, .attrs = FullAttrs{.sizes = {}, .value = 7, .dtype = DType::kI64}},
                                     {.in = {}, .attrs = FullAttrs{.sizes = {0, 2}, .value = 1}}};
        },
    .formula = "out[i] = value",
};
constexpr OpDef kArange{
    .name = "arange",
    .inputs = "",
    .attrs = attrs_of<RangeAttrs>,
    .dtypes = kAll,
    .infer = infer_count<RangeAttrs>,
    .cpu = kernel::cpu::arange,
    .grad = not_differentiable,
    .shard = {.ways = ways_arange, .local = local_arange},
    .samples =
        [] {
          return std::vector<Sample>{
              {.in = {}, .attrs = RangeAttrs{.start = 2, .step = 3, .count = 4, .dtype = DType::kI64}},
              {.in = {}, .attrs = RangeAttrs{.start = 0.5, .step = -0.25, .count = 5, .dtype = DType::kF32}}};
        },
    .formula = "out[i] = start + i * step",
};
constexpr OpDef kLinspace{
    .name = "linspace",
    .inputs = "",
    .attrs = attrs_of<LinspaceAttrs>,
    .dtypes = kAll,
    .infer = infer_count<LinspaceAttrs>,
    .cpu = kernel::cpu::linspace,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples =
        [] {
          return std::vector<Sample>{{.in = {}, .attrs = LinspaceAttrs{.start = -1, .end = 2, .count = 7}},
                                     {.in = {}, .attrs = LinspaceAttrs{.start = 3, .end = 3, .count = 1}}};
        },
    .formula = "out[i] = start + i * (end - start) / (count - 1)",
};
constexpr OpDef kEye{
    .name = "eye",
    .inputs = "",
    .attrs = attrs_of<EyeAttrs>,
    .dtypes = kAll,
    .infer = infer_eye,
    .cpu = kernel::cpu::eye,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = [] { return std::vector<Sample>{{.in = {}, .attrs = EyeAttrs{.rows = 3, .cols = 2}}}; },
    .formula = "out[i][j] = i == j",
};

// The result is like another tensor, also in how it is spread over ranks. The values of that do not matter, so partial
// ones need not be reduced.
void infer_full_like(const InferArgs& args, std::span<OutSpec> out) {
  check_held(args.op.name, args.in[0].dtype(), args.attrs.get<kernel::FullLikeAttrs>().value);
  out[0].sizes = args.in[0].sizes();
  out[0].dtype = args.in[0].dtype();
  out[0].device = args.in[0].device();
}
void ways_full_like(const ShardCall& call, ShardWays& ways) {
  const std::string x = letters(call.dims(0));
  ways.split(join({x}, {x}));
  for (const Reduce kind : {Reduce::kSum, Reduce::kAverage, Reduce::kMax, Reduce::kMin, Reduce::kProduct})
    ways.add({Placement::partial(kind)}, {Placement()});
}
void fill_like(const kernel::KernelArgs& args) {
  const auto& a = args.attrs.get<kernel::FullLikeAttrs>();
  FullAttrs full{.sizes = args.out[0].sizes(), .value = a.value, .dtype = args.out[0].dtype()};
  kernel::cpu::full({.in = {}, .out = args.out, .attrs = full, .stream = args.stream});
}
constexpr OpDef kFullLike{
    .name = "full_like",
    .inputs = "like",
    .attrs = attrs_of<kernel::FullLikeAttrs>,
    .dtypes = kAll,
    .infer = infer_full_like,
    .cpu = fill_like,
    .grad = not_differentiable,
    .shard = {.ways = ways_full_like},
    .in_place = true,
    .samples =
        [] {
          return std::vector<Sample>{{.in = {sample({2, 3})}, .attrs = kernel::FullLikeAttrs{.value = 1.5}}};
        },
    .formula = "out[i] = value",
};

constexpr const OpDef* kCreationRows[] = {&kFull, &kArange, &kLinspace, &kEye, &kFullLike};

}  // namespace

Rows creation_rows() { return kCreationRows; }

}  // namespace op

Tensor empty(const Shape& sizes, DType dtype, Device device) {
  return Tensor::empty(sizes, dtype, op::creation_device(device));
}
Tensor full(const Shape& sizes, Scalar value, DType dtype, Device device) {
  device = op::creation_device(device);
  return op::call(op::kFull, kernel::FullAttrs{sizes, value, dtype, device.type, device.index});
}
Tensor zeros(const Shape& sizes, DType dtype, Device device) { return full(sizes, 0, dtype, device); }
Tensor ones(const Shape& sizes, DType dtype, Device device) { return full(sizes, 1, dtype, device); }
Tensor empty_like(const Tensor& x) {
  op::need_defined("empty_like", "x", x);
  return Tensor::empty(x.sizes(), x.dtype(), x.device());
}
Tensor full_like(const Tensor& x, Scalar value) {
  op::need_defined("full_like", "x", x);
  if (x.extension() && !x.is_sparse()) return op::call(op::kFullLike, kernel::FullLikeAttrs{value}, x);
  return op::call(op::kFull, kernel::FullAttrs{x.sizes(), value, x.dtype(), x.device().type, x.device().index});
}
Tensor zeros_like(const Tensor& x) {
  op::need_defined("zeros_like", "x", x);
  return full_like(x, 0);
}
Tensor ones_like(const Tensor& x) {
  op::need_defined("ones_like", "x", x);
  return full_like(x, 1);
}
const Tensor& fill_(const Tensor& x, Scalar value) {
  op::need_defined("fill_", "x", x);
  return op::call_into(op::kFull, kernel::FullAttrs{x.sizes(), value, x.dtype(), x.device().type, x.device().index}, x);
}
const Tensor& zero_(const Tensor& x) {
  op::need_defined("zero_", "x", x);
  return fill_(x, 0);
}

Tensor arange(Scalar start, Scalar end, Scalar step, std::optional<DType> dtype, Device device) {
  device = op::creation_device(device);
  CHORALE_CHECK(!step.is_zero(), "[arange] the step cannot be zero");
  const bool whole =
      start.kind() <= Scalar::Kind::kInt && end.kind() <= Scalar::Kind::kInt && step.kind() <= Scalar::Kind::kInt;
  const double length = std::ceil((end.real() - start.real()) / step.real());
  CHORALE_CHECK(length >= 0, "[arange] from ", start, " to ", end, " in steps of ", step, " never arrives");
  CHORALE_CHECK(length < 0x1p62, "[arange] from ", start, " to ", end, " in steps of ", step,
                " are more elements than can be counted");
  const DType made = dtype.value_or(whole ? DType::kI64 : DType::kF32);
  const auto count = static_cast<int64_t>(length);
  if (count > 0) {
    op::check_held("arange", made, start);
    op::check_held("arange", made,
                   whole ? Scalar(start.integer() + (count - 1) * step.integer())
                         : Scalar(start.real() + static_cast<double>(count - 1) * step.real()));
  }
  return op::call(op::kArange, kernel::RangeAttrs{start, step, count, made, device.type, device.index});
}
Tensor arange(Scalar end, std::optional<DType> dtype, Device device) { return arange(0, end, 1, dtype, device); }
Tensor linspace(double start, double end, int64_t count, DType dtype, Device device) {
  device = op::creation_device(device);
  for (const double end_of_range : {start, end}) op::check_held("linspace", dtype, end_of_range);
  return op::call(op::kLinspace, kernel::LinspaceAttrs{start, end, count, dtype, device.type, device.index});
}
Tensor eye(int64_t rows, int64_t cols, DType dtype, Device device) {
  device = op::creation_device(device);
  return op::call(op::kEye, kernel::EyeAttrs{rows, cols == -1 ? rows : cols, dtype, device.type, device.index});
}

}  // namespace chorale
