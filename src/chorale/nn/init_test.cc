// Initialisers and the layers' default initialisation: bounds and moments as PyTorch documents them. Seeds are fixed,
// so the numbers are too; tolerances are five standard errors.
#include "chorale/nn/init.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "chorale/nn/nn.h"

namespace chorale::nn {
namespace {

struct Moments {
  double low, high, mean, deviation, count;
};
Moments moments_of(const Tensor& x) {
  const auto values = x.to_vector<double>();
  Moments m{values[0], values[0], 0, 0, static_cast<double>(values.size())};
  for (const double v : values) {
    m.low = std::min(m.low, v);
    m.high = std::max(m.high, v);
    m.mean += v / m.count;
  }
  for (const double v : values) m.deviation += (v - m.mean) * (v - m.mean) / m.count;
  m.deviation = std::sqrt(m.deviation);
  return m;
}
void expect_moments(const Tensor& x, double mean, double deviation) {
  const Moments m = moments_of(x);
  EXPECT_NEAR(m.mean, mean, 5 * deviation / std::sqrt(m.count));
  EXPECT_NEAR(m.deviation, deviation, 5 * deviation / std::sqrt(m.count));
}
// Uniform in (-bound, bound), and reaching close to it.
void expect_uniform(const Tensor& x, double bound) {
  const Moments m = moments_of(x);
  EXPECT_GE(m.low, -bound);
  EXPECT_LE(m.high, bound);
  EXPECT_LT(m.low, -bound * (1 - 20 / m.count));
  EXPECT_GT(m.high, bound * (1 - 20 / m.count));
  expect_moments(x, 0, bound / std::sqrt(3.0));
}

TEST(Init, UniformNormalAndConstant) {
  Generator generator(1);
  const Tensor x = empty({100, 100});
  const Moments m = moments_of(init::uniform_(x, 2, 3, generator));
  EXPECT_GE(m.low, 2);
  EXPECT_LT(m.high, 3);
  expect_moments(x, 2.5, 1 / std::sqrt(12.0));
  expect_moments(init::normal_(x, -1, 0.5, generator), -1, 0.5);
  EXPECT_EQ(moments_of(init::constant_(x, 0.25)).low, 0.25);
  EXPECT_EQ(moments_of(init::ones_(x)).high, 1);
  EXPECT_EQ(moments_of(init::zeros_(x)).low, 0);
}

TEST(Init, TruncatedNormalHasTheDistributionBetweenItsBounds) {
  Generator generator(1);
  const Tensor x = empty({200, 200}, DType::kF64);
  const Moments m = moments_of(init::trunc_normal_(x, 0, 1, -2, 2, generator));
  EXPECT_GE(m.low, -2);
  EXPECT_LE(m.high, 2);
  EXPECT_LT(m.low, -1.99);
  EXPECT_GT(m.high, 1.99);
  // Variance 1 - 2 * 2 phi(2) / (Phi(2) - Phi(-2)).
  expect_moments(x, 0, std::sqrt(0.7737413035));
  // Far out in the tail the distribution falls like an exponential: mean about 6 + 1/6.
  const Moments tail = moments_of(init::trunc_normal_(x, 0, 1, 6, 9, generator));
  EXPECT_GE(tail.low, 6);
  EXPECT_NEAR(tail.mean, 6.158, 0.005);
  EXPECT_THROW(init::trunc_normal_(x, 0, 1, 2, 2), InvalidArgument);
  EXPECT_THROW(init::trunc_normal_(x, 0, 1, 50, 60), InvalidArgument);
}

TEST(Init, XavierAndKaimingScaleByTheFans) {
  Generator generator(2);
  const Tensor w = empty({80, 50, 3, 1});
  const init::Fans fans = init::fans_of(w);
  EXPECT_EQ(fans.in, 150);
  EXPECT_EQ(fans.out, 240);
  expect_uniform(init::xavier_uniform_(w, 2, generator), 2 * std::sqrt(6.0 / 390));
  expect_moments(init::xavier_normal_(w, 2, generator), 0, 2 * std::sqrt(2.0 / 390));
  expect_uniform(init::kaiming_uniform_(w, {.slope = std::sqrt(5.0)}, generator), 1 / std::sqrt(150.0));
  const init::KaimingOptions out{.mode = init::FanMode::kOut, .nonlinearity = init::Nonlinearity::kRelu};
  expect_moments(init::kaiming_normal_(w, out, generator), 0, std::sqrt(2.0 / 240));
  EXPECT_THROW(init::xavier_uniform_(empty({3})), InvalidArgument);
}

TEST(Init, OrthogonalRowsOrColumns) {
  Generator generator(3);
  for (const Shape& shape : {Shape{4, 7}, Shape{7, 4}, Shape{5, 5}, Shape{3, 2, 4}}) {
    const Tensor w = init::orthogonal_(empty(shape, DType::kF64), 3, generator);
    const Tensor m = flatten(w, 1);
    const bool wide = m.size(0) < m.size(1);
    const Tensor product = wide ? matmul(m, t(m)) : matmul(t(m), m);
    const Tensor error = abs(product - 9 * eye(product.size(0), -1, DType::kF64));
    EXPECT_LT(max(error).item<double>(), 1e-12) << shape;
  }
  EXPECT_THROW(init::orthogonal_(empty({3})), InvalidArgument);
}

TEST(Init, AsksNothingOfAutogradAndKeepsParametersLeaves) {
  Linear layer(3, 4);
  init::kaiming_normal_(layer.weight);
  EXPECT_TRUE(is_leaf(layer.weight));
  EXPECT_TRUE(requires_grad(layer.weight));
}

TEST(DefaultInit, IsAsPyTorchDocumentsIt) {
  manual_seed(5);
  const Linear linear(100, 200);
  expect_uniform(linear.weight, 0.1);
  expect_uniform(linear.bias, 0.1);
  const Bilinear bilinear(25, 20, 30);
  expect_uniform(bilinear.weight, 0.2);
  const Conv2d conv(8, 64, {.kernel = 3, .groups = 2});
  expect_uniform(conv.weight, 1 / std::sqrt(4.0 * 9));
  expect_uniform(conv.bias, 1 / std::sqrt(4.0 * 9));
  const ConvTranspose2d transposed(64, 8, {.kernel = 3, .groups = 2});
  expect_uniform(transposed.weight, 1 / std::sqrt(4.0 * 9));
  const Embedding embedding(200, 50, {.padding_idx = 3});
  expect_moments(embedding.weight, 0, 1);
  EXPECT_FALSE(any(select(embedding.weight, 0, 3)).item<bool>());
  const LSTM lstm(20, 25);
  expect_uniform(lstm.weights[0].ih, 0.2);
  expect_uniform(lstm.weights[0].bias_hh, 0.2);
  const MultiheadAttention attention(60, 3);
  expect_uniform(attention.in_proj_weight, std::sqrt(6.0 / 240));
  EXPECT_FALSE(any(attention.in_proj_bias).item<bool>());
  EXPECT_FALSE(any(attention.out_proj.bias).item<bool>());
  const BatchNorm2d norm(4);
  EXPECT_EQ(moments_of(norm.weight).low, 1);
  EXPECT_EQ(moments_of(norm.bias).high, 0);
  EXPECT_EQ(moments_of(norm.running_var).low, 1);
}

TEST(DefaultInit, RepeatsForASeed) {
  manual_seed(7);
  const Linear first(4, 4);
  manual_seed(7);
  const Linear second(4, 4), third(4, 4);
  EXPECT_EQ(first.weight.to_vector<float>(), second.weight.to_vector<float>());
  EXPECT_NE(first.weight.to_vector<float>(), third.weight.to_vector<float>());
}

}  // namespace
}  // namespace chorale::nn
