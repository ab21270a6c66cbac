// Data-parallel over tensor parallel training: sections A10 and B1 of spec/tensor-parallel.md.
#include <gtest/gtest.h>

#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/parallel/tensor_parallel_test_util.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

struct Deep : nn::Module {
  struct Level : nn::Module {
    std::vector<Mlp> layers;
    CHORALE_MODULE(Level, layers)
    Level() : layers(2) {}
    Tensor forward(const Tensor& x) { return layers[1](layers[0](x)); }
  };
  Level level;
  CHORALE_MODULE(Deep, level)
  Tensor forward(const Tensor& x) { return level(x); }
};
struct Normed : nn::Module {
  nn::LayerNorm norm;
  Mlp mlp;
  CHORALE_MODULE(Normed, norm, mlp)
  Normed() : norm(10) {}
  Tensor forward(const Tensor& x) { return mlp(norm(x)); }
};

const Plan& mlp_plan() {
  static const Plan plan{{"net1", Colwise()}, {"net2", Rowwise()}};
  return plan;
}

// What the tests share: a mesh of 2 replicas of 2 shards.
struct Replicas {
  explicit Replicas(comm::Group& group)
      : mesh(group, {2, 2}, {"dp", "tp"}), dp(mesh.coordinate("dp")), tp(mesh.coordinate("tp")) {}
  Mesh mesh;
  int dp, tp;
  // The same for both shards of a replica, different between replicas.
  Tensor input(int step = 0, int64_t rows = 4) const { return op::sample({rows, 10}, 100 * (step + 1) + dp); }
};

template <class M>
DistributedDataParallel<M> wrapped(const Replicas& setup, const Plan& plan, DdpOptions options = {}) {
  M model = filled(M());
  tensor_parallel(model, setup.mesh["tp"], plan);
  options.mesh = setup.mesh["dp"];
  return DistributedDataParallel<M>(std::move(model), options);
}

// spec: test_2d_ddp_integration_functionality
TEST(DdpOverTensorParallel, TrainsAsDdpDoes) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    DistributedDataParallel<Mlp> reference(filled(Mlp()), group);
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan());
    optim::Adam one(reference.named_parameters(), {.lr = 3e-5}), two(ddp.named_parameters(), {.lr = 3e-5});
    const Tensor y = ddp(setup.input()), z = reference(setup.input());
    expect_near(y, z, 1e-12, "before");
    backward(sum(y));
    backward(sum(z));
    one.step();
    two.step();
    const Tensor x = setup.input(1, 16);
    expect_near(ddp(x), reference(x), 1e-12, "after");
  });
}

// spec: x_ddp_tp_params_visible
TEST(DdpOverTensorParallel, ShowsTheSameParametersAlways) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan());
    const auto before = ddp.named_parameters();
    const auto check = [&] {
      const auto now = ddp.named_parameters();
      ASSERT_EQ(now.size(), 4u);
      const Shape shapes[] = {{8, 10}, {8}, {10, 8}, {10}};
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(now[i].first, before[i].first);
        EXPECT_TRUE(now[i].second.is(before[i].second)) << now[i].first;
        EXPECT_FALSE(now[i].second.is_sharded());
        EXPECT_EQ(now[i].second.sizes(), shapes[i]);
      }
    };
    check();
    optim::Sgd optimizer(before, {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      const Tensor weight = clone(detach(before[0].second));
      const Tensor y = ddp(setup.input(step));
      check();
      backward(sum(y));
      check();
      optimizer.step();
      optimizer.zero_grad();
      check();
      EXPECT_NE((weight.to_vector<double>()), (before[0].second.to_vector<double>())) << "the optimizer stays valid";
    }
  });
}

// The gradients of a model in DDP over all ranks, after a backward of the sum of its results.
template <class M>
NamedTensors reference_gradients(comm::Group& group, const Tensor& x) {
  DistributedDataParallel<M> reference(filled(M()), group);
  backward(sum(reference(x)));
  NamedTensors gradients;
  for (const auto& [name, p] : reference.named_parameters()) gradients.emplace_back(name, gradient(p));
  return gradients;
}

// spec: x_ddp_tp_grads, x_ddp_tp_dp_groups
TEST(DdpOverTensorParallel, GradientsAreThePartsOfTheReference) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    const NamedTensors expected = reference_gradients<Mlp>(group, setup.input());
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan());
    const Tensor y = ddp(setup.input());
    const int64_t calls_on_tp = setup.mesh.group("tp").sequence_number();
    backward(sum(y));
    EXPECT_EQ(setup.mesh.group("tp").sequence_number(), calls_on_tp) << "DDP reduces along dp only";
    const auto p = ddp.named_parameters();
    ASSERT_EQ(p.size(), 4u);
    const int64_t first = 8 * setup.tp;
    expect_near(gradient(p[0].second), narrow(expected[0].second, 0, first, 8), 1e-12, "net1.weight");
    expect_near(gradient(p[1].second), narrow(expected[1].second, 0, first, 8), 1e-12, "net1.bias");
    expect_near(gradient(p[2].second), narrow(expected[2].second, 1, first, 8), 1e-12, "net2.weight");
    expect_near(gradient(p[3].second), expected[3].second, 1e-12, "net2.bias");
    // Equal along dp, different along tp.
    const auto differs_along = [&](const char* dim) {
      const comm::Group& line = setup.mesh.group(dim);
      const Tensor own = contiguous(gradient(p[0].second)), other = empty({2, 8, 10}, DType::kF64);
      line.all_gather_into(other, own).wait();
      return max(abs(select(other, 0, 0) - select(other, 0, 1))).item<double>() > 0;
    };
    EXPECT_FALSE(differs_along("dp"));
    EXPECT_TRUE(differs_along("tp"));
  });
}

// spec: x_ddp_tp_norm
TEST(DdpOverTensorParallel, GradientsOfNormsAreReducedBeforeAnyHook) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    const NamedTensors expected = reference_gradients<Normed>(group, setup.input());
    // Each shard of a replica has half of the rows; the norm runs on them.
    const Plan plan{
        {"norm", SequenceParallel(0)}, {"mlp.net1", Colwise().with_input(shard(0))}, {"mlp.net2", Rowwise()}};
    DistributedDataParallel<Normed> ddp = wrapped<Normed>(setup, plan);
    const Tensor x = setup.input();
    const auto p = ddp.named_parameters();
    ASSERT_EQ(p.size(), 6u);
    // The gradients of this replica alone, before averaging along dp.
    Normed alone = filled(Normed());
    backward(sum(alone(x)));
    int seen = 0;
    const Tensor own = gradient(alone.norm.weight);
    on_gradient(p[0].second, [&](const Tensor& g) {
      ++seen;
      expect_near(g, own, 1e-11, "reduced over tp");
      return Tensor();
    });
    backward(sum(ddp(clone(narrow(x, 0, 2 * setup.tp, 2)))));
    EXPECT_EQ(seen, 1);
    expect_near(gradient(p[0].second), expected[0].second, 1e-11, "norm.weight");
    expect_near(gradient(p[1].second), expected[1].second, 1e-11, "norm.bias");
  });
}

// spec: x_ddp_tp_ignored
TEST(DdpOverTensorParallel, IgnoredParametersStaySharded) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan(), {.ignore = {"net1.bias"}});
    size_t sharded = 0;
    for (const auto& [name, p] : ddp.named_parameters()) {
      if (p.is_sharded()) {
        ++sharded;
        EXPECT_EQ(name, "net1.bias");
      }
    }
    EXPECT_EQ(sharded, 1u);
    EXPECT_EQ(ddp.managed_parameters().size(), 3u);
    backward(sum(ddp(setup.input())));
    for (const auto& [name, p] : ddp.named_parameters()) EXPECT_EQ(gradient(p).is_sharded(), p.is_sharded()) << name;
  });
}

// spec: x_ddp_tp_nested
TEST(DdpOverTensorParallel, FindsParametersOfNestedModules) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    const NamedTensors expected = reference_gradients<Deep>(group, setup.input());
    DistributedDataParallel<Deep> ddp =
        wrapped<Deep>(setup, {{"level.layers.*.net1", Colwise()}, {"level.layers.*.net2", Rowwise()}});
    backward(sum(ddp(setup.input())));
    const auto p = ddp.named_parameters();
    ASSERT_EQ(p.size(), 8u);
    for (size_t i = 0; i < 8; ++i) {
      const Tensor whole = expected[i].second;
      const bool rows = i % 4 < 2;
      const Tensor part = i % 4 == 3 ? whole : narrow(whole, rows ? 0 : 1, 8 * setup.tp, 8);
      expect_near(gradient(p[i].second), part, 1e-12, p[i].first);
    }
  });
}

// spec: x_ddp_tp_two_forwards
TEST(DdpOverTensorParallel, TwoForwardsAddUp) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    DistributedDataParallel<Mlp> reference(filled(Mlp()), group);
    backward(sum(reference.module()(setup.input(0))) + sum(reference.module()(setup.input(1))));
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan());
    const auto p = ddp.named_parameters(), q = reference.named_parameters();
    std::vector<int> hooks(p.size());
    for (size_t i = 0; i < p.size(); ++i) after_accumulate(p[i].second, [&hooks, i](const Tensor&) { ++hooks[i]; });
    const Tensor loss = sum(ddp(setup.input(0))) + sum(ddp(setup.input(1)));
    backward(loss);
    for (size_t i = 0; i < p.size(); ++i) {
      EXPECT_EQ(hooks[i], 1) << p[i].first;
      const Tensor expected = clone(gradient(q[i].second));
      group.all_reduce(expected, Reduce::kAverage).wait();
      const Tensor part = i == 3 ? expected : narrow(expected, i < 2 ? 0 : 1, 8 * setup.tp, 8);
      expect_near(gradient(p[i].second), part, 1e-12, p[i].first);
    }
  });
}

// spec: x_ddp_tp_state_dict
TEST(DdpOverTensorParallel, StatesAreRebuiltForSaving) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    DistributedDataParallel<Mlp> reference(filled(Mlp()), group);
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan());
    optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(ddp.named_parameters(), {.lr = 0.1});
    backward(sum(reference(setup.input())));
    backward(sum(ddp(setup.input())));
    one.step();
    two.step();
    NamedTensors whole;
    for (const auto& [name, tensor] : ddp.sharded_state_dict()) {
      EXPECT_TRUE(tensor.is_sharded()) << name;
      whole.emplace_back(name, full_tensor(tensor));
    }
    ASSERT_EQ(whole.size(), 4u);
    Mlp plain = filled(Mlp());
    plain.load_state_dict(whole);
    const auto p = plain.named_parameters(), q = reference.named_parameters();
    for (size_t i = 0; i < 4; ++i) expect_near(p[i].second, q[i].second, 1e-12, p[i].first);
  });
}

// spec: x_ddp_tp_no_sync
TEST(DdpOverTensorParallel, AccumulatesWithoutSynchronizing) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    DistributedDataParallel<Mlp> reference(filled(Mlp()), group);
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan());
    const auto accumulate = [&](auto& model) {
      {
        const auto scope = model.no_sync();
        for (int i = 0; i < 2; ++i) backward(sum(model(setup.input(i))));
      }
      backward(sum(model(setup.input(2))));
    };
    accumulate(reference);
    accumulate(ddp);
    const auto p = ddp.named_parameters(), q = reference.named_parameters();
    ASSERT_EQ(p.size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      const Tensor whole = gradient(q[i].second);
      expect_near(gradient(p[i].second), i == 3 ? whole : narrow(whole, i < 2 ? 0 : 1, 8 * setup.tp, 8), 1e-12,
                  p[i].first);
    }
  });
}

struct WholeThenParts : nn::Module {
  nn::Linear whole{10, 10};
  Mlp mlp;
  CHORALE_MODULE(WholeThenParts, whole, mlp)
  Tensor forward(const Tensor& x) { return mlp(relu(whole(x))); }
};

// A rank's parts are matrices of their own to PowerSGD. With factors of full rank nothing is lost; with fewer, what all
// ranks of a replica have stays the same on them.
TEST(DdpOverTensorParallel, PowerSgdCompressesParts) {
  const Plan plan{{"whole", Replicated()}, {"mlp.net1", Colwise()}, {"mlp.net2", Rowwise()}};
  run_ranks(kWorld, [&](comm::Group& group) {
    const Replicas setup(group);
    for (const int64_t rank : {10, 1}) {
      DistributedDataParallel<WholeThenParts> exact = wrapped<WholeThenParts>(setup, plan),
                                              ddp = wrapped<WholeThenParts>(setup, plan);
      const auto state = std::make_shared<PowerSgd>(
          PowerSgdOptions{.rank = rank, .start_iteration = 2, .min_compression_rate = rank == 10 ? 0 : 1.0});
      ddp.register_comm_hook(power_sgd_hook(state));
      optim::Sgd one(exact.named_parameters(), {.lr = 1e-3}), two(ddp.named_parameters(), {.lr = 1e-3});
      for (int step = 0; step < 5; ++step) {
        one.zero_grad();
        two.zero_grad();
        backward(mean(square(exact(setup.input(step)))));
        backward(mean(square(ddp(setup.input(step)))));
        one.step();
        two.step();
      }
      const auto p = ddp.named_parameters(), q = exact.named_parameters();
      ASSERT_EQ(p.size(), 6u);
      double lost = 0;
      for (size_t i = 0; i < p.size(); ++i) {
        const Tensor mine = detach(p[i].second);
        lost = std::max(lost, max(abs(sub(mine, detach(q[i].second)))).item<double>());
        if (p[i].first.find("whole") == std::string::npos && p[i].first.find("net2.bias") == std::string::npos)
          continue;
        const Tensor first = clone(mine);
        setup.mesh.group("tp").broadcast(first, setup.mesh.group("tp").global_rank(0)).wait();
        expect_near(mine, first, 0, concat(p[i].first, " on ranks of a replica"));
      }
      if (rank == 10) {
        EXPECT_LE(lost, 1e-10);
      } else {
        EXPECT_GT(lost, 1e-8) << "something was compressed";
        EXPECT_LT(state->sent_bytes(), state->gradient_bytes());
      }
    }
  });
}

TEST(DdpOverTensorParallel, ADeathNamesCoordinates) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Replicas setup(group);
    DistributedDataParallel<Mlp> ddp = wrapped<Mlp>(setup, mlp_plan());
    const Tensor loss = sum(ddp(setup.input()));
    if (group.rank() == 3) return;  // and is gone; nothing but the average over replicas follows
    std::string text;
    try {
      backward(loss);
    } catch (const CommError& error) {
      text = error.what();
    }
    const std::string wanted =
        "in the mesh of 2 x 2 ranks (dp, tp) this is rank 1 at dp 0, tp 1, and the culprit rank 3 at dp 1, tp 1";
    EXPECT_EQ(text.find(wanted) != std::string::npos, group.rank() == 1) << text;
  });
}

}  // namespace
}  // namespace chorale::parallel
