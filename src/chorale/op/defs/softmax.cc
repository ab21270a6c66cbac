#include "chorale/kernel/cpu/norm/softmax.h"

#include "chorale/kernel/view.h"
#include "chorale/op/builder.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

using kernel::DimAttrs;

void infer_softmax(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  normalize_dim(args.op.name, args.attrs.get<DimAttrs>().dim, x.dims());
  out[0].sizes = x.sizes();
  out[0].dtype = x.dtype();
  out[0].device = x.device();
}

void infer_backward(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &y = args.in[1];
  CHORALE_CHECK(dy.sizes() == y.sizes() && dy.dtype() == y.dtype(), "[", args.op.name, "] the gradient, ", dy.dtype(),
                " ", dy.sizes(), ", must look like the result, ", y.dtype(), " ", y.sizes());
  infer_softmax(args, out);
}

// What adds up to 1 stays whole.
void ways_softmax(const ShardCall& call, ShardWays& ways) {
  const std::string x = keep_whole(letters(call.dims(0)), call.attrs.get<DimAttrs>().dim);
  ways.split(join(std::vector<std::string>(call.in.size(), x), {x}));
}

std::vector<Sample> samples_softmax() {
  return {{{sample({5})}, DimAttrs{0}},           {{sample({3, 4}, 1)}, DimAttrs{-1}},
          {{sample({3, 4}, 2)}, DimAttrs{0}},     {{sample({2, 3, 4}, 3)}, DimAttrs{1}},
          {{sample({2, 5, 17}, 4)}, DimAttrs{1}}, {{sample({}, 5)}, DimAttrs{0}}};
}
std::vector<Sample> samples_softmax_backward() {
  return {{{sample({4}), sample({4}, 1)}, DimAttrs{0}},
          {{sample({3, 4}, 2), sample({3, 4}, 3)}, DimAttrs{-1}},
          {{sample({2, 3, 2}, 4), sample({2, 3, 2}, 5)}, DimAttrs{1}}};
}

Tensor along(const Tensor& x, const GradArgs& g) { return sum(x, IntList{g.attrs.get<DimAttrs>().dim}, true); }

}  // namespace

constinit const OpDef kSoftmax{
    .name = "softmax",
    .inputs = "x",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kFloats,
    .infer = infer_softmax,
    .cpu = kernel::cpu::softmax,
    .grad = [](const GradArgs& g) -> Tensors { return {call(kSoftmaxBackward, g.attrs, g.dout[0], g.out[0])}; },
    .shard = {.ways = ways_softmax},
    .saves = kSavesOutputs,
    .autocast = Cast::kF32,
    .samples = samples_softmax,
    .formula = "exp(x) / sum(exp(x)) along dim",
};

constinit const OpDef kLogSoftmax{
    .name = "log_softmax",
    .inputs = "x",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kFloats,
    .infer = infer_softmax,
    .cpu = kernel::cpu::log_softmax,
    .grad = [](const GradArgs& g) -> Tensors { return {call(kLogSoftmaxBackward, g.attrs, g.dout[0], g.out[0])}; },
    .shard = {.ways = ways_softmax},
    .saves = kSavesOutputs,
    .autocast = Cast::kF32,
    .samples = samples_softmax,
    .formula = "x - log(sum(exp(x))) along dim",
};

constinit const OpDef kSoftmaxBackward{
    .name = "softmax_backward",
    .inputs = "dy, y",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kFloats,
    .infer = infer_backward,
    .cpu = kernel::cpu::softmax_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor &dy = g.in[0], &y = g.in[1], &v = g.dout[0];
      Tensors result(2);
      // The map dy -> dx is symmetric.
      if (g.needs(0)) result[0] = call(kSoftmaxBackward, g.attrs, v, y);
      if (g.needs(1)) result[1] = v * (dy - along(dy * y, g)) - dy * along(v * y, g);
      return result;
    },
    .shard = {.ways = ways_softmax},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = samples_softmax_backward,
    .formula = "y * (dy - sum(dy * y)) along dim",
};

constinit const OpDef kLogSoftmaxBackward{
    .name = "log_softmax_backward",
    .inputs = "dy, y",
    .attrs = attrs_of<DimAttrs>,
    .dtypes = kFloats,
    .infer = infer_backward,
    .cpu = kernel::cpu::log_softmax_backward,
    .grad = [](const GradArgs& g) -> Tensors {
      const Tensor &dy = g.in[0], &y = g.in[1], &v = g.dout[0];
      const Tensor p = exp(y) * v;
      Tensors result(2);
      if (g.needs(0)) result[0] = v - along(p, g);
      if (g.needs(1)) result[1] = -p * along(dy, g);
      return result;
    },
    .shard = {.ways = ways_softmax},
    .linear = linear_in({0}),
    .saves = kSavesInputs,
    .samples = samples_softmax_backward,
    .formula = "dy - exp(y) * sum(dy) along dim",
};

Rows softmax_rows() {
  static constexpr const OpDef* kRows[] = {&kSoftmax, &kLogSoftmax, &kSoftmaxBackward, &kLogSoftmaxBackward};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {

Tensor softmax(const Tensor& x, int64_t dim) { return op::call(op::kSoftmax, kernel::DimAttrs{dim}, x); }
Tensor log_softmax(const Tensor& x, int64_t dim) { return op::call(op::kLogSoftmax, kernel::DimAttrs{dim}, x); }

}  // namespace chorale
