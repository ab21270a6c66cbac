// Whole graphs: no host code runs again, and what would need it is an error that says what to do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "chorale/api/compile.h"
#include "chorale/api/compile_test_util.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/device/allocator.h"
#include "chorale/graph/host_value.h"
#include "chorale/testing/environment_test_util.h"

namespace chorale {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(WholeGraph, HostCodeDoesNotRunAgain) {
  int calls = 0;
  auto f = compile(
      [&](const Tensor& x) {
        ++calls;
        return add(x, 1);
      },
      {.whole_graph = true});
  for (int i = 0; i < 3; ++i) f(ones({2}));
  EXPECT_EQ(calls, 1);
}

TEST(WholeGraph, AskingForAValueIsAnErrorThatSaysWhatToDo) {
  const std::string line = concat("compile_whole_test.cc:", __LINE__ + 1);
  auto of_traced = compile([](const Tensor& x) { return mul(x, add(x, 1).item<float>()); }, {.whole_graph = true});
  EXPECT_THAT(message_of([&] { of_traced(ones({1})); }),
              AllOf(HasSubstr("item()"), HasSubstr("compile without whole_graph"), HasSubstr(line)));
  auto of_argument = compile([](const Tensor& x) { return mul(x, x.item<float>()); }, {.whole_graph = true});
  const Tensor x = ones({1});
  EXPECT_THAT(message_of([&] { of_argument(x); }), HasSubstr("item()"));
  EXPECT_EQ(x.item<float>(), 1);  // outside it can be had again
  auto dynamic = compile([](const Tensor& y) { return masked_select(y, gt(y, 0)); }, {.whole_graph = true});
  EXPECT_THAT(message_of([&] { dynamic(ones({2})); }), HasSubstr("depends on data"));
}

TEST(WholeGraph, ATensorOfATraceThatFailedSaysWhatMadeItAndWhatToDo) {
  Tensor kept;
  auto f = compile(
      [&](const Tensor& x) {
        kept = mul(x, x);
        return mul(x, add(x, 1).item<float>());
      },
      {.whole_graph = true});
  EXPECT_THROW(f(ones({1})), StateError);
  EXPECT_THAT(message_of([&] { kept.item<float>(); }), AllOf(HasSubstr("made by mul"), HasSubstr("return the tensor")));
}

TEST(WholeGraph, ATensorFromHostDataIsAnErrorUnlessItIsMarked) {
  auto f = compile([](const Tensor& x) { return add(x, Tensor::from<float>({1, 2}, {2})); }, {.whole_graph = true});
  EXPECT_THAT(message_of([&] { f(ones({2})); }), AllOf(HasSubstr("host data"), HasSubstr("constant(x)")));
  auto marked = compile(
      [](const Tensor& x) {
        return add(x, constant(Tensor::from<float>({1, 2}, {2})));
      },
      {.whole_graph = true});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(values(marked(ones({2}))), (Values{2, 3}));
  EXPECT_EQ(explain(marked).compiles, 1);
}

TEST(WholeGraph, AGuardThatFailsIsNamed) {
  const Tensor w = ones({3});
  int64_t epoch = 0;
  auto f = compile([&](const Tensor& x, int64_t n) { return add(mul(x, w), n); },
                   {.whole_graph = true, .watch = {[&] { return epoch; }}});
  f(ones({2, 3}), 1);
  f(ones({4, 3}), 1);
  f(ones({4, 3}), 2);
  f(to(ones({4, 3}), DType::kF64), 2);
  set_data(w, zeros({3}));
  EXPECT_EQ(values(f(ones({1, 3}), 5)), Values(3, 5));
  epoch = 1;
  EXPECT_EQ(values(f(ones({1, 3}), 5)), Values(3, 5));
  {
    const NoGrad quiet;
    f(ones({1, 3}), 5);
  }
  const compiled::Report report = explain(f);
  EXPECT_EQ(report.compiles, 7);
  ASSERT_EQ(report.recompiles.size(), 6u);
  EXPECT_THAT(report.recompiles[0], HasSubstr("tensor 'arg 0' size mismatch at index 0: 4, expected 2"));
  EXPECT_THAT(report.recompiles[1], HasSubstr("arg 1 is 2, expected 1"));
  EXPECT_THAT(report.recompiles[2], HasSubstr("dtype is f64, expected f32"));
  EXPECT_THAT(report.recompiles[5], HasSubstr("switched otherwise"));
  EXPECT_THAT(report.guards, testing::Contains(HasSubstr("captured f32[3] stays in its memory")));
}

TEST(WholeGraph, AutocastToAnotherDtypeIsAnotherGraph) {
  const Tensor w = counted({3, 3});
  auto f = compile([&](const Tensor& x) { return matmul(x, w); }, {.whole_graph = true});
  EXPECT_EQ(f(ones({2, 3})).dtype(), DType::kF32);
  for (int round = 0; round < 2; ++round) {
    for (const DType lower : {DType::kBF16, DType::kF16}) {
      const Autocast scope(lower);
      EXPECT_EQ(f(ones({2, 3})).dtype(), lower);
    }
  }
  EXPECT_EQ(explain(f).compiles, 3);
}

TEST(WholeGraph, FreeFunctionsAndMembersGiveTheSameGraph) {
  struct Module {
    Tensor p = counted({3});
    Tensor member(const Tensor& x) const { return mul(add(x, p), 2); }
  } module;
  const auto free = [&](const Tensor& x) { return mul(add(x, module.p), 2); };
  auto a = compile(free, {.whole_graph = true});
  auto b = compile([&](const Tensor& x) { return module.member(x); }, {.whole_graph = true});
  EXPECT_EQ(values(a(ones({3}))), values(b(ones({3}))));
  EXPECT_EQ(explain(a).graphs[0].text, explain(b).graphs[0].text);
}

// At CHORALE_DEBUG=DETAIL every call is traced again, and a host value that has changed since is an error.
TEST(WholeGraph, DetailNamesTheFirstNodeThatDiffers) {
  const DebugLevel before = debug_level();
  struct Restore {
    DebugLevel level;
    ~Restore() { set_debug_level(level); }
  } const restore{before};
  int epoch = 0;
  const Tensor w = set_requires_grad(full({3}, 2));
  auto f = compile(
      [&](const Tensor& x) {
        set_gradient(w, {});
        const Tensor y = mul(x, w);
        const Tensor loss = sum(epoch > 3 ? tanh(y) : relu(y));
        backward(loss);
        return loss;
      },
      {.whole_graph = true});
  set_debug_level(DebugLevel::kDetail);
  for (; epoch <= 3; ++epoch) {
    EXPECT_EQ(f(full({3}, epoch)).item<float>(), 6 * static_cast<float>(epoch));
    EXPECT_EQ(gradient(w).to_vector<float>(), std::vector<float>(3, static_cast<float>(epoch)));
  }
  EXPECT_EQ(explain(f).compiles, 1);
  try {
    f(ones({3}));
    ADD_FAILURE() << "a frozen branch was not noticed";
  } catch (const StateError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("= relu("), std::string::npos) << text;
    EXPECT_NE(text.find("= tanh("), std::string::npos) << text;
  }
  set_debug_level(DebugLevel::kOff);
  EXPECT_EQ(f(ones({3})).item<float>(), 6);  // as it was traced
}

// Gradients that a step replaces are let go before it runs: old and new ones are never there at once, and memory that
// nobody else sees is written again.
TEST(WholeGraph, NewGradientsLieWhereTheOldOnesWere) {
  const Tensor w = set_requires_grad(full({1000, 1000}, 0.5));
  auto f = compile(
      [&](const Tensor& x) {
        set_gradient(w, {});
        const Tensor loss = sum(mul(w, x));
        backward(loss);
        return loss;
      },
      {.whole_graph = true});
  const Tensor one = ones({1000, 1000}), two = full({1000, 1000}, 2);
  f(one);
  const void* place = gradient(w).raw();
  f(two);
  EXPECT_EQ(gradient(w).raw(), place);
  EXPECT_EQ(gradient(w).to_vector<float>(), two.to_vector<float>());
  // A call that is traced does not keep them either, although it begins with gradients that an eager step left.
  const auto traced_peak = [&](const Tensor& x) {
    auto fresh = compile([&f](const Tensor& in) { return f.function()(in); }, {.whole_graph = true});
    cpu_allocator().reset_peak();
    const size_t before = cpu_allocator().stats().current_bytes;
    fresh(x);
    return cpu_allocator().stats().peak_bytes - before;
  };
  EXPECT_LT(traced_peak(one), size_t{4} * 1000 * 1000 + 100'000);  // the product that is summed; no second gradient
  const size_t current = cpu_allocator().stats().current_bytes;
  f(one);
  EXPECT_EQ(cpu_allocator().stats().current_bytes, current);
  // A gradient that somebody holds keeps its values.
  const Tensor held = gradient(w);
  f(two);
  EXPECT_NE(gradient(w).raw(), held.raw());
  EXPECT_EQ(held.to_vector<float>(), one.to_vector<float>());
  EXPECT_EQ(gradient(w).to_vector<float>(), two.to_vector<float>());
  const Tensor view = narrow(gradient(w), 0, 0, 1);
  f(one);
  EXPECT_EQ(view.to_vector<float>(), std::vector<float>(1000, 2));
  EXPECT_EQ(explain(f).compiles, 1);
}

// The first call makes a state and has a graph of its own, which keeps no memory beside that of the next one.
TEST(WholeGraph, AGraphThatRunsOnceGivesItsMemoryBack) {
  Tensor state;
  const Tensor x = ones({256, 1024});
  auto f = compile(
      [&](const Tensor& in) {
        if (!state.defined()) state = zeros({1});
        return add(sum(softmax(softmax(softmax(in, 1), 0), 1)), state);
      },
      {.whole_graph = true});
  const auto used = [] { return static_cast<int64_t>(cpu_allocator().stats().current_bytes); };
  const int64_t before = used(), arena = int64_t{2} << 20;  // two of the three values live at a time
  f(x);
  EXPECT_LT(used() - before, arena / 2);
  f(x);
  EXPECT_GE(explain(f).graphs.back().arena_bytes, arena);
  EXPECT_LT(used() - before, arena * 3 / 2);
  EXPECT_EQ(explain(f).compiles, 2);
}

// What stands in the log and what is printed at the end, as it is typed by somebody who wonders.
TEST(WholeGraph, SaysWhatItDid) {
  const EnvironmentVariable explain_it("CHORALE_EXPLAIN", "1");
  testing::internal::CaptureStderr();
  {
    auto f = compile([](const Tensor& x, int64_t n) { return add(mul(x, 2), n); },
                     {.whole_graph = true, .dynamic = Dynamic::kNever, .name = "twice"});
    for (const int64_t n : {1, 7, 1, 7, 1}) f(ones({2}), n);
  }
  const std::string said = testing::internal::GetCapturedStderr();
  const std::string again = "[compile] twice is compiled again: arg 1 is 7, expected 1\n";
  const size_t first = said.find(again);
  EXPECT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find("compiled again", first + again.size()), std::string::npos) << said;
  EXPECT_THAT(said,
              AllOf(HasSubstr("twice: compiled 2 times, 2 graphs, 0 breaks\n"),
                    HasSubstr("graph 0: 2 ops, 0 bytes of intermediate values\n"),
                    HasSubstr("  %2: f32[2] = add_scalar(%1) {value=7}\n"), HasSubstr("guard: local arg 1 is 7\n"),
                    HasSubstr("}\nkernel 0: mul_scalar, 16 bytes, 0.1 us expected\nkernel 1: add_scalar, 16 bytes, "),
                    HasSubstr("recompiled: arg 1 is 7, expected 1\n")));
}

// An argument that is a captured tensor, or a gradient that is added to, is written with it; another one is not.
TEST(WholeGraph, AnArgumentThatIsCapturedIsNoOther) {
  const auto run = [](bool compiled) {
    const Tensor w = set_requires_grad(ones({2})), buffer = ones({2});
    set_gradient(w, zeros({2}));
    const auto function = [&](const Tensor& x) {
      add_(buffer, 1);
      backward(sum(w * 3));
      return x * 2;
    };
    auto f = compile(function, {.whole_graph = true});
    std::vector<float> found;
    for (int call = 0; call < 6; ++call) {
      const Tensor own = full({2}, 7), x = call % 3 == 0 ? own : call % 3 == 1 ? buffer : gradient(w);
      for (const Tensor& y : {compiled ? f(x) : function(x), buffer, gradient(w)}) found.push_back(y[0].item<float>());
    }
    return found;
  };
  EXPECT_EQ(run(true), run(false));
}

// What a function reads of the host by graph::HostValue is compared like anything else.
TEST(WholeGraph, HostValuesAreGuards) {
  graph::HostValue factor(2), other(1);
  auto f = compile([&](const Tensor& x) { return mul(x, static_cast<double>(factor.read("the factor"))); },
                   {.whole_graph = true});
  for (const int64_t now : {2, 3, 2, 3, 2}) {
    factor.set(now);
    other.set(now);
    EXPECT_EQ(f(ones({1})).item<float>(), static_cast<float>(now));
  }
  EXPECT_EQ(explain(f).compiles, 2);
  EXPECT_THAT(explain(f).recompiles, testing::ElementsAre("the factor has changed"));
  EXPECT_THAT(explain(f).guards, testing::Contains("host the factor stays what it is"));
  // Where the graph is the same all the same, nothing is compiled.
  auto reads_only = compile(
      [&](const Tensor& x) {
        factor.read("the factor");
        return neg(x);
      },
      {.whole_graph = true});
  for (const int64_t now : {2, 3, 4}) {
    factor.set(now);
    EXPECT_EQ(reads_only(ones({1})).item<float>(), -1);
  }
  EXPECT_EQ(explain(reads_only).compiles, 1);
  // What it sets itself it does not depend on, also where something of another place is put there.
  auto sets = compile(
      [&](const Tensor& x) {
        const int64_t before = factor.exchange(5);
        const Tensor y = mul(x, static_cast<double>(factor.read("the factor")));
        factor = graph::HostValue(before);
        return y;
      },
      {.whole_graph = true});
  for (const int64_t now : {1, 2}) {
    factor.set(now);
    EXPECT_EQ(sets(ones({1})).item<float>(), 5);
    EXPECT_EQ(factor.value(), now);
  }
  EXPECT_EQ(explain(sets).compiles, 1);
}

TEST(CompileOptions, ThatMeanNothingAreRefused) {
  const auto f = [](const Tensor& x) { return neg(x); };
  for (const double budget : {-0.5, 1.5, std::nan("")}) {
    EXPECT_THAT(message_of([&] { compile(f, {.memory_budget = budget}); }), HasSubstr("between 0 and 1"));
  }
  EXPECT_THAT(message_of([&] { compile(f, {.most_variants = 0}); }), HasSubstr("at least 1"));
  for (const bool whole : {false, true}) {
    auto other_argument = compile(f, {.whole_graph = whole, .dynamic_dims = {{1, 0}}});
    EXPECT_THAT(message_of([&] { other_argument(ones({2})); }), HasSubstr("argument 1 is no tensor; there are 1"));
    auto other_dim = compile(f, {.whole_graph = whole, .dynamic_dims = {{0, 1}}});
    EXPECT_THAT(message_of([&] { other_dim(ones({2})); }), HasSubstr("dynamic_dims"));
  }
}

}  // namespace
}  // namespace chorale
