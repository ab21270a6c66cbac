#include "chorale/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "chorale/base/error.h"

namespace chorale::data {
namespace {

using Indices = std::vector<int64_t>;

TEST(SequentialSampler, Counts) { EXPECT_EQ(SequentialSampler(4).indices(7), (Indices{0, 1, 2, 3})); }

TEST(RandomSampler, IsAPermutationThatSeedAndEpochDecide) {
  const RandomSampler sampler(1000, 5);
  const Indices first = sampler.indices(0);
  Indices sorted = first;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, SequentialSampler(1000).indices(0));
  EXPECT_NE(first, sorted);
  EXPECT_EQ(sampler.indices(0), first);
  EXPECT_EQ(RandomSampler(1000, 5).indices(0), first);
  EXPECT_NE(sampler.indices(1), first);
  EXPECT_NE(RandomSampler(1000, 6).indices(0), first);
  EXPECT_EQ(RandomSampler(0, 5).indices(0), Indices{});
  EXPECT_EQ(RandomSampler(1, 5).indices(0), Indices{0});
}

TEST(RandomSampler, GivesEveryPermutationTheSameChance) {
  std::map<Indices, int> counts;
  const RandomSampler sampler(4, 1);
  constexpr int kEpochs = 24000;
  for (int epoch = 0; epoch < kEpochs; ++epoch) ++counts[sampler.indices(epoch)];
  ASSERT_EQ(counts.size(), 24u);
  double chi2 = 0;
  for (const auto& [order, count] : counts) chi2 += (count - 1000.0) * (count - 1000.0) / 1000;
  EXPECT_LT(chi2, 49.7);  // 23 degrees of freedom: one seed in a thousand is above
}

TEST(WeightedSampler, DrawsInProportion) {
  const std::vector<double> weights = {1, 0, 3, 4};
  const WeightedSampler sampler(weights, 80000, 3);
  EXPECT_EQ(sampler.size(), 80000);
  std::vector<int> counts(4);
  for (const int64_t index : sampler.indices(0)) ++counts[static_cast<size_t>(index)];
  EXPECT_EQ(counts[1], 0);
  for (const size_t i : {0, 2, 3}) EXPECT_NEAR(counts[i], 10000 * weights[i], 5 * std::sqrt(10000 * weights[i]));
  EXPECT_EQ(sampler.indices(0), sampler.indices(0));
  EXPECT_NE(sampler.indices(0), sampler.indices(1));
}

TEST(WeightedSampler, WithoutReplacementDrawsTheFirstInProportionAndNothingTwice) {
  const WeightedSampler sampler({1, 0, 3, 4}, 3, 3, false);
  std::vector<int> first(4);
  for (int epoch = 0; epoch < 8000; ++epoch) {
    const Indices indices = sampler.indices(epoch);
    ++first[static_cast<size_t>(indices[0])];
    ASSERT_EQ(std::set<int64_t>(indices.begin(), indices.end()), (std::set<int64_t>{0, 2, 3}));
  }
  EXPECT_NEAR(first[0], 1000, 5 * 30);
  EXPECT_NEAR(first[2], 3000, 5 * 45);
}

TEST(WeightedSampler, RefusesWeightsThatCannotBeDrawnFrom) {
  EXPECT_THROW(WeightedSampler({1, -1}, 1, 0), InvalidArgument);
  EXPECT_THROW(WeightedSampler({1, std::nan("")}, 1, 0), InvalidArgument);
  EXPECT_THROW(WeightedSampler({0, 0}, 1, 0), InvalidArgument);
  EXPECT_THROW(WeightedSampler({1, 0}, 2, 0, false), InvalidArgument);
  EXPECT_THROW(WeightedSampler({}, 1, 0), InvalidArgument);
}

TEST(FixedBatches, GroupsAndKeepsOrDropsTheRest) {
  const auto five = std::make_shared<SequentialSampler>(5);
  EXPECT_EQ(FixedBatches(five, 2).batches(0), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(FixedBatches(five, 2).size(), 3);
  EXPECT_EQ(FixedBatches(five, 2, true).batches(0), (Batches{{0, 1}, {2, 3}}));
  EXPECT_EQ(FixedBatches(five, 2, true).size(), 2);
  EXPECT_EQ(FixedBatches(five, 5, true).batches(0), (Batches{{0, 1, 2, 3, 4}}));
  EXPECT_EQ(FixedBatches(five, 9).batches(0), (Batches{{0, 1, 2, 3, 4}}));
  EXPECT_EQ(FixedBatches(std::make_shared<SequentialSampler>(0), 2).size(), 0);
  EXPECT_THROW(FixedBatches(five, 0), InvalidArgument);
}

TEST(SampleGenerator, DependsOnSeedEpochAndIndex) {
  const auto word = [](uint64_t seed, int64_t epoch, int64_t index) {
    return base::random_word(sample_generator(seed, epoch, index).state(), 0);
  };
  EXPECT_EQ(word(1, 2, 3), word(1, 2, 3));
  EXPECT_EQ((std::set{word(1, 2, 3), word(2, 2, 3), word(1, 3, 3), word(1, 2, 4), word(1, 3, 2)}).size(), 5u);
}

}  // namespace
}  // namespace chorale::data
