#include <gtest/gtest.h>

#include "chorale/autograd/leaf_test_util.h"
#include "chorale/base/error.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

TEST(InPlace, HistoryFollowsTheWrite) {
  const Tensor x = leaf({2, 3});
  const Tensor y = mul(x, 1);
  add_(y, 5);
  mul_(y, 4);
  backward(sum(y));
  EXPECT_EQ(values(gradient(x)), (Values{4, 4}));
}

TEST(InPlace, AnOpThatSavesItsOutputMayRunInPlace) {
  const Tensor x = leaf({0.5, -1});
  const Tensor y = mul(x, 2);
  exp_(y);
  backward(sum(y));
  const Values got = values(gradient(x));
  EXPECT_DOUBLE_EQ(got[0], 2 * std::exp(1.0));
  EXPECT_DOUBLE_EQ(got[1], 2 * std::exp(-2.0));
}

TEST(InPlace, AnOverwrittenValueThatAGradientNeedsIsNamed) {
  const Tensor x = leaf({2, 3});
  const Tensor y = mul(x, 2);
  const Tensor z = mul(y, y);
  add_(y, 1);
  try {
    backward(sum(z));
    FAIL() << "a wrong gradient was computed";
  } catch (const StateError& error) {
    const std::string text = error.what();
    for (const char* part : {"backward of mul", "version 0", "version 1", "add", "f64 [2]"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }
}

TEST(InPlace, ALeafThatRequiresAGradientIsProtected) {
  const Tensor x = leaf({2, 3});
  EXPECT_THROW(add_(x, 1), StateError);
  EXPECT_THROW(zero_(narrow(x, 0, 0, 1)), StateError);
  EXPECT_EQ(values(x), (Values{2, 3}));
  const NoGrad quiet;
  add_(x, 1);
  EXPECT_EQ(values(x), (Values{3, 4}));
}

TEST(InPlace, AWriteThroughAViewChangesTheHistoryOfItsBase) {
  const Tensor x = leaf({1, 2, 3});
  const Tensor y = mul(x, 1);
  const Tensor middle = narrow(y, 0, 1, 1);
  mul_(middle, 10);
  EXPECT_EQ(values(y), (Values{1, 20, 3}));
  backward(sum(mul(y, Tensor::from({1.0, 2.0, 3.0}, {3}))));
  EXPECT_EQ(values(gradient(x)), (Values{1, 20, 3}));
}

TEST(InPlace, AnotherViewOfTheSameBaseSeesTheWrite) {
  const Tensor x = leaf({1, 2, 3, 4});
  const Tensor y = mul(x, 1);
  const Tensor left = narrow(y, 0, 0, 2), square = view(y, {2, 2});
  mul_(left, 10);
  backward(sum(mul(square, square)));  // 100 x^2 on the left, x^2 on the right
  EXPECT_EQ(values(gradient(x)), (Values{200, 400, 6, 8}));
}

TEST(InPlace, AViewOfAViewIsReplayedStepByStep) {
  const Tensor x = leaf({1, 2, 3, 4, 5, 6});
  const Tensor y = mul(x, 1);
  const Tensor column = select(view(y, {2, 3}), 1, 2);  // elements 2 and 5
  mul_(column, column);
  EXPECT_EQ(values(y), (Values{1, 2, 9, 4, 5, 36}));
}

TEST(InPlace, AnOpWhoseGradientNeedsTheOverwrittenInputKeepsIt) {
  struct Case {
    const char* name;
    const Tensor& (*in_place)(const Tensor& x);
    Tensor (*plain)(const Tensor& x);
  };
  static const Tensor factor = Tensor::from({3.0, -2.0}, {2});
  const Case cases[] = {
      {"abs", [](const Tensor& x) -> const Tensor& { return abs_(x); }, [](const Tensor& x) { return abs(x); }},
      {"square", [](const Tensor& x) -> const Tensor& { return square_(x); },
       [](const Tensor& x) { return square(x); }},
      {"log", [](const Tensor& x) -> const Tensor& { return log_(x); }, [](const Tensor& x) { return log(x); }},
      {"sin", [](const Tensor& x) -> const Tensor& { return sin_(x); }, [](const Tensor& x) { return sin(x); }},
      {"silu", [](const Tensor& x) -> const Tensor& { return silu_(x); }, [](const Tensor& x) { return silu(x); }},
      {"gelu", [](const Tensor& x) -> const Tensor& { return gelu_(x); }, [](const Tensor& x) { return gelu(x); }},
      {"pow", [](const Tensor& x) -> const Tensor& { return pow_(x, 3); }, [](const Tensor& x) { return pow(x, 3); }},
      {"clamp", [](const Tensor& x) -> const Tensor& { return clamp_(x, 0.6); },
       [](const Tensor& x) { return clamp(x, 0.6); }},
      {"mul by a constant", [](const Tensor& x) -> const Tensor& { return mul_(x, factor); },
       [](const Tensor& x) { return mul(x, factor); }},
      {"mul by itself", [](const Tensor& x) -> const Tensor& { return mul_(x, x); },
       [](const Tensor& x) { return mul(x, x); }},
      {"div", [](const Tensor& x) -> const Tensor& { return div_(x, factor); },
       [](const Tensor& x) { return div(x, factor); }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    const Tensor x = leaf({0.5, 2}), other = leaf({0.5, 2});
    const Tensor y = mul(x, 1), expected = each.plain(mul(other, 1));
    each.in_place(y);
    EXPECT_EQ(values(y), values(expected));
    // Second derivatives too: what was kept has its place in the graph.
    const Tensor first = grad({sum(y)}, {x}, {.create_graph = true})[0];
    const Tensor expected_first = grad({sum(expected)}, {other}, {.create_graph = true})[0];
    EXPECT_EQ(values(first), values(expected_first));
    if (!requires_grad(expected_first)) continue;
    const Tensor second = grad({sum(first)}, {x}, {.allow_unused = true})[0];
    const Tensor expected_second = grad({sum(expected_first)}, {other}, {.allow_unused = true})[0];
    ASSERT_EQ(second.defined(), expected_second.defined());
    if (second.defined()) {
      EXPECT_EQ(values(second), values(expected_second));
    }
  }
}

TEST(InPlace, BothFactorsOfAProductInPlaceGetTheirGradient) {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  const Tensor y = mul(x, 1);
  mul_(y, w);
  backward(sum(y));
  EXPECT_EQ(values(gradient(x)), (Values{3, 4}));
  EXPECT_EQ(values(gradient(w)), (Values{1, 2}));
}

TEST(InPlace, AViewInPlaceKeepsWhatItOverwrites) {
  const Tensor x = leaf({1, 2});
  const Tensor y = mul(x, 1);
  const Tensor part = narrow(y, 0, 1, 1);
  mul_(part, part);
  EXPECT_EQ(values(y), (Values{1, 4}));
  backward(sum(y));
  EXPECT_EQ(values(gradient(x)), (Values{1, 4}));
}

TEST(InPlace, CopyingAParameterIntoAPlainTensorGivesItAHistory) {
  const Tensor w = leaf({5, 6});
  const Tensor buffer = zeros({4}, DType::kF64);
  copy_(narrow(buffer, 0, 1, 2), w);
  EXPECT_TRUE(requires_grad(buffer));
  backward(sum(mul(buffer, Tensor::from({1.0, 2.0, 3.0, 4.0}, {4}))));
  EXPECT_EQ(values(gradient(w)), (Values{2, 3}));
}

TEST(InPlace, OverwritingWithAConstantCutsTheGradient) {
  const Tensor x = leaf({1, 2, 3});
  const Tensor y = mul(x, 2);
  zero_(narrow(y, 0, 2, 1));
  backward(sum(y));
  EXPECT_EQ(values(gradient(x)), (Values{2, 2, 0}));
}

TEST(InPlace, WritesToPlainTensorsRecordNothing) {
  const Tensor x = zeros({3}, DType::kF64);
  fill_(narrow(x, 0, 0, 2), 1);
  EXPECT_FALSE(requires_grad(x));
  EXPECT_EQ(x.storage()->version(), 1u);
}

TEST(InPlace, NoReferenceCycleKeepsATensorAlive) {
  const Tensor w = leaf({1});
  base::Intrusive<Storage> storage;
  {
    const Tensor x = mul(w, 2);
    storage = x.storage();
    const Tensor y = mul(x, x);  // saves x
    add_(x, y);                  // x now depends on y
  }
  EXPECT_EQ(storage->use_count(), 1);
}

TEST(InPlace, SecondDerivativesThroughAWriteIntoAView) {
  const Tensor x = leaf({1, 2});
  const Tensor y = mul(mul(x, x), x);
  mul_(narrow(y, 0, 0, 1), 10);
  const Tensor g = grad({sum(y)}, {x}, {.create_graph = true})[0];
  EXPECT_EQ(values(g), (Values{30, 12}));
  EXPECT_EQ(values(grad({sum(g)}, {x})[0]), (Values{60, 12}));
}

TEST(Inference, ItsTensorsCannotBeSavedForBackward) {
  const Tensor w = leaf({1});
  Tensor y;
  {
    const Inference scope;
    y = mul(w, 3);
  }
  EXPECT_FALSE(requires_grad(y));
  EXPECT_THROW(mul(w, y), StateError);
  EXPECT_EQ(values(add(w, y)), (Values{4}));  // nothing of it is saved
}

TEST(Views, ALongChainOfViewsNeedsNoStack) {
  const Tensor x = leaf({1, 2});
  Tensor y = mul(x, 1);
  for (int i = 0; i < 200'000; ++i) y = view(y, {2});
  backward(sum(y));
  EXPECT_EQ(values(gradient(x)), (Values{1, 1}));
}

}  // namespace
}  // namespace chorale
