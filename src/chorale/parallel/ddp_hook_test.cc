// Communication hooks, and optimizers that run inside backward.
#include "chorale/base/error.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

CommHook averaging(const comm::Group* on = nullptr) {
  return {"average", [on](GradBucket& bucket) {
            const comm::Group& group = on ? *on : bucket.group();
            div_(bucket.buffer(), group.size());
            return group.all_reduce(bucket.buffer()).future();
          }};
}

// spec: test_ddp_hook_parity_allreduce, test_ddp_hook_parity_allreduce_process_group
TEST(CommHook, AHookThatAveragesGivesTheAverage) {
  for (bool own_group : {false, true}) {
    run_ranks(3, [own_group](comm::Group& group) {
      comm::Group full = group.duplicate();
      DistributedDataParallel plain(seeded(Linear(1, 5), 0), group), hooked(seeded(Linear(1, 5), 0), group);
      hooked.register_comm_hook(averaging(own_group ? &full : nullptr));
      const Tensor x = full_like(ones({1, 1}), group.rank());
      for (int step = 0; step < 100; ++step) {
        for (auto* ddp : {&plain, &hooked}) {
          ddp->zero_grad(false);
          backward(sum((*ddp)(x)));
          ASSERT_NEAR(gradient(ddp->module().weight).to_vector<float>()[0], 1, 1e-5) << step;
        }
      }
    });
  }
}

// spec: test_ddp_python_error_logged
TEST(CommHook, ANullHookIsRefusedAndLogged) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(TwoLin(), group);
    const std::string error = message_of<InvalidArgument>([&] { ddp.register_comm_hook({"none", nullptr}); });
    EXPECT_TRUE(ddp.log().has_error);
    EXPECT_EQ(ddp.log().error, error);
    EXPECT_EQ(ddp.log().comm_hook, "");
    ddp.register_comm_hook(averaging());
    EXPECT_EQ(ddp.log().comm_hook, "average");
    EXPECT_TRUE(has(message_of<StateError>([&] { ddp.register_comm_hook(averaging()); }), "average"));
  });
}

struct LargeNet : nn::Module {
  Linear fc1{1000, 2000, {.bias = false}}, fc2{2000, 500, {.bias = false}};
  CHORALE_MODULE(LargeNet, fc1, fc2)
  Tensor forward(const Tensor& x) { return fc2(fc1(x)); }
};

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(const NamedTensors&)>;

// Averages, and then lets the parameters of the bucket be updated at once, each by an optimizer of its own.
void update_in_hook(const comm::Group& group, const MakeOptimizer& make_one, bool views, bool declared, bool subset) {
  const DdpOptions options{.gradient_as_bucket_view = views, .static_graph = declared};
  DistributedDataParallel fused(seeded(LargeNet(), group.rank()), group, options);
  DistributedDataParallel ordinary(nn::clone(fused.module()), group, options);
  const LargeNet before = nn::clone(fused.module());
  std::map<size_t, std::unique_ptr<optim::Optimizer>> optimizers;
  const auto& managed = fused.managed_parameters();
  for (size_t i = 0; i < (subset ? 1 : managed.size()); ++i) optimizers[i] = make_one({managed[i]});
  fused.register_comm_hook({"update", [&](GradBucket& bucket) {
                              div_(bucket.buffer(), bucket.group().size());
                              const auto gradients = bucket.gradients();
                              const auto parameters = bucket.parameters();
                              return bucket.group()
                                  .all_reduce(bucket.buffer())
                                  .future()
                                  .then([=, &optimizers, &managed](const Tensors& all) {
                                    for (size_t k = 0; k < parameters.size(); ++k) {
                                      const auto found = optimizers.find(parameters[k]);
                                      if (found == optimizers.end()) continue;
                                      const Tensor& parameter = managed[parameters[k]].second;
                                      const Tensor own = gradient(parameter);
                                      set_gradient(parameter, gradients[k]);
                                      found->second->step();
                                      set_gradient(parameter, own);
                                    }
                                    return all;
                                  });
                            }});
  const auto plain = make_one(subset ? NamedTensors{ordinary.managed_parameters()[0]} : ordinary.managed_parameters());
  for (int step = 0; step < 6; ++step) {
    const Tensor x = pattern({1, 1000}, step + 10 * group.rank());
    backward(sum(fused(x)));
    fused.zero_grad();
    backward(sum(ordinary(x)));
    plain->step();
    ordinary.zero_grad();
  }
  expect_equal_parameters(fused.module(), ordinary.module());
  EXPECT_FALSE(equal_bits(fused.module().fc1.weight, before.fc1.weight));
  EXPECT_EQ(equal_bits(fused.module().fc2.weight, before.fc2.weight), subset);
}

// spec: test_ddp_hook_with_optimizer_parity_{adamw,adam,sgd}
TEST(CommHook, AHookMayUpdateTheParametersOfItsBucket) {
  const MakeOptimizer adamw = [](const NamedTensors& p) {
    return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6});
  };
  const MakeOptimizer adam = [](const NamedTensors& p) {
    return std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6});
  };
  const MakeOptimizer sgd = [](const NamedTensors& p) {
    return std::make_unique<optim::Sgd>(p, optim::SgdOptions{.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.01});
  };
  run_ranks(2, [&](comm::Group& group) {
    for (const MakeOptimizer* optimizer : {&adamw, &adam, &sgd}) {
      for (bool views : {false, true}) {
        for (bool declared : {false, true}) {
          for (bool subset : {false, true}) update_in_hook(group, *optimizer, views, declared, subset);
        }
      }
    }
  });
}

struct ThreeLayers : nn::Module {
  Linear a{3, 3}, b{3, 3}, c{3, 3};
  CHORALE_MODULE(ThreeLayers, a, b, c)
  Tensor forward(const Tensor& x) { return c(relu(b(relu(a(x))))); }
};

std::unique_ptr<optim::Optimizer> make(bool adam, const NamedTensors& parameters) {
  if (adam) return std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = 0.03});
  return std::make_unique<optim::Sgd>(parameters, optim::SgdOptions{.lr = 0.03});
}

void update_in_backward(const comm::Group& group, bool adam, bool before, bool views) {
  ThreeLayers net = seeded(ThreeLayers(), group.rank());
  std::unique_ptr<optim::Optimizer> inside;
  const auto attach = [&] {
    inside = make(adam, net.named_parameters());
    inside->update_in_backward();
  };
  if (before) attach();
  DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = views});
  if (!before) attach();
  DistributedDataParallel ordinary(nn::clone(net), group, {.gradient_as_bucket_view = views});
  const auto outside = make(adam, ordinary.module().named_parameters());
  for (int step = 0; step < 8; ++step) {
    const Tensor x = pattern({10, 3}, step + 100 * group.rank());
    backward(sum(ddp(x)));
    inside->step();
    backward(sum(ordinary(x)));
    outside->step();
    outside->zero_grad();
    for (const Tensor& p : ddp.parameters()) EXPECT_FALSE(gradient(p).defined());
    expect_equal_parameters(ddp.module(), ordinary.module());
  }
}

// spec: test_ddp_apply_optim_in_backward, test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
TEST(OptimizerInBackward, UsesTheAverageAndLeavesNoGradient) {
  for (bool adam : {false, true}) {
    for (bool before : {false, true}) {
      run_ranks(2, [=](comm::Group& group) { update_in_backward(group, adam, before, true); });
    }
  }
  run_ranks(3, [](comm::Group& group) { update_in_backward(group, false, true, false); });
}

// spec: test_ddp_apply_optim_in_backward_ignored_params
TEST(OptimizerInBackward, IgnoredParametersAreUpdatedByTheirOwnGradient) {
  run_ranks(2, [](comm::Group& group) {
    TwoLin net = seeded(TwoLin(), group.rank());
    optim::Sgd optimizer(net.named_parameters(), {.lr = 0.03});
    optimizer.update_in_backward();
    DistributedDataParallel ddp(net, group, {.ignore = {"a.weight"}});
    const auto [a, b] = ddp(pattern({5, 10}, group.rank()));
    backward(sum(matmul(transpose(a, 0, 1), b)));
    Tensor first = clone(detach(net.a.weight));
    group.broadcast(first, 0).wait();
    EXPECT_EQ(equal_bits(first, net.a.weight), group.rank() == 0);
    expect_same_on_all_ranks(group, net.b.weight);
    EXPECT_FALSE(gradient(net.b.weight).defined());
  });
}

}  // namespace
}  // namespace chorale::parallel
