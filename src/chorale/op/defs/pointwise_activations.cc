// Activations. Each has a row for its gradient, so that backward is one pass over memory; those rows have gradients
// too.
#include "chorale/kernel/cpu/joined.h"
#include "chorale/op/defs/pointwise_row.h"
#include "chorale/op/joined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/table.h"

namespace chorale::op {

struct LeakyReluAttrs {
  double negative_slope = 0.01;
};
CHORALE_FIELDS(LeakyReluAttrs, negative_slope)
struct EluAttrs {
  double alpha = 1;
};
CHORALE_FIELDS(EluAttrs, alpha)
struct SoftplusAttrs {
  double beta = 1, threshold = 20;
};
CHORALE_FIELDS(SoftplusAttrs, beta, threshold)
struct HardtanhAttrs {
  double min = -1, max = 1;
};
CHORALE_FIELDS(HardtanhAttrs, min, max)

namespace {

constexpr double kRsqrtTwoPi = 0.39894228040143267794;

template <class A>
std::vector<Sample> with(std::vector<Sample> samples, const A& attrs) {
  for (Sample& each : samples) each.attrs = attrs;
  return samples;
}

// dy * f'(x) by dy and by x: `row` computes it, and `second` is f''(x).
template <class Second>
Tensors backward_twice(const GradArgs& g, const OpDef& row, Second&& second) {
  const Tensor &dz = g.dout[0], &dy = g.in[0], &x = g.in[1];
  return {g.needs(0) ? call(row, g.attrs, dz, x) : Tensor{}, g.needs(1) ? mul(mul(dz, dy), second(x)) : Tensor{}};
}

// ---- piecewise linear

extern const OpDef kReluBackward, kLeakyReluBackward, kHardtanhBackward;

constexpr OpDef kRelu =
    pointwise({ScalarOp::kRelu},
              {
                  .name = "relu",
                  .dtypes = kFloats | kInts,
                  .grad = [](const GradArgs& g) -> Tensors { return {call(kReluBackward, {}, g.dout[0], g.out[0])}; },
                  .monotone = rises_in({0}),
                  .saves = kSavesOutputs,
                  .samples = samples_unary,
              });
constexpr OpDef kReluBackward = pointwise({ScalarOp::kReluBackward}, {
                                                                         .name = "relu_backward",
                                                                         .inputs = "dy, y",
                                                                         .grad = passes_first<kReluBackward>,
                                                                         .linear = linear_in({0}),
                                                                         .saves = saves_in({1}),
                                                                         .samples = samples_backward,
                                                                     });
constexpr OpDef kLeakyRelu = pointwise(
    {ScalarOp::kLeakyRelu},
    {
        .name = "leaky_relu",
        .attrs = attrs_of<LeakyReluAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {call(kLeakyReluBackward, g.attrs, g.dout[0], g.in[0])}; },
        .saves = kSavesInputs,
        .samples = [] { return with(samples_unary(), LeakyReluAttrs{0.1}); },
    });
constexpr OpDef kLeakyReluBackward = pointwise(
    {ScalarOp::kLeakyReluBackward}, {
                                        .name = "leaky_relu_backward",
                                        .inputs = "dy, x",
                                        .attrs = attrs_of<LeakyReluAttrs>,
                                        .grad = passes_first<kLeakyReluBackward>,
                                        .linear = linear_in({0}),
                                        .saves = saves_in({1}),
                                        .samples = [] { return with(samples_backward(), LeakyReluAttrs{0.1}); },
                                    });
constexpr OpDef kHardtanh = pointwise(
    {ScalarOp::kHardtanh},
    {
        .name = "hardtanh",
        .attrs = attrs_of<HardtanhAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {call(kHardtanhBackward, g.attrs, g.dout[0], g.in[0])}; },
        .monotone = rises_in({0}),
        .saves = kSavesInputs,
        .samples =
            [] {
              return with(samples_unary(), HardtanhAttrs{-0.5, 1.5});
            },
    });
constexpr OpDef kHardtanhBackward =
    pointwise({ScalarOp::kHardtanhBackward}, {
                                                 .name = "hardtanh_backward",
                                                 .inputs = "dy, x",
                                                 .attrs = attrs_of<HardtanhAttrs>,
                                                 .grad = passes_first<kHardtanhBackward>,
                                                 .linear = linear_in({0}),
                                                 .saves = saves_in({1}),
                                                 .samples =
                                                     [] {
                                                       return with(samples_backward(), HardtanhAttrs{-0.5, 1.5});
                                                     },
                                             });

// ---- smooth

constexpr OpDef kSigmoidBackward = pointwise(
    {ScalarOp::kSigmoidBackward}, {
                                      .name = "sigmoid_backward",
                                      .inputs = "dy, y",
                                      .grad = [](const GradArgs& g) -> Tensors {
                                        const Tensor &dz = g.dout[0], &dy = g.in[0], &y = g.in[1];
                                        return {g.needs(0) ? call(kSigmoidBackward, {}, dz, conj(y)) : Tensor{},
                                                g.needs(1) ? mul(dz, conj(mul(dy, rsub(mul(y, 2), 1)))) : Tensor{}};
                                      },
                                      .linear = linear_in({0}),
                                      .saves = kSavesInputs,
                                      .samples = samples_backward,
                                  });
constexpr OpDef kSigmoid = pointwise(
    {ScalarOp::kSigmoid, Promotion::kFloat},
    {
        .name = "sigmoid",
        .grad = [](const GradArgs& g) -> Tensors { return {call(kSigmoidBackward, {}, g.dout[0], conj(g.out[0]))}; },
        .monotone = rises_in({0}),
        .saves = kSavesOutputs,
        .samples = samples_holomorphic,
    });

constexpr OpDef kSiluBackward =
    pointwise({ScalarOp::kSiluBackward}, {
                                             .name = "silu_backward",
                                             .inputs = "dy, x",
                                             .grad = [](const GradArgs& g) -> Tensors {
                                               return backward_twice(g, kSiluBackward, [](const Tensor& x) {
                                                 // s (1 - s) (2 + x (1 - 2 s)) with s = sigmoid(x)
                                                 const Tensor s = sigmoid(x);
                                                 return s * (1 - s) * (2 + x * (1 - 2 * s));
                                               });
                                             },
                                             .linear = linear_in({0}),
                                             .saves = kSavesInputs,
                                             .samples = samples_backward,
                                         });
constexpr OpDef kSilu =
    pointwise({ScalarOp::kSilu},
              {
                  .name = "silu",
                  .grad = [](const GradArgs& g) -> Tensors { return {call(kSiluBackward, {}, g.dout[0], g.in[0])}; },
                  .saves = kSavesInputs,
                  .samples = samples_unary,
              });

constexpr OpDef kGeluErfBackward =
    pointwise({ScalarOp::kGeluErfBackward}, {
                                                .name = "gelu_erf_backward",
                                                .inputs = "dy, x",
                                                .grad = [](const GradArgs& g) -> Tensors {
                                                  return backward_twice(g, kGeluErfBackward, [](const Tensor& x) {
                                                    // phi(x) (2 - x^2) with the normal density phi
                                                    const Tensor x2 = square(x);
                                                    return exp(x2 * -0.5) * kRsqrtTwoPi * (2 - x2);
                                                  });
                                                },
                                                .linear = linear_in({0}),
                                                .saves = kSavesInputs,
                                                .samples = samples_backward,
                                            });
constexpr OpDef kGeluErf =
    pointwise({ScalarOp::kGeluErf},
              {
                  .name = "gelu_erf",
                  .grad = [](const GradArgs& g) -> Tensors { return {call(kGeluErfBackward, {}, g.dout[0], g.in[0])}; },
                  .saves = kSavesInputs,
                  .samples = samples_unary,
              });

constexpr OpDef kGeluTanhBackward = pointwise(
    {ScalarOp::kGeluTanhBackward}, {
                                       .name = "gelu_tanh_backward",
                                       .inputs = "dy, x",
                                       .grad = [](const GradArgs& g) -> Tensors {
                                         return backward_twice(g, kGeluTanhBackward, [](const Tensor& x) {
                                           // f = x s with s = sigmoid(u), u = c0 x + c1 x^3: f'' = s (1 - s) (2 u' + x
                                           // (u'' + (1 - 2 s) u'^2))
                                           constexpr double c0 = 1.59576912160573071176, c1 = 0.044715 * c0;
                                           const Tensor x2 = square(x), s = sigmoid(x * (c0 + c1 * x2)),
                                                        du = c0 + 3 * c1 * x2;
                                           return s * (1 - s) * (2 * du + x * (6 * c1 * x + (1 - 2 * s) * square(du)));
                                         });
                                       },
                                       .linear = linear_in({0}),
                                       .saves = kSavesInputs,
                                       .samples = samples_backward,
                                   });
constexpr OpDef kGeluTanh = pointwise(
    {ScalarOp::kGeluTanh},
    {
        .name = "gelu_tanh",
        .grad = [](const GradArgs& g) -> Tensors { return {call(kGeluTanhBackward, {}, g.dout[0], g.in[0])}; },
        .saves = kSavesInputs,
        .samples = samples_unary,
    });

constexpr OpDef kEluBackward =
    pointwise({ScalarOp::kEluBackward}, {
                                            .name = "elu_backward",
                                            .inputs = "dy, x",
                                            .attrs = attrs_of<EluAttrs>,
                                            .grad = [](const GradArgs& g) -> Tensors {
                                              return backward_twice(g, kEluBackward, [&](const Tensor& x) {
                                                return where(gt(x, 0), 0, exp(x) * g.attrs.get<EluAttrs>().alpha);
                                              });
                                            },
                                            .linear = linear_in({0}),
                                            .saves = kSavesInputs,
                                            .samples = [] { return with(samples_backward(), EluAttrs{0.7}); },
                                        });
constexpr OpDef kElu = pointwise({ScalarOp::kElu}, {
                                                       .name = "elu",
                                                       .attrs = attrs_of<EluAttrs>,
                                                       .grad = [](const GradArgs& g) -> Tensors {
                                                         return {call(kEluBackward, g.attrs, g.dout[0], g.in[0])};
                                                       },
                                                       .saves = kSavesInputs,
                                                       .samples = [] { return with(samples_unary(), EluAttrs{0.7}); },
                                                   });

constexpr OpDef kSoftplusBackward =
    pointwise({ScalarOp::kSoftplusBackward}, {
                                                 .name = "softplus_backward",
                                                 .inputs = "dy, x",
                                                 .attrs = attrs_of<SoftplusAttrs>,
                                                 .grad = [](const GradArgs& g) -> Tensors {
                                                   return backward_twice(g, kSoftplusBackward, [&](const Tensor& x) {
                                                     const auto& [beta, threshold] = g.attrs.get<SoftplusAttrs>();
                                                     const Tensor s = sigmoid(x * beta);
                                                     return where(gt(x * beta, threshold), 0, s * (1 - s) * beta);
                                                   });
                                                 },
                                                 .linear = linear_in({0}),
                                                 .saves = kSavesInputs,
                                                 .samples =
                                                     [] {
                                                       return with(samples_backward(), SoftplusAttrs{2, 2.5});
                                                     },
                                             });
constexpr OpDef kSoftplus = pointwise(
    {ScalarOp::kSoftplus},
    {
        .name = "softplus",
        .attrs = attrs_of<SoftplusAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {call(kSoftplusBackward, g.attrs, g.dout[0], g.in[0])}; },
        .saves = kSavesInputs,
        .autocast = Cast::kF32,
        .samples =
            [] {
              return with(samples_unary(), SoftplusAttrs{2, 2.5});
            },
    });

// ---- gradients with the sums of their columns, which are those of a bias

void infer_summed(const InferArgs& args, std::span<OutSpec> out) {
  const Tensor &dy = args.in[0], &x = args.in[1];
  CHORALE_CHECK(x.dims() > 0 && dy.sizes() == x.sizes() && dy.dtype() == x.dtype(), "[", args.op.name,
                "] dy and x must look alike, not be ", dy.dtype(), " ", dy.sizes(), " and ", x.dtype(), " ", x.sizes());
  out[0].sizes = x.sizes();
  out[1].sizes = {x.size(-1)};
  for (OutSpec& one : out) {
    one.dtype = x.dtype();
    one.device = x.device();
  }
}
std::vector<Sample> samples_summed() {
  return {{{sample({7, 8}), sample({7, 8}, 1)}, {}}, {{sample({2, 3, 5}, 2), sample({2, 3, 5}, 3)}, {}}};
}

}  // namespace

constinit const OpDef kGeluErfBackwardSummed{
    .name = "gelu_erf_backward_summed",
    .inputs = "dy, x",
    .outputs = 2,
    .dtypes = kFloats,
    .infer = infer_summed,
    .cpu = kernel::cpu::gelu_erf_backward_summed,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = samples_summed,
    .formula = "gelu_erf_backward, and its sums over all but the last dimension",
};
constinit const OpDef kGeluTanhBackwardSummed{
    .name = "gelu_tanh_backward_summed",
    .inputs = "dy, x",
    .outputs = 2,
    .dtypes = kFloats,
    .infer = infer_summed,
    .cpu = kernel::cpu::gelu_tanh_backward_summed,
    .grad = not_differentiable,
    .shard = kReplicateOnly,
    .samples = samples_summed,
    .formula = "gelu_tanh_backward, and its sums over all but the last dimension",
};

Rows activation_rows() {
  static constexpr const OpDef* rows[] = {
      &kRelu,
      &kReluBackward,
      &kLeakyRelu,
      &kLeakyReluBackward,
      &kHardtanh,
      &kHardtanhBackward,
      &kSigmoid,
      &kSigmoidBackward,
      &kSilu,
      &kSiluBackward,
      &kGeluErf,
      &kGeluErfBackward,
      &kGeluTanh,
      &kGeluTanhBackward,
      &kElu,
      &kEluBackward,
      &kSoftplus,
      &kSoftplusBackward,
      &kGeluErfBackwardSummed,
      &kGeluTanhBackwardSummed,
  };
  return rows;
}

}  // namespace chorale::op

namespace chorale {

using namespace op;

CHORALE_DEFINE_FORMS(relu, (const Tensor& x), to(kRelu, {}, x))
CHORALE_DEFINE_FORMS(leaky_relu, (const Tensor& x, double negative_slope),
                     to(kLeakyRelu, LeakyReluAttrs{negative_slope}, x))
CHORALE_DEFINE_FORMS(hardtanh, (const Tensor& x, double min, double max), to(kHardtanh, HardtanhAttrs{min, max}, x))
CHORALE_DEFINE_FORMS(sigmoid, (const Tensor& x), to(kSigmoid, {}, x))
CHORALE_DEFINE_FORMS(silu, (const Tensor& x), to(kSilu, {}, x))
CHORALE_DEFINE_FORMS(gelu, (const Tensor& x, Gelu form), to(form == Gelu::kErf ? kGeluErf : kGeluTanh, {}, x))
CHORALE_DEFINE_FORMS(elu, (const Tensor& x, double alpha), to(kElu, EluAttrs{alpha}, x))
CHORALE_DEFINE_FORMS(softplus, (const Tensor& x, double beta, double threshold),
                     to(kSoftplus, SoftplusAttrs{beta, threshold}, x))

}  // namespace chorale
