// Unused and frozen parameters, hooks, clipping, mixed precision: section B3 of spec/sharded-training.md.
#include <gmock/gmock.h>

#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::fsdp {
namespace {

struct TwoHeads : nn::Module {
  nn::Linear trunk{24, 24}, left{24, 24}, right{24, 24};
  bool uses_right = true;  // calls it
  CHORALE_MODULE(TwoHeads, trunk, left, right)
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const Tensor y = relu(trunk(x));
    return {left(y), uses_right ? right(y) : Tensor()};
  }
};

// spec: test_unused_forward_{output,module}
TEST(FullyShardedGradients, StayNoneWhereNothingIsUsed) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    for (const bool module_unused : {false, true}) {
      const TwoHeads whole = seeded(TwoHeads());
      DistributedDataParallel<TwoHeads> reference(clone(whole), group);
      TwoHeads mine = clone(whole);
      for (nn::Linear* part : {&mine.trunk, &mine.left, &mine.right}) fully_shard(*part, {.mesh = mesh});
      fully_shard(mine, {.mesh = mesh});
      optim::Adam one(reference.named_parameters(), {.lr = 1e-2}), two(mine.named_parameters(), {.lr = 1e-2});
      for (int step = 0; step < 10; ++step) {
        const bool used = step < 3;
        reference.module().uses_right = mine.uses_right = used || !module_unused;
        one.zero_grad();
        two.zero_grad();
        const Tensor x = pattern({2, 24}, group.rank() + 10 * step);
        const auto loss = [&](auto& model) {
          const auto [left, right] = model(x);
          return used ? add(sum(left), sum(right)) : sum(left);
        };
        const Tensor a = loss(reference), b = loss(mine);
        expect_close(b, a, 0, "loss");
        backward(a);
        CommCounter counter;
        backward(b);
        EXPECT_EQ(counter.reduce_scatters(), used ? 3 : 2);
        EXPECT_EQ(gradient(mine.right.weight).defined(), used);
        EXPECT_TRUE(mine.right.weight.is_sharded());
        if (!used) {
          // DDP gives zeros or nothing there; nothing is what one rank would have.
          for (const Tensor& p : reference.module().right.parameters()) set_gradient(p, {});
        }
        one.step();
        two.step();
        expect_sharded_parity(mine.named_parameters(), reference.named_parameters(), 0, concat("step ", step));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

struct Batch {
  Tensor values;
  std::vector<std::pair<std::string, Tensor>> more;
  int64_t count = 0;
  CHORALE_TENSORS(Batch, values, more)
};
struct Structured : nn::Module {
  nn::Linear a{6, 6}, b{6, 6};
  CHORALE_MODULE(Structured, a, b)
  Batch forward(const Batch& in) {
    const Tensor y = a(in.values);
    return {y, {{"sum", add(b(in.more[0].second), y)}}, in.count + 1};
  }
};

// spec: test_nontensor_activations
TEST(FullyShardedGradients, TensorsAreFoundInsideOfArgumentsAndResults) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Structured whole = seeded(Structured());
    Structured plain = clone(whole), mine = clone(whole);
    fully_shard(mine.a, {.mesh = mesh});
    fully_shard(mine.b, {.mesh = mesh});
    fully_shard(mine, {.mesh = mesh, .reshard_after_forward = true});
    // The same inputs everywhere: the average is what one rank has.
    const Batch in{set_requires_grad(pattern({2, 6}, 1)), {{"x", pattern({2, 6}, 2)}}, 4};
    Batch left = plain(in);
    backward(sum(square(left.more[0].second)));
    Batch right = mine(in);
    EXPECT_EQ(right.count, 5);
    expect_close(right.more[0].second, left.more[0].second, 0, "result");
    backward(sum(square(right.more[0].second)));
    expect_sharded_parity(mine.named_parameters(), plain.named_parameters(), 0, "gradients");
  });
}

// spec: test_post_acc_grad_hook_{runs,optim_parity}
TEST(FullyShardedGradients, HooksRunOnceWhenTheReductionIsDone) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const MlpStack whole = seeded(MlpStack(3, 5));
    MlpStack counted = clone(whole);
    shard_layers_and_root(counted, counted.layers, {.mesh = mesh});
    std::map<std::string, int> runs;
    std::vector<HookHandle> handles;
    for (const auto& entry : counted.named_parameters()) {
      handles.push_back(after_accumulate(entry.second, [&runs, name = entry.first](const Tensor& p) {
        ++runs[name];
        EXPECT_TRUE(p.is_sharded());
        EXPECT_TRUE(gradient(p).is_sharded());
      }));
    }
    const Tensor x = pattern({2, 5}, group.rank());
    backward(sum(counted(x)));
    EXPECT_EQ(runs.size(), 12u);
    for (const auto& [name, count] : runs) EXPECT_EQ(count, 1) << name;

    MlpStack one = clone(whole), two = clone(whole);
    shard_layers_and_root(one, one.layers, {.mesh = mesh});
    shard_layers_and_root(two, two.layers, {.mesh = mesh});
    optim::AdamW after(one.named_parameters(), {.lr = 1e-2}), inside(two.named_parameters(), {.lr = 1e-2});
    inside.update_in_backward();
    for (int step = 0; step < 4; ++step) {
      const Tensor y = pattern({2, 5}, group.rank() + 10 * step);
      backward(sum(one(y)));
      after.step();
      after.zero_grad();
      backward(sum(two(y)));
      inside.step();
      const NoGrad quiet;
      for (size_t i = 0; i < 12; ++i) {
        expect_close(to_local(detach(two.parameters()[i])), to_local(detach(one.parameters()[i])), 0,
                     concat("step ", step));
      }
    }
  });
}

// spec: test_train_mixed_requires_grad_{per_group,across_groups}, test_multi_forward_mixed_requires_grad
TEST(FullyShardedGradients, FrozenParametersAreNotReduced) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto freeze_weights = [](MlpStack& m) {
      for (const auto& [name, p] : m.named_parameters()) {
        if (name.ends_with("weight")) set_requires_grad(p, false);
      }
    };
    const auto freeze_first = [](MlpStack& m) { m.layers[0].requires_grad_(false); };
    for (const bool whole_groups : {false, true}) {
      for (const bool before : {false, true}) {
        for (const bool twice : {false, true}) {
          const auto freeze = [&](MlpStack& m) { whole_groups ? freeze_first(m) : freeze_weights(m); };
          MlpStack model = seeded(MlpStack(3, 6)), mine = clone(model);
          freeze(model);
          DistributedDataParallel<MlpStack> reference(clone(model), group);
          if (before) freeze(mine);
          shard_layers_and_root(mine, mine.layers, {.mesh = mesh});
          if (!before) freeze(mine);
          const auto trained = [](NamedTensors all) {
            std::erase_if(all, [](const auto& entry) { return !requires_grad(entry.second); });
            return all;
          };
          optim::Sgd one(trained(reference.named_parameters()), {.lr = 1e-2}),
              two(trained(mine.named_parameters()), {.lr = 1e-2});
          for (int step = 0; step < 3; ++step) {
            one.zero_grad();
            two.zero_grad();
            const Tensor x = pattern({2, 6}, group.rank() + 10 * step);
            const auto loss = [&](auto& m) { return twice ? add(sum(m(x)), sum(m(mul(x, 2)))) : sum(m(x)); };
            if (!twice) backward(loss(reference));
            CommCounter counter;
            const Tensor other = loss(mine);
            backward(other);
            EXPECT_EQ(counter.reduce_scatters(), whole_groups ? 2 : 3);
            if (twice) continue;  // DDP takes one forward per backward
            one.step();
            two.step();
            expect_sharded_parity(mine.named_parameters(), reference.named_parameters(), 0, concat("step ", step));
          }
        }
      }
    }
  });
}

struct Sandwich : nn::Module {
  nn::Linear a{6, 6}, b{6, 6}, c{6, 6};
  CHORALE_MODULE(Sandwich, a, b, c)
  Tensor forward(const Tensor& x) { return c(relu(b(relu(a(x))))); }
};

// spec: test_ddp_A_fsdp_B_ddp_C
TEST(FullyShardedGradients, IgnoredParametersAreLeftToDataParallelTraining) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Sandwich whole = seeded(Sandwich());
    DistributedDataParallel<Sandwich> reference(clone(whole), group);
    Sandwich model = clone(whole);
    std::vector<Tensor> others = model.a.parameters();
    for (const Tensor& p : model.c.parameters()) others.push_back(p);
    fully_shard(model.b, {.mesh = mesh});
    fully_shard(model, {.mesh = mesh, .ignored = others});
    EXPECT_TRUE(own_parameters(model).empty());
    DistributedDataParallel<Sandwich> mixed(std::move(model), group, {.ignore = {"b.weight", "b.bias"}});
    optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(mixed.named_parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      one.zero_grad();
      two.zero_grad();
      const Tensor x = pattern({2, 6}, group.rank() + 10 * step);
      const Tensor a = sum(reference(x)), b = sum(mixed(x));
      expect_close(b, a, 0, "loss");
      backward(a);
      backward(b);
      EXPECT_FALSE(mixed.module().a.weight.is_sharded());
      one.step();
      two.step();
    }
    const NoGrad quiet;
    expect_close(mixed.module().a.weight, reference.module().a.weight, 0, "a");
    expect_close(full_tensor(detach(mixed.module().b.weight)), reference.module().b.weight, 0, "b");
  });
}

// spec: test_clip_grad_norm_{1d,2d}
TEST(FullyShardedGradients, AreClippedByTheNormOfTheWhole) {
  run_ranks(4, [](comm::Group& group) {
    for (const bool replicas : {false, true}) {
      const Mesh mesh = replicas ? Mesh(group, {2, 2}, {"replicate", "shard"}) : line(group);
      for (const double p : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
        for (const double most : {1.0, 0.5}) {
          MlpStack plain = seeded(MlpStack(2, 5)), mine = clone(plain);
          shard_layers_and_root(mine, mine.layers, {.mesh = mesh});
          const Tensor x = pattern({3, 5}, 1);  // the same everywhere: the average is one rank's
          backward(sum(square(plain(x))));
          backward(sum(square(mine(x))));
          const double expected = optim::clip_grad_norm(plain.parameters(), most, {.norm_type = p});
          const double found = optim::clip_grad_norm(mine.parameters(), most, {.norm_type = p});
          EXPECT_GT(expected, most) << "something is clipped";
          EXPECT_NEAR(found, expected, 1e-5 * expected) << p;
          expect_sharded_parity(mine.named_parameters(), plain.named_parameters(), 1e-5, concat("norm ", p));
        }
      }
    }
  });
}

// One rank's mixed-precision step by hand: low parameters from f32 masters, gradients reduced in `reduce`.
struct MasterReference {
  MlpStack master, low;
  std::unique_ptr<optim::Adam> optimizer;
  MasterReference(const MlpStack& from, DType dtype) : master(clone(from)), low(clone(from)) {
    low.to(dtype);
    optimizer = std::make_unique<optim::Adam>(master.named_parameters(), optim::AdamOptions{.lr = 1e-2});
  }
  void load() {
    const NoGrad quiet;
    for (size_t i = 0; i < low.parameters().size(); ++i) copy_(low.parameters()[i], master.parameters()[i]);
  }
  void reduce(comm::Group& group, DType dtype) {
    const NoGrad quiet;
    for (size_t i = 0; i < low.parameters().size(); ++i) {
      const Tensor g = to(gradient(low.parameters()[i]), dtype);
      group.all_reduce(g, comm::premultiplied_sum(1.0 / group.size())).wait();
      set_gradient(master.parameters()[i], to(g, DType::kF32));
      set_gradient(low.parameters()[i], {});
    }
  }
};

void expect_mixed_parity(comm::Group& group, const Precision& precision, DType computes, DType reduces, int micro) {
  const Mesh mesh = line(group);
  const MlpStack whole = seeded(MlpStack(3, 16));
  MasterReference reference(whole, computes);
  MlpStack mine = clone(whole);
  shard_layers_and_root(mine, mine.layers, {.mesh = mesh, .mixed_precision = precision});
  optim::Adam optimizer(mine.named_parameters(), {.lr = 1e-2});
  for (int step = 0; step < 10; ++step) {
    reference.load();
    optimizer.zero_grad();
    std::vector<Tensor> sums(12);
    for (int m = 0; m < micro; ++m) {
      const Tensor x = pattern({4, 16}, group.rank() + 100 * step + 7 * m);
      const Tensor a = sum(reference.low(to(x, computes))), b = sum(mine(x));
      EXPECT_EQ(b.dtype(), computes);
      expect_close(b, a, 0, concat("loss of step ", step));
      backward(a);
      // Accumulated in the dtype of reduction.
      for (size_t i = 0; i < 12; ++i) {
        const NoGrad quiet;
        const Tensor p = reference.low.parameters()[i];
        const Tensor g = to(gradient(p), reduces);
        sums[i] = sums[i].defined() ? add(sums[i], g) : clone(g);
        set_gradient(p, {});
      }
      set_requires_gradient_sync(mine, m + 1 == micro);
      backward(b);
    }
    for (size_t i = 0; i < 12; ++i) {
      group.all_reduce(sums[i], comm::premultiplied_sum(1.0 / group.size())).wait();
      set_gradient(reference.master.parameters()[i], to(sums[i], DType::kF32));
    }
    for (const Tensor& p : mine.parameters()) {
      EXPECT_EQ(p.dtype(), DType::kF32);
      EXPECT_EQ(gradient(p).dtype(), DType::kF32);
    }
    expect_sharded_parity(mine.named_parameters(), reference.master.named_parameters(), 0, concat("step ", step));
    if (testing::Test::HasFatalFailure()) return;
    reference.optimizer->step();
    optimizer.step();
  }
}

// spec: test_compute_dtype
TEST(FullyShardedPrecision, ComputesAndReducesInLowerPrecision) {
  run_ranks(4, [](comm::Group& group) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      expect_mixed_parity(group, {.parameters = dtype}, dtype, dtype, 1);
    }
  });
}
// spec: test_reduce_dtype
TEST(FullyShardedPrecision, ReducesInAnotherOne) {
  run_ranks(4, [](comm::Group& group) {
    expect_mixed_parity(group, {.parameters = DType::kBF16, .reduce = DType::kF32}, DType::kBF16, DType::kF32, 1);
    expect_mixed_parity(group, {.reduce = DType::kBF16}, DType::kF32, DType::kBF16, 1);
  });
}
// spec: test_grad_acc_with_reduce_dtype
TEST(FullyShardedPrecision, AccumulatesInThePrecisionOfReduction) {
  run_ranks(4, [](comm::Group& group) {
    expect_mixed_parity(group, {.parameters = DType::kBF16, .reduce = DType::kF32}, DType::kBF16, DType::kF32, 4);
  });
}

// spec: test_gradient_scaler
TEST(FullyShardedPrecision, AllRanksSkipAStepThatOneCannotTake) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    Mlp model = seeded(Mlp(4));
    fully_shard(model, {.mesh = mesh});
    optim::Sgd optimizer(model.named_parameters(), {.lr = 0.1});
    optim::GradScaler scaler({.scale = 4});
    const Tensor x = pattern({2, 4}, group.rank());
    for (const bool broken : {false, true, false}) {
      optimizer.zero_grad();
      backward(scaler.scale(sum(model(x))));
      // One rank's part of a gradient is broken.
      if (broken && group.rank() == 1) {
        const NoGrad quiet;
        fill_(to_local(gradient(model.in_proj.weight)), std::numeric_limits<float>::infinity());
      }
      const NamedTensors before = model.state_dict();
      std::vector<std::vector<double>> values;
      for (const auto& [name, p] : before) values.push_back(numbers(to_local(p)));
      const double scale = scaler.scale();
      EXPECT_EQ(scaler.step(optimizer), !broken);
      scaler.update();
      EXPECT_EQ(scaler.scale(), broken ? scale / 2 : scale);
      bool moved = false;
      for (size_t i = 0; i < before.size(); ++i) moved |= numbers(to_local(before[i].second)) != values[i];
      EXPECT_EQ(moved, !broken);
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
