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

// Scales of steps between which the host loads a scaler that grows otherwise. The graph has its numbers in a node.
std::vector<double> scales_with_a_loaded_scaler(bool compiled, int* compiles = nullptr) {
  const Tensor a = set_requires_grad(numbers({3}, 1));
  Sgd optimizer(NamedTensors{{"a", a}}, {.lr = 0.05});
  GradScaler scaler({.scale = 4, .interval = 2});
  const NamedTensors other = GradScaler({.scale = 2, .growth = 8, .interval = 1}).state_dict();
  const auto step = [&] {
    optimizer.zero_grad();
    const Tensor loss = sum(square(a));
    backward(scaler.scale(loss));
    scaler.step(optimizer);
    scaler.update();
    return loss;
  };
  auto f = compile(step, {.whole_graph = true});
  std::vector<double> scales;
  const NamedTensors first = scaler.state_dict();
  for (int i = 0; i < 12; ++i) {
    if (i == 4 || i == 6) scaler.load_state_dict(other);
    if (i == 8) scaler.load_state_dict(first);
    compiled ? f() : step();
    scales.push_back(scaler.scale());
  }
  if (compiles) *compiles = explain(f).compiles;
  return scales;
}

TEST(WholeStep, ScalesTheLossAsTheHostHasSetSince) {
  int compiles = 0;
  EXPECT_EQ(scales_with_a_loaded_scaler(true, &compiles), scales_with_a_loaded_scaler(false));
  EXPECT_EQ(compiles, 3) << "the first step, which finds no gradient; two ways to grow";
}

// Micro-batches add to gradients whose memory is new in every step: two graphs, with which steps go on for good.
TEST(WholeStep, AddsToGradientsWhereverTheyLie) {
  const Tensor a = set_requires_grad(numbers({6, 3}, 1)), b = set_requires_grad(numbers({3}, 2));
  const auto micro_batch = [&](const Tensor& x) {
    const Tensor loss = sum(square(add(matmul(x, a), b)));
    backward(loss);
    return loss;
  };
  auto f = compile(micro_batch, {.whole_graph = true});
  std::vector<Tensor> held;
  for (int step = 0; step < 6; ++step) {
    for (const Tensor& leaf : {a, b}) set_gradient(leaf, {});
    std::vector<std::vector<float>> expected;
    for (const bool compiled : {false, true}) {
      for (const Tensor& leaf : {a, b}) set_gradient(leaf, {});
      for (int part = 0; part < 3; ++part) compiled ? f(numbers({5, 6}, part)) : micro_batch(numbers({5, 6}, part));
      for (const Tensor& leaf : {a, b}) expected.push_back(gradient(leaf).to_vector<float>());
    }
    EXPECT_EQ(expected[0], expected[2]);
    EXPECT_EQ(expected[1], expected[3]);
    held.push_back(gradient(a));  // so that the next one lies elsewhere
  }
  EXPECT_EQ(explain(f).compiles, 2) << explain(f).text();
}

// What a graph takes for two gradients must not be one tensor.
TEST(WholeStep, GradientsThatShareMemoryAreAnotherGraph) {
  const Tensor a = set_requires_grad(numbers({3}, 1)), b = set_requires_grad(numbers({3}, 2));
  const auto micro_batch = [&] {
    const Tensor loss = add(sum(square(a)), mul(sum(square(b)), 3));
    backward(loss);
    return loss;
  };
  auto f = compile(micro_batch, {.whole_graph = true});
  for (const bool shared : {false, true, false, true}) {
    std::vector<std::vector<float>> found;
    for (const bool compiled : {false, true}) {
      const Tensor one = zeros({3}), both = zeros({6});
      set_gradient(a, shared ? one : narrow(both, 0, 0, 3));
      set_gradient(b, shared ? one : narrow(both, 0, 3, 3));
      compiled ? f() : micro_batch();
      found.push_back(gradient(a).to_vector<float>());
      found.push_back(gradient(b).to_vector<float>());
    }
    EXPECT_EQ(found[0], found[2]) << shared;
    EXPECT_EQ(found[1], found[3]) << shared;
  }
  for (int i = 0; i < 2; ++i) {
    set_gradient(a, zeros({3}));
    set_gradient(b, zeros({3}));
    f();
    EXPECT_EQ(gradient(a).to_vector<float>(), mul(a, 2).to_vector<float>());
  }
  const Tensor one = zeros({3});
  set_gradient(a, one);
  set_gradient(b, one);
  f();
  EXPECT_EQ(one.to_vector<float>(), add(mul(a, 2), mul(b, 6)).to_vector<float>());
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
