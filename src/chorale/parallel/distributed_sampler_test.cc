#include "chorale/parallel/distributed_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/data/loader.h"

namespace chorale::parallel {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

// The samples of all ranks, in the order in which they were dealt.
std::vector<int64_t> dealt(int64_t size, int replicas, const DistributedSamplerOptions& options, int64_t epoch) {
  std::vector<std::vector<int64_t>> hands;
  hands.reserve(static_cast<size_t>(replicas));
  for (int rank = 0; rank < replicas; ++rank)
    hands.push_back(DistributedSampler(size, rank, replicas, options).indices(epoch));
  std::vector<int64_t> all;
  for (size_t i = 0; i < hands[0].size(); ++i) {
    for (const auto& hand : hands) all.push_back(hand.at(i));
  }
  return all;
}
std::vector<int64_t> sorted(std::vector<int64_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}
std::vector<int64_t> counting(int64_t size) {
  std::vector<int64_t> values(static_cast<size_t>(size));
  std::iota(values.begin(), values.end(), int64_t{0});
  return values;
}

// spec: test_DistributedSampler_padding
TEST(DistributedSampler, GivesAllRanksEquallyMany) {
  for (const int ranks : {2, 3, 4}) {
    comm::run_ranks(ranks, [](comm::Group& group) {
      const int64_t n = group.size(), size = 101 + n, tiny = std::max<int64_t>(n / 2 - 1, 1);
      const auto check = [&](const DistributedSampler& sampler, int64_t expected) {
        EXPECT_EQ(sampler.size(), expected);
        EXPECT_EQ(sampler.total_size(), expected * n);
        EXPECT_EQ(static_cast<int64_t>(sampler.indices(0).size()), expected);
        std::vector<int64_t> counts(static_cast<size_t>(n));
        const int64_t own = sampler.size();
        group.all_gather_into(std::span(counts), std::span(&own, 1)).wait();
        EXPECT_THAT(counts, Each(expected));
      };
      check(DistributedSampler(size, group, {.drop_last = true}), size / n);
      check(DistributedSampler(size, group), (size + n - 1) / n);
      check(DistributedSampler(tiny, group), 1);
    });
  }
}

TEST(DistributedSampler, DealsInTurnAndFillsUpFromTheStart) {
  EXPECT_THAT(DistributedSampler(10, 1, 4, {.shuffle = false}).indices(0), ElementsAre(1, 5, 9));
  EXPECT_THAT(DistributedSampler(10, 3, 4, {.shuffle = false}).indices(0), ElementsAre(3, 7, 1));
  EXPECT_THAT(DistributedSampler(10, 3, 4, {.shuffle = false, .drop_last = true}).indices(0), ElementsAre(3, 7));
  // A divisible number loses nothing.
  EXPECT_THAT(DistributedSampler(8, 3, 4, {.shuffle = false, .drop_last = true}).indices(0), ElementsAre(3, 7));
  // Several rounds for fewer samples than ranks.
  EXPECT_THAT(dealt(3, 8, {.shuffle = false}, 0), ElementsAre(0, 1, 2, 0, 1, 2, 0, 1));
  EXPECT_EQ(DistributedSampler(0, 0, 2).size(), 0);
  EXPECT_EQ(DistributedSampler(1, 0, 2, {.drop_last = true}).size(), 0);
}

TEST(DistributedSampler, OrderDependsOnSeedAndEpochOnly) {
  const std::vector<int64_t> order = dealt(12, 3, {}, 0);
  EXPECT_EQ(sorted(order), counting(12));
  EXPECT_NE(order, counting(12));
  EXPECT_EQ(dealt(12, 3, {}, 0), order);
  EXPECT_EQ(dealt(12, 4, {}, 0), order);  // the world's size deals the same order otherwise
  EXPECT_NE(dealt(12, 3, {}, 1), order);
  EXPECT_NE(dealt(12, 3, {.seed = 1}, 0), order);
  EXPECT_EQ(sorted(dealt(12, 3, {}, 1)), counting(12));
}

TEST(DistributedSampler, RefusesARankOutside) {
  EXPECT_THROW(DistributedSampler(5, 2, 2), InvalidArgument);
  EXPECT_THROW(DistributedSampler(5, -1, 2), InvalidArgument);
  EXPECT_THROW(DistributedSampler(5, 0, 0), InvalidArgument);
}

struct Numbers {
  int64_t size() const { return 23; }
  Tensor get(int64_t index) const { return Tensor::scalar(index, DType::kI64); }
};

TEST(DistributedSampler, ALoaderOverItResumesInTheMiddleOfAnEpoch) {
  for (int rank = 0; rank < 2; ++rank) {
    const auto make = [&] {
      return data::DataLoader(Numbers(), std::make_shared<const DistributedSampler>(23, rank, 2),
                              {.batch_size = 3, .workers = 0});
    };
    auto loader = make(), later = make();
    std::vector<int64_t> seen, resumed;
    loader.set_epoch(4);
    for (int i = 0; i < 2; ++i) loader.next();
    later.load_state(loader.state());
    for (const Tensor& batch : loader) {
      for (const int64_t value : batch.to_vector<int64_t>()) seen.push_back(value);
    }
    for (const Tensor& batch : later) {
      for (const int64_t value : batch.to_vector<int64_t>()) resumed.push_back(value);
    }
    const std::vector<int64_t> all = DistributedSampler(23, rank, 2).indices(4);
    EXPECT_EQ(seen, std::vector<int64_t>(all.begin() + 6, all.end()));
    EXPECT_EQ(resumed, seen);
    EXPECT_EQ(later.state().epoch, 5);
  }
}

}  // namespace
}  // namespace chorale::parallel
