// Sums, products, quotients, and their mixtures.
#include "chorale/op/defs/number_range.h"
#include "chorale/op/defs/pointwise_row.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

// ---- numbers

bool is_one(Scalar a) { return a.real() == 1 && a.imag() == 0; }

std::complex<double> complex_value(Scalar a) { return {a.real(), a.imag()}; }

Scalar conj(Scalar a) { return a.kind() == Scalar::Kind::kComplex ? Scalar(std::conj(complex_value(a))) : a; }

Scalar product(Scalar a, Scalar b) {
  switch (std::max(a.kind(), b.kind())) {
    case Scalar::Kind::kBool:
    case Scalar::Kind::kInt:  // wraps around, like the elements do
      return static_cast<int64_t>(static_cast<uint64_t>(a.integer()) * static_cast<uint64_t>(b.integer()));
    case Scalar::Kind::kFloat:
      return a.real() * b.real();
    case Scalar::Kind::kComplex:
      return complex_value(a) * complex_value(b);
  }
  return {};
}

Scalar negated(Scalar a) { return product(a, -1); }

// ---- samples: `number` beside one or two tensors

std::vector<Sample> samples_number() {
  return {{.in = {sample({2, 3})}, .attrs = NumberAttrs{3}}, {.in = {sample({}, 1)}, .attrs = NumberAttrs{-3}}};
}
// Unsigned tensors have no -3 to be divided by.
std::vector<Sample> samples_divisor() {
  return {{.in = {sample({2, 3})}, .attrs = NumberAttrs{3}}, {.in = {sample({}, 1)}, .attrs = NumberAttrs{-2.5}}};
}
std::vector<Sample> samples_linear() {
  std::vector<Sample> samples = samples_number();
  samples.push_back({.in = {sample({2, 3})}, .attrs = NumberAttrs{1.5}});
  samples.push_back({.in = {sample_complex({2, 3})}, .attrs = NumberAttrs{std::complex<double>(0.5, -2)}});
  return samples;
}
std::vector<Sample> samples_scaled() {
  return {{.in = {sample({2, 3}), sample({3}, 1)}, .attrs = NumberAttrs{2}},
          {.in = {sample({2, 1}), sample({2, 3}, 2)}, .attrs = NumberAttrs{-3}},
          {.in = {sample_complex({3}), sample_complex({3}, 1)}, .attrs = NumberAttrs{std::complex<double>(0.5, -2)}}};
}
std::vector<Sample> samples_lerp_number() {
  return {{.in = {sample({2, 3}), sample({3}, 1)}, .attrs = NumberAttrs{0.25}},
          {.in = {sample({2, 1}), sample({2, 3}, 2)}, .attrs = NumberAttrs{0.75}}};
}
// The second input is away from zero.
std::vector<Sample> samples_quotient() {
  return {{.in = {sample({2, 3}), sample({2, 3}, 1, 0.5, 3)}},
          {.in = {sample({2, 3}), sample({3}, 2, -3, -0.5)}},
          {.in = {sample({4, 1}), sample({2, 1, 3}, 3, 0.5, 3)}},
          {.in = {sample({2, 2}), sample({}, 4, 0.5, 3)}},
          {.in = {sample_complex({2, 2}), sample_complex({2}, 1)}}};
}
// x / y is far from integers, where the quotient jumps.
std::vector<Sample> samples_modulo() {
  const Tensor x = Tensor::from({5.3, -5.3, 7.1, -2.9}, {4}), y = Tensor::from({2.0, 3.0, -4.0, -5.0}, {4});
  return {{.in = {x, y}}, {.in = {Tensor::from({7.5}, {1}), y}}};
}
std::vector<Sample> samples_addc() {
  const auto with = [](int64_t value, std::vector<Tensor> in) {
    return Sample{.in = std::move(in), .attrs = NumberAttrs{value}};
  };
  return {with(1, {sample({2, 3}), sample({2, 3}, 1), sample({2, 3}, 2, 0.5, 3)}),
          with(-2, {sample({2, 1}), sample({3}, 1), sample({}, 2, 0.5, 3)}),
          with(2, {sample_complex({3}), sample_complex({3}, 1), sample_complex({3}, 2)})};
}

// An integer divided by the number zero is an error.
void infer_divided(const InferArgs& args, std::span<OutSpec> out) {
  infer_pointwise(args, out);
  if (is_differentiable(out[0].dtype)) return;
  const Scalar divisor = args.attrs.get<NumberAttrs>().value;
  CHORALE_CHECK(!divisor.is_zero(), "[", args.op.name, "] integer division by zero: a tensor of ", args.in[0].dtype(),
                " divided by 0");
  check_operand_held(args.op.name, out[0].dtype, divisor);
}

// ---- sums

constexpr OpDef kAdd = pointwise({ScalarOp::kAdd}, {
                                                       .name = "add",
                                                       .grad = [](const GradArgs& g) -> Tensors {
                                                         return {g.dout[0], g.dout[0]};
                                                       },
                                                       .linear = linear_terms({{0}, {1}}),
                                                       .monotone = rises_in({0, 1}),
                                                       .samples = samples_bilinear,
                                                   });
constexpr OpDef kAddScaled = pointwise({ScalarOp::kAddScaled, Promotion::kScaled},
                                       {
                                           .name = "add_scaled",
                                           .attrs = attrs_of<NumberAttrs>,
                                           .grad = [](const GradArgs& g) -> Tensors {
                                             const Scalar alpha = g.attrs.get<NumberAttrs>().value;
                                             return {g.dout[0], g.needs(1) ? mul(g.dout[0], conj(alpha)) : Tensor{}};
                                           },
                                           .linear = linear_terms({{0}, {1}}),
                                           .samples = samples_scaled,
                                       });
constexpr OpDef kAddScalar =
    pointwise({ScalarOp::kAddScalar}, {
                                          .name = "add_scalar",
                                          .attrs = attrs_of<NumberAttrs>,
                                          .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
                                          .monotone = rises_in({0}),
                                          .samples = samples_linear,
                                      });
constexpr OpDef kSub = pointwise({ScalarOp::kSub}, {
                                                       .name = "sub",
                                                       .dtypes = kFloats | kInts | kComplexes,
                                                       .grad = [](const GradArgs& g) -> Tensors {
                                                         return {g.dout[0], g.needs(1) ? neg(g.dout[0]) : Tensor{}};
                                                       },
                                                       .linear = linear_terms({{0}, {1}}),
                                                       .monotone = {.rises = 0b01, .falls = 0b10},
                                                       .samples = samples_bilinear,
                                                   });
constexpr OpDef kSubScalar =
    pointwise({ScalarOp::kSubScalar}, {
                                          .name = "sub_scalar",
                                          .attrs = attrs_of<NumberAttrs>,
                                          .dtypes = kFloats | kInts | kComplexes,
                                          .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
                                          .monotone = rises_in({0}),
                                          .samples = samples_linear,
                                      });
constexpr OpDef kRsubScalar =
    pointwise({ScalarOp::kRsubScalar}, {
                                           .name = "rsub_scalar",
                                           .attrs = attrs_of<NumberAttrs>,
                                           .dtypes = kFloats | kInts | kComplexes,
                                           .grad = [](const GradArgs& g) -> Tensors { return {neg(g.dout[0])}; },
                                           .monotone = falls_in({0}),
                                           .samples = samples_linear,
                                       });

// ---- products

constexpr OpDef kMul = pointwise(
    {ScalarOp::kMul},
    {
        .name = "mul",
        .grad = [](const GradArgs& g) -> Tensors {
          const Tensor& dy = g.dout[0];
          return {g.needs(0) ? mul(dy, conj(g.in[1])) : Tensor{}, g.needs(1) ? mul(dy, conj(g.in[0])) : Tensor{}};
        },
        .linear = linear_in({0, 1}),
        .saves = kSavesInputs,
        .samples = samples_bilinear,
    });
constexpr OpDef kMulScalar = pointwise(
    {ScalarOp::kMulScalar},
    {
        .name = "mul_scalar",
        .attrs = attrs_of<NumberAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {mul(g.dout[0], conj(g.attrs.get<NumberAttrs>().value))}; },
        .linear = linear_in({0}),
        .samples = samples_linear,
    });
constexpr OpDef kAddcmul = pointwise({ScalarOp::kAddcmul, Promotion::kScaled},
                                     {
                                         .name = "addcmul",
                                         .attrs = attrs_of<NumberAttrs>,
                                         .dtypes = kFloats | kInts | kComplexes,
                                         .grad = [](const GradArgs& g) -> Tensors {
                                           const Tensor &dy = g.dout[0], &y = g.in[1], &z = g.in[2];
                                           const Scalar value = conj(g.attrs.get<NumberAttrs>().value);
                                           return {dy, g.needs(1) ? mul(mul(dy, conj(z)), value) : Tensor{},
                                                   g.needs(2) ? mul(mul(dy, conj(y)), value) : Tensor{}};
                                         },
                                         .linear = linear_terms({{0}, {1, 2}}),
                                         .saves = saves_in({1, 2}),
                                         .autocast = Cast::kWidest,
                                         .samples = samples_addc,
                                     });

// ---- quotients

constexpr OpDef kDiv = pointwise({ScalarOp::kDiv, Promotion::kFloat},
                                 {
                                     .name = "div",
                                     .grad = [](const GradArgs& g) -> Tensors {
                                       const Tensor dx = div(g.dout[0], conj(g.in[1]));
                                       return {dx, g.needs(1) ? neg(mul(dx, conj(g.out[0]))) : Tensor{}};
                                     },
                                     .linear = linear_in({0}),
                                     .saves = {.in = {1}, .out = {0}},
                                     .samples = samples_quotient,
                                 });
constexpr OpDef kDivScalar = pointwise(
    {ScalarOp::kDivScalar, Promotion::kFloat},
    {
        .name = "div_scalar",
        .attrs = attrs_of<NumberAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {div(g.dout[0], conj(g.attrs.get<NumberAttrs>().value))}; },
        .linear = linear_in({0}),
        .samples = samples_linear,
    });
constexpr OpDef kRdivScalar = pointwise(
    {ScalarOp::kRdivScalar, Promotion::kFloat},
    {
        .name = "rdiv_scalar",
        .attrs = attrs_of<NumberAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {neg(mul(g.dout[0], conj(div(g.out[0], g.in[0]))))}; },
        .saves = kSavesBoth,
        .samples = []() -> std::vector<Sample> {
          return {{.in = {sample({2, 3}, 0, 0.5, 3)}, .attrs = NumberAttrs{2}}};
        },
    });
constexpr OpDef kAddcdiv = pointwise({ScalarOp::kAddcdiv, Promotion::kScaled},
                                     {
                                         .name = "addcdiv",
                                         .attrs = attrs_of<NumberAttrs>,
                                         .grad = [](const GradArgs& g) -> Tensors {
                                           const Tensor &dx = g.dout[0], &y = g.in[1], &z = g.in[2];
                                           const Tensor dy =
                                               div(mul(dx, conj(g.attrs.get<NumberAttrs>().value)), conj(z));
                                           return {dx, dy, g.needs(2) ? neg(mul(dy, conj(div(y, z)))) : Tensor{}};
                                         },
                                         .linear = linear_terms({{0}, {1}}),
                                         .saves = saves_in({1, 2}),
                                         .autocast = Cast::kWidest,
                                         .samples = samples_addc,
                                     });
constexpr OpDef kFloorDivide = pointwise({ScalarOp::kFloorDivide}, {
                                                                       .name = "floor_divide",
                                                                       .grad = not_differentiable,
                                                                       .samples = samples_modulo,
                                                                   });
constexpr OpDef kFloorDivideScalar = pointwise({ScalarOp::kFloorDivideScalar}, {
                                                                                   .name = "floor_divide_scalar",
                                                                                   .attrs = attrs_of<NumberAttrs>,
                                                                                   .infer = infer_divided,
                                                                                   .grad = not_differentiable,
                                                                                   .samples = samples_divisor,
                                                                               });
constexpr OpDef kTruncDivide = pointwise({ScalarOp::kTruncDivide}, {
                                                                       .name = "trunc_divide",
                                                                       .grad = not_differentiable,
                                                                       .samples = samples_modulo,
                                                                   });
constexpr OpDef kTruncDivideScalar = pointwise({ScalarOp::kTruncDivideScalar}, {
                                                                                   .name = "trunc_divide_scalar",
                                                                                   .attrs = attrs_of<NumberAttrs>,
                                                                                   .infer = infer_divided,
                                                                                   .grad = not_differentiable,
                                                                                   .samples = samples_divisor,
                                                                               });
constexpr OpDef kRemainder =
    pointwise({ScalarOp::kRemainder},
              {
                  .name = "remainder",
                  .grad = [](const GradArgs& g) -> Tensors {
                    return {g.dout[0], g.needs(1) ? neg(mul(g.dout[0], floor_divide(g.in[0], g.in[1]))) : Tensor{}};
                  },
                  .saves = kSavesInputs,
                  .samples = samples_modulo,
              });
constexpr OpDef kRemainderScalar =
    pointwise({ScalarOp::kRemainderScalar}, {
                                                .name = "remainder_scalar",
                                                .attrs = attrs_of<NumberAttrs>,
                                                .infer = infer_divided,
                                                .grad = [](const GradArgs& g) -> Tensors { return {g.dout[0]}; },
                                                .samples = samples_divisor,
                                            });

// ---- on the way from x to y

constexpr OpDef kLerp = pointwise({ScalarOp::kLerp}, {
                                                         .name = "lerp",
                                                         .inputs = "x, y, weight",
                                                         .grad = [](const GradArgs& g) -> Tensors {
                                                           const Tensor &dz = g.dout[0], &x = g.in[0], &y = g.in[1],
                                                                        &weight = g.in[2];
                                                           return {g.needs(0) ? mul(dz, rsub(weight, 1)) : Tensor{},
                                                                   g.needs(1) ? mul(dz, weight) : Tensor{},
                                                                   g.needs(2) ? mul(dz, sub(y, x)) : Tensor{}};
                                                         },
                                                         .linear = linear_terms({{0}, {1}}),
                                                         .saves = kSavesInputs,
                                                         .samples = samples_ternary,
                                                     });
constexpr OpDef kLerpScalar = pointwise(
    {ScalarOp::kLerpScalar, Promotion::kScaled},
    {
        .name = "lerp_scalar",
        .attrs = attrs_of<NumberAttrs>,
        .grad = [](const GradArgs& g) -> Tensors {
          const double weight = g.attrs.get<NumberAttrs>().value.real();
          return {g.needs(0) ? mul(g.dout[0], 1 - weight) : Tensor{}, g.needs(1) ? mul(g.dout[0], weight) : Tensor{}};
        },
        .linear = linear_terms({{0}, {1}}),
        .samples = samples_lerp_number,
    });

}  // namespace

Rows arithmetic_rows() {
  static constexpr const OpDef* rows[] = {&kAdd,         &kAddScaled,
                                          &kAddScalar,   &kSub,
                                          &kSubScalar,   &kRsubScalar,
                                          &kMul,         &kMulScalar,
                                          &kAddcmul,     &kDiv,
                                          &kDivScalar,   &kRdivScalar,
                                          &kFloorDivide, &kFloorDivideScalar,
                                          &kTruncDivide, &kTruncDivideScalar,
                                          &kRemainder,   &kRemainderScalar,
                                          &kAddcdiv,     &kLerp,
                                          &kLerpScalar};
  return rows;
}

}  // namespace chorale::op

namespace chorale {

using namespace op;

namespace {

// The row that divides so: by a tensor, by a number.
const OpDef& division(Rounding rounding) {
  return rounding == Rounding::kNone ? kDiv : rounding == Rounding::kFloor ? kFloorDivide : kTruncDivide;
}
const OpDef& division_by_number(Rounding rounding) {
  return rounding == Rounding::kNone    ? kDivScalar
         : rounding == Rounding::kFloor ? kFloorDivideScalar
                                        : kTruncDivideScalar;
}

bool any_is_complex(const Tensor& x, const Tensor& y, const Tensor& z) {
  const auto is = [](const Tensor& t) { return t.defined() && is_complex(t.dtype()); };
  return is(x) || is(y) || is(z);
}

}  // namespace

CHORALE_DEFINE_FORMS(add, (const Tensor& x, const Tensor& y, Scalar alpha),
                     is_one(alpha) ? to(kAdd, {}, x, y) : to(kAddScaled, NumberAttrs{alpha}, x, y))
CHORALE_DEFINE_FORMS(add, (const Tensor& x, Scalar y, Scalar alpha),
                     to(kAddScalar, NumberAttrs{is_one(alpha) ? y : product(y, alpha)}, x))
CHORALE_DEFINE_FORMS(sub, (const Tensor& x, const Tensor& y, Scalar alpha),
                     is_one(alpha) ? to(kSub, {}, x, y) : to(kAddScaled, NumberAttrs{negated(alpha)}, x, y))
CHORALE_DEFINE_FORMS(sub, (const Tensor& x, Scalar y, Scalar alpha),
                     to(kSubScalar, NumberAttrs{is_one(alpha) ? y : product(y, alpha)}, x))
CHORALE_DEFINE_FORMS(rsub, (const Tensor& x, Scalar y), to(kRsubScalar, NumberAttrs{y}, x))
CHORALE_DEFINE_FORMS(mul, (const Tensor& x, const Tensor& y), to(kMul, {}, x, y))
CHORALE_DEFINE_FORMS(mul, (const Tensor& x, Scalar y), to(kMulScalar, NumberAttrs{y}, x))
CHORALE_DEFINE_FORMS(div, (const Tensor& x, const Tensor& y, Rounding rounding), to(division(rounding), {}, x, y))
CHORALE_DEFINE_FORMS(div, (const Tensor& x, Scalar y, Rounding rounding),
                     to(division_by_number(rounding), NumberAttrs{y}, x))
CHORALE_DEFINE_FORMS(rdiv, (const Tensor& x, Scalar y), to(kRdivScalar, NumberAttrs{y}, x))
CHORALE_DEFINE_FORMS(floor_divide, (const Tensor& x, const Tensor& y), to(kFloorDivide, {}, x, y))
CHORALE_DEFINE_FORMS(floor_divide, (const Tensor& x, Scalar y), to(kFloorDivideScalar, NumberAttrs{y}, x))
CHORALE_DEFINE_FORMS(remainder, (const Tensor& x, const Tensor& y), to(kRemainder, {}, x, y))
CHORALE_DEFINE_FORMS(remainder, (const Tensor& x, Scalar y), to(kRemainderScalar, NumberAttrs{y}, x))
CHORALE_DEFINE_FORMS(lerp, (const Tensor& x, const Tensor& y, const Tensor& weight),
                     any_is_complex(x, y, weight) ? to(kAddcmul, NumberAttrs{1}, x, sub(y, x), weight)
                                                  : to(kLerp, {}, x, y, weight))
CHORALE_DEFINE_FORMS(lerp, (const Tensor& x, const Tensor& y, Scalar weight),
                     any_is_complex(x, y, x) ? to(kAddScaled, NumberAttrs{weight}, x, sub(y, x))
                                             : to(kLerpScalar, NumberAttrs{weight}, x, y))
CHORALE_DEFINE_FORMS(addcmul, (const Tensor& x, const Tensor& y, const Tensor& z, Scalar value),
                     to(kAddcmul, NumberAttrs{value}, x, y, z))
CHORALE_DEFINE_FORMS(addcdiv, (const Tensor& x, const Tensor& y, const Tensor& z, Scalar value),
                     to(kAddcdiv, NumberAttrs{value}, x, y, z))

}  // namespace chorale
