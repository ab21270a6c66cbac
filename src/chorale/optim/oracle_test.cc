// Optimizers, schedulers, clipping and the scaler against values recorded from PyTorch (tools/oracle/record_optim.py
// says what the numbers are).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/optim/optim_test_util.h"

namespace chorale::optim {
namespace {

#include "chorale/optim/testdata/optim_oracle.inc"

using op::sample;

void expect_recorded(const std::string& name, const Values& values, double tolerance = 1e-10) {
  ASSERT_TRUE(kRecorded.contains(name)) << name;
  const Values& expected = kRecorded.at(name);
  ASSERT_EQ(values.size(), expected.size()) << name;
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_NEAR(values[i], expected[i], tolerance * std::max(std::abs(expected[i]), 1e-3)) << name << ", number " << i;
}

template <class Optim, class Options>
void expect_trajectory(const std::string& name, const Options& options, double tolerance = 1e-10) {
  const Tensor w1 = set_requires_grad(sample({5, 7}, 1)), b1 = set_requires_grad(sample({7}, 2)),
               w2 = set_requires_grad(sample({7, 3}, 3));
  const Tensor x = sample({4, 5}, 4), y = sample({4, 3}, 5);
  Optim optimizer({{"w1", w1}, {"b1", b1}, {"w2", w2}}, options);
  Values values;
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    const Tensor loss = mean(square(matmul(tanh(matmul(x, w1) + b1), w2) - y));
    if (step % 10 == 0) values.push_back(loss.item<double>());
    backward(loss);
    optimizer.step();
  }
  if constexpr (std::is_same_v<Optim, Asgd>) {
    NamedTensors state = optimizer.state_dict();
    for (const char* key : {"state/w1/ax", "state/b1/ax", "state/w2/ax"}) {
      const Tensor average = at(state, key);
      values.push_back(sum(average * sample(average.sizes(), 6)).item<double>());
    }
  }
  for (const Tensor& p : {w1, b1, w2}) values.push_back(sum(p * sample(p.sizes(), 6)).item<double>());
  expect_recorded(name, values, tolerance);
}

TEST(OptimOracle, Sgd) {
  expect_trajectory<Sgd, SgdOptions>("sgd/1", {.lr = 0.05});
  expect_trajectory<Sgd, SgdOptions>("sgd/2", {.lr = 0.05, .momentum = 0.9});
  expect_trajectory<Sgd, SgdOptions>("sgd/3", {.lr = 0.05, .momentum = 0.8, .dampening = 0.3});
  expect_trajectory<Sgd, SgdOptions>("sgd/4", {.lr = 0.02, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
  expect_trajectory<Sgd, SgdOptions>("sgd/5", {.lr = 0.001, .momentum = 0.5, .maximize = true});
}

TEST(OptimOracle, Adam) {
  expect_trajectory<Adam, AdamOptions>("adam/1", {.lr = 0.01});
  expect_trajectory<Adam, AdamOptions>("adam/2",
                                       {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1});
  expect_trajectory<Adam, AdamOptions>("adam/3", {.lr = 0.02, .beta2 = 0.9, .amsgrad = true});
  expect_trajectory<Adam, AdamOptions>("adam/4", {.lr = 0.001, .maximize = true});
}

TEST(OptimOracle, AdamW) {
  expect_trajectory<AdamW, AdamWOptions>("adamw/1", {.lr = 0.01});
  expect_trajectory<AdamW, AdamWOptions>("adamw/2", {.lr = 0.02, .beta1 = 0.7, .weight_decay = 0.3});
  expect_trajectory<AdamW, AdamWOptions>("adamw/3", {.lr = 0.02, .weight_decay = 0, .amsgrad = true, .maximize = true});
}

TEST(OptimOracle, Adagrad) {
  expect_trajectory<Adagrad, AdagradOptions>("adagrad/1", {.lr = 0.1});
  expect_trajectory<Adagrad, AdagradOptions>(
      "adagrad/2", {.lr = 0.1, .lr_decay = 0.05, .weight_decay = 0.1, .initial_accumulator = 0.5, .eps = 1e-4});
  expect_trajectory<Adagrad, AdagradOptions>("adagrad/3", {.lr = 0.01, .maximize = true});
}

TEST(OptimOracle, AdagradOfSparseGradients) {
  const Tensor table = set_requires_grad(sample({6, 3}, 1));
  Adagrad optimizer({{"table", table}}, {.lr = 0.1, .lr_decay = 0.01});
  for (int64_t step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    const Tensor rows = Tensor::from<int64_t>({step % 5, step * step % 5, 1}, {3});
    backward(sum(square(embedding(rows, table, {}, true))));
    ASSERT_TRUE(gradient(table).is_sparse());
    optimizer.step();
  }
  expect_recorded("adagrad/sparse", table.to_vector<double>());
}

TEST(OptimOracle, Rmsprop) {
  expect_trajectory<Rmsprop, RmspropOptions>("rmsprop/1", {.lr = 0.01});
  expect_trajectory<Rmsprop, RmspropOptions>("rmsprop/2", {.lr = 0.01, .weight_decay = 0.1, .momentum = 0.7});
  expect_trajectory<Rmsprop, RmspropOptions>("rmsprop/3", {.lr = 0.01, .alpha = 0.9, .eps = 1e-2, .centered = true});
  expect_trajectory<Rmsprop, RmspropOptions>(
      "rmsprop/4", {.lr = 0.005, .alpha = 0.9, .eps = 1e-2, .momentum = 0.5, .centered = true, .maximize = true});
}

TEST(OptimOracle, Lamb) {
  expect_trajectory<Lamb, LambOptions>("lamb/1", {.lr = 0.01});
  expect_trajectory<Lamb, LambOptions>("lamb/2",
                                       {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.2});
  expect_trajectory<Lamb, LambOptions>("lamb/3", {.lr = 0.005, .maximize = true});
}

TEST(OptimOracle, Adadelta) {
  expect_trajectory<Adadelta, AdadeltaOptions>("adadelta/1", {});
  expect_trajectory<Adadelta, AdadeltaOptions>("adadelta/2", {.lr = 0.5, .rho = 0.8, .eps = 1e-3, .weight_decay = 0.1});
  expect_trajectory<Adadelta, AdadeltaOptions>("adadelta/3", {.lr = 0.1, .maximize = true});
}

TEST(OptimOracle, Adamax) {
  expect_trajectory<Adamax, AdamaxOptions>("adamax/1", {});
  expect_trajectory<Adamax, AdamaxOptions>("adamax/2",
                                           {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1});
  expect_trajectory<Adamax, AdamaxOptions>("adamax/3", {.lr = 0.001, .maximize = true});
}

TEST(OptimOracle, Rprop) {
  expect_trajectory<Rprop, RpropOptions>("rprop/1", {});
  expect_trajectory<Rprop, RpropOptions>(
      "rprop/2", {.lr = 0.02, .shrink = 0.3, .grow = 1.5, .least_step = 1e-3, .most_step = 0.05});
  expect_trajectory<Rprop, RpropOptions>("rprop/3", {.lr = 0.001, .most_step = 0.002, .maximize = true});
}

// PyTorch keeps the products of NAdam's momenta, and ASGD's rates, in f32.
constexpr double kNumbersInF32 = 1e-6;

TEST(OptimOracle, Nadam) {
  expect_trajectory<Nadam, NadamOptions>("nadam/1", {}, kNumbersInF32);
  expect_trajectory<Nadam, NadamOptions>(
      "nadam/2", {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1, .momentum_decay = 0.02},
      kNumbersInF32);
  expect_trajectory<Nadam, NadamOptions>("nadam/3", {.lr = 0.02, .weight_decay = 0.1, .decoupled = true},
                                         kNumbersInF32);
  expect_trajectory<Nadam, NadamOptions>("nadam/4", {.lr = 0.001, .maximize = true}, kNumbersInF32);
}

TEST(OptimOracle, Radam) {
  expect_trajectory<Radam, RadamOptions>("radam/1", {});
  expect_trajectory<Radam, RadamOptions>("radam/2",
                                         {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1});
  expect_trajectory<Radam, RadamOptions>("radam/3", {.lr = 0.02, .weight_decay = 0.1, .decoupled = true});
  expect_trajectory<Radam, RadamOptions>("radam/4", {.lr = 0.001, .maximize = true});
}

TEST(OptimOracle, Asgd) {
  expect_trajectory<Asgd, AsgdOptions>("asgd/1", {}, kNumbersInF32);
  expect_trajectory<Asgd, AsgdOptions>(
      "asgd/2", {.lr = 0.05, .lambd = 0.01, .alpha = 0.6, .t0 = 20, .weight_decay = 0.1}, kNumbersInF32);
  expect_trajectory<Asgd, AsgdOptions>("asgd/3", {.lr = 0.001, .maximize = true}, kNumbersInF32);
}

struct Scheduled {
  Tensor weight = set_requires_grad(Tensor::from<double>({0}, {1}));
  Sgd optimizer{{{"weight", weight}}, {.lr = 0.3, .momentum = 0.9}};
};

// Learning rates at each step, then momenta where the schedule moves them; half way through, a fresh scheduler takes
// over from the state of the first.
void expect_rates(const std::string& name, const Schedule& lr, const Schedule& momentum = {}) {
  const auto count = static_cast<int>(kRecorded.at(name).size() / (momentum ? 2 : 1));
  Scheduled first, second;
  Scheduler before(first.optimizer, lr, momentum);
  second.optimizer.set_lr(123);
  Scheduler after(second.optimizer, lr, momentum);
  Values rates, momenta;
  for (int step = 0; step < count; ++step) {
    if (step == count / 2) after.load_state_dict(before.state_dict());
    const bool early = step < count / 2;
    Sgd& optimizer = early ? first.optimizer : second.optimizer;
    rates.push_back(early ? before.last_lr()[0] : after.last_lr()[0]);
    EXPECT_EQ(rates.back(), optimizer.lr());
    momenta.push_back(optimizer.options().momentum);
    if (step + 1 < count) (early ? before : after).step();
  }
  if (momentum) rates.insert(rates.end(), momenta.begin(), momenta.end());
  expect_recorded(name, rates, 1e-12);
}

TEST(OptimOracle, Schedules) {
  expect_rates("step_decay", step_decay(3, 0.5));
  expect_rates("multi_step", multi_step({2, 5, 5, 9}, 0.3));
  expect_rates("linear", linear({.start_factor = 0.25, .end_factor = 0.75, .steps = 6}));
  expect_rates("cosine", cosine({.steps = 15, .min_lr = 0.02}));
  expect_rates("warm_cosine", cosine({.warmup_steps = 4, .steps = 20, .min_lr = 0.01, .start_factor = 0.1}));
  expect_rates("scaled_by", scaled_by([](int64_t step) { return 1 / (1 + static_cast<double>(step)); }));
  expect_rates("chained", chained({step_decay(4, 0.5), linear({.start_factor = 0.2, .end_factor = 1, .steps = 5})}));
}

TEST(OptimOracle, OneCycle) {
  const OneCycleOptions plain{.max_lr = 0.5, .steps = 20};
  expect_rates("one_cycle", one_cycle_lr(plain), one_cycle_momentum(plain));
  const OneCycleOptions straight{
      .max_lr = 0.5, .steps = 17, .rising = 0.4, .anneal = Anneal::kLinear, .start_divisor = 10, .final_divisor = 100};
  expect_rates("one_cycle_linear", one_cycle_lr(straight), one_cycle_momentum(straight));
  const OneCycleOptions three{
      .max_lr = 0.5, .steps = 25, .rising = 0.35, .three_phases = true, .base_momentum = 0.7, .max_momentum = 0.9};
  expect_rates("one_cycle_three", one_cycle_lr(three), one_cycle_momentum(three));
}

void expect_plateau(const std::string& name, const PlateauOptions& options) {
  const Values metrics{5,   4,   4.1, 3.99999, 4,   4,   3.9, 3.9, 3.9, 3.8999, 3.9,
                       3.9, 3.9, 3.5, 3.6,     3.6, 3.6, 3.6, 3.6, 3.6, 3.6,    3.6};
  Scheduled first, second;
  PlateauScheduler before(first.optimizer, options), after(second.optimizer, options);
  Values rates;
  for (size_t i = 0; i < metrics.size(); ++i) {
    if (i == metrics.size() / 2) after.load_state_dict(before.state_dict());
    PlateauScheduler& scheduler = i < metrics.size() / 2 ? before : after;
    scheduler.step(metrics[i]);
    rates.push_back(scheduler.last_lr()[0]);
  }
  expect_recorded(name, rates, 1e-12);
}

TEST(OptimOracle, Plateau) {
  expect_plateau("plateau", {.factor = 0.5, .patience = 2});
  expect_plateau("plateau_abs", {.factor = 0.1,
                                 .patience = 1,
                                 .threshold = 0.05,
                                 .threshold_mode = Threshold::kAbsolute,
                                 .cooldown = 2,
                                 .min_lr = 0.005});
  expect_plateau("plateau_max", {.mode = PlateauMode::kMax, .factor = 0.5, .patience = 3, .threshold = 0.01});
}

TEST(OptimOracle, GradScaler) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::map<int, float> bad{{3, kInf}, {4, std::nanf("")}, {11, -kInf}, {12, kInf}};
  const Tensor weight = set_requires_grad(Tensor::from<float>({1, 1, 1}, {3}));
  Sgd optimizer({{"weight", weight}}, {.lr = 0.25});
  GradScaler scaler({.scale = 1024, .growth = 4, .backoff = 0.25, .interval = 3});
  Values values;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    backward(scaler.scale(sum(weight * 0.5)));
    if (bad.contains(step)) gradient(weight).data<float>()[1] = bad.at(step);
    EXPECT_EQ(scaler.step(optimizer), !bad.contains(step));
    scaler.update();
    values.push_back(scaler.scale());
    values.push_back(static_cast<double>(weight.data<float>()[0]));
    if (step == 9) {
      GradScaler resumed;
      resumed.load_state_dict(scaler.state_dict());
      scaler = resumed;
    }
  }
  expect_recorded("scaler", values, 1e-7);
}

TEST(OptimOracle, ClippingByNorm) {
  const auto expect_clipped = [](const std::string& name, double norm_type, double max_norm) {
    const std::vector<Tensor> leaves{set_requires_grad(sample({4, 3}, 8)), set_requires_grad(sample({5}, 9))};
    for (size_t i = 0; i < leaves.size(); ++i) set_gradient(leaves[i], sample(leaves[i].sizes(), static_cast<int>(i)));
    Values values{clip_grad_norm(leaves, max_norm, {.norm_type = norm_type})};
    for (const Tensor& leaf : leaves) {
      for (double v : gradient(leaf).to_vector<double>()) values.push_back(v);
    }
    expect_recorded(name, values, 1e-12);
  };
  expect_clipped("clip/1", 1, 2);
  expect_clipped("clip/2", 2, 2);
  expect_clipped("clip/inf", std::numeric_limits<double>::infinity(), 0.5);
  expect_clipped("clip/2_large", 2, 100);
  expect_clipped("clip/3", 3, 2);
  expect_clipped("clip/half", 0.5, 20);
}

}  // namespace
}  // namespace chorale::optim
