// Training the benchmark models gives PyTorch's losses, step by step (tools/oracle/record_trajectories.py): modules,
// gradients and optimizer together. Weights and data come from formulas.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "chorale/api/api.h"
#include "chorale/base/parallel_for.h"
#include "chorale/models/cnn.h"
#include "chorale/models/encoder.h"
#include "chorale/models/formula_test_util.h"
#include "chorale/models/mlp.h"
#include "chorale/nn/oracle_file_test_util.h"
#include "chorale/op/samples.h"
#include "chorale/optim/adam.h"

namespace chorale::models {
namespace {

using nn::oracle::Json;

template <class Model>
void expect_trajectory(const std::string& name, Model model, const Shape& shape, int64_t classes, DType dtype) {
  const Json expected = nn::oracle::read_oracle("trajectories.json")[name][std::string(name_of(dtype))];
  const double tolerance = dtype == DType::kF64 ? 1e-9 : 1e-4;
  set_thread_count(1);  // tests run side by side: threads that wait for one another would cost more than they give
  model.to(dtype);
  fill_by_formula(model);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3, .weight_decay = 0.01});
  for (size_t step = 0; step < expected["losses"].size(); ++step) {
    const int seed = static_cast<int>(step);
    const bool tokens = shape.size() == 2 && classes > 10;
    const Tensor x =
        tokens ? op::sample_ints(shape, 0, classes, 1000 + seed) : to(op::sample(shape, 1000 + seed, -1, 1), dtype);
    const Tensor target = tokens ? flatten(x) : op::sample_ints({shape[0]}, 0, classes, 2000 + seed);
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(flatten(model(x), 0, -2), target);
    backward(loss);
    optimizer.step();
    const double want = expected["losses"][step];
    ASSERT_NEAR(loss.item<double>(), want, tolerance * want) << name << " in " << dtype << ", step " << step;
  }
  if (!expected.contains("sums")) return;
  for (const auto& [key, value] : model.state_dict()) {
    const double want = expected["sums"].at(key);
    const Tensor total = sum(abs(value));
    EXPECT_NEAR(total.item<double>(), want, 1e-9 * want) << name << " " << key;
  }
}

class Trajectory : public ::testing::TestWithParam<DType> {};

TEST_P(Trajectory, OfTinymlpIsPyTorchs) { expect_trajectory("tinymlp", mlp({20, 32, 10}), {8, 20}, 10, GetParam()); }
TEST_P(Trajectory, OfMlp512x4IsPyTorchs) {
  expect_trajectory("mlp512x4", mlp({512, 512, 512, 512, 512, 10}), {32, 512}, 10, GetParam());
}
TEST_P(Trajectory, OfCnnFashionIsPyTorchs) {
  expect_trajectory("cnn_fashion", fashion_cnn(), {32, 1, 28, 28}, 10, GetParam());
}
TEST_P(Trajectory, OfBert256x4IsPyTorchs) { expect_trajectory("bert_256x4", Encoder(), {2, 32}, 8192, GetParam()); }

INSTANTIATE_TEST_SUITE_P(Models, Trajectory, ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

}  // namespace
}  // namespace chorale::models
