// Compiled functions: what they promise whatever the ops are. (The table tests go through the ops.)
#include "chorale/api/compile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "chorale/api/compile_test_util.h"
#include "chorale/base/error.h"

namespace chorale {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class BothContracts : public testing::TestWithParam<bool> {
 protected:
  CompileOptions options() const { return {.whole_graph = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Compile, BothContracts, testing::Bool(),
                         [](const auto& row) { return row.param ? "Whole" : "Segmented"; });

TEST_P(BothContracts, CompilesOnceAndGivesNewTensorsEveryTime) {
  auto f = compile([](const Tensor& x) { return relu(sub(x, 2)); }, options());
  const Tensor a = f(counted({4})), b = f(counted({4}, 1));
  EXPECT_EQ(values(a), (Values{0, 0, 0, 1}));
  EXPECT_EQ(values(b), (Values{0, 0, 1, 2}));
  EXPECT_EQ(explain(f).compiles, 1);
  EXPECT_EQ(explain(f).runs, 2);
}

TEST_P(BothContracts, WritesInPlaceReachTheCallersTensors) {
  const Tensor state = zeros({3});
  auto f = compile(
      [&](const Tensor& x) {
        add_(state, x);
        mul_(x, 2);
        return add(state, x);
      },
      options());
  for (int i = 1; i <= 3; ++i) {
    const Tensor x = ones({3});
    EXPECT_EQ(values(f(x)), Values(3, static_cast<float>(i + 2)));
    EXPECT_EQ(values(state), Values(3, static_cast<float>(i)));
    EXPECT_EQ(values(x), Values(3, 2));
  }
  EXPECT_EQ(explain(f).compiles, 1);
}

TEST_P(BothContracts, AViewOfWhatIsWrittenShowsTheNewValue) {
  auto f = compile(
      [](const Tensor& x) {
        const Tensor y = add(x, 0), row = select(y, 0, 1), columns = t(y);
        fill_(row, 7);     // through one view
        add_(columns, 1);  // through another
        return std::vector<Tensor>{y, mul(row, 10), add(columns, 0)};
      },
      options());
  for (int i = 0; i < 2; ++i) {
    const std::vector<Tensor> out = f(counted({2, 3}));
    EXPECT_EQ(values(out[0]), (Values{1, 2, 3, 8, 8, 8}));
    EXPECT_EQ(values(out[1]), (Values{80, 80, 80}));
    EXPECT_EQ(values(out[2]), (Values{1, 8, 2, 8, 3, 8}));
  }
}

TEST_P(BothContracts, ArgumentsThatShareMemorySeeEachOthersWrites) {
  auto f = compile(
      [](const Tensor& a, const Tensor& b) {
        add_(a, 10);
        return add(b, 0);
      },
      options());
  for (int i = 0; i < 2; ++i) {
    const Tensor all = counted({5});
    EXPECT_EQ(values(f(narrow(all, 0, 0, 3), narrow(all, 0, 2, 3))), (Values{12, 3, 4}));
    EXPECT_EQ(values(all), (Values{10, 11, 12, 3, 4}));
  }
  EXPECT_EQ(explain(f).compiles, 1);
  // Apart from each other they are another case.
  EXPECT_EQ(values(f(counted({3}), counted({3}))), (Values{0, 1, 2}));
  EXPECT_EQ(explain(f).compiles, 2);
}

TEST_P(BothContracts, OneTensorGivenTwiceIsOneInput) {
  auto f = compile([](const Tensor& a, const Tensor& b) { return mul(a, b); }, options());
  const Tensor x = counted({3});
  EXPECT_EQ(values(f(x, x)), (Values{0, 1, 4}));
  EXPECT_EQ(graph::parse(explain(f).graphs[0].text).inputs.size(), 1u);
  EXPECT_EQ(values(f(x, ones({3}))), (Values{0, 1, 2}));
  EXPECT_EQ(explain(f).compiles, 2);
}

TEST_P(BothContracts, AnInputMayBeAnOutput) {
  auto f = compile([](const Tensor& x) { return std::vector<Tensor>{x, t(x), add_(x, 1)}; }, options());
  for (int i = 0; i < 2; ++i) {
    const Tensor x = counted({2, 2});
    const std::vector<Tensor> out = f(x);
    EXPECT_TRUE(out[0].is(x));
    EXPECT_EQ(out[1].storage(), x.storage());
    EXPECT_EQ(values(out[1]), (Values{1, 3, 2, 4}));
    EXPECT_TRUE(out[2].is(x));
  }
}

// It was a crash: there was nothing to call.
TEST_P(BothContracts, WhatWasMovedFromIsStillTheFunction) {
  auto f = compile([](const Tensor& x) { return add(x, 1); }, options());
  const auto g = std::move(f);
  EXPECT_EQ(values(g(counted({2}))), (Values{1, 2}));
  EXPECT_EQ(values(f(counted({2}))), (Values{1, 2}));  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(explain(f).compiles, 1);                   // NOLINT(bugprone-use-after-move)
}

TEST_P(BothContracts, RandomNumbersAreThoseOfEager) {
  const auto program = [](const Tensor& x) { return add(dropout(x, 0.5), uniform({64})); };
  const auto run = [&](const auto& f) {
    manual_seed(7);
    std::vector<Values> all;
    all.reserve(3);
    for (int i = 0; i < 3; ++i) all.push_back(values(f(ones({64}))));
    return all;
  };
  auto f = compile(program, options());
  const auto eager = run(program), compiled = run(f);
  EXPECT_EQ(eager, compiled);
  EXPECT_NE(compiled[0], compiled[1]);
  EXPECT_EQ(explain(f).compiles, 1);
}

TEST_P(BothContracts, GradientsFlowThroughAsIfItWereOneOp) {
  const Tensor w = set_requires_grad(counted({3, 2}));
  const auto program = [&](const Tensor& x) { return tanh(matmul(x, w)); };
  auto f = compile(program, options());
  const auto gradients = [&](const auto& function) {
    const Tensor x = set_requires_grad(full({2, 3}, 0.1));
    set_gradient(w, {});
    backward(sum(square(function(mul(x, 2)))));
    return std::pair(values(gradient(w)), values(gradient(x)));
  };
  const auto eager = gradients(program);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(gradients(f), eager);
  EXPECT_EQ(explain(f).compiles, 1);
}

TEST_P(BothContracts, ABackwardMayBeInside) {
  const Tensor w = set_requires_grad(counted({2, 2}));
  const auto program = [&](const Tensor& x) {
    set_gradient(w, {});
    const Tensor loss = sum(square(matmul(x, w)));
    backward(loss);
    return loss;
  };
  const Tensor x = counted({2, 2});
  program(x);
  const Values expected = values(gradient(w));
  auto f = compile(program, options());
  for (int i = 0; i < 3; ++i) {
    set_gradient(w, {});
    f(x);
    EXPECT_EQ(values(gradient(w)), expected);
  }
  EXPECT_EQ(explain(f).compiles, 1);
}

TEST_P(BothContracts, GradientsAddUpWhereNobodyClearsThem) {
  const Tensor w = set_requires_grad(ones({2}));
  auto f = compile([&] { backward(sum(mul(w, 3))); }, options());
  for (int i = 1; i <= 4; ++i) {
    f();
    EXPECT_EQ(values(gradient(w)), Values(2, static_cast<float>(3 * i)));
  }
  EXPECT_EQ(explain(f).compiles, 2);  // without a gradient, and with one
}

// SGD with momentum in plain ops: states are made in the first step.
TEST_P(BothContracts, AWholeStepUpdatesParametersAndStates) {
  const auto train = [&](bool compiled) {
    const Tensor w = set_requires_grad(counted({2, 2}, 1)), lr = full({}, 0.1);
    Tensor momentum;
    const auto step = [&](const Tensor& x) {
      set_gradient(w, {});
      const Tensor loss = mean(square(matmul(x, w)));
      backward(loss);
      const NoGrad quiet;
      if (!momentum.defined()) momentum = zeros_like(w);
      mul_(momentum, 0.9);
      add_(momentum, gradient(w));
      sub_(w, mul(momentum, lr));
      return loss;
    };
    auto f = compile(step, options());
    Values losses;
    for (int i = 0; i < 6; ++i) {
      fill_(lr, 0.1 / (i + 1));  // a schedule: an input, not a constant
      const Tensor x = counted({3, 2}, static_cast<float>(i));
      losses.push_back((compiled ? f(x) : step(x)).item<float>());
    }
    if (compiled) {
      EXPECT_LE(explain(f).compiles, 2);
    }
    for (const float value : values(w)) losses.push_back(value);
    return losses;
  };
  EXPECT_EQ(train(true), train(false));
}

TEST_P(BothContracts, ScopesEndWhereTheyEnd) {
  const Tensor w = set_requires_grad(ones({4, 4}));
  auto f = compile(
      [&](const Tensor& x) {
        Tensor y;
        {
          const Autocast scope(DType::kBF16);
          y = matmul(x, w);
        }
        Tensor z;
        {
          const NoGrad quiet;
          z = matmul(x, w);
        }
        return std::vector<Tensor>{y, z, matmul(x, w)};
      },
      options());
  for (int i = 0; i < 2; ++i) {
    const auto out = f(ones({2, 4}));
    EXPECT_EQ(out[0].dtype(), DType::kBF16);
    EXPECT_EQ(out[2].dtype(), DType::kF32);
    EXPECT_TRUE(requires_grad(out[0]));
    EXPECT_FALSE(requires_grad(out[1]));
    EXPECT_TRUE(requires_grad(out[2]));
  }
}

TEST_P(BothContracts, CallsFromSeveralThreadsDoNotMeet) {
  auto f = compile([](const Tensor& x) { return sum(exp(mul(x, 0.01))); }, options());
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const Tensor x = full({100}, t);
        EXPECT_EQ(f(x).item<float>(), sum(exp(mul(x, 0.01))).item<float>());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(BothContracts, ACompiledFunctionInsideOfAnotherIsPartOfIt) {
  auto inner = compile([](const Tensor& x) { return exp(x); }, options());
  auto outer = compile([&](const Tensor& x) { return mul(inner(neg(x)), 2); }, options());
  EXPECT_EQ(values(outer(zeros({2}))), (Values{2, 2}));
  EXPECT_EQ(explain(inner).compiles, 0);
  ASSERT_EQ(explain(outer).graphs.size(), 1u);
  EXPECT_EQ(explain(outer).graphs[0].ops, 3u);
}

TEST_P(BothContracts, AFailedCallLeavesTensorsAsTheyWere) {
  const Tensor state = ones({2});
  auto f = compile(
      [&](const Tensor& x) {
        add_(state, 1);
        return matmul(x, x);
      },
      options());
  EXPECT_THROW(f(ones({2, 3})), InvalidArgument);
  EXPECT_EQ(values(state), (Values{1, 1}));
  EXPECT_EQ(values(f(ones({2, 2}))), (Values{2, 2, 2, 2}));
  EXPECT_EQ(values(state), (Values{2, 2}));
}

// Nothing without bytes is left behind, whoever holds it.
TEST_P(BothContracts, WhatTheHostKeepsHasBytesAfterwards) {
  Tensor kept, view;
  auto f = compile(
      [&](const Tensor& x) {
        kept = mul(x, 2);
        view = select(kept, 0, 1);
        return add(kept, 1);
      },
      options());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(values(f(counted({3}, static_cast<float>(i))))[1], 2.0f * static_cast<float>(i + 1) + 1);
    EXPECT_EQ(values(kept)[1], 2.0f * static_cast<float>(i + 1));
    EXPECT_EQ(view.item<float>(), 2.0f * static_cast<float>(i + 1));
    EXPECT_FALSE(kept.is_traced());
  }
}

TEST_P(BothContracts, AFunctionWithoutTensorWorkMakesNoGraph) {
  auto f = compile([](const Tensor& x) { return x; }, options());
  const Tensor x = ones({1});
  EXPECT_TRUE(f(x).is(x));
  for (const auto& graph : explain(f).graphs) EXPECT_EQ(graph.ops, 0u);
}

// ---- segmented

TEST(Compile, AnEmptyFunctionIsAnErrorWhereItIsGiven) {
  EXPECT_THROW(compile(std::function<Tensor(const Tensor&)>()), InvalidArgument);
  EXPECT_EQ(compile(std::function([](const Tensor& x) { return x * 2; }))(ones({1})).item<float>(), 2);
}

TEST(Segmented, AskingForAValueIsABreakThatIsCounted) {
  auto f = compile([](const Tensor& x) {
    const Tensor y = add(x, 1);
    const float first = y.item<float>();
    std::ostringstream text;
    text << mul(y, 2);
    const Tensor z = mul(y, first);
    (void)z.raw();
    return neg(z);
  });
  for (int i = 0; i < 2; ++i) EXPECT_EQ(f(full({1}, i)).item<float>(), -static_cast<float>((i + 1) * (i + 1)));
  const compiled::Report report = explain(f);
  EXPECT_EQ(report.breaks, (std::vector<std::string>{"item()", "printing", "a pointer to its bytes", "item()",
                                                     "printing", "a pointer to its bytes"}));
  // The stretch behind item() has the number in it: it is another one in the second call.
  EXPECT_EQ(report.compiles, 5);
  EXPECT_THAT(report.recompiles, testing::ElementsAre(HasSubstr("call 0 is mul_scalar, expected mul_scalar")));
  EXPECT_THAT(report.text(), HasSubstr("ends at: item()"));
}

TEST(Segmented, HostCodeRunsInEveryCall) {
  int calls = 0;
  auto f = compile([&](const Tensor& x) {
    ++calls;
    return add(x, 1);
  });
  for (int i = 0; i < 3; ++i) f(ones({2}));
  EXPECT_EQ(calls, 3);
}

TEST(Segmented, GradientsCrossBreaks) {
  const Tensor w = set_requires_grad(counted({3}, 1));
  const auto program = [&](const Tensor& x) {
    const Tensor y = mul(x, w);
    const bool large = sum(y).item<float>() > 1;
    return sum(large ? square(y) : y);
  };
  auto f = compile(program);
  for (const double at : {0.01, 2.0, 0.01, 3.0}) {
    const Tensor x = full({3}, at);
    set_gradient(w, {});
    backward(program(x));
    const Values expected = values(gradient(w));
    set_gradient(w, {});
    backward(f(x));
    EXPECT_EQ(values(gradient(w)), expected);
  }
  EXPECT_EQ(explain(f).compiles, 3);  // up to the break, and either side of it
}

TEST(Segmented, AShapeThatDependsOnDataIsABreak) {
  auto f = compile([](const Tensor& x) { return add(nonzero(mul(x, 1)), 1); });
  EXPECT_EQ(f(Tensor::from<float>({0, 3, 0, 4}, {4})).to_vector<int64_t>(), (std::vector<int64_t>{2, 4}));
  EXPECT_THAT(explain(f).breaks, testing::ElementsAre(HasSubstr("nonzero: the shape of its result depends on data")));
}

TEST(Segmented, HooksOnGradientsInsideAreKept) {
  const Tensor w = set_requires_grad(ones({2}));
  int seen = 0;
  auto f = compile([&](const Tensor& x) {
    const Tensor y = mul(x, w);
    on_gradient(y, [&](const Tensor&) {
      ++seen;
      return Tensor{};
    });
    return sum(square(y));
  });
  for (int i = 1; i <= 2; ++i) {
    set_gradient(w, {});
    backward(f(full({2}, 3)));
    EXPECT_EQ(values(gradient(w)), (Values{18, 18}));
    EXPECT_EQ(seen, i);
  }
}

TEST(Segmented, RunsUncompiledBeyondTheMostVariants) {
  auto f = compile([](const Tensor& x) { return add(x, 1); }, {.dynamic = Dynamic::kNever, .most_variants = 2});
  for (int64_t n = 2; n < 7; ++n) EXPECT_EQ(values(f(zeros({n}))), Values(static_cast<size_t>(n), 1));
  EXPECT_EQ(explain(f).compiles, 2);
  EXPECT_EQ(explain(f).uncompiled, 3);
  EXPECT_EQ(values(f(zeros({2}))), Values(2, 1));
  EXPECT_EQ(explain(f).uncompiled, 3);
}

TEST(Segmented, BreakGraphIsABreakWithItsReason) {
  auto f = compile([](const Tensor& x) {
    const Tensor y = add(x, 1);
    break_graph("the host does something");
    return add(y, 1);
  });
  EXPECT_EQ(values(f(zeros({1}))), Values{2});
  EXPECT_EQ(explain(f).break_reasons(), std::vector<std::string>{"the host does something"});
}

}  // namespace
}  // namespace chorale
