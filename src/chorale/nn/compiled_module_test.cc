// Modules in whole graphs, which run no code of the host: what a module is set to is a guard.
#include <gtest/gtest.h>

#include "chorale/api/compile.h"
#include "chorale/nn/nn.h"

namespace chorale::nn {
namespace {

struct Dropping : Module {
  Linear a{6, 8};
  BatchNorm1d norm{8};
  Dropout drop{0.5};
  CHORALE_MODULE(Dropping, a, norm, drop)
  Tensor forward(const Tensor& x) { return drop(norm(a(x))); }
};

TEST(CompiledModule, TrainsAndEvaluatesAsItIsSetTo) {
  manual_seed(1);
  Dropping eager, compiled = clone(eager);
  auto f = compile(std::ref(compiled), {.whole_graph = true});
  const Tensor x = uniform({4, 6});
  for (int i = 0; i < 12; ++i) {
    const bool trains = i / 2 % 2 == 0;
    eager.train(trains);
    compiled.train(trains);
    manual_seed(7);
    const std::vector<float> expected = eager(x).to_vector<float>();
    manual_seed(7);
    EXPECT_EQ(f(x).to_vector<float>(), expected) << i;
    EXPECT_EQ(compiled.norm.running_mean.to_vector<float>(), eager.norm.running_mean.to_vector<float>()) << i;
  }
  const compiled::Report report = explain(f);
  EXPECT_EQ(report.compiles, 2);
  EXPECT_EQ(report.recompiles, (std::vector<std::string>{"whether a module trains has changed"}));
}

// Another module's mode is none of its business, and one that it sets itself is always the same.
TEST(CompiledModule, IsCompiledOnceWhereItSetsItsModeItself) {
  manual_seed(1);
  Dropping model, other;
  auto f = compile(
      [&](const Tensor& x) {
        model.eval();
        const Tensor y = model(x);
        model.train();
        return y;
      },
      {.whole_graph = true});
  const Tensor x = uniform({4, 6});
  const std::vector<float> first = f(x).to_vector<float>();
  for (const bool trains : {false, true}) {
    other.train(trains);
    model.train(trains);
    EXPECT_EQ(f(x).to_vector<float>(), first);
  }
  EXPECT_EQ(explain(f).compiles, 1);
}

}  // namespace
}  // namespace chorale::nn
