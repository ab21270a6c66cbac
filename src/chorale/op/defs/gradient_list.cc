#include "chorale/kernel/cpu/gradient_list.h"

#include <cmath>
#include <limits>

#include "chorale/op/builder.h"
#include "chorale/op/lists.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/update.h"

namespace chorale {
namespace op {
namespace {

using kernel::ClipNormAttrs;
using kernel::ClipValueAttrs;
using kernel::LossScaleAttrs;
using kernel::PowerAttrs;

void check_number(const OpDef& op, const char* name, const Tensor& x, DType dtype) {
  CHORALE_CHECK(x.dims() == 0 && x.dtype() == dtype, "[", op.name, "] ", name, " is ", dtype,
                " without dimensions, not ", x.dtype(), " ", x.sizes());
}

// The list of tensors: floating, and written in the order in which elements lie in memory.
void check_list(const OpDef& op, std::span<const Tensor> list, bool in_place) {
  for (size_t i = 0; i < list.size(); ++i) {
    CHORALE_CHECK(is_floating(list[i].dtype()), "[", op.name, "] tensor ", i, " is ", list[i].dtype(),
                  "; expected f16, bf16, f32 or f64");
    CHORALE_CHECK(!in_place || is_dense(list[i].sizes(), list[i].strides()), "[", op.name, "] tensor ", i, " of shape ",
                  list[i].sizes(), " has holes or overlaps in memory; make it contiguous first");
  }
}

void infer_power_sums(const InferArgs& args, std::span<OutSpec> out) {
  const double p = args.attrs.get<PowerAttrs>().p;
  CHORALE_CHECK(p > 0, "[power_sums] p must be above 0 or infinite, not ", p);
  check_list(args.op, args.in, false);
  infer_written(ListCall(args.op, args.in, args.attrs), args.in, out);
}
void infer_clip_by_norm(const InferArgs& args, std::span<OutSpec> out) {
  const double max_norm = args.attrs.get<ClipNormAttrs>().max_norm;
  CHORALE_CHECK(max_norm > 0, "[clip_by_norm] max_norm must be positive, not ", max_norm);
  check_number(args.op, "norm", args.in[0], DType::kF64);
  check_list(args.op, args.in.subspan(1), out.empty());
  if (!out.empty()) infer_written(ListCall(args.op, args.in, args.attrs), args.in, out);
}
void infer_clip_by_value(const InferArgs& args, std::span<OutSpec> out) {
  const double limit = args.attrs.get<ClipValueAttrs>().limit;
  CHORALE_CHECK(limit > 0, "[clip_by_value] the limit must be positive, not ", limit);
  check_list(args.op, args.in, out.empty());
  if (!out.empty()) infer_written(ListCall(args.op, args.in, args.attrs), args.in, out);
}
void infer_unscale(const InferArgs& args, std::span<OutSpec> out) {
  check_number(args.op, "scale", args.in[0], DType::kF32);
  check_number(args.op, "found_inf", args.in[1], DType::kF32);
  check_list(args.op, args.in.subspan(2), out.empty());
  if (!out.empty()) infer_written(ListCall(args.op, args.in, args.attrs), args.in, out);
}
void infer_next_loss_scale(const InferArgs& args, std::span<OutSpec> out) {
  check_number(args.op, "scale", args.in[0], DType::kF32);
  check_number(args.op, "steps", args.in[1], DType::kI64);
  check_number(args.op, "found_inf", args.in[2], DType::kF32);
  for (size_t i = 0; i < 2; ++i) static_cast<TensorSpec&>(out[i]) = spec_of(args.in[i]);
}

void split_power_sums(const ShardCall& call, ShardWays& ways) {
  const bool largest = std::isinf(call.attrs.get<PowerAttrs>().p);
  for (ShardWay& way : split_lists(call, {0}, largest ? Reduce::kMax : Reduce::kSum))
    ways.add(std::move(way.in), std::move(way.out));
}
void split_each(const ShardCall& call, ShardWays& ways) {
  for (ShardWay& way : split_lists(call, {0})) ways.add(std::move(way.in), std::move(way.out));
}
// Each rank has seen its parts only: something infinite was found if any of them found it.
void split_unscale(const ShardCall& call, ShardWays& ways) {
  for (ShardWay& way : split_lists(call, {0})) {
    way.out[0] = Placement::partial(Reduce::kMax);
    ways.add(std::move(way.in), std::move(way.out));
  }
}

Lists only_list(const Attrs&) { return {.written = {0}}; }
Lists sums_of_list(const Attrs&) { return {.fresh = 1}; }
Lists number_and_list(const Attrs&) { return {.own = 1, .written = {1}}; }
Lists scaled_list(const Attrs&) { return {.own = 2, .written = {1, 2}}; }

constexpr double kEndless = std::numeric_limits<double>::infinity();

Tensor f32(double value) { return Tensor::scalar(value, DType::kF32); }

const OpDef kPowerSums{
    .name = "power_sums",
    .inputs = "xs...",
    .lists = sums_of_list,
    .attrs = attrs_of<PowerAttrs>,
    .dtypes = kFloats,
    .infer = infer_power_sums,
    .cpu = kernel::cpu::power_sums,
    .grad = not_differentiable,
    .shard = {.ways = split_power_sums},
    .samples =
        [] {
          std::vector<Sample> samples;
          for (const double p : {1.0, 2.0, 3.5, kEndless})
            samples.push_back({.in = {sample({3, 4}), sample({5}, 1)}, .attrs = PowerAttrs{p}, .grad = false});
          return samples;
        },
    .formula = "Σ |x|^p of each tensor; its largest |x| where p is infinite",
};

const OpDef kClipByNorm{
    .name = "clip_by_norm",
    .inputs = "norm, xs...",
    .lists = number_and_list,
    .attrs = attrs_of<ClipNormAttrs>,
    .dtypes = {DType::kF64},
    .infer = infer_clip_by_norm,
    .cpu = kernel::cpu::clip_by_norm,
    .grad = not_differentiable,
    .shard = {.ways = split_each},
    .samples =
        [] {
          std::vector<Sample> samples;
          for (const double norm : {4.0, 0.25, kEndless})
            samples.push_back({.in = {Tensor::scalar(norm, DType::kF64), sample({3, 4}), sample({5}, 1)},
                               .attrs = ClipNormAttrs{0.5},
                               .grad = false});
          return samples;
        },
    .formula = "x min(1, max_norm / (norm + 1e-6)) where the norm is finite",
};

const OpDef kClipByValue{
    .name = "clip_by_value",
    .inputs = "xs...",
    .lists = only_list,
    .attrs = attrs_of<ClipValueAttrs>,
    .dtypes = kFloats,
    .infer = infer_clip_by_value,
    .cpu = kernel::cpu::clip_by_value,
    .grad = not_differentiable,
    .shard = {.ways = split_each},
    .samples =
        [] {
          return std::vector<Sample>{
              {.in = {sample({3, 4}), sample({5}, 1)}, .attrs = ClipValueAttrs{0.5}, .grad = false}};
        },
    .formula = "min(max(x, -limit), limit)",
};

const OpDef kUnscale{
    .name = "unscale",
    .inputs = "scale, found_inf, xs...",
    .lists = scaled_list,
    .dtypes = {DType::kF32},
    .infer = infer_unscale,
    .cpu = kernel::cpu::unscale,
    .grad = not_differentiable,
    .shard = {.ways = split_unscale},
    .samples =
        [] {
          const Tensor infinite = Tensor::from<double>({1, kEndless, 2}, {3});
          return std::vector<Sample>{
              {.in = {f32(8), f32(0), sample({3, 4}), sample({5}, 1)}, .grad = false},
              {.in = {f32(8), f32(1), sample({3, 4}), sample({5}, 1)}, .grad = false},
              {.in = {f32(8), f32(0), sample({3, 4}), infinite}, .grad = false},
          };
        },
    .formula = "found_inf or whether an x is not finite; x / scale",
};

const OpDef kNextLossScale{
    .name = "next_loss_scale",
    .inputs = "scale, steps, found_inf",
    .outputs = 2,
    .attrs = attrs_of<LossScaleAttrs>,
    .dtypes = {DType::kF32},
    .infer = infer_next_loss_scale,
    .cpu = kernel::cpu::next_loss_scale,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .in_place = true,
    .samples =
        [] {
          std::vector<Sample> samples;
          for (const double found : {0.0, 1.0}) {
            for (const int64_t steps : {3, 4})
              samples.push_back({.in = {f32(8), Tensor::scalar(steps, DType::kI64), f32(found)},
                                 .attrs = LossScaleAttrs{.interval = 5},
                                 .grad = false});
          }
          return samples;
        },
    .formula = "scale backoff where something infinite was found; scale growth after interval other steps",
};

}  // namespace

Rows gradient_list_rows() {
  static constexpr const OpDef* rows[] = {&kPowerSums, &kClipByNorm, &kClipByValue, &kUnscale, &kNextLossScale};
  return rows;
}

}  // namespace op

Tensor norm_of_all(std::span<const Tensor> tensors, double p) {
  std::vector<Tensor> sums(tensors.size());
  op::current().call(op::kPowerSums, tensors, kernel::PowerAttrs{p}, sums);
  const Tensor all = stack(sums);
  if (std::isinf(p)) return amax(all);
  const Tensor total = sum(all);
  return p == 1 ? total : p == 2 ? sqrt(total) : pow(total, 1 / p);
}

void clip_by_norm_(std::span<const Tensor> tensors, const Tensor& norm, double max_norm) {
  std::vector<Tensor> in{norm};
  in.insert(in.end(), tensors.begin(), tensors.end());
  op::current().call_into(op::kClipByNorm, in, kernel::ClipNormAttrs{max_norm}, tensors);
}

void clip_by_value_(std::span<const Tensor> tensors, double limit) {
  op::current().call_into(op::kClipByValue, tensors, kernel::ClipValueAttrs{limit}, tensors);
}

void unscale_(std::span<const Tensor> tensors, const Tensor& scale, const Tensor& found_inf) {
  std::vector<Tensor> in{scale, found_inf};
  in.insert(in.end(), tensors.begin(), tensors.end());
  op::current().call_into(op::kUnscale, in, {}, std::span<const Tensor>(in).subspan(1));
}

void next_loss_scale_(const Tensor& scale, const Tensor& steps, const Tensor& found_inf,
                      const kernel::LossScaleAttrs& attrs) {
  const Tensor in[] = {scale, steps, found_inf};
  op::current().call_into(op::kNextLossScale, in, attrs, std::span<const Tensor>(in).first(2));
}

}  // namespace chorale
