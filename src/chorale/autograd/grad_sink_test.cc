#include "chorale/autograd/grad_sink.h"

#include <gtest/gtest.h>

#include <thread>

#include "chorale/autograd/gradient_watch.h"
#include "chorale/autograd/leaf_test_util.h"
#include "chorale/op/creation.h"
#include "chorale/op/embedding.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/sparse.h"

namespace chorale {
namespace {

using autograd::GradientMap;
using autograd::GradSink;

TEST(GradientMap, TakesGradientsInsteadOfTheLeavesThemselves) {
  const Tensor a = leaf({2, 3}), b = leaf({5, 7}), c = leaf({1, 1});
  backward(sum(mul(a, 100)));
  const Tensor own = gradient(a);
  GradientMap map;
  backward(sum(mul(a, b)), {}, {.sink = &map});
  EXPECT_EQ(values(map.gradient(a)), (Values{5, 7}));
  EXPECT_EQ(values(map.gradient(b)), (Values{2, 3}));
  EXPECT_FALSE(map.gradient(c).defined());
  EXPECT_TRUE(gradient(a).is(own));
  EXPECT_EQ(values(own), (Values{100, 100}));
  EXPECT_FALSE(gradient(b).defined());
}

TEST(GradientMap, AddsUpOverBackwardPassesAndKeepsEachMapApart) {
  const Tensor x = leaf({2, 3});
  GradientMap one, other;
  for (int i = 0; i < 3; ++i) backward(sum(mul(x, x)), {}, {.sink = &one});
  backward(sum(mul(x, 5)), {}, {.sink = &other});
  EXPECT_EQ(values(one.gradient(x)), (Values{12, 18}));
  EXPECT_EQ(values(other.gradient(x)), (Values{5, 5}));
  ASSERT_EQ(one.entries().size(), 1u);
  EXPECT_TRUE(one.entries()[0].first.is(x));
}

TEST(GradientMap, LeavesWithOneGradientHaveACopyEach) {
  const Tensor a = leaf({1, 2}), b = leaf({3, 4});
  GradientMap map;
  backward(sum(add(a, b)), {}, {.sink = &map});
  ASSERT_TRUE(map.gradient(a).defined() && map.gradient(b).defined());
  EXPECT_FALSE(map.gradient(a).overlaps(map.gradient(b)));
  add_(map.gradient(a), 10);
  EXPECT_EQ(values(map.gradient(b)), (Values{1, 1}));
}

TEST(GradientMap, IgnoresTheDestinationOfTheLeavesOwnGradients) {
  const Tensor x = leaf({2, 3}), bucket = zeros({2}, DType::kF64);
  set_gradient_destination(x, bucket);
  GradientMap map;
  backward(sum(mul(x, x)), {}, {.sink = &map});
  EXPECT_EQ(values(bucket), (Values{0, 0}));
  EXPECT_EQ(values(map.gradient(x)), (Values{4, 6}));
}

TEST(GradientMap, KeepsSparseGradientsSparse) {
  const Tensor table = set_requires_grad(Tensor::from({1.0, 2.0, 3.0, 4.0}, {4, 1}));
  const Tensor indices = Tensor::from<int64_t>({2, 2, 0}, {3});
  GradientMap map;
  for (int i = 0; i < 2; ++i) backward(sum(embedding(indices, table, {}, /*sparse=*/true)), {}, {.sink = &map});
  ASSERT_TRUE(map.gradient(table).is_sparse());
  EXPECT_EQ(values(to_dense(map.gradient(table))), (Values{2, 0, 4, 0}));
}

TEST(GradientMap, GradientsWithAHistoryCanBeDifferentiatedAgain) {
  const Tensor x = leaf({3});
  GradientMap map, second;
  backward(sum(mul(mul(x, x), x)), {}, {.create_graph = true, .sink = &map});  // 3 x^2
  backward(sum(map.gradient(x)), {}, {.sink = &second});                       // 6 x
  EXPECT_EQ(values(map.gradient(x)), (Values{27}));
  EXPECT_EQ(values(second.gradient(x)), (Values{18}));
}

TEST(GradientMap, TakesGradientsFromSeveralThreads) {
  const Tensor x = leaf({1, 1});
  GradientMap map;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) backward(sum(mul(x, x)), {}, {.sink = &map});
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(values(map.gradient(x)), (Values{400, 400}));
}

TEST(GradSink, HooksOfLeavesLearnWhereTheGradientWent) {
  const Tensor x = leaf({1, 2});
  std::vector<GradSink*> accumulated, completed;
  std::vector<Values> seen;
  after_accumulate(x, [&](const Tensor& at, GradSink& sink) {
    accumulated.push_back(&sink);
    seen.push_back(values(sink.gradient(at)));
    sink.set_gradient(at, mul(sink.gradient(at), 10));
  });
  after_complete(x, [&](const Tensor&, GradSink& sink) { completed.push_back(&sink); });
  GradientMap map;
  backward(sum(mul(x, 3)), {}, {.sink = &map});
  backward(sum(mul(x, 4)));
  EXPECT_EQ(accumulated, (std::vector<GradSink*>{&map, &autograd::grad_field_sink()}));
  EXPECT_EQ(completed, accumulated);
  EXPECT_EQ(seen, (std::vector<Values>{{3, 3}, {4, 4}}));
  EXPECT_EQ(values(map.gradient(x)), (Values{30, 30}));
  EXPECT_EQ(values(gradient(x)), (Values{40, 40}));
}

TEST(GradSink, AGradientThatIsCompletedLaterGoesToTheSinkOfItsBackward) {
  const Tensor x = leaf({1});
  set_completed_by_other(x, true);
  std::vector<GradSink*> completed;
  after_complete(x, [&](const Tensor&, GradSink& sink) { completed.push_back(&sink); });
  after_accumulate(x, [&](const Tensor&) { at_end_of_backward([&] { complete_gradient(x); }); });
  GradientMap map;
  backward(sum(mul(x, 3)), {}, {.sink = &map});
  backward(sum(mul(x, 3)));
  EXPECT_EQ(completed, (std::vector<GradSink*>{&map, &autograd::grad_field_sink()}));
}

struct Watch final : autograd::GradientWatch {
  void note_read(const Tensor& leaf) override { seen += leaf.elems() == 1 ? "r" : "R"; }
  void note_replaced(const Tensor& leaf) override { seen += leaf.elems() == 1 ? "w" : "W"; }
  std::string seen;
};

TEST(GradientWatch, LearnsWhichGradientsAreReadAndReplaced) {
  const Tensor x = leaf({1}), y = leaf({1, 2});
  Watch watch;
  autograd::gradient_watch = &watch;
  set_gradient(x, {});
  EXPECT_EQ(watch.seen, "w");
  backward(mul(x, 3));
  EXPECT_EQ(watch.seen.substr(0, 2), "wr");  // a gradient is added to what is there
  watch.seen.clear();
  (void)gradient(y);
  autograd::grad_field_sink().set_gradient(y, {});
  EXPECT_EQ(watch.seen, "RW");
  watch.seen.clear();
  GradientMap map;
  backward(mul(x, 3), {}, {.sink = &map});  // not its own gradient
  EXPECT_EQ(watch.seen, "");
  autograd::gradient_watch = nullptr;
}

}  // namespace
}  // namespace chorale
