// Powers, exponentials, logarithms, trigonometry.
#include <cmath>

#include "chorale/op/copy.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/defs/pointwise_row.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

constexpr double kLn2 = 0.69314718055994530942, kLn10 = 2.30258509299404568402;
constexpr double kTwoOverSqrtPi = 1.12837916709551257390;

std::vector<Sample> samples_pow() {
  return {{.in = {sample({2, 3}, 0, 0.25, 3), sample({2, 3}, 1)}},
          {.in = {sample({2, 1}, 0, 0.25, 3), sample({3}, 2)}},
          {.in = {sample({}, 0, 0.25, 3), sample({2, 2}, 3)}},
          {.in = {sample_complex({2, 2}), sample_complex({2}, 1)}}};
}
std::vector<Sample> samples_pow_number() {
  std::vector<Sample> samples;
  for (Scalar exponent : {Scalar(2), Scalar(3), Scalar(0.5), Scalar(2.5), Scalar(-1.0), Scalar(0)}) {
    samples.push_back({.in = {sample({2, 3}, 0, 0.25, 3)}, .attrs = NumberAttrs{exponent}});
  }
  samples.push_back({.in = {sample_complex({2, 2})}, .attrs = NumberAttrs{3}});
  return samples;
}
// Samples with one input above 0.25, and with a complex one.
std::vector<Sample> samples_root() {
  std::vector<Sample> samples = samples_positive();
  samples.push_back({.in = {sample_complex({2, 2})}});
  return samples;
}
std::vector<Sample> samples_exponent() {
  return {{.in = {sample({2, 3})}, .attrs = NumberAttrs{2}}, {.in = {sample({}, 1)}, .attrs = NumberAttrs{0.5}}};
}

void infer_pow_scalar(const InferArgs& args, std::span<OutSpec> out) {
  infer_pointwise(args, out);
  if (is_differentiable(out[0].dtype)) return;
  const Scalar exponent = args.attrs.get<NumberAttrs>().value;
  CHORALE_CHECK(exponent.integer() >= 0, "[", args.op.name, "] a tensor of ", args.in[0].dtype(), " to the power ",
                exponent, " has no integer result; cast it to a floating type");
  check_operand_held(args.op.name, out[0].dtype, exponent);
}

// ---- powers

constexpr OpDef kPow =
    pointwise({ScalarOp::kPow}, {
                                    .name = "pow",
                                    .grad = [](const GradArgs& g) -> Tensors {
                                      // The rule computes in the dtype of the result: y may be a narrower one, or bool.
                                      const Tensor &dz = g.dout[0], &z = g.out[0];
                                      const Tensor x = to(g.in[0], z.dtype()), y = to(g.in[1], z.dtype());
                                      Tensors d(2);
                                      if (g.needs(0))
                                        d[0] = where(eq(y, 0), 0, mul(dz, conj(mul(y, pow(x, sub(y, 1))))));
                                      if (g.needs(1)) {
                                        // 0^y is 0 for all y > 0, although log(0) is not finite.
                                        const Tensor flat = logical_and(eq(x, 0), ge(real(y), 0));
                                        d[1] = where(flat, 0, mul(dz, conj(mul(z, log(x)))));
                                      }
                                      return d;
                                    },
                                    .saves = kSavesBoth,
                                    .autocast = Cast::kF32,
                                    .samples = samples_pow,
                                });
constexpr OpDef kPowScalar =
    pointwise({ScalarOp::kPowScalar}, {
                                          .name = "pow_scalar",
                                          .attrs = attrs_of<NumberAttrs>,
                                          .infer = infer_pow_scalar,
                                          .grad = [](const GradArgs& g) -> Tensors {
                                            const Scalar exponent = g.attrs.get<NumberAttrs>().value;
                                            if (exponent.is_zero()) return zero_gradient(g);
                                            const Scalar less_one =
                                                exponent.kind() == Scalar::Kind::kComplex
                                                    ? Scalar(std::complex<double>(exponent.real() - 1, exponent.imag()))
                                                    : Scalar(exponent.real() - 1);
                                            return {mul(g.dout[0], conj(mul(pow(g.in[0], less_one), exponent)))};
                                          },
                                          .saves = kSavesInputs,
                                          .autocast = Cast::kF32,
                                          .samples = samples_pow_number,
                                      });
constexpr OpDef kRpowScalar =
    pointwise({ScalarOp::kRpowScalar}, {
                                           .name = "rpow_scalar",
                                           .attrs = attrs_of<NumberAttrs>,
                                           .grad = [](const GradArgs& g) -> Tensors {
                                             const Scalar base = g.attrs.get<NumberAttrs>().value;
                                             const Scalar log_base =
                                                 base.kind() == Scalar::Kind::kComplex
                                                     ? Scalar(std::log(std::complex<double>(base.real(), base.imag())))
                                                     : Scalar(std::log(base.real()));
                                             const Tensor dx = mul(g.dout[0], conj(mul(g.out[0], log_base)));
                                             // 0^x is 0 for all x > 0, although log(0) is not finite.
                                             return {base.is_zero() ? where(ge(real(g.in[0]), 0), 0, dx) : dx};
                                           },
                                           .saves = kSavesBoth,
                                           .autocast = Cast::kF32,
                                           .samples = samples_exponent,
                                       });
constexpr OpDef kSquare =
    pointwise({ScalarOp::kSquare},
              {
                  .name = "square",
                  .dtypes = kFloats | kInts | kComplexes,
                  .grad = [](const GradArgs& g) -> Tensors { return {mul(g.dout[0], mul(conj(g.in[0]), 2))}; },
                  .saves = kSavesInputs,
                  .samples = samples_holomorphic,
              });
constexpr OpDef kReciprocal =
    pointwise({ScalarOp::kReciprocal, Promotion::kFloat},
              {
                  .name = "reciprocal",
                  .grad = [](const GradArgs& g) -> Tensors { return {neg(mul(g.dout[0], conj(square(g.out[0]))))}; },
                  .saves = kSavesOutputs,
                  .autocast = Cast::kF32,
                  .samples = samples_root,
              });
constexpr OpDef kSqrt =
    pointwise({ScalarOp::kSqrt, Promotion::kFloat},
              {
                  .name = "sqrt",
                  .grad = [](const GradArgs& g) -> Tensors { return {div(g.dout[0], mul(conj(g.out[0]), 2))}; },
                  .saves = kSavesOutputs,
                  .samples = samples_root,
              });
constexpr OpDef kRsqrt = pointwise(
    {ScalarOp::kRsqrt, Promotion::kFloat},
    {
        .name = "rsqrt",
        .grad = [](const GradArgs& g) -> Tensors { return {mul(mul(g.dout[0], conj(pow(g.out[0], 3))), -0.5)}; },
        .saves = kSavesOutputs,
        .autocast = Cast::kF32,
        .samples = samples_root,
    });

// ---- exponentials and logarithms

constexpr OpDef kExp =
    pointwise({ScalarOp::kExp, Promotion::kFloat},
              {
                  .name = "exp",
                  .grad = [](const GradArgs& g) -> Tensors { return {mul(g.dout[0], conj(g.out[0]))}; },
                  .monotone = rises_in({0}),
                  .saves = kSavesOutputs,
                  .autocast = Cast::kF32,
                  .samples = samples_holomorphic,
              });
constexpr OpDef kExp2 =
    pointwise({ScalarOp::kExp2, Promotion::kFloat},
              {
                  .name = "exp2",
                  .grad = [](const GradArgs& g) -> Tensors { return {mul(mul(g.dout[0], g.out[0]), kLn2)}; },
                  .monotone = rises_in({0}),
                  .saves = kSavesOutputs,
                  .autocast = Cast::kF32,
                  .samples = samples_unary,
              });
constexpr OpDef kExpm1 =
    pointwise({ScalarOp::kExpm1, Promotion::kFloat},
              {
                  .name = "expm1",
                  .grad = [](const GradArgs& g) -> Tensors { return {mul(g.dout[0], add(g.out[0], 1))}; },
                  .monotone = rises_in({0}),
                  .saves = kSavesOutputs,
                  .autocast = Cast::kF32,
                  .samples = samples_unary,
              });
constexpr OpDef kLog =
    pointwise({ScalarOp::kLog, Promotion::kFloat},
              {
                  .name = "log",
                  .grad = [](const GradArgs& g) -> Tensors { return {div(g.dout[0], conj(g.in[0]))}; },
                  .saves = kSavesInputs,
                  .autocast = Cast::kF32,
                  .samples = samples_root,
              });
constexpr OpDef kLog2 =
    pointwise({ScalarOp::kLog2, Promotion::kFloat},
              {
                  .name = "log2",
                  .grad = [](const GradArgs& g) -> Tensors { return {div(g.dout[0], mul(g.in[0], kLn2))}; },
                  .saves = kSavesInputs,
                  .autocast = Cast::kF32,
                  .samples = samples_positive,
              });
constexpr OpDef kLog10 =
    pointwise({ScalarOp::kLog10, Promotion::kFloat},
              {
                  .name = "log10",
                  .grad = [](const GradArgs& g) -> Tensors { return {div(g.dout[0], mul(g.in[0], kLn10))}; },
                  .saves = kSavesInputs,
                  .autocast = Cast::kF32,
                  .samples = samples_positive,
              });
constexpr OpDef kLog1p =
    pointwise({ScalarOp::kLog1p, Promotion::kFloat},
              {
                  .name = "log1p",
                  .grad = [](const GradArgs& g) -> Tensors { return {div(g.dout[0], add(g.in[0], 1))}; },
                  .saves = kSavesInputs,
                  .autocast = Cast::kF32,
                  .samples = samples_positive,
              });

// ---- trigonometry

constexpr OpDef kSin =
    pointwise({ScalarOp::kSin, Promotion::kFloat},
              {
                  .name = "sin",
                  .grad = [](const GradArgs& g) -> Tensors { return {mul(g.dout[0], conj(cos(g.in[0])))}; },
                  .saves = kSavesInputs,
                  .samples = samples_holomorphic,
              });
constexpr OpDef kCos =
    pointwise({ScalarOp::kCos, Promotion::kFloat},
              {
                  .name = "cos",
                  .grad = [](const GradArgs& g) -> Tensors { return {neg(mul(g.dout[0], conj(sin(g.in[0]))))}; },
                  .saves = kSavesInputs,
                  .samples = samples_holomorphic,
              });
constexpr OpDef kTan =
    pointwise({ScalarOp::kTan, Promotion::kFloat},
              {
                  .name = "tan",
                  .grad = [](const GradArgs& g) -> Tensors { return {mul(g.dout[0], conj(add(square(g.out[0]), 1)))}; },
                  .saves = kSavesOutputs,
                  .autocast = Cast::kF32,
                  .samples = []() -> std::vector<Sample> {
                    return {{.in = {sample({2, 3}, 0, -1.2, 1.2)}}};
                  },
              });
constexpr OpDef kTanhBackward =
    pointwise({ScalarOp::kTanhBackward}, {
                                             .name = "tanh_backward",
                                             .inputs = "dy, y",
                                             .grad = [](const GradArgs& g) -> Tensors {
                                               const Tensor &dz = g.dout[0], &dy = g.in[0], &y = g.in[1];
                                               return {g.needs(0) ? call(kTanhBackward, {}, dz, conj(y)) : Tensor{},
                                                       g.needs(1) ? mul(mul(dz, conj(mul(dy, y))), -2) : Tensor{}};
                                             },
                                             .linear = linear_in({0}),
                                             .saves = kSavesInputs,
                                             .samples = samples_backward,
                                         });
constexpr OpDef kTanh = pointwise(
    {ScalarOp::kTanh, Promotion::kFloat},
    {
        .name = "tanh",
        .grad = [](const GradArgs& g) -> Tensors { return {call(kTanhBackward, {}, g.dout[0], conj(g.out[0]))}; },
        .monotone = rises_in({0}),
        .saves = kSavesOutputs,
        .samples = samples_holomorphic,
    });
constexpr OpDef kErf = pointwise({ScalarOp::kErf, Promotion::kFloat},
                                 {
                                     .name = "erf",
                                     .grad = [](const GradArgs& g) -> Tensors {
                                       return {mul(mul(g.dout[0], exp(neg(square(g.in[0])))), kTwoOverSqrtPi)};
                                     },
                                     .monotone = rises_in({0}),
                                     .saves = kSavesInputs,
                                     .samples = samples_unary,
                                 });

}  // namespace

Rows function_rows() {
  static constexpr const OpDef* rows[] = {
      &kPow, &kPowScalar, &kRpowScalar, &kSquare, &kReciprocal, &kSqrt, &kRsqrt, &kExp,          &kExp2, &kExpm1,
      &kLog, &kLog2,      &kLog10,      &kLog1p,  &kSin,        &kCos,  &kTan,   &kTanhBackward, &kTanh, &kErf};
  return rows;
}

}  // namespace chorale::op

namespace chorale {

using namespace op;

CHORALE_DEFINE_FORMS(pow, (const Tensor& x, const Tensor& y), to(kPow, {}, x, y))
CHORALE_DEFINE_FORMS(pow, (const Tensor& x, Scalar y), to(kPowScalar, NumberAttrs{y}, x))
Tensor pow(Scalar x, const Tensor& y) { return call(kRpowScalar, NumberAttrs{x}, y); }
CHORALE_DEFINE_FORMS(square, (const Tensor& x),
                     x.dtype() == DType::kBool ? to(kPowScalar, NumberAttrs{2}, x) : to(kSquare, {}, x))
CHORALE_DEFINE_FORMS(reciprocal, (const Tensor& x), to(kReciprocal, {}, x))
CHORALE_DEFINE_FORMS(sqrt, (const Tensor& x), to(kSqrt, {}, x))
CHORALE_DEFINE_FORMS(rsqrt, (const Tensor& x), to(kRsqrt, {}, x))
CHORALE_DEFINE_FORMS(exp, (const Tensor& x), to(kExp, {}, x))
CHORALE_DEFINE_FORMS(exp2, (const Tensor& x), to(kExp2, {}, x))
CHORALE_DEFINE_FORMS(expm1, (const Tensor& x), to(kExpm1, {}, x))
CHORALE_DEFINE_FORMS(log, (const Tensor& x), to(kLog, {}, x))
CHORALE_DEFINE_FORMS(log2, (const Tensor& x), to(kLog2, {}, x))
CHORALE_DEFINE_FORMS(log10, (const Tensor& x), to(kLog10, {}, x))
namespace {
// log |1 + x| without the digits that 1 + x loses where x is small, and the angle of 1 + x.
Tensor complex_log1p(const Tensor& x) {
  const Tensor re = real(x), im = imag(x);
  const Tensor magnitude = mul(log1p(add(mul(re, add(re, 2)), square(im))), 0.5);
  return add(magnitude, mul(angle(add(x, 1)), std::complex<double>(0, 1)));
}
bool holds_complex(const Tensor& x) { return x.defined() && is_complex(x.dtype()); }
}  // namespace
CHORALE_DEFINE_FORMS(log1p, (const Tensor& x),
                     holds_complex(x) ? to(kTo, CopyAttrs{x.dtype()}, complex_log1p(x)) : to(kLog1p, {}, x))
CHORALE_DEFINE_FORMS(sin, (const Tensor& x), to(kSin, {}, x))
CHORALE_DEFINE_FORMS(cos, (const Tensor& x), to(kCos, {}, x))
CHORALE_DEFINE_FORMS(tan, (const Tensor& x), to(kTan, {}, x))
CHORALE_DEFINE_FORMS(tanh, (const Tensor& x), to(kTanh, {}, x))
CHORALE_DEFINE_FORMS(erf, (const Tensor& x), to(kErf, {}, x))

}  // namespace chorale
