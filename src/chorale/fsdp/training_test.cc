// Fully sharded training trains as data-parallel training does: sections A3 and B2 of spec/sharded-training.md.
#include <chrono>
#include <thread>

#include "chorale/device/stream.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/fsdp/fsdp_test_util.h"

namespace chorale::fsdp {
namespace {

struct Pair : nn::Module {
  nn::Linear first, second;
  CHORALE_MODULE(Pair, first, second)
  Pair(int64_t a, int64_t b, int64_t c) : first(a, b), second(b, c) {}
  Tensor forward(const Tensor& x) { return second(relu(first(x))); }
};

TEST(FullySharded, TrainsWithTheBitsOfDataParallelTraining) {
  for (const int size : {2, 3, 4}) {
    run_ranks(size, [](comm::Group& group) {
      const Mesh mesh = line(group);
      const auto input = [&](int step) { return pattern({4, 16}, 43 + group.rank() + 10 * step); };
      expect_parity<optim::Sgd>(
          group, seeded(MlpStack(3, 16)), [&](MlpStack& m) { shard_layers_and_root(m, m.layers, {.mesh = mesh}); },
          input, 4, 1e-2);
    });
  }
}

// spec: test_train_parity_single_group_shard_dim0
TEST(FullySharded, OneGroupWithUnevenAndEmptyShards) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh mesh = line(group);
    for (const auto& [a, b, c] : {std::tuple(16, 15, 8), std::tuple(7, 15, 3), std::tuple(16, 17, 8)}) {
      const auto input = [&, width = a](int step) { return pattern({4, width}, 43 + group.rank() + 10 * step); };
      expect_parity<optim::Adam>(
          group, seeded(Pair(a, b, c)), [&](Pair& m) { fully_shard(m, {.mesh = mesh}); }, input, 10, 1e-2);
    }
  });
}

// Parts of a parameter are uneven, or empty; Lamb wants the norms of whole ones.
TEST(FullySharded, EveryOptimizerTrainsWithParts) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto expect_trains = [&]<class Optimizer>(double lr, double tolerance) {
      const auto input = [&](int step) { return pattern({4, 7}, 43 + group.rank() + 10 * step); };
      expect_parity<Optimizer>(
          group, seeded(Pair(7, 15, 3)), [&](Pair& m) { fully_shard(m, {.mesh = mesh}); }, input, 4, lr, tolerance);
    };
    expect_trains.operator()<optim::Adam>(1e-2, 0);
    expect_trains.operator()<optim::AdamW>(1e-2, 0);
    expect_trains.operator()<optim::Adagrad>(1e-2, 0);
    expect_trains.operator()<optim::Rmsprop>(1e-2, 0);
    expect_trains.operator()<optim::Adadelta>(1, 0);
    expect_trains.operator()<optim::Adamax>(1e-2, 0);
    expect_trains.operator()<optim::Nadam>(1e-2, 0);
    expect_trains.operator()<optim::Radam>(1e-2, 0);
    expect_trains.operator()<optim::Asgd>(1e-2, 0);
    expect_trains.operator()<optim::Rprop>(1e-2, 0);
    expect_trains.operator()<optim::Lamb>(1e-1, 1e-6);
  });
}

// spec: test_train_parity_single_group_shard_largest_dim, test_train_parity_shard_placement_fn_shard_largest_dim
TEST(FullySharded, CutsByTheLargestDimension) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto input = [&](int step) { return pattern({4, 32}, 43 + group.rank() + 10 * step); };
    const auto largest = [](const Tensor& p) -> std::optional<int64_t> {
      return p.dims() == 2 && p.size(1) > p.size(0) ? 1 : 0;
    };
    expect_parity<optim::Adam>(
        group, seeded(Pair(32, 16, 8)),
        [&](Pair& m) {
          fully_shard(m, {.mesh = mesh, .shard_dim = largest});
          EXPECT_EQ(placements_of(m.first.weight), Placements{shard(1)});
          EXPECT_EQ(to_local(detach(m.first.weight)).sizes(), (Shape{16, 8}));
          EXPECT_EQ(placements_of(m.first.bias), Placements{shard(0)});
        },
        input, 10, 1e-2);
  });
}

struct Twice : nn::Module {
  nn::Linear inner{4, 4}, outer{4, 5};
  CHORALE_MODULE(Twice, inner, outer)
  Tensor forward(const Tensor& x) { return outer(relu(inner(relu(inner(x))))); }
};

// spec: test_multi_forward_module
TEST(FullySharded, AModuleMayRunTwice) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto input = [&](int step) { return pattern({32, 4}, group.rank() + 10 * step); };
    const auto sharded = [&](Twice& m) {
      fully_shard(m.inner, {.mesh = mesh});
      fully_shard(m.outer, {.mesh = mesh});
      fully_shard(m, {.mesh = mesh});
    };
    expect_parity<optim::Adam>(group, seeded(Twice()), sharded, input, 10, 1e-2);
    Twice counted = seeded(Twice());
    sharded(counted);
    const Tensor x = pattern({32, 4}, group.rank());
    const Tensor loss = sum(counted(x));
    const CommCounter counter;
    backward(loss);
    EXPECT_EQ(counter.reduce_scatters(), 2);  // one for inner, one for outer
  });
}

// spec: test_explicit_prefetching
TEST(FullySharded, GroupsMayBeGatheredAheadByHand) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto input = [&](int step) { return pattern({3, 6}, group.rank() + 10 * step); };
    expect_parity<optim::AdamW>(
        group, seeded(MlpStack(8, 6)),
        [&](MlpStack& m) {
          shard_layers_and_root(m, m.layers, {.mesh = mesh});
          for (size_t i = 0; i < 8; ++i) {
            std::vector<nn::Module*> next, before;
            for (size_t k = i + 1; k <= i + 2 && k < 8; ++k) next.push_back(&m.layers[k]);
            for (size_t k = 1; k <= 2 && k <= i; ++k) before.push_back(&m.layers[i - k]);
            set_modules_to_forward_prefetch(m.layers[i], next);
            set_modules_to_backward_prefetch(m.layers[i], before);
          }
        },
        input, 10, 1e-2);
  });
}

// spec: test_train_parity_with_activation_checkpointing
TEST(FullySharded, RecomputesActivations) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto input = [&](int step) { return ids({2, 6}, group.rank() + 10 * step, 8); };
    for (const int kind : {0, 1, 2}) {  // a group for each layer; a group of two layers; tied weights
      Transformer model = seeded(Transformer(3, 8, 16, 16, kind == 2));
      model.recomputes = true;
      expect_parity<optim::Adam>(
          group, model,
          [&](Transformer& m) {
            if (kind == 1) {
              fully_shard(std::vector<nn::Module*>{&m.layers[0], &m.layers[1]}, {.mesh = mesh});
              fully_shard(m.layers[2], {.mesh = mesh});
              fully_shard(m, {.mesh = mesh});
            } else {
              shard_layers_and_root(m, m.layers, {.mesh = mesh});
            }
          },
          input, 10, 1e-2);
    }
  });
}

// spec: test_train_parity_with_shared_params, test_train_shared_params_uneven_shard
TEST(FullySharded, TiedWeightsStayTied) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh = line(group);
    for (const int64_t vocabulary : {8, 17}) {
      const auto input = [&](int step) { return ids({3, 7}, group.rank() + 10 * step, vocabulary); };
      for (const bool reshards : {true, false}) {
        expect_parity<optim::Adam>(
            group, seeded(Transformer(2, vocabulary)),
            [&](Transformer& m) {
              shard_layers_and_root(m, m.layers, {.mesh = mesh, .reshard_after_forward = reshards});
              EXPECT_TRUE(m.output.weight.is(m.tokens.weight));
            },
            input, 10, 1e-2);
      }
    }
    // Every row is updated: also those of the last rank, whose part is shorter.
    Transformer model = seeded(Transformer(1, 17));
    const Tensor before = clone(model.tokens.weight);
    fully_shard(model, {.mesh = mesh});
    optim::Sgd optimizer(model.named_parameters(), {.lr = 0.1});
    backward(sum(square(model(ids({3, 7}, 0, 17)))));
    optimizer.step();
    const NoGrad quiet;
    const Tensor moved = amax(abs(sub(full_tensor(detach(model.tokens.weight)), before)), {1});
    for (const double m : numbers(moved)) EXPECT_GT(m, 0);
  });
}

// spec: test_train_parity_multi_group
TEST(FullySharded, LateRanksChangeNothing) { expect_parity_of_late_ranks(kCpu, LateRanks::kPlain); }
// spec: test_train_parity_multi_group_cpu_offload_eager
TEST(FullySharded, LateRanksChangeNothingWherePartsStayOnTheHost) {
  expect_parity_of_late_ranks(kCpu, LateRanks::kOffload);
}
// spec: test_train_parity_multi_group_unshard_async_op
TEST(FullySharded, LateRanksChangeNothingWhereLayersAreGatheredByHand) {
  expect_parity_of_late_ranks(kCpu, LateRanks::kByHand);
}

// spec: test_non_root_forward_backward
TEST(FullySharded, APartOfTheModelMayRunAlone) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const MlpStack model = seeded(MlpStack(3, 32));
    DistributedDataParallel<MlpStack> reference(clone(model), group,
                                                {.find_unused_parameters = parallel::FindUnused::kOn});
    MlpStack mine = clone(model);
    shard_layers_and_root(mine, mine.layers, {.mesh = mesh});
    optim::Adam one(reference.named_parameters(), {.lr = 1e-2}), two(mine.named_parameters(), {.lr = 1e-2});
    const Tensor x = pattern({2, 32}, 42 + group.rank());
    const auto step = [&](const Tensor& loss, const Tensor& other) {
      expect_close(other, loss, 0, "loss");
      backward(loss);
      backward(other);
    };
    step(sum(reference(x)), sum(mine(x)));
    one.step();
    two.step();
    one.zero_grad();
    two.zero_grad();
    const Tensor y = pattern({2, 32}, 7 + group.rank());
    // The reference's gradients are averaged by hand: DDP reduces its own forwards only.
    Mlp& first = reference.module().layers[0];
    Mlp alone = clone(first);
    const Tensor loss = sum(alone(y)), other = sum(mine.layers[0](y));
    step(loss, other);
    for (size_t i = 0; i < 4; ++i) {
      const Tensor g = gradient(alone.parameters()[i]);
      group.all_reduce(g, comm::premultiplied_sum(1.0 / group.size())).wait();
      set_gradient(first.parameters()[i], g);
    }
    one.step();
    two.step();
    const NoGrad quiet;
    expect_close(mine(x), reference(x), 0, "afterwards");
  });
}

// spec: test_train_parity_single_worldsize1
TEST(FullySharded, OneRankAloneSendsNothing) {
  run_ranks(1, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto input = [&](int step) { return pattern({4, 16}, 10 * step); };
    MlpStack model = seeded(MlpStack(2, 16));
    const auto sharded = [&](MlpStack& m) { shard_layers_and_root(m, m.layers, {.mesh = mesh}); };
    expect_parity<optim::Adam>(group, model, sharded, input, 3, 1e-2);
    sharded(model);
    const CommCounter counter;
    backward(sum(model(input(0))));
    EXPECT_EQ(counter.total(), 0);
  });
}

// ---- on a device

// The device runs the CPU's kernels behind streams, on memory that faults when the host touches it: the same bits.
TEST(FullySharded, ComputesOnADeviceWithItsPartsThereOrOnTheHost) {
  eager::add_sim_device({});
  constexpr Device kSim{DeviceType::kSim, 0};
  struct Kept {
    std::vector<double> losses;
    std::vector<std::vector<double>> parts, gradients;
  };
  for (const ReshardAfterForward policy : {ReshardAfterForward(), ReshardAfterForward(2)}) {
    run_ranks(4, [&](comm::Group& group) {
      const StreamScope own(make_stream(kSim));  // these ranks are threads, which share the default one
      const auto train = [&](Device computes, Device keeps) {
        MlpStack model = seeded(MlpStack(2, 6));
        model.to(keeps);
        shard_layers_and_root(model, model.layers,
                              {.mesh = policy.is_number() ? line(group) : Mesh(group, {2, 2}, {"replicate", "shard"}),
                               .reshard_after_forward = policy,
                               .offload = computes != keeps,
                               .device = computes});
        optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
        Kept kept;
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          for (int piece = 0; piece < 2; ++piece) {
            set_requires_gradient_sync(model, piece == 1);
            const Tensor x = to(pattern({3, 6}, 10 * step + 4 * piece + group.rank()), computes);
            const Tensor loss = sum(square(model(x)));
            EXPECT_EQ(loss.device(), computes);
            backward(loss);
            kept.losses.push_back(loss.item<double>());
          }
          optim::clip_grad_norm(model.parameters(), 0.5);
          optimizer.step();
        }
        for (const auto& [name, p] : model.named_parameters()) {
          EXPECT_EQ(to_local(detach(p)).device(), keeps) << name;
          EXPECT_EQ(to_local(gradient(p)).device(), keeps) << name;
          kept.parts.push_back(to_local(detach(p)).to_vector<double>());
          kept.gradients.push_back(to_local(gradient(p)).to_vector<double>());
        }
        return kept;
      };
      for (const Device keeps : {kSim, kCpu}) {
        const Kept expected = train(kCpu, kCpu), found = train(kSim, keeps);
        EXPECT_NE(expected.losses.front(), expected.losses.back());
        EXPECT_EQ(found.losses, expected.losses) << "parts on " << keeps;
        EXPECT_EQ(found.parts, expected.parts) << "parts on " << keeps;
        EXPECT_EQ(found.gradients, expected.gradients) << "parts on " << keeps;
      }
    });
  }
}

}  // namespace
}  // namespace chorale::fsdp
