#include "chorale/kernel/cpu/dropout.h"

#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/random.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

using kernel::DropoutAttrs;

void infer_dropout(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor& x = args.in[0];
  const double p = args.attrs.get<DropoutAttrs>().p;
  CHORALE_CHECK(p >= 0 && p <= 1, "[dropout] p must lie between 0 and 1, not be ", p);
  out[0].sizes = x.sizes();
  out[0].dtype = x.dtype();
  out[0].device = x.device();
}

}  // namespace

constinit const OpDef kDropout{
    .name = "dropout",
    .inputs = "x, stretch",
    .attrs = attrs_of<DropoutAttrs>,
    .dtypes = kFloats,
    .infer = infer_dropout,
    .cpu = kernel::cpu::dropout,
    .grad = [](const GradArgs& g) -> Tensors {
      return {call(kDropout, g.attrs, g.dout[0], g.in[1]), Tensor{}};
    },
    .shard = {.labels = "...,S->...", .stretch = 1},
    .saves = saves_in({1}),
    .samples = []() -> std::vector<Sample> {
      return {{{sample({7, 5}), sample_stretch(1, 0)}, DropoutAttrs{0.5}},
              {{sample({3}, 1), sample_stretch(-1, 1000)}, DropoutAttrs{0.1}},
              {{sample({2, 2, 2}, 2), sample_stretch(5, 5)}, DropoutAttrs{1}},
              {{sample({}, 3), sample_stretch(2, 7)}, DropoutAttrs{0}}};
    },
    .formula = "x / (1 - p), or 0 with probability p",
};

Rows dropout_rows() {
  static constexpr const OpDef* kRows[] = {&kDropout};
  return kRows;
}

}  // namespace chorale::op

namespace chorale {

Tensor dropout(const Tensor& x, double p, bool training, Generator& generator) {
  op::need_defined("dropout", "x", x);
  CHORALE_CHECK(p >= 0 && p <= 1, "[dropout] p must lie between 0 and 1, not be ", p);
  if (!training || p == 0) return x;
  return op::call(op::kDropout, kernel::DropoutAttrs{p}, x, draw(generator, x.elems(), x.device()));
}

Tensor feature_dropout(const Tensor& x, double p, bool training, Generator& generator) {
  op::need_defined("feature_dropout", "x", x);
  CHORALE_CHECK(x.dims() >= 2, "[feature_dropout] x must be [N, C, …], not ", x.sizes());
  if (!training || p == 0) return x;
  Shape sizes(x.sizes().size(), 1);
  sizes[0] = x.size(0);
  sizes[1] = x.size(1);
  return x * dropout(ones(sizes, x.dtype(), x.device()), p, true, generator);
}

}  // namespace chorale
