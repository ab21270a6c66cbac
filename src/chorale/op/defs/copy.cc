#include "chorale/op/copy.h"

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/device_copy.h"
#include "chorale/op/builder.h"
#include "chorale/op/joined.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

void keep_layout(const Tensor& x, OutSpec& out) {
  if (x.is_contiguous() || !is_dense(x.sizes(), x.strides())) return;
  out.strided = true;
  out.strides = x.strides();
}

void infer_to(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& attrs = args.attrs.get<CopyAttrs>();
  out[0].sizes = x.sizes();
  out[0].dtype = attrs.dtype;
  out[0].device = x.device();
  if (attrs.keep_layout) keep_layout(x, out[0]);
}

// Sums and averages survive a cast unless it cuts fractions off, or parts; extremes survive every cast in which order
// does.
void pass_through_cast(const ShardCall& call, ShardWays& ways) {
  const DType from = call.in[0].dtype(), to = call.attrs.get<CopyAttrs>().dtype;
  if (to == DType::kBool) return;
  if (is_differentiable(to) || !is_differentiable(from)) ways.pass(linear_in({0}));
  if (!is_complex(to)) ways.pass(rises_in({0}));
}

std::vector<Sample> samples_to() {
  return {
      {.in = {sample({2, 3})}, .attrs = CopyAttrs{DType::kF64}},
      {.in = {sample({2, 3, 4, 2})}, .attrs = CopyAttrs{DType::kF64, true}},
      {.in = {sample({})}, .attrs = CopyAttrs{DType::kC128}},
      {.in = {sample_complex({4})}, .attrs = CopyAttrs{DType::kC128}},
      {.in = {sample({5}, 1, -100, 100)}, .attrs = CopyAttrs{DType::kI32}, .grad = false},
  };
}

Lists lists_to_each(const Attrs&) { return {.fresh = 1}; }
void infer_to_each(const InferArgs& args, std::span<OutSpec> out) {
  for (size_t i = 0; i < out.size(); ++i) infer_to({args.op, args.in.subspan(i, 1), args.attrs}, out.subspan(i, 1));
}

}  // namespace

const OpDef kTo{
    .name = "to",
    .inputs = "x",
    .attrs = attrs_of<CopyAttrs>,
    .dtypes = kAll,
    .infer = infer_to,
    .cpu = kernel::cpu::copy,
    // The caller of a rule casts the gradient back to the dtype of x.
    .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
    .shard = {.labels = kElementwiseLabels, .ways = pass_through_cast},
    .in_place = true,
    .samples = samples_to,
    .formula = "x in another dtype",
};

const OpDef kToEach{
    .name = "to_each",
    .inputs = "xs...",
    .lists = lists_to_each,
    .attrs = attrs_of<CopyAttrs>,
    .dtypes = kFloats,
    .infer = infer_to_each,
    .cpu = kernel::cpu::copy_each,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = []() -> std::vector<Sample> {
      return {{.in = {sample({2, 3}), sample({70}, 1), sample({}, 2)}, .attrs = CopyAttrs{DType::kF32}, .grad = false},
              {.in = {sample({4, 8}, 3)}, .attrs = CopyAttrs{DType::kBF16, true}, .grad = false}};
    },
    .formula = "each x in another dtype",
};

const OpDef kToDevice{
    .name = "to_device",
    .inputs = "x",
    .attrs = attrs_of<ToDeviceAttrs>,
    .dtypes = kAll,
    .infer =
        [](const InferArgs& args, std::span<OutSpec> out) {
          const auto& attrs = args.attrs.get<ToDeviceAttrs>();
          out[0].sizes = args.in[0].sizes();
          out[0].dtype = args.in[0].dtype();
          // What has no values stays without them.
          const bool null = args.in[0].device().type == DeviceType::kNull;
          out[0].device = null ? kNull : Device{attrs.device, static_cast<int16_t>(attrs.device_index)};
          keep_layout(args.in[0], out[0]);
        },
    .cpu = kernel::move_to_device,
    .grad = [](const GradArgs& g) -> Tensors { return {to(g.dout[0], g.context.spec(0).device)}; },
    .shard = {.labels = kElementwiseLabels},
    .linear = linear_in({0}),
    .samples = []() -> std::vector<Sample> {
      return {{.in = {sample({2, 3})}, .attrs = ToDeviceAttrs{}}, {.in = {sample({})}, .attrs = ToDeviceAttrs{}}};
    },
    .formula = "x on another device",
};

Rows copy_rows() {
  static constexpr const OpDef* rows[] = {&kTo, &kToEach, &kToDevice};
  return rows;
}

}  // namespace chorale::op

namespace chorale {

using op::CopyAttrs;
using op::kTo;

Tensor to(const Tensor& x, DType dtype) {
  op::need_defined("to", "x", x);
  return x.dtype() == dtype ? x : op::call(kTo, CopyAttrs{dtype, /*keep_layout=*/true}, x);
}

Tensor to(const Tensor& x, Device device) {
  op::need_defined("to", "x", x);
  CHORALE_CHECK_STATE(x.device().type != DeviceType::kNull || device.type == DeviceType::kNull,
                      "[to] a tensor on device null has no values to copy to ", device);
  return x.device() == device ? x : op::call(op::kToDevice, op::ToDeviceAttrs{device.type, device.index}, x);
}

Tensor clone(const Tensor& x) {
  op::need_defined("clone", "x", x);
  return op::call(kTo, CopyAttrs{x.dtype()}, x);
}

Tensor contiguous(const Tensor& x) {
  op::need_defined("contiguous", "x", x);
  return x.is_contiguous() ? x : clone(x);
}

const Tensor& copy_(const Tensor& x, const Tensor& source) {
  op::need_defined("copy_", "x", x);
  op::need_defined("copy_", "source", source);
  if (source.device() != x.device()) return copy_(x, to(to(source, x.dtype()), x.device()));
  const CopyAttrs attrs{x.dtype()};
  if (source.sizes() == x.sizes()) return op::call_into(kTo, attrs, x, source);
  return op::call_into(kTo, attrs, x, expand(source, x.sizes()));
}

void set_data(const Tensor& x, const Tensor& other) { op::current().set_data(x, other); }

}  // namespace chorale
