#include "chorale/models/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "chorale/api/api.h"

namespace chorale::models {
namespace {

using ::testing::ElementsAre;

// Probabilities 0.4, 0.1, 0.3, 0.2.
Tensor logits() { return log(Tensor::from({0.4, 0.1, 0.3, 0.2}, {1, 4})); }

std::vector<double> kept(const SamplingOptions& options) {
  return isfinite(restrict_logits(logits(), options)).to_vector<double>();
}

TEST(Sampling, TopKKeepsTheLikeliest) {
  EXPECT_THAT(kept({.temperature = 1, .top_k = 1}), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(kept({.temperature = 1, .top_k = 3}), ElementsAre(1, 0, 1, 1));
  EXPECT_THAT(kept({.temperature = 1, .top_k = 9}), ElementsAre(1, 1, 1, 1));
}

TEST(Sampling, TopPKeepsTheFewestThatReachTheProbability) {
  EXPECT_THAT(kept({.temperature = 1, .top_p = 0.01}), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(kept({.temperature = 1, .top_p = 0.5}), ElementsAre(1, 0, 1, 0));
  EXPECT_THAT(kept({.temperature = 1, .top_p = 0.85}), ElementsAre(1, 0, 1, 1));
  EXPECT_THAT(kept({.temperature = 1, .top_p = 1}), ElementsAre(1, 1, 1, 1));
  // Among those that top_k leaves (4/7, 3/7), one is enough for a half.
  EXPECT_THAT(kept({.temperature = 1, .top_k = 2, .top_p = 0.5}), ElementsAre(1, 0, 0, 0));
}

TEST(Sampling, TemperatureSharpensAndFlattens) {
  const Tensor p = softmax(restrict_logits(logits(), {.temperature = 0.5}), -1);
  // p^2, made to add up to 1.
  const std::vector<double> expected = {0.16 / 0.3, 0.01 / 0.3, 0.09 / 0.3, 0.04 / 0.3};
  EXPECT_THAT(p.to_vector<double>(), ::testing::Pointwise(::testing::DoubleNear(1e-12), expected));
}

TEST(Sampling, DrawsWithTheProbabilitiesThatAreLeftAndRepeatsForASeed) {
  Generator generator(1);
  const Tensor rows = repeat(logits(), {5000, 1});
  const SamplingOptions options{.temperature = 1, .top_k = 2, .generator = &generator};
  const auto tokens = sample_token(rows, options).to_vector<int64_t>();
  const auto first = std::count(tokens.begin(), tokens.end(), 0), third = std::count(tokens.begin(), tokens.end(), 2);
  EXPECT_EQ(first + third, 5000);
  EXPECT_NEAR(static_cast<double>(first), 5000 * 4 / 7.0, 5 * std::sqrt(5000 * 12 / 49.0));
  generator.reseed(1);
  EXPECT_EQ(sample_token(rows, options).to_vector<int64_t>(), tokens);
  EXPECT_THAT(sample_token(logits(), {}).to_vector<int64_t>(), ElementsAre(0));
}

TEST(Sampling, BadInput) {
  EXPECT_THROW(restrict_logits(logits(), {.temperature = -1}), InvalidArgument);
  EXPECT_THROW(restrict_logits(logits(), {.temperature = 1, .top_k = -1}), InvalidArgument);
  EXPECT_THROW(restrict_logits(logits(), {.temperature = 1, .top_p = 0}), InvalidArgument);
  EXPECT_THROW(sample_token(ones({3}), {}), InvalidArgument);
}

}  // namespace
}  // namespace chorale::models
