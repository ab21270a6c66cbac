#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/autograd/leaf_test_util.h"
#include "chorale/base/error.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

TEST(Hooks, AGradientHookReplacesTheGradientOfLeavesAndMiddleTensors) {
  const Tensor x = leaf({1, 2});
  const Tensor y = mul(x, 3);
  on_gradient(y, [](const Tensor& g) { return mul(g, 10); });
  on_gradient(x, [](const Tensor& g) { return add(g, 1); });
  backward(sum(y));
  EXPECT_EQ(values(gradient(x)), (Values{31, 31}));
}

// A leaf kept what it was given: the wrong sum showed in the optimizer, or never.
TEST(Hooks, WhatAHookReturnsMustHaveTheShapeOfTheTensor) {
  const Tensor x = leaf({1, 2});
  const Tensor y = mul(x, 3);
  for (const Tensor& hooked : {x, y}) {
    HookHandle handle = on_gradient(hooked, [](const Tensor&) { return ones({9}); });
    EXPECT_THAT(message_of<InvalidArgument>([&] { backward(sum(y), {}, {.retain_graph = true}); }),
                testing::HasSubstr("[on_gradient] a hook returned a gradient of shape [9] for a tensor of shape [2]"));
    handle.remove();
    EXPECT_FALSE(gradient(x).defined());
  }
}

TEST(Hooks, AHookThatReturnsNothingOnlyWatches) {
  const Tensor x = leaf({5});
  Values seen;
  on_gradient(x, [&](const Tensor& g) {
    seen = values(g);
    return Tensor{};
  });
  backward(sum(mul(x, x)));
  EXPECT_EQ(seen, (Values{10}));
  EXPECT_EQ(values(gradient(x)), (Values{10}));
}

TEST(Hooks, AfterAccumulateFiresOncePerBackwardHoweverOftenTheLeafIsUsed) {
  const Tensor x = leaf({2});
  int fired = 0;
  after_accumulate(x, [&](const Tensor& at) {
    ++fired;
    EXPECT_TRUE(at.is(x));
    EXPECT_TRUE(gradient(at).defined());
  });
  backward(sum(add(mul(x, x), mul(x, 3))));
  EXPECT_EQ(fired, 1);
  EXPECT_EQ(values(gradient(x)), (Values{7}));
  backward(sum(x));
  EXPECT_EQ(fired, 2);
}

TEST(Hooks, AGradientIsCompleteAfterAllOthersSawItOrWhenTheHookThatClaimedItSaysSo) {
  const Tensor x = leaf({2});
  std::string order;
  after_complete(x, [&](const Tensor&) { order += "c"; });
  after_accumulate(x, [&](const Tensor&) { order += "a"; });
  backward(sum(x));
  EXPECT_EQ(order, "ac");
  set_completed_by_other(x, true);
  backward(sum(x));
  EXPECT_EQ(order, "aca");
  complete_gradient(x);
  EXPECT_EQ(order, "acac");
}

TEST(Hooks, AddingAndRemovingInsideAHookTakesEffectAfterIt) {
  const Tensor x = leaf({2});
  std::string order;
  std::vector<HookHandle> handles;
  handles.push_back(after_accumulate(x, [&](const Tensor&) {
    order += "a";
    handles[0].remove();
    after_accumulate(x, [&](const Tensor&) { order += "b"; });
  }));
  backward(sum(x));
  EXPECT_EQ(order, "a");
  backward(sum(x));
  EXPECT_EQ(order, "ab");
}

TEST(Hooks, ALeafIsDoneAsSoonAsItsLastUseIs) {
  // The first layer's weight is finished last: hooks fire in the order in which gradients become complete.
  const Tensor first = leaf({1}), second = leaf({1}), third = leaf({1});
  std::vector<int> order;
  after_accumulate(first, [&](const Tensor&) { order.push_back(1); });
  after_accumulate(second, [&](const Tensor&) { order.push_back(2); });
  after_accumulate(third, [&](const Tensor&) { order.push_back(3); });
  Tensor y = mul(first, 2);
  bool middle_ran = false;
  on_gradient(y, [&](const Tensor&) {
    middle_ran = true;
    EXPECT_EQ(order, (std::vector<int>{3, 2}));
    return Tensor{};
  });
  backward(sum(mul(mul(y, second), third)));
  EXPECT_TRUE(middle_ran);
  EXPECT_EQ(order, (std::vector<int>{3, 2, 1}));
}

TEST(Hooks, HandlesRemoveAndMayDoSoFromInside) {
  const Tensor x = leaf({1});
  int first = 0, second = 0;
  std::vector<HookHandle> handles;
  handles.push_back(after_accumulate(x, [&](const Tensor&) {
    ++first;
    handles[0].remove();
    after_accumulate(x, [&](const Tensor&) { ++second; });  // counts from the next backward on
  }));
  backward(sum(x));
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 0);
  backward(sum(x));
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 1);
  handles[0].remove();
}

TEST(Hooks, ThatAreEmptyFunctionsAreErrorsWhereTheyAreGiven) {
  const Tensor x = leaf({2}), y = mul(x, 3);
  const auto expect_refused = [](const char* function, const auto& call) {
    EXPECT_EQ(message_of<InvalidArgument>(call), concat("[", function, "] the hook is an empty function"));
  };
  expect_refused("on_gradient", [&] { on_gradient(x, nullptr); });
  expect_refused("after_accumulate", [&] { after_accumulate(x, autograd::LeafHook()); });
  expect_refused("after_accumulate", [&] { after_accumulate(x, std::function<void(const Tensor&)>()); });
  expect_refused("after_complete", [&] { after_complete(x, autograd::LeafHook()); });
  expect_refused("after_complete", [&] { after_complete(x, std::function<void(const Tensor&)>()); });
  expect_refused("before_node", [&] { before_node(y, nullptr); });
  expect_refused("after_node", [&] { after_node(y, nullptr); });
  on_gradient(x, [&](const Tensor&) {
    expect_refused("at_end_of_backward", [] { at_end_of_backward(nullptr); });
    return Tensor();
  });
  backward(sum(y));
  EXPECT_EQ(message_of<InvalidArgument>([&] { checkpoint(nullptr, {x}); }), "[checkpoint] the function is empty");
}

TEST(Hooks, AHandleThatWasMovedFromRemovesNothing) {
  const Tensor x = leaf({2});
  int calls = 0;
  HookHandle first = on_gradient(x, [&](const Tensor&) {
    ++calls;
    return Tensor();
  });
  HookHandle second = std::move(first);
  first.remove();  // NOLINT(bugprone-use-after-move)
  backward(sum(x));
  EXPECT_EQ(calls, 1);
  second.remove();
  backward(sum(x));
  EXPECT_EQ(calls, 1);
}

TEST(Hooks, NodeHooksSeeAndReplaceGradientsAroundTheRule) {
  const Tensor x = leaf({2});
  const Tensor y = mul(x, x);
  before_node(y, [](std::span<Tensor> dout) { dout[0] = mul(dout[0], 2); });
  after_node(y, [](std::span<Tensor> din, std::span<const Tensor> dout) {
    EXPECT_EQ(values(dout[0]), (Values{2}));
    EXPECT_EQ(din.size(), 2u);
    din[1] = Tensor{};
  });
  backward(sum(y));
  EXPECT_EQ(values(gradient(x)), (Values{4}));
}

TEST(Hooks, EndOfBackwardRunsOnceAfterEverything) {
  const Tensor a = leaf({1}), b = leaf({1});
  int ended = 0, accumulated = 0;
  const auto hook = [&](const Tensor&) {
    if (accumulated++ == 0) {
      at_end_of_backward([&] {
        ++ended;
        EXPECT_EQ(accumulated, 2);
      });
    }
  };
  after_accumulate(a, hook);
  after_accumulate(b, hook);
  backward(sum(mul(a, b)));
  EXPECT_EQ(ended, 1);
  EXPECT_THROW(at_end_of_backward([] {}), StateError);
}

TEST(Hooks, ABackwardInsideAHookIsItsOwn) {
  const Tensor a = leaf({1}), b = leaf({3});
  after_accumulate(a, [&](const Tensor&) {
    const EnableGrad record;  // hooks run without recording, as the pass around them does
    backward(sum(mul(b, b)));
  });
  backward(sum(a));
  EXPECT_EQ(values(gradient(b)), (Values{6}));
}

TEST(Hooks, AnExceptionFromAHookReachesTheCallerAndLeavesTheThreadUsable) {
  const Tensor x = leaf({1});
  HookHandle handle = on_gradient(x, [](const Tensor&) -> Tensor { throw InvalidArgument("from the hook"); });
  EXPECT_THROW(backward(sum(x)), InvalidArgument);
  EXPECT_EQ(autograd::BackwardRun::current(), nullptr);
  EXPECT_TRUE(grad_enabled());
  handle.remove();
  backward(sum(x));
  EXPECT_EQ(values(gradient(x)), (Values{1}));
}

TEST(Anomaly, NamesTheForwardOpWhoseGradientBecameNaN) {
  const Tensor x = leaf({-1});
  const DetectAnomaly scope;
  try {
    backward(sum(mul(sqrt(x), 1)));
    FAIL() << "no error";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("sqrt"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace chorale
