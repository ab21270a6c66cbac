// Hooks around modules whose arguments and results are more than one tensor.
#include "chorale/nn/hooks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/nn/nn.h"

namespace chorale::nn {
namespace {

using ::testing::ElementsAre;

std::vector<double> values(const Tensor& x) { return x.to_vector<double>(); }

struct Output {
  Tensor sum;
  std::vector<Tensor> parts;
  int64_t count = 0;
  CHORALE_TENSORS(Output, sum, parts)
};
struct Options {
  bool twice = false;
};

// sum = a b + c, parts = {a, maybe 2 c}.
struct Mixed : Module {
  CHORALE_MODULE(Mixed)
  Output forward(const Tensor& a, const std::map<std::string, Tensor>& others, Options options = {}) {
    const Tensor &b = others.at("b"), &c = others.at("c");
    return {a * b + c, {a, options.twice ? 2 * c : Tensor{}}, 2};
  }
};

Tensor leaf(double value) {
  const Tensor x = full({1}, value, DType::kF64);
  return set_requires_grad(x);
}

TEST(VisitTensors, FindsAndReplacesEveryTensorOfNestedValues) {
  const Tensor a = leaf(1), b = leaf(2), c = leaf(3), d = leaf(4);
  std::tuple<Tensor, std::optional<Output>, std::pair<int, std::vector<std::map<int, Tensor>>>, std::string> value{
      a, Output{b, {Tensor{}, c}, 1}, {5, {{{7, d}}}}, "text"};
  EXPECT_EQ(tensors_of(value).size(), 4u);
  visit_tensors(value, [](Tensor& x) { x = x * 10; });
  std::vector<double> seen;
  visit_tensors(std::as_const(value), [&](const Tensor& x) { seen.push_back(x.item<double>()); });
  EXPECT_THAT(seen, ElementsAre(10, 20, 30, 40));
  EXPECT_THROW(replace_tensors(value, {a}), InvalidArgument);
}

TEST(Hooks, SeeAndReplaceTensorsOfArgumentsAndResultsButNotTheCallers) {
  Mixed mixed;
  std::vector<double> seen;
  mixed.before_forward([&](Module& module, std::vector<Tensor>& in) {
    EXPECT_EQ(&module, &mixed);
    for (const Tensor& x : in) seen.push_back(x.item<double>());
    in[0] = in[0] + 10;
  });
  mixed.after_forward([&](Module&, const std::vector<Tensor>& in, std::vector<Tensor>& out) {
    seen.push_back(in[0].item<double>());
    seen.push_back(static_cast<double>(out.size()));
    out[0] = out[0] * 100;
  });
  Tensor a = leaf(1);
  const Output output = mixed(a, std::map<std::string, Tensor>{{"b", leaf(2)}, {"c", leaf(3)}});
  EXPECT_THAT(seen, ElementsAre(1, 2, 3, 11, 2));
  EXPECT_THAT(values(output.sum), ElementsAre((11 * 2 + 3) * 100));
  EXPECT_EQ(output.count, 2);
  EXPECT_THAT(values(a), ElementsAre(1));
}

TEST(Hooks, RemovedOnesDoNotRunAndHandlesMaySurviveTheModule) {
  std::optional<ReLU> layer(std::in_place);
  int first = 0, second = 0;
  HookHandle one = layer->after_forward([&](Module&, const auto&, auto&) { ++first; });
  HookHandle two = layer->after_forward([&](Module&, const auto&, auto&) { ++second; });
  (*layer)(ones({1}));
  one.remove();
  one.remove();
  (*layer)(ones({1}));
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 2);
  layer.reset();
  two.remove();
}

TEST(Hooks, ThatAreEmptyFunctionsAreErrorsWhereTheyAreGiven) {
  ReLU layer;
  EXPECT_THROW(layer.before_forward(nullptr), InvalidArgument);
  EXPECT_THROW(layer.after_forward(nullptr), InvalidArgument);
  EXPECT_THROW(layer.before_backward(nullptr), InvalidArgument);
  EXPECT_THROW(layer.after_backward(nullptr), InvalidArgument);
  EXPECT_THROW(layer.apply(nullptr), InvalidArgument);
  EXPECT_EQ(layer(ones({1})).item<float>(), 1);
}

TEST(Hooks, MayRemoveThemselves) {
  ReLU layer;
  int calls = 0;
  std::optional<HookHandle> handle;
  handle = layer.after_forward([&](Module&, const auto&, auto&) {
    ++calls;
    handle->remove();
  });
  layer.after_forward([&](Module&, const auto&, auto&) { calls += 10; });
  layer(ones({1}));
  layer(ones({1}));
  EXPECT_EQ(calls, 21);
}

TEST(Hooks, ACopiedModuleHasItsOwnHooks) {
  ReLU layer;
  int calls = 0;
  HookHandle handle = layer.after_forward([&](Module&, const auto&, auto&) { ++calls; });
  ReLU copy = layer, moved = ReLU(copy);
  handle.remove();
  layer(ones({1}));
  EXPECT_EQ(calls, 0);
  copy(ones({1}));
  moved(ones({1}));
  EXPECT_EQ(calls, 2);
}

TEST(Hooks, BackwardHooksGetAllGradientsAndMayReplaceThem) {
  Mixed mixed;
  std::vector<double> seen;
  mixed.before_backward([&](std::vector<Tensor>& dout) { dout[0] = dout[0] * 10; });
  mixed.after_backward([&](std::vector<Tensor>& din, const std::vector<Tensor>& dout) {
    seen = {dout.at(0).item<double>(), dout.at(1).item<double>(), din.at(0).item<double>(), din.at(1).item<double>()};
    EXPECT_FALSE(din.at(2).defined());
    din[1] = din[1] * 100;
  });
  const Tensor a = leaf(2), b = leaf(3), c = full({1}, 4, DType::kF64);
  const Output output = mixed(a, std::map<std::string, Tensor>{{"b", b}, {"c", c}});
  backward(output.sum + output.parts[0]);
  EXPECT_THAT(seen, ElementsAre(10, 1, 10 * 3 + 1, 10 * 2));
  EXPECT_THAT(values(gradient(a)), ElementsAre(31));
  EXPECT_THAT(values(gradient(b)), ElementsAre(2000));
}

TEST(Hooks, BackwardHooksRunWhereNoInputAsksForGradients) {
  Linear layer(1, 1);
  int calls = 0;
  layer.after_backward([&](std::vector<Tensor>& din, const std::vector<Tensor>& dout) {
    EXPECT_TRUE(din.empty());
    EXPECT_THAT(values(dout.at(0)), ElementsAre(1));
    ++calls;
  });
  backward(layer(ones({1, 1})));
  EXPECT_EQ(calls, 1);
  const NoGrad quiet;
  layer(ones({1, 1}));
}

struct Cube : Module {
  CHORALE_MODULE(Cube)
  Tensor forward(const Tensor& x) { return x * x * x; }
};
TEST(Hooks, BackwardHooksRunForEveryBackwardAndInSecondDerivatives) {
  Cube cube;
  int calls = 0;
  cube.after_backward([&](std::vector<Tensor>&, const std::vector<Tensor>&) { ++calls; });
  const Tensor x = leaf(2);
  const Tensor dx = grad({cube(x)}, {x}, {.create_graph = true})[0];
  EXPECT_THAT(values(grad({dx}, {x})[0]), ElementsAre(12));
  EXPECT_GE(calls, 1);
}

// Forward that writes to its argument: with hooks or without, it is the caller's.
struct Counter : Module {
  CHORALE_MODULE(Counter)
  Tensor forward(const Tensor& x, std::vector<Tensor>& cache) {
    cache.push_back(x);
    return x;
  }
};
TEST(Hooks, AnArgumentThatForwardWritesIsTheCallersOwn) {
  Counter counter;
  std::vector<Tensor> cache;
  counter(leaf(1), cache);
  counter.after_forward([](Module&, const auto&, auto&) {});
  counter(leaf(2), cache);
  ASSERT_EQ(cache.size(), 2u);
}

}  // namespace
}  // namespace chorale::nn
