#include "chorale/op/product.h"
#include "chorale/op/shape.h"

#include <gtest/gtest.h>

#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"
#include "chorale/op/convolution.h"
#include "chorale/op/copy.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using Values = std::vector<double>;

void expect_near(const Tensor& a, const Tensor& b, double tolerance = 1e-12) {
  ASSERT_EQ(a.sizes(), b.sizes());
  const auto x = values(a), y = values(b);
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], tolerance) << "element " << i;
}

TEST(Matmul, VectorsLoseTheirDimension) {
  const Tensor a = iota<float>({2, 3}), v = iota<float>({3}, 1), w = iota<float>({2}, 1);
  EXPECT_EQ(values(matmul(a, v)), (Values{8, 26}));
  EXPECT_EQ(values(matmul(w, a)), (Values{6, 9, 12}));
  EXPECT_EQ(matmul(v, v).dims(), 0);
  EXPECT_EQ(matmul(v, v).item<float>(), 14);
  EXPECT_EQ(values(outer(w, v)), (Values{1, 2, 3, 2, 4, 6}));
}

TEST(Matmul, BatchesBroadcast) {
  const Tensor a = op::sample({2, 1, 3, 4}), b = op::sample({5, 4, 2}, 1);
  const Tensor c = matmul(a, b);
  ASSERT_EQ(c.sizes(), (Shape{2, 5, 3, 2}));
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 5; ++j)
      expect_near(select(select(c, 0, i), 0, j), mm(select(select(a, 0, i), 0, 0), select(b, 0, j)));
  }
}

TEST(Matmul, OperandsOfAnyLayoutGiveTheSame) {
  const Tensor a = op::sample({4, 3, 5}), b = op::sample({4, 5, 6}, 1);
  const Tensor expected = bmm(a, b);
  const Tensor turned_a = transpose(contiguous(transpose(a, 1, 2)), 1, 2),
               turned_b = permute(contiguous(permute(b, {2, 0, 1})), {1, 2, 0});
  ASSERT_FALSE(turned_a.is_contiguous());
  expect_near(bmm(turned_a, turned_b), expected);
  expect_near(matmul(expand(slice(a, 0, 0, 1), {4, 3, 5}), b),
              bmm(contiguous(expand(slice(a, 0, 0, 1), {4, 3, 5})), b));
}

TEST(Matmul, OneMatrixForManyIsOneProductInTheGradientToo) {
  const Tensor a = set_requires_grad(op::sample({2, 3, 4})), b = set_requires_grad(op::sample({4, 5}, 1));
  backward(sum(square(matmul(a, b))));
  const Tensor da = gradient(a), db = gradient(b);
  const Tensor flat = set_requires_grad(clone(detach(reshape(a, {6, 4})))), b2 = set_requires_grad(clone(detach(b)));
  backward(sum(square(mm(flat, b2))));
  expect_near(reshape(da, {6, 4}), gradient(flat));
  expect_near(db, gradient(b2));
}

TEST(Matmul, ZeroSizes) {
  EXPECT_EQ(matmul(op::sample({0, 3}), op::sample({3, 2})).sizes(), (Shape{0, 2}));
  EXPECT_EQ(values(matmul(op::sample({2, 0}), op::sample({0, 2}))), (Values{0, 0, 0, 0}));
  EXPECT_EQ(values(linear(op::sample({1, 0}), op::sample({2, 0}), Tensor::from({3.0, 4.0}, {2}))), (Values{3, 4}));
  EXPECT_EQ(matmul(op::sample({0, 2, 3}), op::sample({3, 4})).sizes(), (Shape{0, 2, 4}));
}

TEST(Matmul, BadOperandsAreNamed) {
  EXPECT_EQ(message_of([] {
              mm(iota({2, 3}), iota({2, 3}));
            }),
            "[matmul] inner dimensions differ: [2, 3] x [2, 3]; transpose one side?");
  EXPECT_NE(message_of([] { mm(iota({2, 3}), iota<double>({3, 2})); }).find("f32 and f64"), std::string::npos);
  EXPECT_NE(message_of([] { matmul(iota({2, 2, 3}), iota({3, 3, 2})); }).find("do not broadcast"), std::string::npos);
  EXPECT_NE(message_of([] { matmul(iota({}), iota({2})); }).find("scalar"), std::string::npos);
  EXPECT_NE(message_of([] { linear(iota({2, 3}), iota({4, 5})); }).find("3 features"), std::string::npos);
  EXPECT_NE(message_of([] { linear(iota({2, 3}), iota({4, 3}), iota({5})); }).find("bias [5]"), std::string::npos);
  EXPECT_NE(message_of([] { dot(iota({2}), iota({3})); }).find("[2] and [3]"), std::string::npos);
}

TEST(Addmm, DoesNotReadCWhenBetaIsZero) {
  const Tensor c = Tensor::from({std::nan(""), std::nan("")}, {2});
  EXPECT_EQ(values(addmm(c, iota<double>({1, 2}), iota<double>({2, 2}), 0, 2)), (Values{4, 6}));
}

TEST(Linear, WritesItsWeightGradientIntoABucket) {
  const Tensor x = op::sample({3, 4}), w = set_requires_grad(op::sample({2, 4}, 1));
  const Tensor bucket = Tensor::from(Values(8, -1), {2, 4});
  set_gradient_destination(w, bucket);
  backward(sum(linear(x, w)));
  EXPECT_TRUE(gradient(w).is(bucket));
  EXPECT_EQ(bucket.storage()->version(), 1u);  // one write: the product itself
  expect_near(select(bucket, 0, 1), sum(x, {0}));
}

TEST(Einsum, EqualsWhatItSays) {
  const Tensor a = op::sample({3, 4}), b = op::sample({4, 5}, 1), c = op::sample({2, 3, 4}, 2);
  expect_near(einsum("ij,jk->ik", {a, b}), mm(a, b));
  expect_near(einsum("ij,jk", {a, b}), mm(a, b));
  expect_near(einsum("ij->ji", {a}), t(a));
  expect_near(einsum("ij->", {a}), sum(a));
  expect_near(einsum("bij,jk->bik", {c, b}), matmul(c, b));
  expect_near(einsum("...ij,...jk->...ik", {c, b}), matmul(c, b));
  expect_near(einsum("i,j->ij", {select(a, 0, 0), select(b, 1, 0)}), outer(select(a, 0, 0), select(b, 1, 0)));
  expect_near(einsum("ij,ij->i", {a, a}), sum(mul(a, a), {1}));
  const Tensor s = op::sample({3, 3}, 4);
  expect_near(einsum("ii->", {s}), sum(diagonal(s)));
  expect_near(einsum("ii->i", {s}), diagonal(s));
  expect_near(einsum("ij,jk,kl->il", {a, b, op::sample({5, 2}, 5)}), mm(mm(a, b), op::sample({5, 2}, 5)));
}

TEST(Einsum, BadEquationsAreNamed) {
  const Tensor a = op::sample({3, 4});
  EXPECT_THROW(einsum("ij,jk->ik", {a}), InvalidArgument);
  EXPECT_THROW(einsum("ijk->i", {a}), InvalidArgument);
  EXPECT_THROW(einsum("ij,ij->ij", {a, op::sample({3, 5})}), InvalidArgument);
  EXPECT_THROW(einsum("ij->ik", {a}), InvalidArgument);
  EXPECT_THROW(einsum("i1->i", {a}), InvalidArgument);
}

TEST(Conv, HandComputedOneDimension) {
  const Tensor x = Tensor::from({1.0, 2.0, 3.0, 4.0}, {1, 1, 4}), w = Tensor::from({1.0, 10.0}, {1, 1, 2});
  EXPECT_EQ(values(conv1d(x, w)), (Values{21, 32, 43}));
  EXPECT_EQ(values(conv1d(x, w, Tensor::from({0.5}, {1}), 2, 1)), (Values{10.5, 32.5, 4.5}));
  EXPECT_EQ(values(conv1d(x, w, {}, 1, 0, 2)), (Values{31, 42}));
  EXPECT_EQ(values(conv_transpose1d(x, w, {}, 2)), (Values{1, 10, 2, 20, 3, 30, 4, 40}));
  EXPECT_EQ(conv1d(squeeze(x, {0}), w).sizes(), (Shape{1, 3}));
  EXPECT_EQ(conv_transpose1d(x, w, {}, 2, 0, 1).sizes(), (Shape{1, 1, 9}));
}

TEST(Conv, ChannelsLastStaysChannelsLastAndGivesTheSame) {
  const Tensor x = op::sample({2, 3, 6, 5}), w = op::sample({4, 3, 3, 3}, 1), bias = op::sample({4}, 2);
  const Tensor last = permute(contiguous(permute(x, {0, 2, 3, 1})), {0, 3, 1, 2});
  const Tensor y = conv2d(last, w, bias, 1, 1);
  EXPECT_TRUE(y.is_channels_last());
  expect_near(y, conv2d(x, w, bias, 1, 1));
}

TEST(Conv, TransposesTakeAnOutputPaddingBelowTheDilation) {
  const Tensor x = iota({1, 2, 3, 4}), w = iota({2, 3, 2, 2}), bias = iota({3});
  const Tensor reached = conv_transpose2d(x, w, bias, 1, 0, 0, 1, 3);
  const Tensor y = conv_transpose2d(x, w, bias, 1, 0, {2, 1}, 1, 3);
  ASSERT_EQ(y.sizes(), (Shape{1, 3, reached.size(2) + 2, reached.size(3) + 1}));
  expect_near(narrow(narrow(y, 2, 0, reached.size(2)), 3, 0, reached.size(3)), reached);
  // No window reaches the rest: it is the bias.
  const Tensor below = narrow(y, 2, reached.size(2), 2), beside = narrow(y, 3, reached.size(3), 1);
  expect_near(below, expand(view(bias, {1, 3, 1, 1}), below.sizes()));
  expect_near(beside, expand(view(bias, {1, 3, 1, 1}), beside.sizes()));
}

// They take a padding, too: a transposed convolution without paddings is the whole, from which both are cut and to
// which they are added.
TEST(Conv, TransposesTakeAnOutputPaddingBelowTheDilationBesideAPadding) {
  const Tensor x = iota({1, 2, 3, 4}), w = iota({2, 3, 2, 2});
  const Tensor whole = conv_transpose2d(x, w, {}, 1, 0, 0, 1, 3);  // 6 x 7
  for (const int64_t padding : {1, 2}) {
    for (const int64_t extra : {1, 2}) {
      const Tensor y = conv_transpose2d(x, w, {}, 1, padding, extra, 1, 3);
      const int64_t high = 6 - 2 * padding + extra, wide = 7 - 2 * padding + extra;
      ASSERT_EQ(y.sizes(), (Shape{1, 3, high, wide}));
      const Tensor larger = pad(whole, {0, 2, 0, 2});
      expect_near(y, narrow(narrow(larger, 2, padding, high), 3, padding, wide));
    }
  }
}

TEST(Conv, BadShapesAreNamed) {
  const Tensor x = iota({1, 3, 4, 4});
  EXPECT_NE(message_of([&] { conv2d(x, iota({2, 2, 3, 3})); }).find("3 channels"), std::string::npos);
  EXPECT_NE(message_of([&] { conv2d(x, iota({2, 3, 5, 5})); }).find("covers 5 elements"), std::string::npos);
  EXPECT_NE(message_of([&] { conv2d(x, iota({2, 3, 3, 3}), {}, 0); }).find("stride 0"), std::string::npos);
  EXPECT_NE(message_of([&] {
              conv2d(x, iota({2, 3, 3, 3}), {}, {1, 1, 1});
            }).find("1 or 2 entries"),
            std::string::npos);
  EXPECT_NE(message_of([&] { conv2d(x, iota({2, 3, 3, 3}), iota({3})); }).find("bias"), std::string::npos);
  EXPECT_NE(message_of([&] { conv2d(iota({4, 4}), iota({2, 3, 3, 3})); }).find("4 dimensions"), std::string::npos);
  EXPECT_NE(message_of([&] {
              conv_transpose2d(x, iota({3, 2, 3, 3}), {}, 1, 0, 1);
            }).find("output_padding"),
            std::string::npos);
}

TEST(ComplexProducts, LinearTakesABiasAndAddmmWorks) {
  using Z = complex128;
  const Tensor x = Tensor::from({Z(1, 2), Z(0, -1)}, {1, 2});
  const Tensor weight = Tensor::from({Z(1, 0), Z(0, 1), Z(2, 0), Z(0, 0)}, {2, 2});
  const Tensor bias = Tensor::from({Z(10, 0), Z(0, 20)}, {2});
  // (1 + 2i) 1 + (-i) i = 2 + 2i; (1 + 2i) 2 = 2 + 4i
  const std::vector<Z> expected{Z(12, 2), Z(2, 24)};
  EXPECT_EQ(linear(x, weight, bias).to_vector<Z>(), expected);
  EXPECT_EQ(addmm(unsqueeze(bias, 0), x, transpose(weight, 0, 1)).to_vector<Z>(), expected);
  EXPECT_EQ(addmm(unsqueeze(bias, 0), x, transpose(weight, 0, 1), 0, Z(0, 1)).to_vector<Z>(),
            (std::vector<Z>{Z(-2, 2), Z(-4, 2)}));
}

}  // namespace
}  // namespace chorale
