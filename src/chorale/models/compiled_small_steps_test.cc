// Training steps of small models as one kernel (codegen/block.h), with the bits of the ops one by one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/codegen/fused.h"
#include "chorale/models/mlp.h"
#include "chorale/optim/optim.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::models {
namespace {

using testing::ElementsAre;

std::vector<std::string> nodes_of(const graph::Graph& graph) {
  std::vector<std::string> names;
  for (const graph::Node& node : graph.nodes) names.push_back(node.name());
  return names;
}

// Trains a model for some steps; everything that a step changes or gives, after each of them.
template <class MakeOptimizer>
std::vector<std::vector<float>> train(const MakeOptimizer& make_optimizer, const std::vector<int64_t>& layers,
                                      int64_t lines, const compiled::Backend& backend) {
  manual_seed(7);
  nn::Sequential model = mlp(layers);
  auto optimizer = make_optimizer(model.named_parameters());
  const auto step = [&](const Tensor& x, const Tensor& target) {
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(model(x), target);
    backward(loss);
    optimizer.step();
    return loss;
  };
  auto compiled = compile(step, {.whole_graph = true, .backend = backend});
  std::vector<std::vector<float>> seen;
  for (int i = 0; i < 20; ++i) {
    const Tensor x = normal({lines, layers[0]}), target = randint(0, layers.back(), {lines});
    seen.push_back((backend ? compiled(x, target) : step(x, target)).template to_vector<float>());
    for (const auto& [name, parameter] : model.named_parameters()) {
      seen.push_back(parameter.template to_vector<float>());
      seen.push_back(gradient(parameter).template to_vector<float>());
    }
  }
  return seen;
}

struct Watched {
  const TemporaryFolder folder{};
  codegen::CodeCache cache{{.folder = folder.path()}};
  std::vector<std::vector<std::string>> graphs;  // of each compilation: what its kernels are
  compiled::Backend backend() {
    return [this](graph::Graph graph, const compiled::GraphInfo&) {
      auto program = codegen::fuse_and_compile(std::move(graph), {.cache = &cache, .optimize = "-O1"});
      graphs.push_back(nodes_of(program->graph()));
      return program;
    };
  }
};

TEST(SmallSteps, AreOneKernelWithTheBitsOfTheOps) {
  const auto adam = [](auto parameters) { return optim::AdamW(std::move(parameters), {.lr = 0.01}); };
  Watched watched;
  EXPECT_EQ(train(adam, {20, 32, 10}, 8, watched.backend()), train(adam, {20, 32, 10}, 8, {}));
  ASSERT_FALSE(watched.graphs.empty());
  EXPECT_THAT(watched.graphs.back(), ElementsAre("block"));
}

TEST(SmallSteps, OddSizesAndOtherRules) {
  const auto momentum = [](auto parameters) {
    return optim::Sgd(std::move(parameters), {.lr = 0.05, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.01});
  };
  const auto plain = [](auto parameters) { return optim::Sgd(std::move(parameters), {.lr = 0.05}); };
  const auto adam = [](auto parameters) {
    return optim::Adam(std::move(parameters), {.lr = 0.01, .weight_decay = 0.1, .maximize = true});
  };
  Watched watched;
  EXPECT_EQ(train(momentum, {5, 17, 9, 3}, 7, watched.backend()), train(momentum, {5, 17, 9, 3}, 7, {}));
  EXPECT_EQ(train(plain, {3, 50, 33}, 11, watched.backend()), train(plain, {3, 50, 33}, 11, {}));
  EXPECT_EQ(train(adam, {13, 21, 12}, 40, watched.backend()), train(adam, {13, 21, 12}, 40, {}));
}

}  // namespace
}  // namespace chorale::models
