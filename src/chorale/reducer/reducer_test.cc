#include "chorale/reducer/reducer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"

namespace chorale::reducer {
namespace {

using comm::run_ranks;
using Buckets = std::vector<std::vector<size_t>>;

// A client without a tensor library: plain arrays, and gradients written by hand.
class Arrays : public GradientOwner {
 public:
  explicit Arrays(std::vector<size_t> sizes) : values(sizes.size()), present(sizes.size()), completed(sizes.size()) {
    for (size_t i = 0; i < sizes.size(); ++i) values[i].resize(sizes[i]);
    views.resize(sizes.size());
  }
  std::vector<GradientInfo> infos() const {
    std::vector<GradientInfo> list;
    for (size_t i = 0; i < values.size(); ++i) {
      list.push_back({"p" + std::to_string(i), {static_cast<int64_t>(values[i].size())}, {1}, DType::kF32});
    }
    return list;
  }
  Tensor gradient(size_t i) override {
    if (!present[i]) return {};
    return views[i].defined() ? views[i]
                              : Tensor::borrow(std::span(values[i]), {static_cast<int64_t>(values[i].size())});
  }
  void set_gradient(size_t i, const Tensor& gradient) override {
    present[i] = gradient.defined();
    const std::vector<float> given = gradient.to_vector<float>();
    std::copy(given.begin(), given.end(), target(i).begin());
  }
  void set_destination(size_t i, const Tensor& view) override { views[i] = view; }
  void complete(size_t i) override { ++completed[i]; }

  std::span<float> target(size_t i) { return views[i].defined() ? views[i].span<float>() : std::span(values[i]); }
  // What a backward pass would do: adds to the gradient.
  void accumulate(size_t i, float value) {
    for (float& x : target(i)) x = present[i] ? x + value : value;
    present[i] = true;
  }
  float at(size_t i) { return target(i)[0]; }

  std::vector<std::vector<float>> values;
  std::vector<Tensor> views;  // where gradients are to be written; undefined: in `values`
  std::vector<bool> present;
  std::vector<int> completed;
};

// One reduced step in which these gradients come, in this order.
void step(Reducer& reducer, Arrays& arrays, const std::vector<std::pair<size_t, float>>& gradients) {
  reducer.check_finished();
  reducer.rebuild_if_due();
  reducer.expect_backward(true);
  reducer.begin_backward();
  for (const auto& [i, value] : gradients) {
    arrays.accumulate(i, value);
    reducer.mark_ready(i);
  }
  reducer.end_backward();
}

Buckets buckets_of(const Reducer& reducer) {
  Buckets all;
  for (size_t b = 0; b < reducer.bucket_count(); ++b) {
    all.emplace_back(reducer.bucket(b).begin(), reducer.bucket(b).end());
  }
  return all;
}

class BothModes : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Reducer, BothModes, testing::Bool(),
                         [](const auto& mode) { return mode.param ? "Views" : "Copies"; });

TEST_P(BothModes, GradientsBecomeTheAverageOverRanksAndAccumulate) {
  for (int size : {1, 2, 3, 4}) {
    run_ranks(size, [](comm::Group& group) {
      Arrays arrays({3, 1000, 1});
      Reducer reducer(group.duplicate(), arrays, arrays.infos(),
                      {.bucket_cap_bytes = 100, .gradient_as_bucket_view = GetParam()});
      const auto r = static_cast<float>(group.rank());
      const float mean = static_cast<float>(group.size() - 1) / 2;
      float expected = 0;
      for (int i = 0; i < 4; ++i) {
        step(reducer, arrays, {{2, 12 * r}, {1, 24 * r}, {0, 36 * r}});
        expected += mean;
        EXPECT_FLOAT_EQ(arrays.at(2), 12 * expected);
        EXPECT_FLOAT_EQ(arrays.at(1), 24 * expected);
        EXPECT_FLOAT_EQ(arrays.target(1)[999], 24 * expected);
        EXPECT_FLOAT_EQ(arrays.at(0), 36 * expected);
      }
      EXPECT_EQ(arrays.completed, (std::vector<int>{4, 4, 4}));
    });
  }
}

// Buckets large enough to be under way while others become ready.
void average_large_buckets(const comm::Group& group, bool views, Progress asked, Progress expected) {
  Arrays arrays({100'000, 3, 50'000, 100'000});
  Reducer reducer(group.duplicate(), arrays, arrays.infos(),
                  {.bucket_cap_bytes = 100'000, .gradient_as_bucket_view = views, .progress = asked});
  EXPECT_EQ(reducer.progress(), expected);
  const auto r = static_cast<float>(group.rank());
  for (int i = 1; i <= 6; ++i) {
    arrays.present.assign(4, false);
    step(reducer, arrays, {{3, 3 * r}, {2, 6 * r}, {1, 9 * r}, {0, 12 * r}});
    for (size_t p = 0; p < 4; ++p) {
      const std::span<float> values = arrays.target(p);
      EXPECT_EQ(std::vector<float>(values.begin(), values.end()),
                std::vector<float>(values.size(), 3 * static_cast<float>(4 - p)));
    }
    if (i == 3) reducer.set_group(group.duplicate());
  }
  EXPECT_EQ(reducer.progress(), expected);
}
TEST_P(BothModes, TheThreadThatMovesThemChangesNothing) {
  for (Progress progress : {Progress::kCaller, Progress::kHelper})
    run_ranks(3, [=](comm::Group& group) { average_large_buckets(group, GetParam(), progress, progress); });
  for (Progress progress : {Progress::kAuto, Progress::kHelper}) {
    comm::run_hosts({0, 1, 1},
                    [=](comm::Group& group) { average_large_buckets(group, GetParam(), progress, Progress::kGroup); });
  }
}

TEST_P(BothModes, WhatNobodyUsedStaysAsItIs) {
  run_ranks(3, [](comm::Group& group) {
    Arrays arrays({2, 2, 2});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(), {.gradient_as_bucket_view = GetParam()});
    const auto r = static_cast<float>(group.rank());
    // Parameter 1 is used on rank 2 only, parameter 2 nowhere.
    std::vector<std::pair<size_t, float>> used{{0, r}};
    if (group.rank() == 2) used.emplace_back(1, 6.0f);
    step(reducer, arrays, used);
    EXPECT_FLOAT_EQ(arrays.at(0), 1);
    EXPECT_TRUE(arrays.present[1]);
    EXPECT_FLOAT_EQ(arrays.at(1), 2);
    EXPECT_FALSE(arrays.present[2]);
    EXPECT_EQ(reducer.used_map(), (std::vector<int32_t>{3, 1, 0}));
    EXPECT_EQ(arrays.completed, (std::vector<int>{1, 1, 0}));

    // An old value that is no third of anything stays bit for bit.
    step(reducer, arrays, {{0, 1}, {1, 1}, {2, 0.1f}});
    const float old = arrays.at(2);
    step(reducer, arrays, {{0, 1}, {1, 1}});
    EXPECT_EQ(arrays.at(2), old);
    EXPECT_FALSE(reducer.looks_static());
  });
}

TEST_P(BothModes, UsageInPassesThatAreNotReducedCounts) {
  run_ranks(2, [](comm::Group& group) {
    Arrays arrays({1, 1});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(), {.gradient_as_bucket_view = GetParam()});
    reducer.expect_backward(false);
    EXPECT_FALSE(reducer.begin_backward());
    const size_t mine = group.rank() == 0 ? 0 : 1;
    arrays.accumulate(mine, 2);
    reducer.mark_ready(mine);
    reducer.end_backward();
    EXPECT_EQ(arrays.at(mine), 2);
    step(reducer, arrays, {{0, 4}});
    EXPECT_EQ(arrays.at(0), 5);
    EXPECT_EQ(arrays.at(1), 1);
    EXPECT_EQ(reducer.used_map(), (std::vector<int32_t>{2, 1}));
  });
}

TEST_P(BothModes, BucketsAreMadeAnewInTheOrderThatRank0Saw) {
  run_ranks(2, [](comm::Group& group) {
    Arrays arrays({20, 500, 200});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(),
                    {.bucket_cap_bytes = 1048, .gradient_as_bucket_view = GetParam()});
    EXPECT_EQ(buckets_of(reducer), (Buckets{{0, 1, 2}}));
    // Rank 1 sees another order.
    if (group.rank() == 0) step(reducer, arrays, {{2, 1}, {1, 2}, {0, 3}});
    if (group.rank() == 1) step(reducer, arrays, {{0, 5}, {1, 4}, {2, 3}});
    EXPECT_FALSE(reducer.has_rebuilt());
    EXPECT_TRUE(reducer.rebuild_if_due());
    EXPECT_EQ(buckets_of(reducer), (Buckets{{2, 1}, {0}}));
    // What was accumulated has moved along.
    EXPECT_EQ(arrays.at(0), 4);
    EXPECT_EQ(arrays.at(1), 3);
    EXPECT_EQ(arrays.at(2), 2);
    // The bucket that is full first waits for the one before it.
    step(reducer, arrays, {{0, 1}, {1, 1}, {2, 1}});
    EXPECT_EQ(arrays.at(0), 5);
    EXPECT_EQ(arrays.at(1), 4);
    EXPECT_EQ(arrays.at(2), 3);
    EXPECT_FALSE(reducer.rebuild_if_due());
  });
}

TEST(Reducer, NewBucketsTakeTheMemoryOfTheOldOnesUnlessGradientsLieThere) {
  for (bool dropped : {false, true}) {
    run_ranks(2, [dropped](comm::Group& group) {
      Arrays arrays({20, 500, 200});
      Reducer reducer(group.duplicate(), arrays, arrays.infos(), {.bucket_cap_bytes = 1048});
      const Tensor before = arrays.views[0];
      step(reducer, arrays, {{2, 1}, {1, 2}, {0, 3}});
      if (dropped) arrays.present.assign(3, false);
      EXPECT_TRUE(reducer.rebuild_if_due());
      EXPECT_EQ(reducer.bucket_count(), 2u);
      EXPECT_EQ(arrays.views[0].storage() == before.storage(), dropped);
      if (!dropped) {
        EXPECT_EQ(arrays.at(0), 3);
        EXPECT_EQ(arrays.at(1), 2);
        EXPECT_EQ(arrays.at(2), 1);
      }
      arrays.present.assign(3, false);
      step(reducer, arrays, {{2, 4}, {1, 5}, {0, 6}});
      EXPECT_EQ(arrays.at(0), 6);
      EXPECT_EQ(arrays.target(1)[499], 5);
      EXPECT_EQ(arrays.target(2)[199], 4);
    });
  }
}

TEST(Reducer, WithSearchOnBucketsAreSmallAtOnceAndStay) {
  run_ranks(2, [](comm::Group& group) {
    Arrays arrays({1000, 1000, 1000});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(),
                    {.bucket_cap_bytes = 4000, .find_unused = FindUnused::kOn});
    EXPECT_EQ(buckets_of(reducer), (Buckets{{2}, {1}, {0}}));
    step(reducer, arrays, {{0, 1}, {1, 1}, {2, 1}});
    EXPECT_FALSE(reducer.rebuild_if_due());
    EXPECT_EQ(buckets_of(reducer), (Buckets{{2}, {1}, {0}}));
  });
}

TEST(Reducer, AGradientThatNeverCameIsNamedAtTheNextForward) {
  run_ranks(2, [](comm::Group& group) {
    Arrays arrays({1, 1});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(), {.find_unused = FindUnused::kOff});
    step(reducer, arrays, {{0, 1}});
    try {
      reducer.check_finished();
      FAIL() << "no error";
    } catch (const StateError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("rank " + std::to_string(group.rank())), std::string::npos) << text;
      EXPECT_NE(text.find("1 (p1)"), std::string::npos) << text;
      EXPECT_EQ(text.find("p0"), std::string::npos) << text;
      EXPECT_NE(text.find("set find_unused_parameters"), std::string::npos) << text;
    }
    // Another group, another try.
    reducer.set_group(group.duplicate());
    step(reducer, arrays, {{1, 1}, {0, 1}});
    EXPECT_NO_THROW(reducer.check_finished());
  });
}

TEST(Reducer, AParameterThatIsReadyTwiceIsNamed) {
  run_ranks(1, [](comm::Group& group) {
    Arrays arrays({1, 1});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(), {});
    reducer.expect_backward(true);
    reducer.begin_backward();
    arrays.accumulate(1, 1);
    reducer.mark_ready(1);
    EXPECT_THROW(
        {
          try {
            reducer.mark_ready(1);
          } catch (const StateError& error) {
            EXPECT_NE(std::string(error.what()).find("1 (p1)"), std::string::npos) << error.what();
            throw;
          }
        },
        StateError);
  });
}

TEST_P(BothModes, AHookOwnsTheDivisionAndItsResultBecomesTheGradients) {
  run_ranks(3, [](comm::Group& group) {
    Arrays arrays({2, 3});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(),
                    {.bucket_cap_bytes = 1, .gradient_as_bucket_view = GetParam()});
    std::vector<std::vector<size_t>> seen;
    std::vector<bool> last;
    reducer.set_hook({"sum", [&](GradBucket& bucket) {
                        seen.emplace_back(bucket.parameters().begin(), bucket.parameters().end());
                        last.push_back(bucket.is_last());
                        EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
                        return bucket.group().all_reduce(bucket.buffer()).future();
                      }});
    EXPECT_THROW(reducer.set_hook({"second", reducer.hook()->run}), StateError);
    const auto r = static_cast<float>(group.rank());
    step(reducer, arrays, {{1, r}, {0, 10 * r}});
    step(reducer, arrays, {{1, r}, {0, 10 * r}});
    // Twice the sum of 3 and 10 r.
    EXPECT_EQ(arrays.at(1), 3 + 3 * 2 + 3);
    EXPECT_EQ(arrays.at(0), 30 + 30 * 2 + 30);
    EXPECT_EQ(seen, (Buckets{{0, 1}, {1}, {0}}));
    EXPECT_EQ(last, (std::vector<bool>{true, false, true}));
  });
}

TEST(Reducer, AHookThatReturnsAnotherShapeIsNamed) {
  run_ranks(2, [](comm::Group& group) {
    Arrays arrays({2, 3});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(), {});
    EXPECT_THROW(reducer.set_hook({"none", nullptr}), InvalidArgument);
    reducer.set_hook({"short", [](GradBucket&) { return ready_future(Tensor::empty({4}, DType::kF32)); }});
    try {
      step(reducer, arrays, {{1, 1}, {0, 1}});
      FAIL() << "no error";
    } catch (const StateError& error) {
      EXPECT_NE(std::string(error.what()).find("the hook short"), std::string::npos) << error.what();
    }
  });
}

TEST(Reducer, AStaticGraphReducesAtTheEndFirstAndThenHoldsTheGraphToIt) {
  run_ranks(2, [](comm::Group& group) {
    Arrays arrays({1, 1, 1});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(), {.find_unused = FindUnused::kOff});
    EXPECT_TRUE(reducer.set_static_graph());
    EXPECT_FALSE(reducer.set_static_graph());
    int launched = 0;
    reducer.set_hook({"count", [&](GradBucket& bucket) {
                        ++launched;
                        return bucket.group().all_reduce(bucket.buffer(), Reduce::kAverage).future();
                      }});
    const auto r = static_cast<float>(group.rank());
    reducer.expect_backward(true);
    reducer.begin_backward();
    for (size_t i : {2u, 0u, 2u}) {
      arrays.accumulate(i, r);
      reducer.mark_ready(i);
    }
    EXPECT_EQ(launched, 0);
    reducer.end_backward();
    EXPECT_EQ(launched, 1);
    EXPECT_EQ(arrays.at(0), 0.5f);
    EXPECT_EQ(arrays.at(2), 1);
    EXPECT_FALSE(arrays.present[1]);

    EXPECT_FALSE(reducer.rebuild_if_due());
    step(reducer, arrays, {{2, r}, {2, r}, {0, r}});
    EXPECT_EQ(arrays.at(2), 2);
    EXPECT_TRUE(reducer.rebuild_if_due());
    EXPECT_EQ(buckets_of(reducer), (Buckets{{2, 0, 1}}));

    // Used less often than before: the reduction cannot finish. Used more often: an error at once.
    step(reducer, arrays, {{2, r}, {0, r}});
    EXPECT_THROW(reducer.check_finished(), StateError);
    EXPECT_THROW(reducer.mark_ready(1), StateError);
    EXPECT_THROW(reducer.mark_ready(0), StateError);
  });
}

TEST(Reducer, ARankWithoutInputsTakesPartWithZeros) {
  run_ranks(2, [](comm::Group& group) {
    Arrays arrays({4, 4});
    Reducer reducer(group.duplicate(), arrays, arrays.infos(), {.bucket_cap_bytes = 16});
    step(reducer, arrays, {{1, 1}, {0, 1}});
    for (int i = 0; i < 2; ++i) {
      if (group.rank() == 0) {
        arrays.present.assign(2, false);
        reducer.rebuild_if_due();
        reducer.set_divisor(1);  // the live ranks
        step(reducer, arrays, {{1, 3}, {0, 5}});
        EXPECT_EQ(arrays.at(1), 3);
        EXPECT_EQ(arrays.at(0), 5);
      } else {
        reducer.rebuild_if_due();
        reducer.set_divisor(1);
        const bool wanted = i == 1;
        reducer.shadow_backward(wanted);
        EXPECT_EQ(arrays.at(0), wanted ? 5 : 1);  // 1: of the step before
        EXPECT_EQ(arrays.at(1), wanted ? 3 : 1);
      }
    }
    EXPECT_EQ(reducer.reductions(), 3);
  });
}

}  // namespace
}  // namespace chorale::reducer
