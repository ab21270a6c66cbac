// Rows of ops with a mask.
#include "chorale/kernel/cpu/index/index.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/index.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"

namespace chorale::op {
namespace {

void infer_masked_scatter(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &x = args.in[0], &mask = args.in[1], &source = args.in[2];
  CHORALE_CHECK(mask.dtype() == DType::kBool, "[masked_scatter] a mask is bool, not ", mask.dtype());
  CHORALE_CHECK(broadcast_shapes("masked_scatter", x.sizes(), mask.sizes()) == x.sizes(),
                "[masked_scatter] a mask of shape ", mask.sizes(), " does not broadcast to ", x.sizes());
  CHORALE_CHECK(source.dtype() == x.dtype(), "[masked_scatter] the source is ", source.dtype(), ", but x is ",
                x.dtype());
  out[0].sizes = x.sizes();
  out[0].dtype = x.dtype();
  out[0].device = x.device();
}

Tensor bools(std::initializer_list<bool> list, const Shape& sizes) { return Tensor::from(list, sizes); }

}  // namespace

constinit const OpDef kMaskedSelect{
    .name = "masked_select",
    .inputs = "x, mask",
    .dtypes = kAll,
    .cpu = kernel::cpu::masked_select,
    .grad = [](const GradArgs& g) -> Tensors {
      const Shape sizes = broadcast_shapes("masked_select", g.shape(0), g.in[1].sizes());
      return {masked_scatter(zeros(sizes, g.dout[0].dtype(), g.dout[0].device()), g.in[1], g.dout[0]), {}};
    },
    .shard = kReplicateOnly,
    .linear = linear_in({0}),
    .saves = saves_in({1}),
    .dynamic = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), bools({true, false, false, true}, {4})}},
              {{sample({3, 2}), bools({true, false}, {2})}},
              {{sample({2}), bools({false, true, true, true}, {2, 2})}}};
    },
    .formula = "the elements of x where mask holds, as a vector",
};

constinit const OpDef kMaskedScatter{
    .name = "masked_scatter",
    .inputs = "x, mask, source",
    .dtypes = kAll,
    .infer = infer_masked_scatter,
    .cpu = kernel::cpu::masked_scatter,
    .grad = [](const GradArgs& g) -> Tensors {
      Tensor dsource;
      if (g.needs(2)) {
        // What source had beyond the places was not used.
        const Shape sizes = g.shape(2);
        const Tensor placed = masked_select(g.dout[0], g.in[1]);
        dsource = reshape(pad(placed, {0, count_elems(sizes) - placed.elems()}), sizes);
      }
      return {g.needs(0) ? masked_fill(g.dout[0], g.in[1], Scalar(0)) : Tensor{}, {}, dsource};
    },
    .shard = kReplicateOnly,  // which elements of source a part takes depends on the mask before it
    .linear = linear_terms({{0}, {2}}),
    .saves = saves_in({1}),
    .in_place = true,
    .samples = []() -> std::vector<Sample> {
      return {{{sample({4}), bools({true, false, false, true}, {4}), sample({2}, 1)}},
              {{sample({3, 2}), bools({true, false}, {2}), sample({2, 2}, 1)}}};
    },
    .formula = "x with elements of source, in order, where mask holds",
};

constinit const OpDef kNonzero{
    .name = "nonzero",
    .inputs = "x",
    .dtypes = kAll,
    .cpu = kernel::cpu::nonzero,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .dynamic = true,
    .samples = []() -> std::vector<Sample> {
      return {{{bools({true, false, true, true}, {2, 2})}}, {{sample({3})}}, {{bools({true}, {})}}};
    },
    .formula = "the indices of elements that are not zero",
};

}  // namespace chorale::op
