// Golden texts: what a person sees. Each starts on a line of its own so that columns can be judged by eye.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale {
namespace {

std::string shown(const Tensor& tensor, const PrintOptions& options = {}) { return "\n" + to_string(tensor, options); }

template <class T>
Tensor of(std::initializer_list<double> numbers, const Shape& sizes) {
  std::vector<T> values;
  for (const double number : numbers) values.push_back(Scalar(number).to<T>());
  return Tensor::from(values, sizes);
}
template <class T>
Tensor counted(const Shape& sizes, double step = 1) {
  std::vector<T> values;
  for (int64_t i = 0; i < count_elems(sizes); ++i) values.push_back(Scalar(step * static_cast<double>(i)).to<T>());
  return Tensor::from(values, sizes);
}

TEST(Print, WholeFloatingNumbersEndWithAPoint) {
  EXPECT_EQ(shown(counted<float>({2, 3})), R"(
[[0., 1., 2.],
 [3., 4., 5.]])");
}

TEST(Print, DecimalsAreCommonAndAsFewAsNeeded) {
  EXPECT_EQ(shown(of<float>({0.5, -1.25, 100, 3, 4, 5}, {2, 3})), R"(
[[  0.50,  -1.25, 100.00],
 [  3.00,   4.00,   5.00]])");
  EXPECT_EQ(shown(of<float>({0.1, 0.2, -0.0}, {3})), R"(
[ 0.1,  0.2, -0.0])");
  EXPECT_EQ(shown(of<float>({1.0 / 3, 2.0 / 3, 12345}, {3})), R"(
[    0.3333,     0.6667, 12345.0000])");
}

TEST(Print, ScientificWhereFixedDecimalsWouldHideOrDrownNumbers) {
  EXPECT_EQ(shown(of<float>({1e-5, 0.3, -2}, {3})), R"(
[ 1.0e-05,  3.0e-01, -2.0e+00])");
  EXPECT_EQ(shown(of<float>({1234567.5, 2}, {2})), R"(
[1.2346e+06, 2.0000e+00])");
  EXPECT_EQ(shown(of<float>({123456792, 0}, {2})), R"(
[1.2346e+08, 0.0000e+00])");
  EXPECT_EQ(shown(of<float>({12345678, 1}, {2})), R"(
[12345678.,        1.])");
  EXPECT_EQ(shown(of<float>({0.0001, 999999.5}, {2})), R"(
[     0.0001, 999999.5000])");
  EXPECT_EQ(shown(Tensor::from({std::numeric_limits<double>::max(), std::numeric_limits<double>::denorm_min()}, {2})),
            R"(
[1.7977e+308, 4.9407e-324]  f64[2])");
}

TEST(Print, NaNAndInfinityKeepTheFormatOfTheOthers) {
  EXPECT_EQ(shown(of<float>({NAN, HUGE_VAL, -HUGE_VAL, 1}, {2, 2})), R"(
[[ nan,  inf],
 [-inf,   1.]])");
  EXPECT_EQ(shown(of<float>({NAN, 0.25}, {2})), R"(
[ nan, 0.25])");
  EXPECT_EQ(shown(of<float>({-NAN}, {1})), R"(
[nan])");
}

TEST(Print, IntegersAndTruthsAreAlignedToTheRight) {
  EXPECT_EQ(shown(counted<int64_t>({3, 4})), R"(
[[ 0,  1,  2,  3],
 [ 4,  5,  6,  7],
 [ 8,  9, 10, 11]])");
  EXPECT_EQ(shown(of<bool>({0, 1, 1, 0}, {2, 2})), R"(
[[false,  true],
 [ true, false]])");
  EXPECT_EQ(shown(Tensor::from({std::numeric_limits<int64_t>::min(), int64_t{1}}, {2})), R"(
[-9223372036854775808,                    1])");
}

TEST(Print, AnUnusualDTypeIsNamedWithTheShape) {
  EXPECT_EQ(shown(of<int32_t>({-1, 200, 3}, {3})), R"(
[ -1, 200,   3]  i32[3])");
  EXPECT_EQ(shown(of<uint8_t>({0, 255}, {2})), R"(
[  0, 255]  u8[2])");
  EXPECT_EQ(shown(of<double>({1, 2, 3, 4}, {2, 2})), R"(
[[1., 2.],
 [3., 4.]]  f64[2, 2])");
  EXPECT_EQ(shown(of<float16>({0.1, 0.2}, {2})), R"(
[0.1, 0.2]  f16[2])");
  EXPECT_EQ(shown(of<bfloat16>({0.1, 0.2}, {2})), R"(
[0.1001, 0.2002]  bf16[2])");
}

TEST(Print, ComplexNumbersShowBothPartsInFormatsOfTheirOwn) {
  EXPECT_EQ(shown(Tensor::from({complex64(1, 2), complex64(-0.5f, -10)}, {2})), R"(
[  1.0+2.j, -0.5-10.j])");
  EXPECT_EQ(shown(Tensor::from({complex64(0, NAN), complex64(HUGE_VALF, -0.0f)}, {2})), R"(
[0.+nanj, inf-0.j])");
  EXPECT_EQ(shown(Tensor::from({complex128(1, 2)}, {})), R"(
1.+2.j  c128[])");
}

TEST(Print, AScalarIsANumber) {
  EXPECT_EQ(shown(Tensor::scalar(3.5, DType::kF32)), "\n3.5");
  EXPECT_EQ(shown(Tensor::scalar(3, DType::kF32)), "\n3.");
  EXPECT_EQ(shown(Tensor::scalar(-7, DType::kI64)), "\n-7");
  EXPECT_EQ(shown(Tensor::scalar(true, DType::kBool)), "\ntrue");
  EXPECT_EQ(shown(Tensor::scalar(3, DType::kF64)), "\n3.  f64[]");
}

TEST(Print, MatricesOfAStackStandApart) {
  EXPECT_EQ(shown(counted<float>({2, 2, 3})), R"(
[[[ 0.,  1.,  2.],
  [ 3.,  4.,  5.]],

 [[ 6.,  7.,  8.],
  [ 9., 10., 11.]]])");
  EXPECT_EQ(shown(counted<int64_t>({2, 2, 1, 2})), R"(
[[[[0, 1]],

  [[2, 3]]],


 [[[4, 5]],

  [[6, 7]]]])");
}

TEST(Print, LargeTensorsShowTheirEdgesAndTheShape) {
  EXPECT_EQ(shown(counted<float>({1001})), R"(
[   0.,    1.,    2., …,  998.,  999., 1000.]  f32[1001])");
  EXPECT_EQ(shown(counted<float>({100, 100}, 0.01)), R"(
[[ 0.00,  0.01,  0.02, …,  0.97,  0.98,  0.99],
 [ 1.00,  1.01,  1.02, …,  1.97,  1.98,  1.99],
 [ 2.00,  2.01,  2.02, …,  2.97,  2.98,  2.99],
 …,
 [97.00, 97.01, 97.02, …, 97.97, 97.98, 97.99],
 [98.00, 98.01, 98.02, …, 98.97, 98.98, 98.99],
 [99.00, 99.01, 99.02, …, 99.97, 99.98, 99.99]]  f32[100, 100])");
  // A short dimension is shown whole, and the one element that an ellipsis would replace too.
  EXPECT_EQ(shown(counted<int64_t>({200, 7})), R"(
[[   0,    1,    2,    3,    4,    5,    6],
 [   7,    8,    9,   10,   11,   12,   13],
 [  14,   15,   16,   17,   18,   19,   20],
 …,
 [1379, 1380, 1381, 1382, 1383, 1384, 1385],
 [1386, 1387, 1388, 1389, 1390, 1391, 1392],
 [1393, 1394, 1395, 1396, 1397, 1398, 1399]]  i64[200, 7])");
}

TEST(Print, TheFormatSuitsWhatIsShownNotWhatIsLeftOut) {
  const Tensor x = counted<float>({2000});
  x.data<float>()[1000] = 0.125f;
  EXPECT_EQ(shown(x), R"(
[   0.,    1.,    2., …, 1997., 1998., 1999.]  f32[2000])");
}

TEST(Print, ALongRowGoesOnBelowItsFirstElement) {
  EXPECT_EQ(shown(counted<float>({2, 12}, 0.5), {.line_width = 40}), R"(
[[ 0.0,  0.5,  1.0,  1.5,  2.0,  2.5,
   3.0,  3.5,  4.0,  4.5,  5.0,  5.5],
 [ 6.0,  6.5,  7.0,  7.5,  8.0,  8.5,
   9.0,  9.5, 10.0, 10.5, 11.0, 11.5]])");
  EXPECT_EQ(shown(counted<int64_t>({3}), {.line_width = 0}), R"(
[0,
 1,
 2])");
}

TEST(Print, OptionsSetPrecisionThresholdAndEdge) {
  EXPECT_EQ(shown(of<double>({1.0 / 3}, {1}), {.precision = 8}), R"(
[0.33333333]  f64[1])");
  EXPECT_EQ(shown(of<float>({1.5, 20.25}, {2}), {.precision = 1}), R"(
[ 1.5, 20.2])");
  EXPECT_EQ(shown(counted<int64_t>({10}), {.threshold = 5, .edge = 1}), R"(
[0, …, 9]  i64[10])");
  EXPECT_EQ(shown(counted<int64_t>({2}), {.threshold = 0, .edge = 0}), R"(
[0, 1])");
}

TEST(Print, EmptyTensorsShowTheirShape) {
  EXPECT_EQ(shown(Tensor::empty({0}, DType::kF32)), "\n[]  f32[0]");
  EXPECT_EQ(shown(Tensor::empty({2, 0, 3}, DType::kI64)), "\n[]  i64[2, 0, 3]");
}

TEST(Print, ViewsShowTheElementsInTheirOwnOrder) {
  EXPECT_EQ(shown(counted<float>({2, 3}).view_as({3, 2}, {1, 3}, 0)), R"(
[[0., 3.],
 [1., 4.],
 [2., 5.]])");
  EXPECT_EQ(shown(counted<int64_t>({6}).view_as({2, 2}, {0, -1}, 4)), R"(
[[4, 3],
 [4, 3]])");
}

TEST(Print, TensorsWithoutReadableElementsSayWhy) {
  EXPECT_EQ(shown(Tensor()), "\nundefined");
  EXPECT_EQ(shown(Tensor::empty({2, 3}, DType::kBF16, kNull)), "\nbf16[2, 3] on null, no data");
}

TEST(Print, SparseTensorsShowTheirParts) {
  const Tensor indices = Tensor::from({int64_t{0}, int64_t{4}}, {1, 2});
  EXPECT_EQ(shown(Tensor::sparse_coo(indices, counted<float>({2, 3}), {5, 3}, true)), R"(
sparse f32[5, 3], 2 entries, coalesced
  indices  [[0, 4]]
  values   [[0., 1., 2.],
            [3., 4., 5.]])");
  EXPECT_EQ(shown(Tensor::sparse_coo(Tensor::from({int64_t{3}}, {1, 1}), counted<double>({1}), {5})), R"(
sparse f64[5], 1 entry
  indices  [[3]]
  values   [0.]  f64[1])");
}

TEST(Print, StreamsTakeTensors) {
  std::ostringstream out;
  out << counted<int64_t>({2}) << " and " << Tensor();
  EXPECT_EQ(out.str(), "[0, 1] and undefined");
}

}  // namespace
}  // namespace chorale
