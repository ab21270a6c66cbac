// Whole training steps, forward, backward and update as one graph, against the same steps run op by op.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/optim/optim.h"

namespace chorale::optim {
namespace {

using Make = std::function<std::unique_ptr<Optimizer>(const NamedTensors&)>;

Tensor numbers(const Shape& sizes, double seed) {
  std::vector<float> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(std::sin(1.7 * static_cast<double>(i) + 12.9898 * seed + 0.3));
  }
  return Tensor::from(values, sizes);
}

// Losses and parameters of a small network with dropout under a schedule; with a scaler its scale after each step as
// well, which is too large at first, and every third step again.
std::vector<float> train(const Make& make, int steps, const CompileOptions* options, int* compiles = nullptr,
                         bool scaled = false) {
  const Tensor a = set_requires_grad(numbers({6, 8}, 1)), b = set_requires_grad(numbers({8}, 2)),
               c = set_requires_grad(numbers({8, 3}, 3));
  const auto optimizer = make({{"a", a}, {"b", b}, {"c", c}});
  GradScaler scaler({.scale = 0x1p127, .interval = 2, .enabled = scaled});
  const auto step = [&](const Tensor& x, const Tensor& y) {
    optimizer->zero_grad();
    const Tensor hidden = dropout(relu(add(matmul(x, a), b)), 0.25);
    const Tensor loss = mul(cross_entropy(matmul(hidden, c), y), scaled ? 8.0 : 1.0);
    backward(scaler.scale(loss));
    if (scaled) {
      scaler.unscale(*optimizer);
      clip_grad_norm(optimizer->parameters(), 0.5);
    }
    scaler.step(*optimizer);
    if (scaled) scaler.update();
    return loss;
  };
  auto f = compile(step, options ? *options : CompileOptions{});
  manual_seed(9);
  std::vector<float> all;
  for (int i = 0; i < steps; ++i) {
    optimizer->set_lr(0.05 / (1 + i));
    const Tensor x = numbers({5, 6}, i), y = Tensor::from<int64_t>({0, 1, 2, i % 3, 1}, {5});
    all.push_back((options ? f(x, y) : step(x, y)).item<float>());
    if (scaled) all.push_back(static_cast<float>(scaler.scale()));
  }
  if (compiles) *compiles = explain(f).compiles;
  for (const Tensor& parameter : {a, b, c}) {
    for (const float value : parameter.to_vector<float>()) all.push_back(value);
  }
  return all;
}

class CompiledStep : public testing::TestWithParam<bool> {};

TEST_P(CompiledStep, HasTheBitsOfTheStepItself) {
  const CompileOptions options{.whole_graph = GetParam()};
  const std::vector<Make> all{
      [](const NamedTensors& p) { return std::make_unique<Sgd>(p, SgdOptions{.lr = 0.05}); },
      [](const NamedTensors& p) { return std::make_unique<Sgd>(p, SgdOptions{.lr = 0.05, .momentum = 0.9}); },
      [](const NamedTensors& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.05}); },
      [](const NamedTensors& p) { return std::make_unique<Rmsprop>(p, RmspropOptions{.lr = 0.05}); },
  };
  for (size_t i = 0; i < all.size(); ++i) {
    int compiles = 0;
    EXPECT_EQ(train(all[i], 20, &options, &compiles), train(all[i], 20, nullptr)) << i;
    EXPECT_LE(compiles, 3) << i;
  }
}

// What the scaler decides and what clipping scales by is read when the graph runs, not when it is traced.
TEST_P(CompiledStep, WithLossScalingAndClippingHasTheBitsOfTheStepItself) {
  const CompileOptions options{.whole_graph = GetParam()};
  const std::vector<Make> all{
      [](const NamedTensors& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.05}); },
      [](const NamedTensors& p) { return std::make_unique<Rprop>(p, RpropOptions{.lr = 0.05}); },
  };
  for (size_t i = 0; i < all.size(); ++i) {
    int compiles = 0;
    const std::vector<float> eager = train(all[i], 20, nullptr, nullptr, true);
    EXPECT_EQ(train(all[i], 20, &options, &compiles, true), eager) << i;
    EXPECT_LE(compiles, 3) << i;
    EXPECT_EQ(eager[1], 0x1p126F) << "the first step was to be skipped";
  }
}

// Losses of steps between which the host sets an option, goes back to earlier states, and forgets them.
std::vector<float> train_with_interruptions(bool compiled, int* compiles = nullptr) {
  const Tensor a = set_requires_grad(numbers({6, 3}, 1)), x = numbers({5, 6}, 2);
  const Tensor y = Tensor::from<int64_t>({0, 1, 2, 0, 1}, {5});
  Sgd optimizer(NamedTensors{{"a", a}}, {.lr = 0.05, .momentum = 0.9});
  const NamedTensors none = optimizer.state_dict();
  const auto step = [&] {
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(matmul(x, a), y);
    backward(loss);
    optimizer.step();
    return loss;
  };
  auto f = compile(step, {.whole_graph = true});
  NamedTensors saved;
  std::vector<float> losses;
  for (int i = 0; i < 24; ++i) {
    if (i == 3) saved = optimizer.state_dict();
    if (i >= 6 && i < 18 && i % 3 == 0) optimizer.load_state_dict(saved);
    if (i == 8 || i == 14) optimizer.set_option(0, "momentum", 0.3);
    if (i == 11 || i == 17) optimizer.set_option(0, "momentum", 0.9);
    if (i == 20) optimizer.load_state_dict(none);
    losses.push_back((compiled ? f() : step()).item<float>());
  }
  if (compiles) *compiles = explain(f).compiles;
  return losses;
}

// The graph has the momentum as a number, and the states as captured tensors.
TEST(WholeStep, GoesOnWithOptionsAndStatesThatTheHostHasSetSince) {
  int compiles = 0;
  EXPECT_EQ(train_with_interruptions(true, &compiles), train_with_interruptions(false));
  EXPECT_LE(compiles, 4) << "the first step, which makes the states; two momenta; the first step once more";
}

// Each rank has parts of one model as tensors of its own. Which step is skipped is decided by all, inside of the graph:
// rank 1 alone has a gradient that is not finite, in every third step, and neither takes it.
TEST_P(CompiledStep, WithALossScalerOverPartsSkipsWhatOneRankCannotTake) {
  comm::run_ranks(2, [&](comm::Group& ranks) {
    const auto train_parts = [&](bool compiled) {
      const Tensor w = set_requires_grad(numbers({4, 3}, ranks.rank() + 1));
      Sgd optimizer(NamedTensors{{"w", w}}, {.lr = 0.05});
      GradScaler scaler(
          {.scale = 8, .interval = 2, .parts = std::shared_ptr<const comm::Group>(std::shared_ptr<void>(), &ranks)});
      const auto step = [&](const Tensor& x) {
        optimizer.zero_grad();
        const Tensor loss = sum(mul(matmul(x, w), matmul(x, w)));
        backward(scaler.scale(loss));
        scaler.step(optimizer);
        scaler.update();
        return loss;
      };
      auto f = compile(step, {.whole_graph = GetParam()});
      std::vector<float> all;
      for (int i = 0; i < 9; ++i) {
        const bool spoiled = ranks.rank() == 1 && i % 3 == 1;
        const Tensor x = spoiled ? full({2, 4}, 1e25) : numbers({2, 4}, i);
        compiled ? f(x) : step(x);
        all.push_back(static_cast<float>(scaler.scale()));
        for (const float value : w.to_vector<float>()) all.push_back(value);
      }
      return all;
    };
    const std::vector<float> eager = train_parts(false);
    EXPECT_EQ(train_parts(true), eager);
    EXPECT_EQ(eager[13], 4) << "the second step was to be skipped";
    EXPECT_TRUE(std::equal(&eager[1], &eager[13], &eager[14])) << "rank " << ranks.rank() << " took the second step";
  });
}

// The rate and the count of steps are inputs.
TEST_P(CompiledStep, AScheduleOfAThousandStepsCompilesNothingMore) {
  const CompileOptions options{.whole_graph = GetParam()};
  const Make make = [](const NamedTensors& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.05}); };
  int after_few = 0, after_many = 0;
  train(make, 5, &options, &after_few);
  train(make, 1000, &options, &after_many);
  EXPECT_EQ(after_few, after_many);
}

INSTANTIATE_TEST_SUITE_P(Contracts, CompiledStep, testing::Bool(),
                         [](const auto& row) { return row.param ? "Whole" : "Segmented"; });

}  // namespace
}  // namespace chorale::optim
