// Optimizers over sharded parameters: an update of parts is the update of the whole.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "chorale/api/api.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/sharding/sharded.h"

namespace chorale::optim {
namespace {

constexpr int kWorld = 4;

void expect_near(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 1e-12) << what << " element " << i;
}

// Three steps with given gradients. Parameters are split by rows (unevenly), by columns, and copies; the gradient of a
// copy arrives as partial sums and is reduced once per step.
template <class Make>
void expect_equal_to_whole(const char* name, const Make& make) {
  comm::run_ranks(kWorld, [&](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Shape sizes[] = {{6, 5}, {3, 8}, {5}, {12, 2}};
    const Placement placements[] = {shard(0), shard(1), replicate(), strided_shard(0, 3)};
    NamedTensors wholes, parts;
    for (int i = 0; i < 4; ++i) {
      const std::string key(1, static_cast<char>('a' + i));
      const Tensor value = op::sample(sizes[i], i);
      wholes.emplace_back(key, set_requires_grad(clone(value)));
      parts.emplace_back(key, set_requires_grad(distribute(value, mesh, {placements[i]}, std::nullopt)));
    }
    auto one = make(wholes);
    auto many = make(parts);
    for (int step = 0; step < 3; ++step) {
      for (int i = 0; i < 4; ++i) {
        const Tensor g = op::sample(sizes[i], 10 * (step + 1) + i);
        set_gradient(wholes[static_cast<size_t>(i)].second, g);
        set_gradient(parts[static_cast<size_t>(i)].second,
                     distribute(g, mesh, {i == 2 ? partial() : placements[i]}, std::nullopt));
      }
      one.step();
      const comm::CommCounter counter;
      many.step();
      EXPECT_EQ(counter.all_reduces(), 1) << name;
      EXPECT_EQ(counter.total(), 1) << name;
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(placements_of(parts[i].second)[0], placements[i]) << name;
        expect_near(full_tensor(detach(parts[i].second)), wholes[i].second, concat(name, " step ", step, " ", i));
      }
    }
  });
}

// spec: test_{adam,adamw,sgd,adagrad,RMSprop,adadelta,nadam,radam,adamax,asgd}_1d_sharding
TEST(ShardedOptimizers, UpdatePartsAsTheyWouldTheWhole) {
  expect_equal_to_whole("adam", [](const NamedTensors& p) { return Adam(p, {.lr = 0.1}); });
  expect_equal_to_whole("adamw", [](const NamedTensors& p) { return AdamW(p, {.lr = 0.1, .weight_decay = 0.1}); });
  expect_equal_to_whole("sgd", [](const NamedTensors& p) { return Sgd(p, {.lr = 0.1, .momentum = 0.9}); });
  expect_equal_to_whole("adagrad", [](const NamedTensors& p) { return Adagrad(p, {.lr = 0.1}); });
  expect_equal_to_whole("rmsprop", [](const NamedTensors& p) { return Rmsprop(p, {.lr = 0.1, .momentum = 0.9}); });
  expect_equal_to_whole("adadelta", [](const NamedTensors& p) { return Adadelta(p, {.lr = 0.1}); });
  expect_equal_to_whole("nadam", [](const NamedTensors& p) { return Nadam(p, {.lr = 0.1}); });
  expect_equal_to_whole("radam", [](const NamedTensors& p) { return Radam(p, {.lr = 0.1}); });
  expect_equal_to_whole("adamax", [](const NamedTensors& p) { return Adamax(p, {.lr = 0.1}); });
  expect_equal_to_whole("asgd", [](const NamedTensors& p) { return Asgd(p, {.lr = 0.1}); });
}

TEST(ShardedClipping, TakesTheNormOfWholeGradients) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    comm::run_ranks(kWorld, [&](comm::Group& group) {
      const Mesh mesh(group, {kWorld});
      const Shape sizes[] = {{6, 5}, {3, 8}, {5}, {7}};
      const Placement placements[] = {shard(0), shard(1), replicate(), replicate()};
      std::vector<Tensor> wholes, parts;
      for (int i = 0; i < 4; ++i) {
        const Tensor value = op::sample(sizes[i], i), g = op::sample(sizes[i], 10 + i);
        wholes.push_back(set_requires_grad(clone(value)));
        parts.push_back(set_requires_grad(distribute(value, mesh, {placements[i]}, std::nullopt)));
        set_gradient(wholes.back(), clone(g));
        set_gradient(parts.back(), distribute(g, mesh, {i == 2 ? partial() : placements[i]}, std::nullopt));
      }
      const double norm = clip_grad_norm(wholes, 0.1, {.norm_type = p});
      comm::CommCounter counter;
      EXPECT_NEAR(clip_grad_norm(parts, 0.1, {.norm_type = p}), norm, 1e-12);
      // Partial sums of one gradient, and the norm; the maxima of the two that are split are reduced one by one.
      EXPECT_EQ(counter.total(), std::isinf(p) ? 3 : 2) << counter;
      for (size_t i = 0; i < 4; ++i)
        expect_near(full_tensor(gradient(parts[i])), gradient(wholes[i]), concat("gradient ", i, ", p = ", p));
    });
  }
}

// One rank's part overflows: no rank steps, and all have the same scale afterwards. Parts as sharded tensors, and as
// tensors of a rank's own.
TEST(ShardedScaling, RanksSkipAStepTogether) {
  comm::run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2});
    for (const bool as_sharded : {true, false}) {
      const Tensor part = ones({3});
      const Tensor p = set_requires_grad(as_sharded ? from_local(part, mesh, {shard(0)}) : part);
      Sgd optimizer({{"p", p}}, {.lr = 1});
      GradScaler scaler({.scale = 8, .parts = as_sharded ? nullptr : mesh.shared_group(0)});
      const auto step_with = [&](double value) {
        const Tensor g = full({3}, value);
        set_gradient(p, as_sharded ? from_local(g, mesh, {shard(0)}) : g);
        const bool stepped = scaler.step(optimizer);
        scaler.update();
        return stepped;
      };
      EXPECT_FALSE(step_with(group.rank() == 1 ? std::numeric_limits<double>::infinity() : 8));
      EXPECT_EQ(scaler.scale(), 4);
      const NoGrad quiet;
      EXPECT_EQ(to_local(as_sharded ? p : from_local(p, mesh, {shard(0)})).to_vector<float>(),
                (std::vector<float>{1, 1, 1}));
      EXPECT_TRUE(step_with(2));
      EXPECT_EQ(to_local(as_sharded ? p : from_local(p, mesh, {shard(0)})).to_vector<float>(),
                (std::vector<float>{0.5, 0.5, 0.5}));
    }
  });
}

}  // namespace
}  // namespace chorale::optim
