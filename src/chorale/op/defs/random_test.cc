#include "chorale/op/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/random_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/nn.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

double mean_of(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v;
  return sum / static_cast<double>(x.size());
}
double deviation_of(const std::vector<double>& x) {
  const double mean = mean_of(x);
  double sum = 0;
  for (double v : x) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / static_cast<double>(x.size()));
}

TEST(Random, EqualSeedsGiveEqualNumbersWhateverTheThreads) {
  const int before = thread_count();
  std::vector<std::vector<double>> runs;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    Generator generator(42);
    runs.push_back(values(normal({50'001}, 0, 1, DType::kF32, generator)));
    const auto more = values(uniform({777}, 0, 1, DType::kF64, generator));
    runs.back().insert(runs.back().end(), more.begin(), more.end());
  }
  set_thread_count(before);
  EXPECT_EQ(runs[0], runs[1]);
  EXPECT_EQ(runs[0], runs[2]);
}

TEST(Random, AStreamCanBeSavedAndForked) {
  Generator generator(1);
  uniform({3}, 0, 1, DType::kF32, generator);
  const RandomStream state = generator.state();
  const auto first = values(uniform({5}, 0, 1, DType::kF32, generator));
  generator.restore(state);
  EXPECT_EQ(values(uniform({5}, 0, 1, DType::kF32, generator)), first);
  Generator rank0 = generator.fork(0), rank1 = generator.fork(1), again = generator.fork(1);
  const auto a = values(uniform({5}, 0, 1, DType::kF32, rank0)), b = values(uniform({5}, 0, 1, DType::kF32, rank1));
  EXPECT_NE(a, b);
  EXPECT_EQ(values(uniform({5}, 0, 1, DType::kF32, again)), b);
}

TEST(Random, UniformFillsItsInterval) {
  Generator generator(3);
  for (DType dtype : {DType::kF32, DType::kF64}) {
    const auto x = values(uniform({100'000}, -1, 3, dtype, generator));
    EXPECT_GE(*std::min_element(x.begin(), x.end()), -1);
    EXPECT_LT(*std::max_element(x.begin(), x.end()), 3);
    EXPECT_NEAR(mean_of(x), 1, 0.02);
    EXPECT_NEAR(deviation_of(x), 4 / std::sqrt(12.0), 0.02);
  }
}

TEST(Random, NormalHasItsMomentsAndTails) {
  Generator generator(4);
  const auto x = values(normal({200'000}, 2, 3, DType::kF32, generator));
  EXPECT_NEAR(mean_of(x), 2, 0.03);
  EXPECT_NEAR(deviation_of(x), 3, 0.03);
  const auto beyond = std::count_if(x.begin(), x.end(), [](double v) { return std::abs(v - 2) > 6; });
  EXPECT_NEAR(static_cast<double>(beyond) / 200'000, 0.0455, 0.003);
  EXPECT_TRUE(std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); }));
}

TEST(Random, RandintHitsEveryValueAboutEquallyOften) {
  Generator generator(5);
  const auto x = values(randint(-3, 4, {70'000}, DType::kI32, generator));
  for (int v = -3; v < 4; ++v) EXPECT_NEAR(static_cast<double>(std::count(x.begin(), x.end(), v)), 10'000, 450) << v;
  EXPECT_EQ(values(randint(5, 6, {3})), (std::vector<double>{5, 5, 5}));
}

TEST(Random, RandpermIsAPermutationAndNotTheIdentity) {
  Generator generator(6);
  auto x = randperm(1000, DType::kI64, generator).to_vector<int64_t>();
  EXPECT_FALSE(std::is_sorted(x.begin(), x.end()));
  std::sort(x.begin(), x.end());
  for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(x[static_cast<size_t>(i)], i);
  EXPECT_EQ(randperm(0).elems(), 0);
}

TEST(Random, BernoulliFollowsItsProbabilities) {
  Generator generator(7);
  const auto x = values(bernoulli(full({50'000}, 0.25), generator));
  EXPECT_NEAR(mean_of(x), 0.25, 0.01);
  EXPECT_EQ(mean_of(values(bernoulli(full({100}, 1.0), generator))), 1);
  EXPECT_EQ(mean_of(values(bernoulli(full({100}, 0.0), generator))), 0);
}

TEST(Random, MultinomialFollowsItsWeights) {
  Generator generator(8);
  const Tensor weights = Tensor::from({1.0, 0.0, 3.0}, {3});
  const auto x = values(multinomial(weights, 40'000, true, generator));
  EXPECT_EQ(std::count(x.begin(), x.end(), 1), 0);
  EXPECT_NEAR(static_cast<double>(std::count(x.begin(), x.end(), 2)), 30'000, 400);
  auto once = values(multinomial(Tensor::from({1.0, 2.0, 3.0}, {3}), 3, false, generator));
  std::sort(once.begin(), once.end());
  EXPECT_EQ(once, (std::vector<double>{0, 1, 2}));
}

TEST(Random, BadArgumentsAreNamed) {
  EXPECT_THROW(uniform({2}, 2, 1), InvalidArgument);
  EXPECT_THROW(uniform({2}, 0, 1, DType::kI64), InvalidArgument);
  EXPECT_THROW(normal({2}, 0, -1), InvalidArgument);
  EXPECT_THROW(randint(3, 3, {2}), InvalidArgument);
  // What the dtype cannot hold: neither wrapped around nor infinite nor rounded up to the bound.
  EXPECT_THROW(randint(0, 100'000, {2}, DType::kI8), InvalidArgument);
  EXPECT_THROW(randint(-1, 10, {2}, DType::kU8), InvalidArgument);
  EXPECT_THROW(randint(0, 100'000, {2}, DType::kF16), InvalidArgument);
  EXPECT_THROW(randint(0, 1000, {2}, DType::kBF16), InvalidArgument);
  EXPECT_THROW(randint(0, 3, {2}, DType::kBool), InvalidArgument);
  EXPECT_THROW(randperm(300, DType::kU8), InvalidArgument);
  EXPECT_NO_THROW(randint(0, 256, {2}, DType::kU8));
  EXPECT_NO_THROW(randint(-2048, 2049, {2}, DType::kF16));
  EXPECT_NO_THROW(randperm(256, DType::kU8));
  EXPECT_THROW(bernoulli(full({1}, 1.5)), InvalidArgument);
  EXPECT_THROW(multinomial(full({3}, 1.0), 4), InvalidArgument);
  EXPECT_THROW(multinomial(full({3}, 0.0), 1), InvalidArgument);
  EXPECT_THROW(multinomial(full({3}, -1.0), 1), InvalidArgument);
}

TEST(Random, UniformNeverReachesItsUpperBound) {
  // A float rounds up to the bound with a chance of 2^-12 in f16 and of 2^-9 in bf16.
  const struct { double low, high; } ranges[] = {{0, 1}, {-3, -1}, {-1, 0}, {0.5, 0.7}};
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const auto& [low, high] : ranges) {
      Generator generator(11);
      const auto x = values(uniform({100'000}, low, high, dtype, generator));
      const double largest = *std::max_element(x.begin(), x.end());
      EXPECT_LT(largest, high) << dtype;
      EXPECT_GT(largest, high - (high - low) * 0.05) << dtype;
    }
  }
  EXPECT_EQ(values(uniform({2}, 1, 1, DType::kBF16)), (std::vector<double>{1, 1}));
}

// A stretch that says where a shard begins and how large the whole is: the shard draws what the whole has there.
TEST(Random, AShardDrawsWhatTheWholeWouldDrawThere) {
  const Shape whole{5, 7};
  const struct {
    int64_t row, rows, column, columns;
  } shards[] = {{0, 2, 0, 7}, {2, 3, 0, 7}, {0, 5, 0, 3}, {0, 5, 3, 4}, {1, 3, 2, 5}, {4, 1, 6, 1}};
  const auto expect = [&](const char* name, auto&& make) {
    const Tensor all = make(whole, op::sample_stretch(9, 4));
    for (const auto& s : shards) {
      const Tensor place = Tensor::from<int64_t>({9, 4, s.row, 5, s.column, 7}, {6});
      const Tensor part = make({s.rows, s.columns}, place);
      EXPECT_EQ(values(part), values(narrow(narrow(all, 0, s.row, s.rows), 1, s.column, s.columns)))
          << name << " from " << s.row << ", " << s.column;
    }
  };
  for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    expect("uniform", [&](const Shape& sizes, const Tensor& stretch) {
      return op::call(*op::find_op("uniform"), kernel::RandomAttrs{.sizes = sizes, .dtype = dtype}, stretch);
    });
    expect("normal", [&](const Shape& sizes, const Tensor& stretch) {
      return op::call(*op::find_op("normal"), kernel::RandomAttrs{.sizes = sizes, .dtype = dtype}, stretch);
    });
    expect("dropout", [&](const Shape& sizes, const Tensor& stretch) {
      return op::call(op::kDropout, kernel::DropoutAttrs{0.5}, ones(sizes, dtype), stretch);
    });
    expect("bernoulli", [&](const Shape& sizes, const Tensor& stretch) {
      return op::call(*op::find_op("bernoulli"), {}, full(sizes, 0.5, dtype), stretch);
    });
  }
  expect("randint", [&](const Shape& sizes, const Tensor& stretch) {
    return op::call(*op::find_op("randint"), kernel::RandintAttrs{.sizes = sizes, .low = 0, .high = 1000}, stretch);
  });
}

TEST(Random, AStretchThatDoesNotFitIsRefused) {
  const Tensor stretch = Tensor::from<int64_t>({9, 4, 0}, {3});
  EXPECT_THROW(op::call(op::kDropout, kernel::DropoutAttrs{0.5}, ones({2}), stretch), InvalidArgument);
}

}  // namespace
}  // namespace chorale
