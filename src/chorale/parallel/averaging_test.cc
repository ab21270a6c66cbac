#include "chorale/parallel/averaging.h"

#include <gmock/gmock.h>

#include "chorale/optim/sgd.h"
#include "chorale/parallel/comm_hooks.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

void set_all(const std::vector<Tensor>& parameters, double value) {
  const NoGrad quiet;
  for (const Tensor& p : parameters) fill_(p, value);
}
void expect_all(const std::vector<Tensor>& parameters, double value, int64_t step = 0) {
  for (const Tensor& p : parameters) {
    EXPECT_THAT(p.to_vector<double>(), ::testing::Each(value)) << "step " << step;
  }
}
void give_gradients(const std::vector<Tensor>& parameters) {
  for (const Tensor& p : parameters) set_gradient(p, ones_like(p));
}

// spec: test_average_parameters
TEST(AverageParameters, AveragesAmongTheRanksOfTheGroupOnly) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [](comm::Group& world) {
      nn::Sequential net(nn::Conv2d(3, 3, {.kernel = 3}), nn::Linear(1, 5));
      set_all(net.parameters(), 1);
      average_parameters(net.parameters(), world);
      expect_all(net.parameters(), 1);
      const comm::Group pair = world.new_group({0, 1});
      set_all(net.parameters(), world.rank());
      average_parameters(net.parameters(), pair);
      expect_all(net.parameters(), world.rank() < 2 ? 0.5 : world.rank());
    });
  }
}

// In each of `steps` steps every parameter is the rank's number before it.
template <class Average>
void expect_averages(const std::vector<Tensor>& parameters, const comm::Group& world, int64_t steps,
                     const Average& average, const std::function<double(int64_t step)>& expected) {
  for (int64_t step = 0; step < steps; ++step) {
    set_all(parameters, world.rank());
    give_gradients(parameters);
    average();
    expect_all(parameters, expected(step), step);
  }
}

// spec: test_periodic_model_averager
// spec: test_periodic_model_averager_param_group
TEST(PeriodicAverager, AveragesInEveryPeriodOnceTheWarmUpIsOver) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [](comm::Group& world) {
      for (const int64_t warmup : {12, 13, 14, 15}) {
        nn::Linear linear(1, 5);
        const auto expected = [&](int64_t step) {
          return step >= warmup && (step - warmup) % 4 == 0 ? (world.size() - 1) / 2.0 : world.rank();
        };
        PeriodicAverager averager(world, {.period = 4, .warmup_steps = warmup});
        expect_averages(
            linear.parameters(), world, 20, [&] { averager.average_parameters(linear.parameters()); }, expected);
        EXPECT_EQ(averager.step(), 20);
        // The same through an optimizer with two groups of parameters.
        optim::Sgd sgd({{.parameters = {{"weight", linear.weight}}, .options = {.lr = 0.1}},
                        {.parameters = {{"bias", linear.bias}}, .options = {.lr = 0.2}}});
        PeriodicAverager of_groups(world, {.period = 4, .warmup_steps = warmup});
        expect_averages(
            linear.parameters(), world, 20, [&] { of_groups.average_parameters(sgd); }, expected);
      }
    });
  }
}

TEST(PeriodicAverager, LeavesParametersWithoutGradientAlone) {
  run_ranks(2, [](comm::Group& world) {
    nn::Linear linear(1, 5);
    set_all(linear.parameters(), world.rank());
    give_gradients({linear.weight});
    PeriodicAverager averager(world, {.period = 2});
    averager.average_parameters(linear.parameters());
    expect_all({linear.weight}, 0.5);
    expect_all({linear.bias}, world.rank());
  });
}

// spec: test_1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager
TEST(HierarchicalAverager, OfOneLevelCountsFromTheFirstStep) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [](comm::Group& world) {
      for (const int64_t warmup : {12, 13, 14, 15}) {
        nn::Linear linear(1, 5);
        HierarchicalAverager averager(world, {{4, world.size()}}, warmup);
        expect_averages(
            linear.parameters(), world, 20, [&] { averager.average_parameters(linear.parameters()); },
            [&](int64_t step) { return step >= warmup && step % 4 == 0 ? (world.size() - 1) / 2.0 : world.rank(); });
      }
    });
  }
}

// spec: test_3_level_hierarchical_model_averager
TEST(HierarchicalAverager, LetsTheLongestPeriodWin) {
  run_ranks(4, [](comm::Group& world) {
    HierarchicalAverager averager(world, {{2, 2}, {4, 4}, {8, 4}}, 10);
    ASSERT_EQ(averager.levels().size(), 3u);
    const std::vector<int> pair = world.rank() < 2 ? std::vector{0, 1} : std::vector{2, 3}, all{0, 1, 2, 3};
    EXPECT_EQ(averager.levels()[0].group.members(), pair);
    EXPECT_EQ(averager.levels()[1].group.members(), all);
    EXPECT_EQ(averager.levels()[2].group.members(), all);
    nn::Linear linear(1, 5);
    expect_averages(
        linear.parameters(), world, 25, [&] { averager.average_parameters(linear.parameters()); },
        [&](int64_t step) -> double {
          if (step < 10 || step % 2 != 0) return world.rank();
          return step % 4 == 0 ? 1.5 : (pair[0] + pair[1]) / 2.0;
        });
    EXPECT_EQ(averager.step(), 25);
  });
  run_ranks(8, [](comm::Group& world) {
    HierarchicalAverager averager(world, {{1, 2}, {2, 4}, {4, 8}});
    nn::Linear linear(1, 5);
    expect_averages(
        linear.parameters(), world, 8, [&] { averager.average_parameters(linear.parameters()); },
        [&](int64_t step) {
          const int size = step % 4 == 0 ? 8 : step % 2 == 0 ? 4 : 2;
          const int first = world.rank() / size * size;
          return first + (size - 1) / 2.0;
        });
  });
}

TEST(ModelAverager, RefusesWhatCannotBe) {
  run_ranks(2, [](comm::Group& world) {
    EXPECT_THROW(PeriodicAverager(world, {.period = 0}), InvalidArgument);
    EXPECT_THROW(PeriodicAverager(world, {.period = 2, .warmup_steps = -1}), InvalidArgument);
    EXPECT_THROW(HierarchicalAverager(world, {}), InvalidArgument);
    EXPECT_THROW(HierarchicalAverager(world, {{0, 2}}), InvalidArgument);
    EXPECT_THROW(HierarchicalAverager(world, {{2, 1}}), InvalidArgument);
    EXPECT_THROW(HierarchicalAverager(world, {{2, 2}}, -1), InvalidArgument);
  });
}

// A step on this rank's own data.
template <class M>
void compute_gradients(M& module, const comm::Group& world, int step) {
  const int seed = step * world.size() + world.rank();
  module.zero_grad();
  backward(mse_loss(module(pattern({2, 2}, seed)), pattern({2, 4}, 100 + seed)));
}

void expect_parity(const comm::Group& world, ModelAverager& plain, ModelAverager& wrapped, bool views) {
  DistributedDataParallel a(seeded(Net(), 1), world, {.gradient_as_bucket_view = views});
  DistributedDataParallel b(seeded(Net(), 1), world, {.gradient_as_bucket_view = views});
  // After the first steps gradients stay this rank's own, and parameters drift apart until they are averaged.
  for (auto* ddp : {&a, &b}) {
    ddp->register_comm_hook(post_local_sgd_hook({.start_iteration = 4, .average_in_subgroup = false}));
  }
  optim::Sgd sgd_a(a.managed_parameters(), {.lr = 0.03}), sgd_b(b.managed_parameters(), {.lr = 0.03});
  PostLocalSgdOptimizer optimizer(sgd_b, wrapped);
  for (int step = 0; step < 20; ++step) {
    compute_gradients(a, world, step);
    compute_gradients(b, world, step);
    sgd_a.step();
    plain.average_parameters(sgd_a);
    optimizer.step();
    expect_equal_parameters(a, b);
  }
  EXPECT_EQ(plain.step(), 20);
  EXPECT_EQ(wrapped.step(), 20);
}

// spec: test_post_localSGD_optimizer_parity, test_post_localSGD_optimizer_parity_grad_is_view
// spec: test_post_localSGD_optimizer_parity_with_hierarchical_sgd
// spec: test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
TEST(PostLocalSgdOptimizer, IsTheOptimizerFollowedByTheAverager) {
  for (const bool views : {false, true}) {
    for (const int ranks : {2, 3, 4}) {
      run_ranks(ranks, [&](comm::Group& world) {
        const PeriodicAveragerOptions options{.period = 4, .warmup_steps = 10};
        PeriodicAverager plain(world, options), wrapped(world, options);
        expect_parity(world, plain, wrapped, views);
      });
    }
    run_ranks(4, [&](comm::Group& world) {
      HierarchicalAverager plain(world, {{2, 2}, {4, 4}}, 4), wrapped(world, {{2, 2}, {4, 4}}, 4);
      expect_parity(world, plain, wrapped, views);
    });
  }
}

// spec: test_post_localSGD_optimizer_step_reload
TEST(PostLocalSgdOptimizer, SavesAndRestoresTheAveragersStep) {
  run_ranks(2, [](comm::Group& world) {
    Net a, b;
    optim::Sgd sgd_a(managed_parameters(a), {.lr = 0.03, .momentum = 0.9});
    optim::Sgd sgd_b(managed_parameters(b), {.lr = 0.03, .momentum = 0.9});
    PeriodicAverager averager_a(world, {.period = 4, .warmup_steps = 10});
    PeriodicAverager averager_b(world, {.period = 4, .warmup_steps = 10});
    PostLocalSgdOptimizer one(sgd_a, averager_a), other(sgd_b, averager_b);
    for (int step = 0; step < 20; ++step) {
      compute_gradients(a, world, step);
      one.step();
    }
    NamedTensors state = one.state_dict();
    other.load_state_dict(state);
    EXPECT_EQ(averager_b.step(), 20);
    EXPECT_EQ(other.state_dict().size(), state.size());
    std::erase_if(state, [](const auto& entry) { return entry.first == "averager/step"; });
    other.load_state_dict(state);
    EXPECT_EQ(averager_b.step(), 0);
  });
}

TEST(PostLocalSgdOptimizer, WarnsOfAStateWithoutStep) {
  run_ranks(1, [](comm::Group& world) {
    Net net;
    optim::Sgd sgd(managed_parameters(net), {.lr = 0.03});
    PeriodicAverager averager(world, {.period = 4});
    PostLocalSgdOptimizer optimizer(sgd, averager);
    testing::internal::CaptureStderr();
    optimizer.load_state_dict(sgd.state_dict());
    EXPECT_THAT(testing::internal::GetCapturedStderr(), ::testing::HasSubstr("starts over from 0"));
  });
}

}  // namespace
}  // namespace chorale::parallel
