// Signs, bounds and steps.
#include "chorale/op/copy.h"
#include "chorale/op/defs/number_range.h"
#include "chorale/op/defs/pointwise_row.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

std::vector<Sample> samples_bound() {
  return {{.in = {sample({2, 3})}, .attrs = NumberAttrs{0.5}}, {.in = {sample({}, 1)}, .attrs = NumberAttrs{-1}}};
}
std::vector<Sample> samples_clamp() {
  return {{.in = {sample({2, 3})}, .attrs = BoundsAttrs{-0.5, 1.0}},
          {.in = {sample({}, 1)}, .attrs = BoundsAttrs{0, 1}}};
}
std::vector<Sample> samples_clamp_backward() {
  return {{.in = {sample({2, 3}), sample({2, 3}, 1)}, .attrs = BoundsAttrs{-0.5, 1.0}}};
}
std::vector<Sample> samples_bound_backward() {
  return {{.in = {sample({2, 3}), sample({2, 3}, 1)}, .attrs = NumberAttrs{0.25}}};
}

// ---- the larger and the smaller

extern const OpDef kMinimumBackward, kMaximumBackward;

constexpr OpDef kMinimum =
    pointwise({ScalarOp::kMinimum}, {
                                        .name = "minimum",
                                        .grad = [](const GradArgs& g) -> Tensors {
                                          const Tensor &dz = g.dout[0], &x = g.in[0], &y = g.in[1];
                                          return {g.needs(0) ? call(kMinimumBackward, {}, dz, x, y) : Tensor{},
                                                  g.needs(1) ? call(kMinimumBackward, {}, dz, y, x) : Tensor{}};
                                        },
                                        .monotone = rises_in({0, 1}),
                                        .saves = kSavesInputs,
                                        .samples = samples_binary,
                                    });
constexpr OpDef kMaximum =
    pointwise({ScalarOp::kMaximum}, {
                                        .name = "maximum",
                                        .grad = [](const GradArgs& g) -> Tensors {
                                          const Tensor &dz = g.dout[0], &x = g.in[0], &y = g.in[1];
                                          return {g.needs(0) ? call(kMaximumBackward, {}, dz, x, y) : Tensor{},
                                                  g.needs(1) ? call(kMaximumBackward, {}, dz, y, x) : Tensor{}};
                                        },
                                        .monotone = rises_in({0, 1}),
                                        .saves = kSavesInputs,
                                        .samples = samples_binary,
                                    });
// What x gets of the gradient.
constexpr OpDef kMinimumBackward = pointwise({ScalarOp::kMinimumBackward}, {
                                                                               .name = "minimum_backward",
                                                                               .inputs = "dz, x, y",
                                                                               .grad = passes_first<kMinimumBackward>,
                                                                               .linear = linear_in({0}),
                                                                               .saves = saves_in({1, 2}),
                                                                               .samples = samples_ternary,
                                                                           });
constexpr OpDef kMaximumBackward = pointwise({ScalarOp::kMaximumBackward}, {
                                                                               .name = "maximum_backward",
                                                                               .inputs = "dz, x, y",
                                                                               .grad = passes_first<kMaximumBackward>,
                                                                               .linear = linear_in({0}),
                                                                               .saves = saves_in({1, 2}),
                                                                               .samples = samples_ternary,
                                                                           });

// ---- bounds that are numbers: no gradient at or beyond them

extern const OpDef kClampBackward, kClampMinBackward, kClampMaxBackward;

constexpr OpDef kClamp = pointwise({ScalarOp::kClamp}, {
                                                           .name = "clamp",
                                                           .attrs = attrs_of<BoundsAttrs>,
                                                           .grad = [](const GradArgs& g) -> Tensors {
                                                             return {call(kClampBackward, g.attrs, g.dout[0], g.in[0])};
                                                           },
                                                           .monotone = rises_in({0}),
                                                           .saves = kSavesInputs,
                                                           .samples = samples_clamp,
                                                       });
constexpr OpDef kClampMin = pointwise(
    {ScalarOp::kMaxScalar},
    {
        .name = "clamp_min",
        .attrs = attrs_of<NumberAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {call(kClampMinBackward, g.attrs, g.dout[0], g.in[0])}; },
        .monotone = rises_in({0}),
        .saves = kSavesInputs,
        .samples = samples_bound,
    });
constexpr OpDef kClampMax = pointwise(
    {ScalarOp::kMinScalar},
    {
        .name = "clamp_max",
        .attrs = attrs_of<NumberAttrs>,
        .grad = [](const GradArgs& g) -> Tensors { return {call(kClampMaxBackward, g.attrs, g.dout[0], g.in[0])}; },
        .monotone = rises_in({0}),
        .saves = kSavesInputs,
        .samples = samples_bound,
    });
constexpr OpDef kClampBackward = pointwise({ScalarOp::kClampBackward}, {
                                                                           .name = "clamp_backward",
                                                                           .inputs = "dy, x",
                                                                           .attrs = attrs_of<BoundsAttrs>,
                                                                           .grad = passes_first<kClampBackward>,
                                                                           .linear = linear_in({0}),
                                                                           .saves = saves_in({1}),
                                                                           .samples = samples_clamp_backward,
                                                                       });
constexpr OpDef kClampMinBackward =
    pointwise({ScalarOp::kClampMinBackward}, {
                                                 .name = "clamp_min_backward",
                                                 .inputs = "dy, x",
                                                 .attrs = attrs_of<NumberAttrs>,
                                                 .grad = passes_first<kClampMinBackward>,
                                                 .linear = linear_in({0}),
                                                 .saves = saves_in({1}),
                                                 .samples = samples_bound_backward,
                                             });
constexpr OpDef kClampMaxBackward =
    pointwise({ScalarOp::kClampMaxBackward}, {
                                                 .name = "clamp_max_backward",
                                                 .inputs = "dy, x",
                                                 .attrs = attrs_of<NumberAttrs>,
                                                 .grad = passes_first<kClampMaxBackward>,
                                                 .linear = linear_in({0}),
                                                 .saves = saves_in({1}),
                                                 .samples = samples_bound_backward,
                                             });

// ---- signs

constexpr OpDef kNeg =
    pointwise({ScalarOp::kNeg}, {
                                    .name = "neg",
                                    .dtypes = kFloats | kInts | kComplexes,
                                    .grad = [](const GradArgs& g) -> Tensors { return {neg(g.dout[0])}; },
                                    .linear = linear_in({0}),
                                    .monotone = falls_in({0}),
                                    .samples = samples_holomorphic,
                                });
extern const OpDef kAbsBackward;
constexpr OpDef kAbs =
    pointwise({ScalarOp::kAbs},
              {
                  .name = "abs",
                  .dtypes = kFloats | kInts,
                  .grad = [](const GradArgs& g) -> Tensors { return {call(kAbsBackward, {}, g.dout[0], g.in[0])}; },
                  .saves = kSavesInputs,
                  .samples = samples_unary,
              });
constexpr OpDef kAbsBackward = pointwise({ScalarOp::kAbsBackward}, {
                                                                       .name = "abs_backward",
                                                                       .inputs = "dy, x",
                                                                       .grad = passes_first<kAbsBackward>,
                                                                       .linear = linear_in({0}),
                                                                       .saves = saves_in({1}),
                                                                       .samples = samples_backward,
                                                                   });
constexpr OpDef kSign = pointwise({ScalarOp::kSign}, {
                                                         .name = "sign",
                                                         .dtypes = kReals,
                                                         .grad = zero_gradient,
                                                         .monotone = rises_in({0}),
                                                         .samples = samples_steps,
                                                     });

// ---- steps; integers are what they are

constexpr OpDef kFloor = pointwise(
    {ScalarOp::kFloor}, {.name = "floor", .grad = zero_gradient, .monotone = rises_in({0}), .samples = samples_steps});
constexpr OpDef kCeil = pointwise(
    {ScalarOp::kCeil}, {.name = "ceil", .grad = zero_gradient, .monotone = rises_in({0}), .samples = samples_steps});
constexpr OpDef kRound = pointwise(
    {ScalarOp::kRound}, {.name = "round", .grad = zero_gradient, .monotone = rises_in({0}), .samples = samples_steps});

constexpr OpDef kTrunc = pointwise(
    {ScalarOp::kTrunc}, {.name = "trunc", .grad = zero_gradient, .monotone = rises_in({0}), .samples = samples_steps});

}  // namespace

Rows order_rows() {
  static constexpr const OpDef* rows[] = {&kMinimum,
                                          &kMinimumBackward,
                                          &kMaximumBackward,
                                          &kClampMinBackward,
                                          &kClampMaxBackward,
                                          &kMaximum,
                                          &kClampBackward,
                                          &kClamp,
                                          &kClampMin,
                                          &kClampMax,
                                          &kNeg,
                                          &kAbsBackward,
                                          &kAbs,
                                          &kSign,
                                          &kFloor,
                                          &kCeil,
                                          &kRound,
                                          &kTrunc};
  return rows;
}

}  // namespace chorale::op

namespace chorale {

using namespace op;

namespace {

// A bound that the dtype of the result cannot hold is that of the dtype.
Scalar bound(const Tensor& x, Scalar number) {
  return x.defined() ? nearest_held(promote(x.dtype(), number.kind()), number) : number;
}

template <class To>
decltype(auto) clamp_to(const To& to, const Tensor& x, std::optional<Scalar> min, std::optional<Scalar> max) {
  CHORALE_CHECK(min || max, "[clamp] needs at least one bound");
  if (min && max) {
    if (!x.defined()) return to(kClamp, BoundsAttrs{*min, *max}, x);
    const DType dtype = promote(x.dtype(), std::max(min->kind(), max->kind()));
    return to(kClamp, BoundsAttrs{nearest_held(dtype, *min), nearest_held(dtype, *max)}, x);
  }
  return min ? to(kClampMin, NumberAttrs{bound(x, *min)}, x) : to(kClampMax, NumberAttrs{bound(x, *max)}, x);
}

// A copy for integers.
template <class To>
decltype(auto) step_to(const To& to, const OpDef& op, const Tensor& x) {
  return is_integral(x.dtype()) ? to(kTo, CopyAttrs{x.dtype(), true}, x) : to(op, {}, x);
}

}  // namespace

CHORALE_DEFINE_FORMS(minimum, (const Tensor& x, const Tensor& y), to(kMinimum, {}, x, y))
CHORALE_DEFINE_FORMS(maximum, (const Tensor& x, const Tensor& y), to(kMaximum, {}, x, y))
CHORALE_DEFINE_FORMS(minimum, (const Tensor& x, Scalar y), to(kClampMax, NumberAttrs{bound(x, y)}, x))
CHORALE_DEFINE_FORMS(maximum, (const Tensor& x, Scalar y), to(kClampMin, NumberAttrs{bound(x, y)}, x))
CHORALE_DEFINE_FORMS(clamp, (const Tensor& x, std::optional<Scalar> min, std::optional<Scalar> max),
                     clamp_to(to, x, min, max))
Tensor clamp(const Tensor& x, const Tensor& min, const Tensor& max) {
  const Tensor above = min.defined() ? maximum(x, min) : x;
  return max.defined() ? minimum(above, max) : above;
}
CHORALE_DEFINE_FORMS(neg, (const Tensor& x), to(kNeg, {}, x))
CHORALE_DEFINE_FORMS(abs, (const Tensor& x), to(is_complex(x.dtype()) ? kComplexAbs : kAbs, {}, x))
CHORALE_DEFINE_FORMS(sign, (const Tensor& x), to(is_complex(x.dtype()) ? kComplexSign : kSign, {}, x))
CHORALE_DEFINE_FORMS(floor, (const Tensor& x), step_to(to, kFloor, x))
CHORALE_DEFINE_FORMS(ceil, (const Tensor& x), step_to(to, kCeil, x))
CHORALE_DEFINE_FORMS(round, (const Tensor& x), step_to(to, kRound, x))
CHORALE_DEFINE_FORMS(trunc, (const Tensor& x), step_to(to, kTrunc, x))

}  // namespace chorale
