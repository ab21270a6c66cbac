#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "chorale/autograd/leaf_test_util.h"
#include "chorale/base/error.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/view.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

TEST(Backward, GradientOfAProductIsTheOtherFactor) {
  const Tensor a = leaf({2, 3}), b = leaf({5, 7});
  backward(sum(mul(a, b)));
  EXPECT_EQ(values(gradient(a)), (Values{5, 7}));
  EXPECT_EQ(values(gradient(b)), (Values{2, 3}));
}

TEST(Backward, GradientsOfPathsThatMeetAddUp) {
  const Tensor x = leaf({3});
  const Tensor y = mul(x, x);        // 2x
  backward(sum(add(mul(y, x), y)));  // x^3 + x^2
  EXPECT_EQ(values(gradient(x)), (Values{3 * 9 + 2 * 3}));
}

TEST(Backward, GradientsOfPartsAddUpInTheirPlaces) {
  const Tensor x = leaf({1, 2, 3, 4});
  const Tensor y = mul(x, 10);
  // Parts that overlap, one of them twice, and the whole.
  const Tensor parts = mul(sum(slice(y, 0, 1, 3)), 2) + select(y, 0, 0) * select(y, 0, 2) + sum(slice(y, 0, 0, 4, 3));
  backward(parts + mul(sum(y), 5));
  EXPECT_EQ(values(gradient(x)), (Values{10 * (30 + 1 + 5), 10 * (2 + 5), 10 * (2 + 10 + 5), 10 * (1 + 5)}));
}

TEST(Backward, ASecondBackwardAddsToTheGradientAndKeepsItsMemory) {
  const Tensor x = leaf({1, 2});
  backward(sum(mul(x, x)));
  const Tensor first = gradient(x);
  backward(sum(mul(x, x)));
  EXPECT_EQ(values(gradient(x)), (Values{4, 8}));
  EXPECT_EQ(gradient(x).raw(), first.raw());
}

TEST(Backward, BroadcastAndDtypeAreUndoneForEachInput) {
  const Tensor wide = leaf({1, 2, 3});
  const Tensor one = set_requires_grad(Tensor::scalar(2.0, DType::kF32));
  const Tensor y = mul(wide, one);  // f64[3] times f32[]
  backward(sum(y));
  EXPECT_EQ(gradient(one).dtype(), DType::kF32);
  EXPECT_EQ(gradient(one).dims(), 0);
  EXPECT_EQ(gradient(one).item<double>(), 6);
  EXPECT_EQ(values(gradient(wide)), (Values{2, 2, 2}));
}

TEST(Backward, AGraphRunsTwiceOnlyWithRetainGraph) {
  const Tensor x = leaf({3});
  const Tensor y = sum(mul(x, x));
  backward(y, {}, {.retain_graph = true});
  backward(y);
  EXPECT_EQ(values(gradient(x)), (Values{12}));
  try {
    backward(y);
    FAIL() << "a freed graph ran";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("retain_graph"), std::string::npos) << error.what();
  }
}

TEST(Backward, RootsMayHaveSeveralElementsWhenTheirGradientIsGiven) {
  const Tensor x = leaf({1, 2});
  EXPECT_THROW(backward(mul(x, x)), InvalidArgument);
  backward(mul(x, x), Tensor::from({10.0, 100.0}, {2}));
  EXPECT_EQ(values(gradient(x)), (Values{20, 400}));
  EXPECT_THROW(backward(mul(x, x), Tensor::from({1.0}, {1})), InvalidArgument);
}

TEST(Backward, OneRootMayLeadToAnother) {
  const Tensor x = leaf({2});
  const Tensor y = mul(x, x), z = mul(y, y);
  const std::vector<Tensor> roots{y, z};
  const std::vector<Tensor> gradients{Tensor::from({1.0}, {1}), Tensor::from({1.0}, {1})};
  backward(roots, gradients);
  EXPECT_EQ(values(gradient(x)), (Values{2 * 2 + 4 * 8}));
}

TEST(Backward, NothingToDifferentiateIsAnError) {
  const Tensor x = Tensor::from({1.0}, {1});
  EXPECT_THROW(backward(sum(x)), StateError);
  const Tensor w = leaf({1});
  Tensor y;
  {
    const NoGrad quiet;
    y = mul(w, w);
  }
  EXPECT_FALSE(requires_grad(y));
  {
    const NoGrad quiet;
    const EnableGrad loud;
    EXPECT_TRUE(requires_grad(mul(w, w)));
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_FALSE(requires_grad(detach(mul(w, w))));
}

TEST(Backward, LeafRules) {
  const Tensor x = leaf({1});
  EXPECT_TRUE(is_leaf(x));
  const Tensor y = mul(x, x);
  EXPECT_FALSE(is_leaf(y));
  EXPECT_THROW(set_requires_grad(y, false), StateError);
  EXPECT_THROW(set_requires_grad(Tensor::from({int64_t{1}}, {1})), InvalidArgument);
}

TEST(Backward, AMillionOpsNeedNoStack) {
  const Tensor x = set_requires_grad(Tensor::scalar(1.0, DType::kF32));
  Tensor y = x;
  for (int i = 0; i < 1'000'000; ++i) y = add(y, 1);
  backward(y);
  EXPECT_EQ(gradient(x).item<float>(), 1);
  Tensor z = x;
  for (int i = 0; i < 1'000'000; ++i) z = add(z, 1);
  z = Tensor();  // the tape goes without backward
  EXPECT_EQ(x.use_count(), 1 + (y.defined() ? 1 : 0));
}

TEST(Backward, RetainedGradientOfAMiddleTensor) {
  const Tensor x = leaf({3});
  const Tensor y = mul(x, x);
  retain_grad(y);
  backward(sum(mul(y, y)));
  EXPECT_EQ(values(gradient(y)), (Values{18}));
}

TEST(Backward, WritesTheFirstGradientIntoTheDestination) {
  const Tensor x = leaf({1, 2});
  const Tensor bucket = Tensor::from({9.0, 9.0, 9.0, 9.0}, {4});
  const Tensor view = bucket.view_as({2}, {1}, 1);
  set_gradient_destination(x, view);
  backward(sum(mul(x, x)));
  EXPECT_EQ(gradient(x).raw(), view.raw());
  EXPECT_EQ(values(bucket), (Values{9, 2, 4, 9}));
  backward(sum(mul(x, x)));
  EXPECT_EQ(values(bucket), (Values{9, 4, 8, 9}));
  set_gradient(x, {});
  backward(sum(mul(x, x)));  // overwrites, does not add
  EXPECT_EQ(values(bucket), (Values{9, 2, 4, 9}));
}

TEST(Grad, LeavesGradientsOfLeavesAloneAndTakesMiddleTensors) {
  const Tensor x = leaf({2}), w = leaf({10});
  const Tensor y = mul(x, x);
  const auto g = grad({mul(mul(y, y), w)}, {y, x});
  EXPECT_EQ(values(g[0]), (Values{2 * 4 * 10}));
  EXPECT_EQ(values(g[1]), (Values{2 * 4 * 10 * 4}));
  EXPECT_FALSE(gradient(x).defined());
  EXPECT_FALSE(gradient(w).defined());
}

TEST(Grad, UnusedInputIsAnErrorUnlessAllowed) {
  const Tensor x = leaf({2}), unused = leaf({1});
  EXPECT_THROW(grad({sum(mul(x, x))}, {x, unused}), StateError);
  const auto g = grad({sum(mul(x, x))}, {x, unused}, {.allow_unused = true});
  EXPECT_TRUE(g[0].defined());
  EXPECT_FALSE(g[1].defined());
}

TEST(Grad, ThirdDerivativeOfAPower) {
  const Tensor x = leaf({2});
  Tensor y = mul(mul(x, x), mul(x, x));  // x^4
  for (int order = 0; order < 3; ++order) y = grad({sum(y)}, {x}, {.create_graph = true})[0];
  EXPECT_EQ(values(y), (Values{24 * 2}));
}

TEST(Grad, BackwardWithCreateGraphMakesDifferentiableGradients) {
  const Tensor x = leaf({3});
  backward(sum(mul(mul(x, x), x)), {}, {.create_graph = true});
  const Tensor g = gradient(x);
  EXPECT_EQ(values(g), (Values{27}));
  EXPECT_EQ(values(grad({sum(g)}, {x})[0]), (Values{18}));
  set_gradient(x, {});
}

TEST(Threads, AGraphBuiltInOneThreadIsDifferentiatedInAnother) {
  const Tensor x = leaf({2});
  Tensor y;
  std::thread([&] { y = mul(mul(x, x), x); }).join();
  const Tensor z = sum(mul(y, x));  // made here from what was made there: numbers must still be ordered
  std::thread([&] { backward(z); }).join();
  EXPECT_EQ(values(gradient(x)), (Values{32}));
}

TEST(Threads, DisjointGraphsRunAtOnceAndMeetAtALeaf) {
  const Tensor x = leaf({1, 1});
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) backward(sum(mul(x, x)));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(values(gradient(x)), (Values{400, 400}));
}

TEST(BackwardRun, TakesARootFromInsideAHook) {
  const Tensor a = leaf({1}), b = leaf({1});
  const Tensor late = sum(mul(b, b));
  autograd::BackwardRun run({});
  const Tensor early = mul(a, a);
  on_gradient(early, [&](const Tensor&) {
    autograd::BackwardRun::current()->add_root(late, Tensor::scalar(1.0, DType::kF64));
    return Tensor{};
  });
  run.add_root(sum(early), Tensor::scalar(1.0, DType::kF64));
  run.run();
  EXPECT_EQ(values(gradient(a)), (Values{2}));
  EXPECT_EQ(values(gradient(b)), (Values{2}));
}

// A tracer as seen from autograd: it hands everything on, notes the ops, and forbids looking at reference counts.
class Noting final : public op::Builder {
 public:
  explicit Noting(bool may_reuse) : Builder(op::Place::kSharding), may_reuse_(may_reuse) {}
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override {
    calls += std::string(op.name) + " ";
    rest.call(op, in, attrs, out);
  }
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override {
    calls += std::string(op.name) + "_ ";
    rest.call_into(op, in, attrs, out);
  }
  bool may_reuse_memory() const override { return may_reuse_; }
  std::string calls;

 private:
  bool may_reuse_;
};

struct Noted {
  std::string calls;
  Values gradient;
};
// Gradients that meet, and gradients of parts; a hook may hold on to one that is on its way.
Noted noted(bool may_reuse, bool holds) {
  const Tensor x = leaf({1, 2, 3, 4});
  const Tensor y = mul(x, 10);
  const Tensor total = sum(mul(slice(y, 0, 0, 2), 3)) + sum(mul(slice(y, 0, 1, 4), 5)) + sum(mul(y, y));
  std::vector<Tensor> held;
  if (holds) {
    on_gradient(y, [&](const Tensor& gradient) {
      held.push_back(gradient);
      return Tensor{};
    });
  }
  Noting builder(may_reuse);
  {
    const op::Under scope(op::current_stack().with(builder));
    backward(total, ones({}, DType::kF64));
  }
  return {builder.calls, values(gradient(x))};
}

TEST(BackwardRun, ATracedGraphDoesNotDependOnReferenceCounts) {
  const Noted traced = noted(false, false), traced_and_held = noted(false, true), eager = noted(true, false);
  EXPECT_EQ(traced.calls, traced_and_held.calls);
  EXPECT_EQ(traced.calls.find("add_ "), std::string::npos) << traced.calls;
  EXPECT_NE(eager.calls.find("add_ "), std::string::npos) << eager.calls;
  const Values expected{10 * (3 + 20), 10 * (3 + 5 + 40), 10 * (5 + 60), 10 * (5 + 80)};
  EXPECT_EQ(traced.gradient, expected);
  EXPECT_EQ(eager.gradient, expected);
}

TEST(UndefinedTensors, AreErrorsThatNameTheFunction) {
  const Tensor none;
  const auto expect = [](const std::string& function, auto&& call) {
    try {
      call();
      ADD_FAILURE() << function << " took an undefined tensor";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()).find("[" + function + "] x is an undefined tensor"), 0u) << error.what();
    }
  };
  expect("gradient", [&] { gradient(none); });
  expect("set_gradient", [&] { set_gradient(none, {}); });
  expect("set_gradient", [&] { set_gradient(none, ones({1})); });
  expect("set_gradient_destination", [&] { set_gradient_destination(none, {}); });
  expect("retain_grad", [&] { retain_grad(none); });
  expect("detach", [&] { detach(none); });
  expect("on_gradient", [&] { on_gradient(none, [](const Tensor& x) { return x; }); });
  expect("after_accumulate", [&] { after_accumulate(none, [](const Tensor&) {}); });
  expect("clone", [&] { clone(none); });
  expect("to", [&] { to(none, DType::kF64); });
  expect("contiguous", [&] { contiguous(none); });
  const Tensor w = set_requires_grad(ones({1}));
  EXPECT_THAT(message_of([&] { grad({none}, {w}); }), testing::HasSubstr("[grad] an output is an undefined tensor"));
  EXPECT_THAT(message_of([&] { grad({w}, {none}); }), testing::HasSubstr("[grad] an input is an undefined tensor"));
}

}  // namespace
}  // namespace chorale
