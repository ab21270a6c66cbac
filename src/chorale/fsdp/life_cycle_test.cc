// When parameters are whole, how gradients are accumulated, replicas of shards, recovery: section B2 of
// spec/sharded-training.md.
#include "chorale/fsdp/fsdp_test_util.h"

namespace chorale::fsdp {
namespace {

// spec: test_param_registration_after_{forward,backward}
TEST(FullyShardedLifeCycle, ThePolicySaysWhatIsInTheModuleAfterForward) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Tensor x = pattern({2, 3}, group.rank());
    const ReshardAfterForward policies[] = {true, false, 2, {}};
    for (const bool several : {false, true}) {
      for (const ReshardAfterForward& policy : policies) {
        MlpStack model = seeded(MlpStack(3, 3));
        const MlpStack whole = clone(model);
        const Options options{.mesh = mesh, .reshard_after_forward = policy};
        if (several) {
          shard_layers_and_root(model, model.layers, options);
        } else {
          fully_shard(model, options);
        }
        const auto expect = [&](bool is_whole, bool is_piece, const char* when) {
          const NamedTensors now = model.named_parameters(), values = whole.named_parameters();
          ASSERT_EQ(now.size(), 12u);
          const NoGrad quiet;
          for (size_t i = 0; i < now.size(); ++i) {
            EXPECT_EQ(now[i].first, values[i].first);
            EXPECT_EQ(now[i].second.is_sharded(), !is_whole) << when << " " << now[i].first;
            EXPECT_EQ(now[i].second.sizes(), values[i].second.sizes());
            if (is_whole) {
              expect_close(now[i].second, values[i].second, 0, when);
              continue;
            }
            EXPECT_EQ(mesh_of(now[i].second).size(), is_piece ? 2 : 4) << when;
            expect_close(full_tensor(detach(now[i].second)), values[i].second, 0, when);
          }
        };
        const bool root_only_kept = policy.is_automatic() && !several;
        const Tensor loss = sum(model(x));
        expect(policy.keeps() || root_only_kept, policy.is_number(), "after forward");
        for (Mlp& layer : model.layers) {
          if (several) reshard(layer);
        }
        reshard(model);
        expect(false, false, "after reshard()");
        backward(loss);
        expect(false, false, "after backward");
      }
    }
  });
}

struct Accumulating : nn::Module {
  nn::Linear first{32, 32};
  std::vector<Mlp> layers;
  CHORALE_MODULE(Accumulating, first, layers)
  Accumulating() {
    for (int i = 0; i < 3; ++i) layers.emplace_back(32);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = first(x);
    for (Mlp& layer : layers) y = layer(y);
    return y;
  }
};

enum class Mode : uint8_t { kAll, kRootOnly, kSome };
struct Accumulation {
  Mode mode;
  ReshardAfterForward policy;
  bool reshards_after_backward;
  bool only_reduce_scatter = false;  // of replicas: reduced over shards each time
};

template <class Ddp>
void backward_of(Ddp& ddp, const Tensor& x, bool reduces) {
  if (reduces) return backward(mean(ddp(x)));
  const auto quiet = ddp.no_sync();
  backward(mean(ddp(x)));
}

// Three micro-batches; gradients are reduced in the last one, or, outside of the groups that wait, in each.
void expect_accumulation(comm::Group& group, const Mesh& mesh, const Accumulation& how, int64_t gathers,
                         int64_t reductions) {
  const bool has_replicas = mesh.dims() == 2;
  const Accumulating whole = seeded(Accumulating());
  // Gradients are linear: the reference averages what all micro-batches give together.
  DistributedDataParallel<Accumulating> reference(clone(whole), group);
  Accumulating mine = clone(whole);
  shard_layers_and_root(mine, mine.layers, {.mesh = mesh, .reshard_after_forward = how.policy});
  optim::Sgd one(reference.named_parameters(), {.lr = 1e-2}), two(mine.named_parameters(), {.lr = 1e-2});
  for (int step = 0; step < 2; ++step) {
    one.zero_grad();
    two.zero_grad();
    CommCounter counter;
    for (int micro = 0; micro < 3; ++micro) {
      const bool last = micro == 2;
      const auto set = [&](nn::Module& module, bool recurse) {
        if (how.only_reduce_scatter) {
          set_requires_all_reduce(module, last, recurse);
        } else {
          set_requires_gradient_sync(module, last, recurse);
        }
        if (!how.reshards_after_backward) set_reshard_after_backward(module, last, recurse);
      };
      if (how.mode == Mode::kAll) set(mine, true);
      if (how.mode == Mode::kRootOnly) set(mine, false);
      if (how.mode == Mode::kSome) {
        for (size_t i = 0; i < 2; ++i) set(mine.layers[i], true);
      }
      const Tensor x = pattern({2, 32}, 100 * step + 10 * micro + group.rank());
      backward(mean(mine(x)));
    }
    const int64_t gathered = counter.all_gathers(), scattered = counter.reduce_scatters(),
                  summed = counter.all_reduces();
    EXPECT_EQ(gathered, gathers);
    EXPECT_EQ(scattered, reductions);
    if (has_replicas) {
      EXPECT_EQ(summed, how.only_reduce_scatter ? 4 : reductions);
    } else {
      EXPECT_EQ(summed, 0);
    }
    for (int micro = 0; micro < 3; ++micro) {
      const Tensor x = pattern({2, 32}, 100 * step + 10 * micro + group.rank());
      backward_of(reference, x, micro == 2);
    }
    one.step();
    two.step();
    expect_sharded_parity(mine.named_parameters(), reference.named_parameters(), 1e-5, concat("step ", step));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// spec: test_gradient_accumulation
TEST(FullyShardedLifeCycle, AccumulatesGradients) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh one = line(group), two(group, {2, 2}, {"replicate", "shard"});
    for (const Mesh& mesh : {one, two}) {
      // reductions: 4 groups once; root once and 3 groups 3 times; 2 groups once, root and one group 3 times
      for (const auto& [mode, reductions] :
           {std::pair(Mode::kAll, 4), std::pair(Mode::kRootOnly, 10), std::pair(Mode::kSome, 8)}) {
        expect_accumulation(group, mesh, {mode, true, true}, 24, reductions);
        if (mesh.dims() == 1) expect_accumulation(group, mesh, {mode, 2, true}, 24, reductions);
        expect_accumulation(group, mesh, {mode, false, true}, 12, reductions);
      }
      expect_accumulation(group, mesh, {Mode::kAll, false, false}, 4, 4);
      expect_accumulation(group, mesh, {Mode::kRootOnly, false, false}, 10, 10);
    }
    expect_accumulation(group, two, {Mode::kAll, true, true, true}, 24, 12);
  });
}

struct Normed : nn::Module {
  nn::LayerNorm norm;
  std::vector<Mlp> layers;
  CHORALE_MODULE(Normed, norm, layers)
  explicit Normed(int64_t dim) : norm(dim) {
    for (int i = 0; i < 3; ++i) layers.emplace_back(dim);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = norm(x);
    for (Mlp& layer : layers) y = layer(y);
    return y;
  }
};

// spec: test_train_parity_hsdp
TEST(FullyShardedLifeCycle, ReplicasOfShardsTrainAlike) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"replicate", "shard"});
    for (const int64_t dim : {3, 16, 17}) {
      for (const bool each : {false, true}) {
        const Normed whole = seeded(Normed(dim));
        DistributedDataParallel<Normed> reference(clone(whole), group);
        Normed mine = clone(whole);
        shard_layers_and_root(mine, mine.layers, {.mesh = mesh});
        EXPECT_EQ(placements_of(mine.norm.weight), (Placements{replicate(), shard(0)}));
        optim::Adam one(reference.named_parameters(), {.lr = 1e-2}), two(mine.named_parameters(), {.lr = 1e-2});
        for (int step = 0; step < 5; ++step) {
          one.zero_grad();
          two.zero_grad();
          for (int micro = 0; micro < 3; ++micro) {
            const Tensor x = pattern({2, dim}, 100 * step + 10 * micro + group.rank());
            set_requires_gradient_sync(mine, each || micro == 2);
            const Tensor other = mean(mine(x));
            {
              const NoGrad quiet;
              expect_close(other, mean(reference(x)), 1e-4, "loss");
            }
            backward_of(reference, x, each || micro == 2);
            backward(other);
          }
          expect_sharded_parity(mine.named_parameters(), reference.named_parameters(), 2e-4, "before the step");
          one.step();
          two.step();
          expect_sharded_parity(mine.named_parameters(), reference.named_parameters(), 2e-4, "after the step");
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

// spec: test_to_float64_after_init
TEST(FullyShardedLifeCycle, MayBeCastAfterwards) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    MlpStack model = seeded(MlpStack(2, 5));
    MlpStack whole = clone(model);
    whole.to(DType::kF64);
    DistributedDataParallel<MlpStack> reference(std::move(whole), group);
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    model.to(DType::kF64);
    optim::Adam one(reference.named_parameters(), {.lr = 1e-2}), two(model.named_parameters(), {.lr = 1e-2});
    for (int step = 0; step < 4; ++step) {
      const Tensor x = pattern({3, 5}, group.rank() + 10 * step, DType::kF64);
      one.zero_grad();
      two.zero_grad();
      const Tensor loss = sum(reference(x)), other = sum(model(x));
      EXPECT_EQ(other.dtype(), DType::kF64);
      expect_close(other, loss, 0, "loss");
      backward(loss);
      backward(other);
      one.step();
      two.step();
      expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 0, concat("step ", step));
    }
  });
}

// spec: test_register_fsdp_forward_method
TEST(FullyShardedLifeCycle, OtherFunctionsMayBeCalledLikeForward) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const MlpStack whole = seeded(MlpStack(2, 4));
    MlpStack model = clone(whole), plain = clone(whole);
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    const Tensor x = pattern({3, 4}, 1);
    const auto twice = [](MlpStack& m, const Tensor& in) { return mul(m.layers[1](m.layers[0](in)), 2); };
    const Tensor y =
        call_method(model, {x}, [&](const std::vector<Tensor>& in) { return std::vector{twice(model, in[0])}; })[0];
    const Tensor z = twice(plain, x);
    expect_close(y, z, 0, "result");
    backward(sum(y));
    backward(sum(z));
    expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 0, "gradients");
  });
}

struct Throwing : nn::Module {
  std::vector<Mlp> layers;
  bool throws = false;
  CHORALE_MODULE(Throwing, layers)
  Throwing() {
    for (int i = 0; i < 2; ++i) layers.emplace_back(4);
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = layers[0](x);
    if (throws) throw std::runtime_error("on purpose");
    return layers[1](y);
  }
};

// spec: test_reset_iter_state_after_exception
TEST(FullyShardedLifeCycle, GoesOnAfterAnException) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    for (const bool by_hand : {true, false}) {
      const Throwing whole = seeded(Throwing());
      Throwing model = clone(whole);
      DistributedDataParallel<Throwing> reference(clone(whole), group);
      shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = false});
      optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(model.named_parameters(), {.lr = 0.1});
      const Tensor x = pattern({3, 4}, group.rank());
      for (int step = 0; step < 3; ++step) {
        model.throws = true;
        EXPECT_THROW(model(x), std::runtime_error);
        model.throws = false;
        if (by_hand) reset_iter_state(model);
        for (const auto& [name, p] : model.named_parameters())
          EXPECT_EQ(p.is_sharded(), by_hand || name.starts_with("layers.1")) << name;
        one.zero_grad();
        two.zero_grad();
        backward(sum(reference(x)));
        backward(sum(model(x)));
        one.step();
        two.step();
        expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 0, concat("step ", step));
      }
    }
  });
}

TEST(FullyShardedLifeCycle, OldParametersAreNeverUsed) {
  run_ranks(3, [](comm::Group& group) {
    const Mesh mesh = line(group);
    Mlp model = seeded(Mlp(2)), whole = clone(model);
    fully_shard(model, {.mesh = mesh, .reshard_after_forward = false});
    const Tensor x = pattern({3, 2}, 1);
    const NoGrad quiet;
    model(x);  // whole parameters stay in the module
    for (const auto& [name, p] : own_parameters(model)) mul_(p, 2);
    for (const Tensor& p : whole.parameters()) mul_(p, 2);
    expect_close(model(x), whole(x), 0, "after a change of the shards");
  });
}

// Its results are views of what its layer gave.
struct Turned : nn::Module {
  nn::Linear layer{4, 4};
  CHORALE_MODULE(Turned, layer)
  Tensor forward(const Tensor& x) { return transpose(layer(x), 0, 1); }
};
struct TurnedTwice : nn::Module {
  std::vector<Turned> layers;
  CHORALE_MODULE(TurnedTwice, layers)
  TurnedTwice() : layers(2) {}
  // Changed where they are, as a whole and in part, between modules and behind the last one.
  Tensor forward(const Tensor& x) {
    const Tensor y = layers[0](x);
    mul_(y, 2);
    const Tensor z = layers[1](y);
    mul_(narrow(z, 0, 1, 2), 3);
    return z;
  }
};

// What waits for the gradient of a result still does when the result is changed in place: parameters that were let go
// are there in backward.
TEST(FullyShardedLifeCycle, ResultsMayBeChangedInPlace) {
  run_ranks(2, [](comm::Group& group) {
    TurnedTwice model = seeded(TurnedTwice());
    DistributedDataParallel<TurnedTwice> reference(clone(model), group);
    const Mesh mesh = line(group);
    for (Turned& layer : model.layers) fully_shard(layer, {.mesh = mesh, .reshard_after_forward = true});
    fully_shard(model, {.mesh = mesh, .reshard_after_forward = true});
    const Tensor x = pattern({4, 4}, group.rank());
    for (int step = 0; step < 2; ++step) {
      const Tensor expected = reference(x), found = model(x);
      for (const Tensor& y : {expected, found}) add_(y, 0.5);
      backward(sum(square(expected)));
      backward(sum(square(found)));
      expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 1e-6, concat("step ", step));
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
