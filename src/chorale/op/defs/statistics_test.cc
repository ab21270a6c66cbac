#include <cmath>
#include <limits>

#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/gradient_test_util.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

void expect_values_near(const Tensor& actual, const Shape& sizes, const std::vector<double>& expected,
                        double tolerance = 1e-12) {
  EXPECT_EQ(actual.sizes(), sizes);
  EXPECT_THAT(values(actual), testing::Pointwise(testing::DoubleNear(tolerance), expected));
}

using testing::ElementsAre;

TEST(Norm, OfEveryKind) {
  const Tensor x = Tensor::from<double>({3, -4, 0, 0, 5, -12}, {2, 3});
  expect_tensor(norm(x, 2, 1), {2}, {5, 13});
  expect_tensor(norm(x, 1, 1, true), {2, 1}, {7, 17});
  expect_tensor(norm(x, kInf, 0), {3}, {3, 5, 12});
  expect_tensor(norm(x, -kInf, 0), {3}, {0, 4, 0});
  expect_tensor(norm(x, 0), {}, {4});
  expect_values_near(norm(x, 3, 1), {2}, {std::cbrt(27 + 64), std::cbrt(125 + 1728)});
  expect_values_near(norm(x, 0.5, 0), {3}, {3, std::pow(2 + std::sqrt(5), 2), 12});
  const Tensor z = Tensor::from<complex128>({{3, 4}, {0, 1}}, {2});
  expect_values_near(norm(z), {}, {std::sqrt(26)});
  expect_values_near(norm(z, 3), {}, {std::cbrt(126)});
  EXPECT_EQ(norm(z).dtype(), DType::kF64);
  EXPECT_EQ(norm(full({4}, 2, DType::kBF16)).item<double>(), 4);
}

TEST(Norm, GradientsAtZeroAreZero) {
  for (double p : {0.5, 1.0, 1.5, 2.0, 3.0, kInf}) {
    EXPECT_THAT(slope([&](const Tensor& x) { return norm(x, p); }, vector({0, 0})), ElementsAre(0, 0)) << p;
  }
  EXPECT_THAT(slope([](const Tensor& x) { return norm(x, kInf); }, vector({0, 2, -2})), ElementsAre(0, 0.5, -0.5));
  EXPECT_THAT(slope([](const Tensor& x) { return norm(x, 1); }, vector({0, 2, -2})), ElementsAre(0, 1, -1));
  EXPECT_THAT(slope([](const Tensor& x) { return norm(x, 0.5); }, vector({0, 2, -2})),
              testing::Pointwise(testing::DoubleNear(1e-12), std::vector<double>{0, 2, -2}));
}

TEST(Var, MatchesTheDefinitionInAnyLayout) {
  const Tensor x = build({40, 50}, [](const Shape& i) { return std::sin(static_cast<double>(i[0] * 50 + i[1])); });
  for (int64_t dim : {0, 1}) {
    const int64_t n = x.size(dim);
    for (double correction : {0.0, 1.0, 2.5}) {
      const Tensor variance = build({x.size(1 - dim)}, [&](const Shape& i) {
        const auto element = [&](int64_t k) { return dim == 0 ? at(x, {k, i[0]}) : at(x, {i[0], k}); };
        double mean = 0, squares = 0;
        for (int64_t k = 0; k < n; ++k) mean += element(k) / static_cast<double>(n);
        for (int64_t k = 0; k < n; ++k) squares += std::pow(element(k) - mean, 2);
        return squares / (static_cast<double>(n) - correction);
      });
      expect_values_near(var(x, dim, false, correction), variance.sizes(), values(variance));
      const Tensor transposed = transpose(x, 0, 1);
      expect_values_near(var(transposed, 1 - dim, false, correction), variance.sizes(), values(variance));
      std::vector<double> roots = values(variance);
      for (double& root : roots) root = std::sqrt(root);
      expect_values_near(stddev(x, dim, false, correction), variance.sizes(), roots);
    }
  }
}

TEST(Var, ALargeMeanCostsNoAccuracy) {
  // 100000, 100001, 100002, 100003 again and again: variance 1.25, exact in f32.
  const Tensor row = build(
      {1 << 16}, [](const Shape& i) { return static_cast<double>(100000 + i[0] % 4); }, DType::kF32);
  EXPECT_EQ(var(row, {}, false, 0).item<double>(), 1.25);
  expect_tensor(select(var(view(row, {-1, 16}), {0}, false, 0), 0, 3), {}, {0});
  expect_values_near(var(reshape(transpose(view(row, {-1, 4}), 0, 1), {-1, 64}), 0, false, 0), {64},
                     std::vector<double>(64, 1.25), 1e-6);
}

TEST(Var, OfTooFewElementsIsNanAndItsGradientToo) {
  const Tensor one = vector({1});
  EXPECT_TRUE(std::isnan(var(one).item<double>()));
  EXPECT_TRUE(std::isnan(slope([](const Tensor& x) { return stddev(x); }, vector({1}))[0]));
  EXPECT_TRUE(std::isnan(var(vector({1, NAN, 2})).item<double>()));
}

TEST(Std, GradientAtZeroIsZero) {
  EXPECT_THAT(slope([](const Tensor& x) { return stddev(x); }, vector({1, 1})), ElementsAre(0, 0));
}

TEST(Logsumexp, DoesNotOverflowAndPropagatesTheInfinite) {
  EXPECT_NEAR(logsumexp(vector({1000, 1000})).item<double>(), 1000 + std::log(2), 1e-12);
  EXPECT_EQ(logsumexp(vector({kInf, 1})).item<double>(), kInf);
  EXPECT_EQ(logsumexp(vector({-kInf, -kInf})).item<double>(), -kInf);
  EXPECT_TRUE(std::isnan(logsumexp(vector({kInf, NAN})).item<double>()));
  EXPECT_NEAR(logsumexp(vector({-kInf, 3})).item<double>(), 3, 1e-15);
  const Tensor columns = Tensor::from<double>({kInf, -kInf, 1, NAN, 0, -kInf, 1, 0}, {2, 4});
  const auto found =
      values(logsumexp(expand(unsqueeze(columns, 2), {2, 4, 8}), 0));  // columns long enough to be direct
  EXPECT_EQ(found[0], kInf);
  EXPECT_EQ(found[8], -kInf);
  EXPECT_NEAR(found[16], 1 + std::log(2), 1e-12);
  EXPECT_TRUE(std::isnan(found[24]));
}

TEST(Logsumexp, OfLongRowsAndColumns) {
  const auto element = [](int64_t r, int64_t c) { return std::cos(static_cast<double>(r * 31 + c)) * 20; };
  const Tensor x = build({3000, 20}, [&](const Shape& i) { return element(i[0], i[1]); });
  std::vector<double> by_column, by_row;
  for (int64_t c = 0; c < 20; ++c) {
    double total = 0;
    for (int64_t r = 0; r < 3000; ++r) total += std::exp(element(r, c));
    by_column.push_back(std::log(total));
  }
  expect_values_near(logsumexp(x, 0), {20}, by_column);
  expect_values_near(logsumexp(transpose(x, 0, 1), 1), {20}, by_column);
  expect_values_near(logsumexp(clone(transpose(x, 0, 1)), 1), {20}, by_column);
}

TEST(Statistics, OfNothing) {
  const Tensor x = zeros({2, 0});
  expect_tensor(logsumexp(x, 1), {2}, {-kInf, -kInf});
  expect_tensor(norm(x, 2, 1), {2}, {0, 0});
  EXPECT_TRUE(std::isnan(var(x).item<double>()));
  EXPECT_THAT(message_of([&] { norm(x, kInf); }), testing::HasSubstr("[norm] nothing has no extreme"));
  EXPECT_THAT(message_of([&] { norm(iota<int64_t>({3})); }), testing::HasSubstr("[norm]"));
}

TEST(ComplexStatistics, FollowTheirDefinitions) {
  using Z = complex128;
  const std::vector<Z> z{Z(1, 2), Z(-0.5, 1), Z(0.25, -3)};
  const Tensor x = Tensor::from(z, {3});
  const Z average = (z[0] + z[1] + z[2]) / 3.0;
  double squares = 0;
  Z exponentials = 0;
  for (const Z& each : z) {
    squares += std::norm(each - average);
    exponentials += std::exp(each);
  }
  EXPECT_EQ(var(x).dtype(), DType::kF64);
  EXPECT_NEAR(var(x).item<double>(), squares / 2, 1e-12);
  EXPECT_NEAR(stddev(x).item<double>(), std::sqrt(squares / 2), 1e-12);
  EXPECT_NEAR(std::abs(logsumexp(x).item<Z>() - std::log(exponentials)), 0, 1e-12);
  EXPECT_EQ(logsumexp(reshape(x, {1, 3}), {1}, true).sizes(), (Shape{1, 1}));
  // Far beyond the range of exp.
  EXPECT_NEAR(std::abs(logsumexp(add(x, 1000)).item<Z>() - (std::log(exponentials) + 1000.0)), 0, 1e-9);
}

}  // namespace
}  // namespace chorale
