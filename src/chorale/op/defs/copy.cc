#include "chorale/op/copy.h"

#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/op/builder.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

void infer_to(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const auto& attrs = args.attrs.get<CopyAttrs>();
  out[0].sizes = x.sizes();
  out[0].dtype = attrs.dtype;
  out[0].device = x.device();
  if (attrs.keep_layout && !x.is_contiguous() && is_dense(x.sizes(), x.strides())) {
    out[0].strided = true;
    out[0].strides = x.strides();
  }
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

}  // namespace

const OpDef kTo{
    .name = "to",
    .inputs = "x",
    .attrs = attrs_of<CopyAttrs>,
    .dtypes = kAll,
    .infer = infer_to,
    .cpu = kernel::cpu::copy,
    // Whoever calls a rule casts the gradient back to the dtype of x.
    .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
    .shard = {.labels = kElementwiseLabels, .ways = pass_through_cast},
    .in_place = true,
    .samples = samples_to,
    .formula = "x in another dtype",
};

Rows copy_rows() {
  static constexpr const OpDef* rows[] = {&kTo};
  return rows;
}

}  // namespace chorale::op

namespace chorale {

using op::CopyAttrs;
using op::kTo;

Tensor to(const Tensor& x, DType dtype) {
  return x.dtype() == dtype ? x : op::call(kTo, CopyAttrs{dtype, /*keep_layout=*/true}, x);
}

Tensor clone(const Tensor& x) { return op::call(kTo, CopyAttrs{x.dtype()}, x); }

Tensor contiguous(const Tensor& x) { return x.is_contiguous() ? x : clone(x); }

const Tensor& copy_(const Tensor& x, const Tensor& source) {
  const CopyAttrs attrs{x.dtype()};
  if (source.sizes() == x.sizes()) return op::call_into(kTo, attrs, x, source);
  return op::call_into(kTo, attrs, x, expand(source, x.sizes()));
}

void set_data(const Tensor& x, const Tensor& other) { op::current().set_data(x, other); }

}  // namespace chorale
