#include "chorale/op/pointwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "chorale/autograd/autograd.h"
#include "chorale/op/assignment.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/index.h"
#include "chorale/op/reduce.h"
#include "chorale/op/shape.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using ::testing::HasSubstr;

Tensor floats(std::initializer_list<float> values) {
  return Tensor::from(values, {static_cast<int64_t>(values.size())});
}
Tensor ints(std::initializer_list<int64_t> values) {
  return Tensor::from(values, {static_cast<int64_t>(values.size())});
}
Tensor bools(std::initializer_list<bool> values) { return Tensor::from(values, {static_cast<int64_t>(values.size())}); }

// ---- forms

TEST(PointwiseForms, NewInPlaceAndOutAreTheSameFunction) {
  const Tensor x = floats({1, 2, 3}), y = floats({10, 20, 30});
  expect_tensor(add(x, y), {3}, {11, 22, 33});
  expect_tensor(x, {3}, {1, 2, 3});

  const Tensor out = floats({0, 0, 0});
  EXPECT_TRUE(add_out(out, x, y, 2).is(out));
  expect_tensor(out, {3}, {21, 42, 63});

  EXPECT_TRUE(add_(x, y).is(x));
  expect_tensor(x, {3}, {11, 22, 33});
  expect_tensor(mul_(x, 2), {3}, {22, 44, 66});
  expect_tensor(clamp_(x, 30, 50), {3}, {30, 44, 50});
  expect_tensor(relu_(neg_(x)), {3}, {0, 0, 0});
}

TEST(PointwiseForms, AssignmentsAreInPlace) {
  const Tensor x = floats({1, 2, 3}), same = x;  // NOLINT(performance-unnecessary-copy-initialization)
  x += floats({1, 1, 1});
  x *= 2;
  x -= 1;
  x /= floats({1, 5, 7});
  x += 1;
  EXPECT_TRUE(x.is(same));
  expect_tensor(same, {3}, {4, 2, 2});
}

TEST(PointwiseForms, InPlaceKeepsShapeAndDType) {
  const Tensor x = ints({1, 2, 3});
  expect_tensor(add_(x, ints({1})), {3}, {2, 3, 4});
  EXPECT_EQ(x.dtype(), DType::kI64);
  const Tensor narrow = floats({1, 2, 3});
  add_(narrow, Tensor::from({0.5, 0.5, 0.5}, {3}));  // f64
  EXPECT_EQ(narrow.dtype(), DType::kF32);
  expect_tensor(narrow, {3}, {1.5, 2.5, 3.5});
  // A truth value is a number too.
  expect_tensor(eq_(narrow, 2.5), {3}, {0, 1, 0});
}

TEST(PointwiseForms, AResultOfAHigherCategoryOrAnotherShapeIsRefusedAndNothingChanges) {
  const Tensor x = ints({1, 2, 3});
  EXPECT_THAT(message_of([&] { add_(x, 0.5); }), HasSubstr("f32"));
  EXPECT_THAT(message_of([&] { div_(x, 2); }), HasSubstr("i64"));
  EXPECT_THAT(message_of([&] {
                add_(x, Tensor::from({int64_t{1}, int64_t{2}, int64_t{3}}, {3, 1}));
              }),
              HasSubstr("[3, 3]"));
  EXPECT_THAT(message_of([&] { add_out(floats({0, 0}), x, x); }), HasSubstr("[3]"));
  EXPECT_THAT(message_of([&] { add_(expand(floats({1}), {3}), 1); }), HasSubstr("expanded"));
  expect_tensor(x, {3}, {1, 2, 3});
}

TEST(PointwiseForms, AnOutputMayBeOrOverlapAnyInput) {
  const Tensor x = floats({1, 2, 3, 4}), y = floats({4, 3, 2, 1});
  sub_out(y, x, y);
  expect_tensor(y, {4}, {-3, -1, 1, 3});
  add_(x, x);
  expect_tensor(x, {4}, {2, 4, 6, 8});
  // x[1:] += x[:-1], as if the right side had been read before.
  add_(slice(x, 0, 1), slice(x, 0, 0, 3));
  expect_tensor(x, {4}, {2, 6, 10, 14});
}

// ---- shapes and layouts

TEST(PointwiseShapes, Broadcast) {
  const Tensor column = Tensor::from({10.f, 20.f}, {2, 1}), row = floats({1, 2, 3});
  expect_tensor(column + row, {2, 3}, {11, 12, 13, 21, 22, 23});
  expect_tensor(row - column, {2, 3}, {-9, -8, -7, -19, -18, -17});
  expect_tensor(Tensor::scalar(2, DType::kF32) * row, {3}, {2, 4, 6});
  expect_tensor(lerp(row, column, Tensor::scalar(0.5, DType::kF32)), {2, 3}, {5.5, 6, 6.5, 10.5, 11, 11.5});
  EXPECT_THAT(message_of([&] { row + floats({1, 2}); }), HasSubstr("[3] and [2]"));
}

TEST(PointwiseShapes, EmptyStaysEmpty) {
  const Tensor none = Tensor::empty({0, 3}, DType::kF32);
  EXPECT_EQ((none + floats({1, 2, 3})).sizes(), (Shape{0, 3}));
  EXPECT_EQ(exp(none).sizes(), (Shape{0, 3}));
  EXPECT_EQ((none + 1).sizes(), (Shape{0, 3}));
  EXPECT_EQ((Tensor::empty({0}, DType::kF32) + floats({1})).sizes(), (Shape{0}));
}

TEST(PointwiseLayouts, DenseOnesFlowThrough) {
  const Tensor channels_last =
      Tensor::empty_strided({2, 3, 4, 5}, channels_last_strides(Shape{2, 3, 4, 5}), DType::kF32);
  EXPECT_TRUE(relu(channels_last).is_channels_last());
  EXPECT_TRUE(add(channels_last, channels_last).is_channels_last());
  EXPECT_TRUE(mul(channels_last, Tensor::empty({3, 1, 1}, DType::kF32)).is_channels_last());
  EXPECT_TRUE(gt(channels_last, 0).is_channels_last());
  // An operand that shows one element at many places lies in no order.
  EXPECT_TRUE(mul(expand(Tensor::empty({2, 3, 1, 1}, DType::kF32), {2, 3, 4, 5}), channels_last).is_channels_last());
  const Tensor transposed = t(iota({3, 4}));
  EXPECT_EQ(neg(transposed).strides(), transposed.strides());
  // Where inputs disagree, and where there are holes, the result is contiguous.
  EXPECT_TRUE(add(transposed, iota({4, 3})).is_contiguous());
  EXPECT_TRUE(neg(slice(iota({4, 4}), 1, 0, 2)).is_contiguous());
  EXPECT_TRUE(neg(expand(iota({4, 1}), {4, 4})).is_contiguous());
}

TEST(PointwiseLayouts, DoNotChangeValues) {
  const Tensor a = iota({3, 4}), b = iota({4, 3}, 100.f);
  expect_equal(contiguous(add(t(a), b)), build(
                                             {4, 3},
                                             [&](const Shape& i) {
                                               return at(a, {i[1], i[0]}) + at(b, i);
                                             },
                                             DType::kF32));
}

// ---- dtypes

TEST(PointwiseDTypes, NumbersPromoteByCategoryOnly) {
  EXPECT_EQ((floats({1}) + 1).dtype(), DType::kF32);
  EXPECT_EQ((ints({1}) + 1).dtype(), DType::kI64);
  EXPECT_EQ((ints({1}) + 1.5).dtype(), DType::kF32);
  EXPECT_EQ((bools({true}) + 1).dtype(), DType::kI64);
  EXPECT_EQ((to(floats({1}), DType::kBF16) * 1.5).dtype(), DType::kBF16);
  EXPECT_EQ((floats({1}) * std::complex<double>(0, 1)).dtype(), DType::kC64);
  EXPECT_EQ((to(ints({1}), DType::kI8) + 1000).dtype(), DType::kI8);
}

TEST(PointwiseDTypes, FunctionsOfRealNumbersTurnIntegersIntoF32) {
  for (const Tensor& x : {ints({1, 4}), bools({true, false}), to(ints({1, 4}), DType::kU8)}) {
    EXPECT_EQ(sqrt(x).dtype(), DType::kF32);
    EXPECT_EQ(sigmoid(x).dtype(), DType::kF32);
    EXPECT_EQ((x / x).dtype(), DType::kF32);
    EXPECT_EQ((x / 2).dtype(), DType::kF32);
  }
  expect_tensor(ints({7, -7}) / 2, {2}, {3.5, -3.5});
  expect_tensor(exp2(ints({3, -1})), {2}, {8, 0.5});
}

TEST(PointwiseDTypes, ComparisonsGiveBoolAndPartsOfComplexGiveReal) {
  EXPECT_EQ(lt(floats({1}), ints({2})).dtype(), DType::kBool);
  EXPECT_EQ(isnan(ints({2})).dtype(), DType::kBool);
  const Tensor z = Tensor::from({complex64(3, -4)}, {1});
  EXPECT_EQ(abs(z).dtype(), DType::kF32);
  expect_tensor(abs(z), {1}, {5});
  expect_tensor(real(z), {1}, {3});
  expect_tensor(imag(z), {1}, {-4});
  EXPECT_EQ(conj(z).item<complex64>(), complex64(3, 4));
  EXPECT_EQ(sign(z).item<complex64>(), complex64(0.6f, -0.8f));
  const Tensor x = floats({1});
  EXPECT_TRUE(real(x).is(x));
  EXPECT_TRUE(conj(x).is(x));
}

TEST(PointwiseDTypes, FunctionsOfComplexNumbersFollowTheirDefinitions) {
  using Z = complex128;
  const std::vector<Z> a{Z(1, 2), Z(-0.5, 1e-3), Z(1e-9, -2e-9)}, b{Z(0, 1), Z(3, -1), Z(2, 2)};
  const Tensor x = Tensor::from(a, {3}), y = Tensor::from(b, {3});
  const Z weight(0.25, 0.5);
  const auto mixed = lerp(x, y, weight).to_vector<Z>(),
             by_tensor = lerp(x, y, Tensor::from({weight}, {1})).to_vector<Z>();
  const auto logs = log1p(x).to_vector<Z>();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(std::abs(mixed[i] - (a[i] + weight * (b[i] - a[i]))), 0, 1e-14);
    EXPECT_NEAR(std::abs(by_tensor[i] - mixed[i]), 0, 1e-14);
  }
  EXPECT_NEAR(std::abs(logs[0] - std::log(Z(2, 2))), 0, 1e-14);
  EXPECT_NEAR(std::abs(logs[1] - std::log(Z(0.5, 1e-3))), 0, 1e-14);
  // Where 1 + x has lost most digits: x - x^2 / 2.
  EXPECT_NEAR(std::abs(logs[2] - (a[2] - a[2] * a[2] / 2.0)), 0, 1e-22);
  EXPECT_EQ(log1p_(clone(x)).to_vector<Z>(), logs);
}

TEST(PointwiseDTypes, IntegersStayExactAndWrapAround) {
  const int64_t big = std::numeric_limits<int64_t>::max();
  EXPECT_EQ((ints({big}) - 1).item<int64_t>(), big - 1);
  EXPECT_EQ((ints({big}) + 1).item<int64_t>(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(mul(to(ints({200}), DType::kU8), 2).item<int64_t>(), 400 - 256);
  EXPECT_EQ(pow(ints({3}), 39).item<int64_t>(), 4052555153018976267);
  expect_tensor(clamp(ints({-5, 0, 5}), -1, 1), {3}, {-1, 0, 1});
  expect_tensor(floor(ints({-5, 5})), {2}, {-5, 5});
}

TEST(PointwiseDTypes, ABoundThatADTypeCannotHoldIsItsOwn) {
  const Tensor u8 = to(ints({0, 7, 255}), DType::kU8), i8 = to(ints({-128, 7, 127}), DType::kI8);
  expect_tensor(clamp(u8, -1, 300), {3}, {0, 7, 255});
  expect_tensor(clamp(u8, -1), {3}, {0, 7, 255});
  expect_tensor(clamp(i8, {}, 200), {3}, {-128, 7, 127});
  expect_tensor(clamp(i8, 200), {3}, {127, 127, 127});
  expect_tensor(minimum(u8, 300), {3}, {0, 7, 255});
  expect_tensor(maximum(u8, -5), {3}, {0, 7, 255});
  expect_tensor(minimum(u8, -5), {3}, {0, 0, 0});
  expect_tensor(maximum(clone(i8), -1000), {3}, {-128, 7, 127});
  expect_tensor(clamp_(clone(u8), -1, 300), {3}, {0, 7, 255});
  // A fraction makes the result floating, and then the other bound is no problem.
  expect_tensor(clamp(u8, 300, 400.5), {3}, {300, 300, 300});
  const Tensor half = to(floats({-1, 1}), DType::kF16);
  expect_tensor(clamp(half, -1e6, 1e6), {2}, {-1, 1});
  expect_tensor(maximum(half, 1e6), {2}, {65504, 65504});
}

TEST(PointwiseDTypes, ComparisonWithANumberBeyondTheRangeIsThatOfNumbers) {
  const Tensor u8 = to(ints({0, 7, 255}), DType::kU8), i8 = to(ints({-128, -1, 127}), DType::kI8);
  expect_tensor(lt(u8, 256), {3}, {1, 1, 1});
  expect_tensor(le(u8, 300), {3}, {1, 1, 1});
  expect_tensor(gt(u8, 256), {3}, {0, 0, 0});
  expect_tensor(ge(u8, 300), {3}, {0, 0, 0});
  expect_tensor(eq(u8, 263), {3}, {0, 0, 0});  // 7 if it wrapped around
  expect_tensor(ne(u8, 263), {3}, {1, 1, 1});
  expect_tensor(lt(u8, -1), {3}, {0, 0, 0});
  expect_tensor(gt(u8, -1), {3}, {1, 1, 1});
  expect_tensor(ge(i8, -129), {3}, {1, 1, 1});
  expect_tensor(eq(i8, 255), {3}, {0, 0, 0});  // -1 if it wrapped around
  expect_tensor(le(i8, -200), {3}, {0, 0, 0});
}

TEST(PointwiseDTypes, ANumberToStoreThatADTypeCannotHoldIsRefused) {
  const Tensor u8 = to(ints({0, 7, 255}), DType::kU8), mask = bools({true, false, true});
  EXPECT_THAT(message_of([&] { masked_fill(u8, mask, 300); }),
              HasSubstr("[masked_fill] a tensor of u8 cannot hold 300"));
  EXPECT_THAT(message_of([&] { masked_fill_(u8, mask, -1); }), HasSubstr("cannot hold -1"));
  EXPECT_THAT(message_of([&] { masked_fill(u8, mask, full({}, 300, DType::kI64)); }),
              HasSubstr("[masked_fill] a tensor of u8 cannot hold 300"));
  EXPECT_THAT(message_of([&] { masked_fill(u8, mask, full({}, -1.0)); }), HasSubstr("cannot hold -1"));
  EXPECT_THAT(message_of([] { arange(0, 1e30); }), HasSubstr("are more elements than can be counted"));
  EXPECT_THAT(message_of([] { eye(2, -5); }), HasSubstr("sizes cannot be negative: 2 x -5"));
  EXPECT_THAT(message_of([&] { where(mask, 300, u8); }), HasSubstr("[where] a tensor of u8 cannot hold 300"));
  EXPECT_THAT(message_of([&] { where(mask, u8, -1); }), HasSubstr("[where] a tensor of u8 cannot hold -1"));
  EXPECT_THAT(message_of([&] { masked_fill(to(floats({1, 2, 3}), DType::kF16), mask, 1e6); }), HasSubstr("f16"));
  EXPECT_THAT(message_of([&] { fill_(u8, 256); }), HasSubstr("cannot hold 256"));
  EXPECT_THAT(message_of([&] { full({2}, -129, DType::kI8); }), HasSubstr("cannot hold -129"));
  const Tensor first = ints({0});
  EXPECT_THAT(message_of([&] { index_fill(u8, 0, first, 300); }), HasSubstr("[index_fill] a tensor of u8 cannot hold"));
  EXPECT_THAT(message_of([&] { scatter(u8, 0, first, -1); }), HasSubstr("[scatter] a tensor of u8 cannot hold -1"));
  EXPECT_THAT(message_of([&] { pad(u8, {1, 1}, PadMode::kConstant, 256); }), HasSubstr("[pad] a tensor of u8 cannot"));
  EXPECT_THAT(message_of([&] { arange(0, 300, 100, DType::kI8); }),
              HasSubstr("[arange] a tensor of i8 cannot hold 200"));
  EXPECT_THAT(message_of([&] { arange(-1, 3, 1, DType::kU8); }), HasSubstr("[arange] a tensor of u8 cannot hold -1"));
  EXPECT_THAT(message_of([&] { linspace(0, 600, 4, DType::kI8); }),
              HasSubstr("[linspace] a tensor of i8 cannot hold 600"));
  expect_tensor(linspace(0, 255, 2, DType::kU8), {2}, {0, 255});
  expect_tensor(arange(0, 256, 255, DType::kU8), {2}, {0, 255});
  expect_tensor(u8, {3}, {0, 7, 255});
  expect_tensor(where(mask, 300.5, u8), {3}, {300.5, 7, 300.5});
}

// 300 would be 44 in u8. Sums and products are the same for both, modulo 256.
TEST(PointwiseDTypes, ADivisorOrExponentThatADTypeCannotHoldIsRefused) {
  const Tensor u8 = to(ints({2, 44, 255}), DType::kU8);
  EXPECT_THAT(message_of([&] { remainder(u8, 300); }), HasSubstr("a tensor of u8 cannot hold 300; cast"));
  EXPECT_THAT(message_of([&] { floor_divide(u8, -1); }), HasSubstr("cannot hold -1"));
  EXPECT_THAT(message_of([&] { div(u8, 256, Rounding::kTrunc); }), HasSubstr("cannot hold 256"));
  EXPECT_THAT(message_of([&] { pow(u8, 257); }), HasSubstr("cannot hold 257"));
  expect_tensor(remainder(u8, 255), {3}, {2, 44, 0});
  expect_tensor(remainder(u8, 300.5), {3}, {2, 44, 255});
  expect_tensor(u8 + 300, {3}, {46, 88, 43});
}

TEST(PointwiseDTypes, BoolsFollowLogic) {
  const Tensor a = bools({true, true, false, false}), b = bools({true, false, true, false});
  expect_tensor(add(a, b), {4}, {1, 1, 1, 0});
  expect_tensor(mul(a, b), {4}, {1, 0, 0, 0});
  expect_tensor(bitwise_xor(a, b), {4}, {0, 1, 1, 0});
  expect_tensor(bitwise_not(a), {4}, {0, 0, 1, 1});
  expect_tensor(add(a, true), {4}, {1, 1, 1, 1});
  EXPECT_EQ(add(a, b).dtype(), DType::kBool);
  EXPECT_EQ(add(a, true).dtype(), DType::kBool);
  expect_tensor(square(a), {4}, {1, 1, 0, 0});
  EXPECT_EQ(square(a).dtype(), DType::kI64);
}

TEST(PointwiseDTypes, WhatMakesNoSenseIsRefused) {
  EXPECT_THAT(message_of([] { bools({true}) - bools({true}); }), HasSubstr("bool"));
  EXPECT_THAT(message_of([] { -bools({true}); }), HasSubstr("[neg] is not defined for bool"));
  EXPECT_THAT(message_of([] { bitwise_and(ints({1}), floats({1})); }), HasSubstr("f32"));
  EXPECT_THAT(message_of([] { lt(Tensor::from({complex64(1, 1)}, {1}), 2); }), HasSubstr("c64"));
  EXPECT_THAT(message_of([] { where(ints({1}), 1, floats({2})); }), HasSubstr("must be bool, not i64"));
  EXPECT_THAT(message_of([] { imag(floats({1})); }), HasSubstr("f32"));
  EXPECT_THAT(message_of([] { add(ints({1}), ints({2}), 1.5); }), HasSubstr("1.5"));
  EXPECT_THAT(message_of([] { masked_fill(ints({1}), bools({true}), 1.5); }), HasSubstr("1.5"));
  EXPECT_THAT(message_of([] { clamp(floats({1}), {}); }), HasSubstr("at least one bound"));
  EXPECT_THAT(message_of([] { pow(ints({2}), -1); }), HasSubstr("-1"));
  EXPECT_THAT(message_of([] { add(floats({1}), Tensor()); }), HasSubstr("y (input 1) is an undefined tensor"));
  EXPECT_THAT(message_of([] { add(floats({1}), Tensor::empty({1}, DType::kF32, kNull)); }),
              HasSubstr("different devices"));
}

// ---- division

TEST(PointwiseDivision, RoundsAsAsked) {
  for (DType dtype : {DType::kI64, DType::kI8, DType::kF32, DType::kF64}) {
    const Tensor x = to(ints({7, -7, 7, -7, 6}), dtype), y = to(ints({2, 2, -2, -2, 3}), dtype);
    expect_tensor(div(x, y, Rounding::kFloor), {5}, {3, -4, -4, 3, 2});
    expect_tensor(div(x, y, Rounding::kTrunc), {5}, {3, -3, -3, 3, 2});
    expect_tensor(remainder(x, y), {5}, {1, 1, -1, -1, 0});
    EXPECT_EQ(div(x, y, Rounding::kTrunc).dtype(), dtype);
    expect_tensor(div(x, 2, Rounding::kFloor), {5}, {3, -4, 3, -4, 3});
    expect_tensor(div(x, -2, Rounding::kTrunc), {5}, {-3, 3, -3, 3, -3});
    expect_tensor(div_(to(x, dtype == DType::kF64 ? DType::kF32 : dtype), 2, Rounding::kTrunc), {5}, {3, -3, 3, -3, 3});
  }
}

TEST(PointwiseDivision, OfAnIntegerByZeroIsAnErrorAndNothingIsWritten) {
  const Tensor x = ints({1, 2, 3});
  EXPECT_THAT(message_of([&] { floor_divide_(x, ints({1, 0, 1})); }), HasSubstr("element 1"));
  EXPECT_THAT(message_of([&] { remainder_(x, ints({1, 1, 0})); }), HasSubstr("element 2"));
  EXPECT_THAT(message_of([&] { floor_divide_(x, 0); }), HasSubstr("division by zero"));
  EXPECT_THAT(message_of([&] { remainder_(x, 0); }), HasSubstr("division by zero"));
  EXPECT_THAT(message_of([&] { div_(x, 0, Rounding::kTrunc); }), HasSubstr("division by zero"));
  EXPECT_THAT(message_of([&] { div_(x, ints({0, 1, 1}), Rounding::kTrunc); }), HasSubstr("element 0"));
  expect_tensor(x, {3}, {1, 2, 3});
  EXPECT_TRUE(std::isinf((x / 0).to_vector<double>()[0]));
}

// ---- choice

TEST(PointwiseChoice, WhereTakesTensorsAndNumbers) {
  const Tensor c = bools({true, false, true}), x = floats({1, 2, 3}), y = floats({-1, -2, -3});
  expect_tensor(where(c, x, y), {3}, {1, -2, 3});
  expect_tensor(where(c, 9, y), {3}, {9, -2, 9});
  expect_tensor(where(c, x, 9), {3}, {1, 9, 3});
  EXPECT_EQ(where(c, ints({1, 2, 3}), 2.5).dtype(), DType::kF32);
  EXPECT_EQ(where(c, ints({1, 2, 3}), x).dtype(), DType::kF32);
  expect_tensor(where(c, Tensor::scalar(1, DType::kF32), Tensor::from({5.f, 6.f}, {2, 1})), {2, 3}, {1, 5, 1, 1, 6, 1});
  // What is not chosen does not leak, not even NaN.
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect_tensor(where(c, x, floats({nan, 0, nan})), {3}, {1, 0, 3});
}

TEST(PointwiseChoice, MaskedFillTakesZeroAndOneForTruthValues) {
  const Tensor x = bools({false, false, true});
  expect_tensor(masked_fill(x, bools({true, false, false}), 1), {3}, {1, 0, 1});
  EXPECT_EQ(masked_fill(x, bools({true, false, false}), 1).dtype(), DType::kBool);
  expect_tensor(masked_fill_(clone(x), bools({false, false, true}), 0), {3}, {0, 0, 0});
  EXPECT_THAT(message_of([&] { masked_fill(x, x, 2); }), HasSubstr("2"));
}

TEST(PointwiseChoice, MaskedFillKeepsTheDType) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kU8, DType::kC64}) {
    const Tensor x = to(ints({1, 2, 3}), dtype);
    expect_tensor(masked_fill(x, bools({false, true, false}), 7), {3}, {1, 7, 3});
    EXPECT_EQ(masked_fill(x, bools({false, true, false}), 7).dtype(), dtype);
    masked_fill_(x, bools({true}), 5);
    expect_tensor(x, {3}, {5, 5, 5});
  }
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(masked_fill(to(floats({1}), DType::kBF16), bools({true}), -infinity).item<double>(), -infinity);
}

// ---- gradients

Tensor leaf(std::initializer_list<double> values) {
  const Tensor x = Tensor::from(values, {static_cast<int64_t>(values.size())});
  set_requires_grad(x);
  return x;
}
Tensor ones_for(const Tensor& y) {
  return Tensor::from(std::vector<double>(static_cast<size_t>(y.elems()), 1), y.sizes());
}

TEST(PointwiseGradient, OfAnInPlaceChainIsThatOfThePlainOne) {
  const Tensor x = leaf({0.5, -1, 2});
  const Tensor y = x * 2;
  add_(mul_(y, 3), 1);
  relu_(y);
  expect_tensor(y, {3}, {4, 0, 13});
  backward(y, ones_for(y));
  expect_tensor(gradient(x), {3}, {6, 0, 6});
}

TEST(PointwiseGradient, ReachesBroadcastAndNarrowerInputs) {
  const Tensor x = leaf({1, 2, 3});
  const Tensor w = Tensor::from({2.f}, {1});
  set_requires_grad(w);
  const Tensor y = x * w;
  backward(y, ones_for(y));
  expect_tensor(gradient(w), {1}, {6});
  EXPECT_EQ(gradient(w).dtype(), DType::kF32);
  expect_tensor(gradient(x), {3}, {2, 2, 2});
}

TEST(PointwiseGradient, OfAPowerWithTwoDTypesIsComputedInTheResults) {
  // 1.1 is no f32: log(1.1f) in f32 and in f64 differ.
  const Tensor x = Tensor::from({1.1f, 2.3f}, {2}), y = leaf({3, 2.5});
  set_requires_grad(x);
  const Tensor z = pow(x, y);
  const Tensor dy = grad({sum(z)}, {y})[0];
  const std::vector<double> base = x.to_vector<double>(), exponent = y.to_vector<double>();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_DOUBLE_EQ(dy.to_vector<double>()[i], std::pow(base[i], exponent[i]) * std::log(base[i]));
  }
  // y - 1 is no bf16: that type has no odd numbers here.
  const Tensor base64 = leaf({1.01});
  const Tensor narrow_exponent = to(Tensor::from({258.0}, {1}), DType::kBF16);
  const Tensor dx = grad({sum(pow(base64, narrow_exponent))}, {base64})[0];
  EXPECT_NEAR(dx.item<double>(), 258 * std::pow(1.01, 257), 1e-9);
  const Tensor chosen = grad({sum(pow(base64, bools({true})))}, {base64})[0];
  EXPECT_EQ(chosen.item<double>(), 1);
}

TEST(PointwiseGradient, OfWhereDoesNotLeakNaN) {
  const Tensor x = leaf({-1, 4});
  const Tensor y = where(lt(x, 0), x, sqrt(maximum(x, 0)));
  backward(y, ones_for(y));
  expect_tensor(gradient(x), {2}, {1, 0.25});
}

}  // namespace
}  // namespace chorale
