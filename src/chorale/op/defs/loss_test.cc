#include <limits>

#include "chorale/op/defs/nn_test_util.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"

namespace chorale {
namespace {

using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

Tensor classes(std::initializer_list<int64_t> values) {
  return Tensor::from<int64_t>(values, {static_cast<int64_t>(values.size())});
}

// What cross_entropy means, class by class, for [N, C] logits.
std::vector<double> naive_cross_entropy(const Tensor& x, const Tensor& target, const Tensor& weight, int64_t ignore,
                                        double smoothing) {
  std::vector<double> losses;
  const int64_t C = x.size(1);
  for (int64_t n = 0; n < x.size(0); ++n) {
    const auto t = static_cast<int64_t>(at(target, {n}));
    double total = 0, loss = 0;
    for (int64_t c = 0; c < C; ++c) total += std::exp(at(x, {n, c}));
    for (int64_t c = 0; c < C; ++c) {
      const double wanted = (c == t ? 1 - smoothing : 0) + smoothing / static_cast<double>(C);
      loss -= wanted * (weight.defined() ? at(weight, {c}) : 1) * std::log(std::exp(at(x, {n, c})) / total);
    }
    losses.push_back(t == ignore ? 0 : loss);
  }
  return losses;
}

TEST(CrossEntropy, IsMinusTheLogarithmOfTheTargetsShare) {
  const Tensor x = Tensor::from<double>({0, std::log(3), std::log(3), 0}, {2, 2});
  expect_values(cross_entropy(x, classes({0, 0}), {}, Reduction::kNone), {std::log(4), std::log(4.0 / 3)});
  expect_values(cross_entropy(x, classes({0, 0})), {(std::log(4) + std::log(4.0 / 3)) / 2});
  expect_values(cross_entropy(x, classes({0, 0}), {}, Reduction::kSum), {std::log(4) + std::log(4.0 / 3)});
}

TEST(CrossEntropy, AgreesWithItsDefinition) {
  const Tensor x = op::sample({7, 19}, 1), weight = op::sample({19}, 2, 0.5, 2),
               target = classes({0, 18, 5, 5, 7, -1, 3});
  for (double smoothing : {0.0, 0.3}) {
    for (const Tensor& w : {Tensor(), weight}) {
      const auto expected = naive_cross_entropy(x, target, w, -1, smoothing);
      expect_values(cross_entropy(x, target, w, Reduction::kNone, -1, smoothing), expected);
      expect_near(cross_entropy(as(x, DType::kF32), target, w, Reduction::kNone, -1, smoothing),
                  Tensor::from(expected, {7}), 1e-5);
      double sum = 0, count = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        sum += expected[i];
        const auto t = target.span<int64_t>()[i];
        if (t >= 0) count += w.defined() ? at(w, {t}) : 1;
      }
      expect_values(cross_entropy(x, target, w, Reduction::kMean, -1, smoothing), {sum / count});
    }
  }
}

TEST(CrossEntropy, TakesClassesInTheSecondDimension) {
  const Tensor x = op::sample({2, 3, 4, 5}, 1), target = op::sample_ints({2, 4, 5}, 0, 3, 2);
  const Tensor flat = reshape(permute(x, {0, 2, 3, 1}), {40, 3});
  expect_near(reshape(cross_entropy(x, target, {}, Reduction::kNone), {40}),
              cross_entropy(flat, reshape(target, {40}), {}, Reduction::kNone), 1e-14);
  expect_values(cross_entropy(Tensor::from<double>({0, std::log(3)}, {2}), Tensor::from<int64_t>({0}, {})),
                {std::log(4)});
}

TEST(CrossEntropy, TakesProbabilities) {
  const Tensor x = op::sample({4, 3}, 1), weight = op::sample({3}, 2, 0.5, 2);
  const Tensor one_hot = Tensor::from<double>({1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0}, {4, 3});
  for (Reduction reduction : {Reduction::kNone, Reduction::kSum}) {
    expect_near(cross_entropy(x, one_hot, weight, reduction, -100, 0.2),
                cross_entropy(x, classes({0, 2, 1, 1}), weight, reduction, -100, 0.2), 1e-12);
  }
  // The mean of soft targets divides by the number of samples, whatever the weights.
  expect_near(cross_entropy(x, one_hot, weight), cross_entropy(x, one_hot, weight, Reduction::kSum) / 4, 1e-12);
}

TEST(CrossEntropy, OfNothingButIgnoredTargetsIsNan) {
  EXPECT_TRUE(std::isnan(cross_entropy(op::sample({2, 3}), classes({-100, -100})).item<double>()));
  expect_values(cross_entropy(op::sample({2, 3}), classes({-100, -100}), {}, Reduction::kSum), {0});
}

TEST(CrossEntropy, DoesNotOverflow) {
  expect_values(cross_entropy(Tensor::from<float>({1000, -1000}, {1, 2}), classes({1})), {2000});
  EXPECT_EQ(cross_entropy(Tensor::from<double>({0, -kInf}, {1, 2}), classes({1})).item<double>(), kInf);
}

TEST(CrossEntropy, NamesABadTargetAndItsBound) {
  const Tensor x = op::sample({3, 4});
  EXPECT_THAT(message_of([&] {
                cross_entropy(x, classes({0, 4, 1}));
              }),
              HasSubstr("target 4 at place 1 of 3 is not one of the 4 classes"));
  EXPECT_THAT(message_of([&] { nll_loss(x, classes({0, 1, -2})); }), HasSubstr("target -2 at place 2"));
  EXPECT_THAT(message_of([&] { cross_entropy(x, classes({0, 1})); }), HasSubstr("integers of shape [3], not i64 [2]"));
  EXPECT_THAT(message_of([&] { cross_entropy(x, op::sample({3})); }),
              HasSubstr("must have the shape of x, [3, 4], not [3]"));
  EXPECT_THAT(message_of([&] { cross_entropy(x, classes({0, 1, 2}), op::sample({3})); }), HasSubstr("weight"));
  EXPECT_THAT(message_of([&] {
                cross_entropy(x, classes({0, 1, 2}), {}, Reduction::kMean, -100, 1.5);
              }),
              HasSubstr("1.5"));
}

TEST(NllLoss, PicksAndWeighsTheTargets) {
  const Tensor x = Tensor::from<double>({-1, -2, -3, -4, -5, -6}, {3, 2}), weight = Tensor::from<double>({1, 3}, {2});
  expect_values(nll_loss(x, classes({0, 1, 1}), weight, Reduction::kNone), {1, 12, 18});
  expect_values(nll_loss(x, classes({0, 1, 1}), weight), {31.0 / 7});
  expect_values(nll_loss(x, classes({0, 1, 1}), {}, Reduction::kMean, 1), {1});
  expect_values(nll_loss(reshape(x, {1, 3, 2}), Tensor::from<int64_t>({2, 0}, {1, 2}), {}, Reduction::kNone), {5, 2});
}

TEST(DifferenceLosses, HaveTheirTextbookValues) {
  const Tensor x = Tensor::from<double>({0, 0, 0, 0}, {4}), y = Tensor::from<double>({1, -2, 0.5, 0}, {4});
  expect_values(mse_loss(x, y, Reduction::kNone), {1, 4, 0.25, 0});
  expect_values(mse_loss(x, y), {5.25 / 4});
  expect_values(l1_loss(x, y, Reduction::kSum), {3.5});
  expect_values(smooth_l1_loss(x, y, Reduction::kNone), {0.5, 1.5, 0.125, 0});
  expect_values(smooth_l1_loss(x, y, Reduction::kNone, 2), {0.25, 1, 0.0625, 0});
  expect_values(smooth_l1_loss(x, y, Reduction::kNone, 0), {1, 2, 0.5, 0});
  expect_values(huber_loss(x, y, Reduction::kNone, 0.5), {0.375, 0.875, 0.125, 0});
}

TEST(DifferenceLosses, SumLongInputsAccuratelyAndBroadcast) {
  const Tensor x = op::sample({3, 5000}, 1), y = op::sample({3, 5000}, 2);
  expect_near(mse_loss(as(x, DType::kF32), as(y, DType::kF32)), mean(square(x - y)), 1e-6);
  expect_near(l1_loss(x, op::sample({5000}, 3)), mean(abs(x - op::sample({5000}, 3))), 1e-12);
  expect_near(mse_loss(as(x, DType::kBF16), y), mean(square(as(x, DType::kBF16) - y)), 1e-12);
}

TEST(DifferenceLosses, RefuseBadBounds) {
  const Tensor x = op::sample({2});
  EXPECT_THAT(message_of([&] { huber_loss(x, x, Reduction::kMean, 0); }), HasSubstr("delta must be positive"));
  EXPECT_THAT(message_of([&] { smooth_l1_loss(x, x, Reduction::kMean, -1); }), HasSubstr("beta"));
  EXPECT_THAT(message_of([&] { mse_loss(x, op::sample({3})); }), HasSubstr("[2]"));
}

TEST(BinaryCrossEntropy, CutsLogarithmsAtMinusHundred) {
  const Tensor x = Tensor::from<double>({0.5, 1, 0, 0.25}, {4}), y = Tensor::from<double>({1, 0, 1, 0.5}, {4});
  expect_values(binary_cross_entropy(x, y, {}, Reduction::kNone),
                {std::log(2), 100, 100, -0.5 * (std::log(0.25) + std::log(0.75))});
  expect_near(binary_cross_entropy(as(x, DType::kF32), as(y, DType::kF32)), binary_cross_entropy(x, y), 1e-6);
  EXPECT_THAT(message_of([&] { binary_cross_entropy(x + 0.5, y); }), HasSubstr("between 0 and 1, not be 1.5"));
}

TEST(BinaryCrossEntropy, OfLogitsIsStable) {
  const Tensor x = Tensor::from<double>({0, 1000, -1000, 2}, {4}), y = Tensor::from<double>({1, 0, 1, 0.5}, {4});
  const double expected = 0.5 * std::log1p(std::exp(-2)) + 0.5 * std::log1p(std::exp(2));
  expect_values(binary_cross_entropy_with_logits(x, y, {}, Reduction::kNone), {std::log(2), 1000, 1000, expected});
  const Tensor weight = Tensor::from<double>({1, 2, 3, 4}, {4}), pos_weight = Tensor::from<double>({5}, {1});
  expect_values(
      binary_cross_entropy_with_logits(x, y, weight, Reduction::kNone, pos_weight),
      {5 * std::log(2), 2000, 15000, 4 * (0.5 * 5 * std::log1p(std::exp(-2)) + 0.5 * std::log1p(std::exp(2)))});
}

TEST(KlDiv, OfAZeroTargetIsZero) {
  const Tensor x = Tensor::from<double>({-1, -2, -3, -4}, {2, 2}),
               target = Tensor::from<double>({0.5, 0, 0.25, 1}, {2, 2});
  const std::vector<double> expected{0.5 * (std::log(0.5) + 1), 0, 0.25 * (std::log(0.25) + 3), 4};
  expect_values(kl_div(x, target, KlReduction::kNone), expected);
  expect_values(kl_div(x, target, KlReduction::kBatchMean), {(expected[0] + expected[2] + 4) / 2});
  expect_values(kl_div(x, target), {(expected[0] + expected[2] + 4) / 4});
  expect_values(kl_div(x, log(target + 1), KlReduction::kSum, true),
                {values(sum((target + 1) * (log(target + 1) - x)))[0]});
}

TEST(CosineSimilarity, IsTheCosineOfTheAngle) {
  const Tensor x = Tensor::from<double>({3, 4, 0, 0, 1, 0}, {3, 2}),
               y = Tensor::from<double>({4, 3, 1, 1, -2, 0}, {3, 2});
  expect_values(cosine_similarity(x, y), {24.0 / 25, 0, -1});
  expect_values(cosine_similarity(x, Tensor::from<double>({1, 0}, {2}), -1), {0.6, 0, 1});
}

}  // namespace
}  // namespace chorale
