// Compiled functions at several sizes: what becomes a symbol, what stays fixed, and what is compiled again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/api/compile.h"
#include "chorale/api/compile_test_util.h"
#include "chorale/base/error.h"
#include "chorale/graph/split.h"
#include "chorale/graph/symbolic.h"

namespace chorale {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

class DynamicSizes : public testing::TestWithParam<bool> {
 protected:
  CompileOptions options() const { return {.whole_graph = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Compile, DynamicSizes, testing::Bool(),
                         [](const auto& row) { return row.param ? "Whole" : "Segmented"; });

// A function of a batch, its values and gradients, against the same without compiling, at each of the sizes.
template <class F>
void expect_equal_at(const F& program, const Tensor& w, const std::vector<int64_t>& batches, auto& compiled) {
  for (const int64_t n : batches) {
    SCOPED_TRACE(n);
    const auto run = [&](auto& function) {
      set_gradient(w, {});
      const Tensor x = set_requires_grad(mul(counted({n, 3}, 1), 0.1));
      const Tensor loss = function(x);
      backward(sum(square(loss)));
      return std::vector<Values>{values(loss), values(gradient(w)), values(gradient(x))};
    };
    EXPECT_EQ(run(compiled), run(program));
  }
}

TEST_P(DynamicSizes, TheSecondSizeIsCompiledWithASymbolAndTheThirdNotAtAll) {
  const Tensor w = set_requires_grad(mul(counted({3, 4}), 0.25));
  const auto program = [&](const Tensor& x) {
    const Tensor h = relu(matmul(reshape(x, {x.size(0), 3}), w));
    return mean(mul(softmax(h, 1), expand(mean(h, {1}, true), h.sizes())));
  };
  int graphs = 0;
  CompileOptions counting = options();
  counting.backend = [&graphs, run = compiled::joint_eager()](graph::Graph graph, const compiled::GraphInfo& info) {
    ++graphs;
    return run(std::move(graph), info);
  };
  auto f = compile(program, counting);
  expect_equal_at(program, w, {4}, f);
  expect_equal_at(program, w, {6}, f);
  EXPECT_EQ(explain(f).compiles, 2);
  const int before = graphs;
  expect_equal_at(program, w, {8, 5, 4, 6, 8, 117}, f);
  const compiled::Report report = explain(f);
  EXPECT_EQ(report.compiles, 2);
  EXPECT_EQ(report.resizes, 3);
  EXPECT_EQ(graphs, before);
  EXPECT_EQ(report.recompiles.size(), 1u);
  EXPECT_THAT(report.fixed, IsEmpty());
  EXPECT_THAT(report.graphs.back().text, HasSubstr("graph[s0=6]("));
  EXPECT_THAT(report.graphs.back().text, HasSubstr(": f32[s0, 3]"));
  EXPECT_EQ(graph::SymbolicText::parse(report.graphs.back().text).text(), report.graphs.back().text);
  graph::verify(graph::parse(report.graphs.back().text));
  if (GetParam()) {
    EXPECT_THAT(report.guards, Contains("arg 0.size(0) = s0, at least 2"));
  }
}

TEST_P(DynamicSizes, ZeroAndOneAreCompiledByThemselves) {
  auto f = compile([](const Tensor& x) { return add(mul(x, 2), 1); }, options());
  for (const int64_t n : {0, 1, 5, 7, 9, 1, 0}) {
    EXPECT_EQ(values(f(ones({n, 2}))), Values(static_cast<size_t>(2 * n), 3)) << n;
  }
  EXPECT_EQ(explain(f).compiles, 4);  // 0, 1, 5, and the symbol at 7
  EXPECT_EQ(explain(f).resizes, 1);
}

TEST_P(DynamicSizes, ABranchOnASizeIsAnotherGraphAndNeverAWrongOne) {
  const auto program = [](const Tensor& x) {
    const Tensor y = x.size(0) > 10 ? neg(x) : mul(x, 3);
    return x.size(0) % 4 == 0 ? add(y, 1) : y;
  };
  auto f = compile(program, options());
  for (const int64_t n : {2, 3, 4, 5, 8, 11, 12, 13, 16, 17, 9, 12, 2}) {
    EXPECT_EQ(values(f(counted({n}, 1))), values(program(counted({n}, 1)))) << n;
  }
  const compiled::Report report = explain(f);
  // Four paths, two sizes of each.
  EXPECT_EQ(report.compiles, 8);
  EXPECT_THAT(report.recompiles, Contains(HasSubstr("neg")));
}

TEST_P(DynamicSizes, SizesInAttributesAndFactorsFollow) {
  const auto program = [](const Tensor& x) {
    const int64_t n = x.size(0), half = n / 2;
    const Tensor square_ = matmul(x, t(x));                                   // n * n
    const Tensor flat = reshape(square_, {n * n});                            // a product
    const Tensor padded = cat({narrow(x, 0, 0, half), x, zeros({3, 2})}, 0);  // n / 2 + n + 3
    const Tensor spread = mul(reshape(expand(unsqueeze(x, 0), {2, n, 2}), {2 * n, 2}), 1.0 / static_cast<double>(n));
    return std::vector<Tensor>{sum(flat), padded, spread, full({n, 1}, static_cast<double>(n))};
  };
  auto f = compile(program, options());
  for (const int64_t n : {4, 6, 10, 7, 31}) {
    const std::vector<Tensor> is = f(counted({n, 2}, 1)), expected = program(counted({n, 2}, 1));
    for (size_t i = 0; i < is.size(); ++i) {
      EXPECT_EQ(is[i].sizes(), expected[i].sizes()) << n << ' ' << i;
      EXPECT_EQ(values(is[i]), values(expected[i])) << n << ' ' << i;
    }
  }
  EXPECT_LE(explain(f).compiles, 3);
}

TEST_P(DynamicSizes, SizesThatChangedTogetherShareASymbolUntilTheyPart) {
  auto f = compile([](const Tensor& a, const Tensor& b) { return std::vector<Tensor>{neg(a), mul(b, 2)}; }, options());
  const auto at = [&](int64_t n, int64_t m) {
    const std::vector<Tensor> out = f(ones({n}), ones({m}));
    EXPECT_EQ(values(out[0]), Values(static_cast<size_t>(n), -1));
    EXPECT_EQ(values(out[1]), Values(static_cast<size_t>(m), 2));
  };
  at(4, 4);
  at(5, 5);
  at(6, 6);
  EXPECT_EQ(explain(f).compiles, 2);
  EXPECT_THAT(explain(f).graphs.back().text, testing::Not(HasSubstr("s1")));
  at(6, 7);
  EXPECT_EQ(explain(f).compiles, 3);
  EXPECT_THAT(explain(f).recompiles.back(), HasSubstr("arg 1.size(0) is 7, expected that of arg 0.size(0), 6"));
  EXPECT_THAT(explain(f).graphs.back().text, HasSubstr("s1=7"));
  at(9, 3);
  at(3, 9);
  EXPECT_EQ(explain(f).compiles, 3);
}

TEST_P(DynamicSizes, AMarkedDimensionIsASymbolFromTheStart) {
  CompileOptions marked = options();
  marked.dynamic_dims = {{0, 1}};
  auto f = compile([](const Tensor& x, const Tensor& y) { return add(mul(x, 2), y); }, marked);
  for (const int64_t n : {5, 6, 9})
    EXPECT_EQ(values(f(ones({3, n}), ones({1}))), Values(static_cast<size_t>(3 * n), 3));
  EXPECT_EQ(explain(f).compiles, 1);
  EXPECT_EQ(explain(f).resizes, 2);
  EXPECT_THAT(explain(f).graphs[0].text, HasSubstr("f32[3, s0]"));
  f(ones({4, 9}), ones({1}));  // the other dimension is not marked
  EXPECT_EQ(explain(f).compiles, 2);
}

// Marked dimensions that happen to be equal are two symbols all the same.
TEST_P(DynamicSizes, MarkedDimensionsAreNotJoinedBecauseTheyAreEqual) {
  CompileOptions marked = options();
  marked.dynamic_dims = {{0, 0}, {1, 0}};
  auto f = compile([](const Tensor& a, const Tensor& b) { return std::vector<Tensor>{neg(a), mul(b, 2)}; }, marked);
  for (const auto& [n, m] : {std::pair<int64_t, int64_t>{5, 5}, {5, 7}, {4, 3}, {9, 9}}) {
    const std::vector<Tensor> out = f(ones({n}), ones({m}));
    EXPECT_EQ(values(out[0]), Values(static_cast<size_t>(n), -1));
    EXPECT_EQ(values(out[1]), Values(static_cast<size_t>(m), 2));
  }
  EXPECT_EQ(explain(f).compiles, 1);
}

TEST_P(DynamicSizes, AnIntegerArgumentMayBeASymbol) {
  auto f = compile([](const Tensor& x, int64_t n) { return add(x, sum(ones({n}))); }, options());
  for (const int64_t n : {3, 3, 4, 7, 9}) EXPECT_EQ(values(f(zeros({5}), n)), Values(5, static_cast<float>(n))) << n;
  EXPECT_EQ(explain(f).compiles, 2);
}

TEST_P(DynamicSizes, NeverMeansThatEachSizeIsCompiled) {
  CompileOptions never = options();
  never.dynamic = Dynamic::kNever;
  auto f = compile([](const Tensor& x) { return add(x, 1); }, never);
  for (int64_t n = 2; n < 14; ++n) EXPECT_EQ(values(f(zeros({n}))), Values(static_cast<size_t>(n), 1));
  EXPECT_EQ(explain(f).compiles, 8);
  EXPECT_EQ(explain(f).uncompiled, 4);
}

TEST_P(DynamicSizes, AllStretchesTogetherHaveALimit) {
  CompileOptions few = options();
  few.dynamic = Dynamic::kNever;
  few.most_in_all = 3;
  auto f = compile([](const Tensor& x) { return add(x, 1); }, few);
  for (int64_t n = 2; n < 7; ++n) EXPECT_EQ(values(f(zeros({n}))), Values(static_cast<size_t>(n), 1));
  EXPECT_EQ(explain(f).compiles, 3);
  EXPECT_EQ(explain(f).uncompiled, 2);
}

TEST_P(DynamicSizes, RandomNumbersFollowTheSize) {
  const auto program = [](const Tensor& x) { return dropout(x, 0.5); };
  const auto run = [&](auto& function) {
    manual_seed(3);
    std::vector<Values> all;
    for (const int64_t n : {8, 12, 20, 33}) all.push_back(values(function(ones({n, 3}))));
    return all;
  };
  auto f = compile(program, options());
  EXPECT_EQ(run(f), run(program));
  EXPECT_EQ(explain(f).compiles, 2);
}

TEST_P(DynamicSizes, WritesAndViewsFollow) {
  const auto program = [](const Tensor& x) {
    const Tensor y = mul(x, 1);
    fill_(select(y, 0, x.size(0) - 1), 7);
    add_(narrow(t(y), 0, 0, 1), 1);
    mul_(x, 2);
    return y;
  };
  auto f = compile(program, options());
  for (const int64_t n : {3, 5, 4, 9}) {
    const Tensor a = counted({n, 2}), b = counted({n, 2});
    EXPECT_EQ(values(f(a)), values(program(b))) << n;
    EXPECT_EQ(values(a), values(b)) << n;
  }
  EXPECT_EQ(explain(f).compiles, 2);
}

// The second piece gets the tensor that the first put together, what it computed, and the size of both.
// spec: test_symbol_splitting
TEST(DynamicSizesAndBuckets, ASizeIsKnownToEveryPieceThatNeedsIt) {
  const Tensor w0 = set_requires_grad(uniform({512, 512}, -0.1, 0.1));
  const Tensor w1 = set_requires_grad(uniform({512, 512}, -0.1, 0.1));
  const auto program = [&](const Tensor& in) {
    const Tensor x = cat({in, in}, 0), y = matmul(x, w0);
    return add(x, matmul(y, w1));
  };
  const graph::ActiveDdp module;
  const graph::ActiveDdpScope active(module);
  auto f = compile(program, {.whole_graph = true, .dynamic = Dynamic::kAlways});
  const Tensor x = uniform({20, 512});
  EXPECT_EQ(values(f(x)), values(program(x)));
  const compiled::Report report = explain(f);
  EXPECT_EQ(report.compiles, 1);
  ASSERT_EQ(report.graphs.size(), 2u);
  for (const auto& graph : report.graphs) EXPECT_EQ(graph.bucket_bytes, 1 << 20);
  EXPECT_THAT(report.graphs[0].text, testing::StartsWith("graph[s0=20](%0: f32[s0, 512]"));
  EXPECT_THAT(report.graphs[1].text, testing::StartsWith("graph[s0=20]("));
  const graph::Graph second = graph::parse(report.graphs[1].text);
  EXPECT_EQ(second.inputs.size(), 3u);
  int joined = 0;
  for (const uint32_t input : second.inputs) joined += second.values[input].sizes == Shape{40, 512} ? 1 : 0;
  EXPECT_EQ(joined, 2) << report.graphs[1].text;
  EXPECT_THAT(report.fixed, testing::ElementsAre(HasSubstr("arg 0.size(1) must be 512")));
  // Other sizes flow through both pieces.
  const Tensor other = uniform({7, 512});
  EXPECT_EQ(values(f(other)), values(program(other)));
  EXPECT_EQ(explain(f).compiles, 1);
}

// ---- numbers that only running tells

struct LateSizes : testing::Test {
  const Tensor w0 = set_requires_grad(uniform({512, 512}, -0.1, 0.1));
  const Tensor w1 = set_requires_grad(uniform({512, 512}, -0.1, 0.1));
  const Tensor w2 = set_requires_grad(uniform({512, 512}, -0.1, 0.1));
  const Tensor x = uniform({20, 512});

  // Values and gradients of a program of x and of y, compiled and not, for several y; what was compiled.
  template <class F>
  compiled::Report expect_equal(const F& program, const std::vector<Tensor>& ys, int64_t cap = graph::kBucketBytes) {
    graph::ActiveDdp module;
    module.cap = cap;
    const graph::ActiveDdpScope active(module);
    auto f = compile(program, {.whole_graph = true, .dynamic = Dynamic::kAlways});
    for (const Tensor& y : ys) {
      const auto run = [&](const auto& function) {
        for (const Tensor& w : {w0, w1, w2}) set_gradient(w, {});
        const Tensor out = function(x, y);
        backward(mean(square(out)));
        return std::vector<Values>{values(out), values(gradient(w0)), values(gradient(w1))};
      };
      EXPECT_EQ(run(f), run(program));
    }
    EXPECT_EQ(explain(f).compiles, 1);
    EXPECT_THAT(explain(f).guards, Contains(HasSubstr("u0, known when it runs")));
    return explain(f);
  }
  static std::vector<Tensor> pairs() {
    return {Tensor::from<int64_t>({12, 13}, {2}), Tensor::from<int64_t>({5, 1}, {2}),
            Tensor::from<int64_t>({1, 0}, {2})};
  }
};

// spec: test_unbacked_symbol_splitting_direct
TEST_F(LateSizes, ANumberLeavesThePieceThatReadsItAndEntersTheNext) {
  const compiled::Report report = expect_equal(
      [&](const Tensor& in, const Tensor& y) {
        const int64_t u0 = late_item(select(y, 0, 0));
        const Tensor both = cat({in, in}, 0), z = matmul(both, w0);
        return mul(add(both, matmul(z, w1)), u0);
      },
      pairs());
  ASSERT_EQ(report.graphs.size(), 2u);
  EXPECT_THAT(report.graphs[0].text, HasSubstr("i64[]"));
  EXPECT_THAT(report.graphs[1].text, testing::StartsWith("graph[u0="));
}

// spec: test_unbacked_symbol_splitting_indirect
TEST_F(LateSizes, ATensorOfThatLengthBringsItAlong) {
  const compiled::Report report = expect_equal(
      [&](const Tensor& in, const Tensor& y) {
        const Tensor a = ones({late_item(select(y, 0, 0))});
        const Tensor both = cat({in, in}, 0), z = matmul(both, w0);
        const Tensor v = matmul(z, w1), count = sum(a);
        return mul(add(both, v), count);
      },
      pairs());
  ASSERT_EQ(report.graphs.size(), 2u);
  EXPECT_THAT(report.graphs[0].text, HasSubstr("f32[u0] = full"));
  EXPECT_THAT(report.graphs[1].text, testing::AllOf(testing::StartsWith("graph[u0="), HasSubstr(": f32[u0]")));
}

// spec: test_unbacked_symbol_splitting_torture_multi
TEST_F(LateSizes, TheLastPieceGetsTheNumberFromTheFirstAndTheTensorFromTheSecond) {
  const compiled::Report report = expect_equal(
      [&](const Tensor& in, const Tensor& y) {
        const int64_t u0 = late_item(select(y, 0, 0));
        const Tensor both = cat({in, in}, 0), z = matmul(both, w0);
        const Tensor v = matmul(z, w1), a = ones({u0});
        const Tensor last = matmul(v, w2), count = sum(a);
        return mul(add(both, last), count);
      },
      pairs(), 1 << 20);
  ASSERT_EQ(report.graphs.size(), 3u);
  EXPECT_THAT(report.graphs[0].text, testing::Not(HasSubstr("full")));
  EXPECT_THAT(report.graphs[1].text, HasSubstr("f32[u0] = full"));
  EXPECT_THAT(report.graphs[2].text, testing::AllOf(testing::StartsWith("graph[u0="), HasSubstr(": f32[u0]")));
}

// spec: test_unbacked_symbol_splitting_no_binding
TEST_F(LateSizes, ALengthThatNothingReadsIsKnownWhereItIsMade) {
  const compiled::Report report = expect_equal(
      [&](const Tensor& in, const Tensor& y) {
        const Tensor found = nonzero(y);
        const Tensor both = cat({in, in}, 0), z = matmul(both, w0);
        const Tensor v = matmul(z, w1), places = to(sum(add(found, 1)), DType::kF32);
        return mul(add(both, v), places);
      },
      {Tensor::from<float>({0, 12, 0, 11}, {4}), ones({4}), zeros({4})});
  ASSERT_EQ(report.graphs.size(), 2u);
  EXPECT_THAT(report.graphs[0].text, HasSubstr("i64[u0, 1] = nonzero"));
}

TEST_F(LateSizes, ABranchOnSuchANumberIsAnError) {
  auto f = compile([](const Tensor& y) { return late_item(select(y, 0, 0)) > 4500 ? neg(y) : mul(y, 2); },
                   {.whole_graph = true});
  EXPECT_THAT(message_of([&] { f(pairs()[0]); }),
              testing::AllOf(HasSubstr("does something else"), HasSubstr("not in decisions"), HasSubstr("neg")));
  EXPECT_EQ(late_item(Tensor::from<int64_t>({7}, {1})), 7);
  auto segmented =
      compile([](const Tensor& y) { return late_item(select(add(y, 0), 0, 0)) > 10 ? neg(y) : mul(y, 2); });
  EXPECT_EQ(segmented(pairs()[0]).to_vector<int64_t>(), (std::vector<int64_t>{-12, -13}));
  EXPECT_EQ(explain(segmented).breaks.size(), 1u);
}

}  // namespace
}  // namespace chorale
