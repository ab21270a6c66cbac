// ZeRO beside DistributedDataParallel: ranks that run out of inputs, updates inside of backward, and stage 2.
#include <gtest/gtest.h>

#include <functional>

#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/device/allocator.h"
#include "chorale/nn/linear.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/comm_hooks.h"
#include "chorale/parallel/ddp.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/zero/zero_join_test_util.h"
#include "chorale/zero/zero_optimizer.h"
#include "chorale/zero/zero_test_util.h"

namespace chorale::zero {
namespace {

using optim::Adam;
using optim::AdamOptions;
using optim::Sgd;
using optim::SgdOptions;
using ZeroDdpSgd = ZeroOptimizer<Sgd, SgdOptions>;

// spec: test_zero_join_cpu
TEST(ZeroOptimizer, RanksMayHaveDifferentNumbersOfInputs) { expect_join_of_uneven_inputs(kCpu); }

// A rank that has run out of inputs updates its part of the parameters with the average that DDP's buckets bring it,
// which must be in its gradients by then.
void expect_joins_with_ddp(int stage) {
  constexpr int kRanks = 3, kLeast = 2;  // rank r has kLeast + r inputs
  comm::run_ranks(kRanks, [stage](comm::Group& group) {
    const auto fresh_model = [] {
      nn::Linear model(4, 5);
      model.to(DType::kF64);
      const NoGrad quiet;
      int number = 0;
      for (const Tensor& p : model.parameters()) copy_(p, op::sample(p.sizes(), ++number));
      return model;
    };
    const auto loss_of = [](const Tensor& y) { return mean(square(y)); };
    const auto input = [](int step, int rank) { return op::sample({6, 4}, 100 * step + rank); };
    nn::Linear whole = fresh_model();
    Adam reference(whole.named_parameters(), {.lr = 0.01});
    for (int step = 0; step < kLeast + kRanks - 1; ++step) {
      reference.zero_grad();
      for (int r = 0; r < kRanks; ++r) {
        if (step < kLeast + r) backward(loss_of(whole(input(step, r))) / kRanks);
      }
      reference.step();
    }
    parallel::DistributedDataParallel<nn::Linear> ddp(fresh_model(), group);
    ZeroOptimizer<Adam, AdamOptions> optimizer({{ddp.named_parameters(), {.lr = 0.01}}}, group);
    if (stage == 2) optimizer.shard_gradients(ddp);
    reducer::join({&ddp, &optimizer}, {}, [&] {
      for (int step = 0; step < kLeast + group.rank(); ++step) {
        optimizer.zero_grad();
        backward(loss_of(ddp(input(step, group.rank()))));
        optimizer.step();
      }
    });
    const NamedTensors found = ddp.named_parameters(), expected = whole.named_parameters();
    for (size_t i = 0; i < found.size(); ++i) {
      const auto a = found[i].second.to_vector<double>(), b = expected[i].second.to_vector<double>();
      for (size_t j = 0; j < a.size(); ++j) ASSERT_NEAR(a[j], b[j], 1e-12) << found[i].first << " " << j;
    }
  });
}

// spec: x_join_ddp_zero
TEST(ZeroOptimizer, JoinsTogetherWithDdp) { expect_joins_with_ddp(1); }
TEST(ZeroStage2, JoinsTogetherWithDdp) { expect_joins_with_ddp(2); }

struct TwoLayers : nn::Module {
  nn::Linear first{1000, 2000}, second{2000, 500};
  CHORALE_MODULE(TwoLayers, first, second)
  Tensor forward(const Tensor& x) { return second(relu(first(x))); }
};

// spec: test_ddp_zero_overlap
TEST(ZeroOptimizer, UpdatesWhileBackwardGoesOn) {
  struct Way {
    bool compresses, views, is_static, shards_buckets;
  };
  comm::run_ranks(2, [](comm::Group& group) {
    TwoLayers start;
    {
      const NoGrad quiet;
      int seed = 0;
      for (const auto& [name, p] : start.named_parameters())
        copy_(p, mul(to(op::sample(p.sizes(), ++seed), DType::kF32), 0.05));
    }
    for (const Way way : {Way{false, false, false, false},
                          {false, true, true, false},
                          {true, false, true, true},
                          {false, true, false, true}}) {
      const parallel::DdpOptions buckets{.gradient_as_bucket_view = way.views, .bucket_cap_mb = 1};
      const SgdOptions options{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.001};
      const auto hook = [&] { return way.compresses ? parallel::bf16_compress_hook() : parallel::allreduce_hook(); };
      parallel::DistributedDataParallel<TwoLayers> plain(nn::clone(start), group, buckets),
          ddp(nn::clone(start), group, buckets);
      plain.register_comm_hook(hook());
      Sgd reference(plain.named_parameters(), options);
      ZeroDdpSgd zero({{ddp.named_parameters(), options}}, group);
      const int warm_up = way.is_static ? 3 : 2;
      ddp.register_comm_hook(
          zero.overlap(ddp.managed_parameters(), hook(), {.warm_up = warm_up, .shard_buckets = way.shards_buckets}));
      if (way.is_static) ddp.set_static_graph();
      for (int step = -warm_up; step < 5; ++step) {
        const Tensor x = to(op::sample({3, 1000}, 50 + 2 * step + group.rank()), DType::kF32);
        ddp.zero_grad();
        backward(mean(square(ddp(x))));
        zero.step();
        if (step < 0) {
          for (size_t i = 0; i < 4; ++i)
            ASSERT_EQ(ddp.parameters()[i].to_vector<float>(), start.parameters()[i].to_vector<float>()) << "warm-up";
          continue;
        }
        plain.zero_grad();
        backward(mean(square(plain(x))));
        reference.step();
      }
      expect_equal(ddp.named_parameters(), plain.named_parameters());
      for (size_t i = 0; i < 4; ++i)
        EXPECT_NE(ddp.parameters()[i].to_vector<float>(), start.parameters()[i].to_vector<float>());
      zero.consolidate_state_dict(0);
      if (group.rank() == 0) {
        EXPECT_EQ(zero.state_dict().size(), reference.state_dict().size());
      }
    }
  });
}

TEST(ZeroOptimizer, RefusesToOverlapWhatItCannot) {
  comm::run_ranks(2, [](comm::Group& group) {
    const NamedTensors some = parameters_of({4}), more = parameters_of({2});
    ZeroDdpSgd two({{some, {}}, {more, {}}}, group);
    EXPECT_THROW(two.overlap(some, parallel::allreduce_hook()), StateError);
    ZeroDdpSgd in_views({{some, {}}}, group, {.bucket_views = true});
    EXPECT_THROW(in_views.overlap(some, parallel::allreduce_hook()), StateError);
    ZeroDdpSgd one({{some, {}}}, group);
    EXPECT_THROW(one.overlap(more, parallel::allreduce_hook()), InvalidArgument);
  });
}

struct FourLayers : nn::Module {
  nn::Linear a{12, 24}, b{24, 24}, c{24, 7}, spare{12, 7};
  CHORALE_MODULE(FourLayers, a, b, c, spare)
  Tensor forward(const Tensor& x, bool with_spare) {
    const Tensor y = c(relu(b(relu(a(x)))));
    return with_spare ? y + spare(x) : y;
  }
};

FourLayers four_layers() {
  FourLayers model;
  const NoGrad quiet;
  int seed = 0;
  for (const auto& [name, p] : model.named_parameters())
    copy_(p, mul(to(op::sample(p.sizes(), ++seed), DType::kF32), 0.3));
  return model;
}

TEST(ZeroOptimizer, SendsNewValuesWhileBackwardGoesOn) {
  comm::run_ranks(3, [](comm::Group& group) {
    for (const bool views : {false, true}) {  // of gradients
      // Buckets of a layer each; backward's own thread moves them, so that this one counts all calls.
      parallel::DistributedDataParallel<FourLayers> ddp(
          four_layers(), group,
          {.gradient_as_bucket_view = views, .bucket_cap_mb = 0.0005, .progress = reducer::Progress::kCaller});
      ZeroDdpSgd zero({{ddp.named_parameters(), {.lr = 0.1}}}, group);
      ddp.register_comm_hook(zero.overlap(ddp.managed_parameters(), parallel::allreduce_hook()));
      const Tensor x = to(op::sample({5, 12}, group.rank()), DType::kF32);
      for (int step = 0; step < 5; ++step) {
        const bool warms_up = step < 2;
        ddp.zero_grad();
        const Tensor loss = mean(square(ddp(x, true)));
        comm::CommCounter in_backward;
        backward(loss);
        EXPECT_EQ(in_backward.count(comm::CallKind::kBroadcast), warms_up ? 0 : 8) << "each parameter";
        comm::CommCounter in_step;
        zero.step();
        EXPECT_EQ(in_step.count(comm::CallKind::kBroadcast), 0);
      }
      std::vector<float> mine = ddp.module().b.weight.to_vector<float>(), first = mine;
      group.broadcast(std::span(first), 0).wait();
      EXPECT_EQ(mine, first);
      backward(mean(square(ddp(x, true))));
      EXPECT_NE(message_of<StateError>([&] { backward(mean(square(ddp(x, true)))); }).find("call step()"),
                std::string::npos);
    }
  });
}

// ---- stage 2

// Steps of three kinds: one with a parameter that one rank alone uses, one that accumulates, and one in which nobody
// uses that parameter.
template <class Ddp, class Optimizer>
void train_in_step(Ddp& ddp, Optimizer& optimizer, const comm::Group& group, const std::function<void()>& look) {
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    const auto run = [&](int piece) {
      const Tensor x = to(op::sample({5, 12}, 1000 * step + 10 * piece + group.rank()), DType::kF32);
      backward(mean(square(ddp(x, step % 3 == 0 && group.rank() == 1))));
    };
    if (step % 3 == 1) {
      const auto quiet = ddp.no_sync();
      run(0);
      run(1);
    }
    run(2);
    look();
    optimizer.step();
  }
}

TEST(ZeroStage2, ItsBitsAreThoseOfDdpAndStage1AndGradientsAreTheOwners) {
  for (const int ranks : comm::sizes_to_run({2, 3, 4})) {
    comm::run_ranks(ranks, [](comm::Group& group) {
      const FourLayers start = four_layers();
      for (const auto unused : {parallel::FindUnused::kAuto, parallel::FindUnused::kOn}) {
        const parallel::DdpOptions small{.find_unused_parameters = unused, .bucket_cap_mb = 0.0005};
        const SgdOptions options{.lr = 0.1, .momentum = 0.9};
        parallel::DistributedDataParallel<FourLayers> plain(nn::clone(start), group, small),
            first(nn::clone(start), group, small), second(nn::clone(start), group, small);
        Sgd reference(plain.named_parameters(), options);
        ZeroDdpSgd one({{first.named_parameters(), options}}, group),
            two({{second.named_parameters(), options}}, group);
        two.shard_gradients(second);
        EXPECT_GT(second.reducer().bucket_count(), 2u);
        train_in_step(plain, reference, group, [] {});
        train_in_step(first, one, group, [] {});
        int steps = 0;
        train_in_step(second, two, group, [&] {
          const NamedTensors all = second.named_parameters();
          const bool uses_spare = steps++ % 3 == 0;
          for (size_t i = 0; i < all.size(); ++i) {
            const bool is_used = uses_spare || !all[i].first.starts_with("spare");
            EXPECT_EQ(gradient(all[i].second).defined(), is_used && two.owners()[i] == group.rank())
                << all[i].first << " in step " << steps;
          }
        });
        expect_equal(first.named_parameters(), plain.named_parameters());
        expect_equal(second.named_parameters(), plain.named_parameters());
        EXPECT_NE(second.parameters()[0].to_vector<float>(), start.a.weight.to_vector<float>());
      }
    });
  }
}

struct ManyLayers : nn::Module {
  static constexpr int64_t kWidth = 256;
  static constexpr size_t kLayers = 16;
  std::vector<nn::Linear> layers;
  ManyLayers() {
    for (size_t i = 0; i < kLayers; ++i) layers.emplace_back(kWidth, kWidth);
  }
  const char* type_name() const override { return "ManyLayers"; }
  void visit_members(nn::MemberVisitor& visitor) override {
    for (size_t i = 0; i < layers.size(); ++i) visitor.module(std::to_string(i), layers[i]);
  }
  Tensor forward(Tensor x) {
    for (nn::Linear& layer : layers) x = relu(layer(x));
    return x;
  }
  Tensor operator()(const Tensor& x) { return nn::call(*this, x); }
};

// Ranks are processes here: memory is counted by process.
TEST(ZeroStage2, ARankHasTheGradientsOfItsPartAndOfTwoBuckets) {
  const std::vector<int> ended = comm::run_processes(2, [](comm::Group& group) {
    const auto stats = [] { return cpu_allocator().stats(); };
    constexpr int64_t kLayerBytes = ManyLayers::kWidth * (ManyLayers::kWidth + 1) * 4;
    constexpr int64_t kGradients = kLayerBytes * static_cast<int64_t>(ManyLayers::kLayers);
    int64_t peaks[3] = {}, after[3] = {};
    for (const int stage : {1, 2}) {
      parallel::DistributedDataParallel<ManyLayers> ddp(ManyLayers(), group,
                                                        {.bucket_cap_mb = 1.1 * kLayerBytes / (1 << 20)});
      ZeroDdpSgd optimizer({{ddp.named_parameters(), {.lr = 0.01}}}, group);
      if (stage == 2) optimizer.shard_gradients(ddp);
      const Tensor x = to(op::sample({2, ManyLayers::kWidth}, group.rank()), DType::kF32);
      const auto before = static_cast<int64_t>(stats().current_bytes);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        cpu_allocator().reset_peak();
        backward(mean(square(ddp(x))));
        // Stage 1 has its buckets all the time; what backward adds is what stage 2 has.
        const int64_t buckets = stage == 1 ? kGradients : 0;
        peaks[stage] = static_cast<int64_t>(stats().peak_bytes) - before + buckets;
        after[stage] = static_cast<int64_t>(stats().current_bytes) - before + buckets;
        optimizer.step();
      }
    }
    constexpr int64_t kSlack = 64 << 10;  // activations of two rows, and small tensors
    EXPECT_GE(after[1], kGradients);
    EXPECT_NEAR(static_cast<double>(after[2]), kGradients / 2.0, kSlack);
    // Two buckets, and the gradient that is computed.
    EXPECT_LE(peaks[2], kGradients / 2 + 3 * kLayerBytes + kSlack);
    EXPECT_GE(peaks[2], kGradients / 2);
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0}));
}

TEST(ZeroStage2, ClipsByTheNormOfAllRanks) {
  comm::run_ranks(3, [](comm::Group& group) {
    const FourLayers start = four_layers();
    parallel::DistributedDataParallel<FourLayers> plain(nn::clone(start), group), ddp(nn::clone(start), group);
    ZeroDdpSgd optimizer({{ddp.named_parameters(), {}}}, group);
    optimizer.shard_gradients(ddp);
    const Tensor x = to(op::sample({5, 12}, group.rank()), DType::kF32);
    for (const double most : {1e-2, 1e6}) {  // the second clips nothing
      plain.zero_grad();
      optimizer.zero_grad();
      backward(mean(square(plain(x, true))));
      backward(mean(square(ddp(x, true))));
      const double expected = optim::clip_grad_norm(plain.parameters(), most);
      EXPECT_NEAR(optimizer.clip_grad_norm(most), expected, 1e-9 * expected);
      for (size_t i = 0; i < plain.parameters().size(); ++i) {
        if (optimizer.owners()[i] != group.rank()) continue;
        const auto a = gradient(ddp.parameters()[i]).to_vector<float>(),
                   b = gradient(plain.parameters()[i]).to_vector<float>();
        for (size_t j = 0; j < a.size(); ++j) ASSERT_FLOAT_EQ(a[j], b[j]) << i << " " << j;
      }
    }
    EXPECT_THROW(optimizer.clip_grad_norm(0), InvalidArgument);
  });
}

// The gradient that overflows has one owner; every rank must skip the step, also one that owns nothing.
TEST(ZeroStage2, ALossScaleIsFoundByAllRanksTogether) {
  comm::run_ranks(4, [](comm::Group& group) {
    const auto fresh = [] {
      nn::Linear model(6, 5);
      const NoGrad quiet;
      int seed = 0;
      for (const Tensor& p : model.parameters()) copy_(p, mul(to(op::sample(p.sizes(), ++seed), DType::kF32), 0.3));
      return model;
    };
    const SgdOptions options{.lr = 0.1, .momentum = 0.9};
    parallel::DistributedDataParallel<nn::Linear> plain(fresh(), group), ddp(fresh(), group);
    Sgd reference(plain.named_parameters(), options);
    ZeroDdpSgd optimizer({{ddp.named_parameters(), options}}, group);
    optimizer.shard_gradients(ddp);
    optim::GradScaler expected({.scale = 8, .interval = 2}), scaler({.scale = 8, .interval = 2});
    for (int step = 0; step < 6; ++step) {
      Tensor x = to(op::sample({3, 6}, 10 * step + group.rank()), DType::kF32);
      // Only the weight's gradient is infinite, and only its owner has it.
      if (step == 2 && group.rank() == 1) x = mul(x, 3e38);
      plain.zero_grad();
      optimizer.zero_grad();
      backward(expected.scale(sum(plain(x))));
      backward(scaler.scale(sum(ddp(x))));
      const bool stepped = expected.step(reference);
      EXPECT_EQ(stepped, step != 2);
      EXPECT_EQ(scaler.step(optimizer), stepped) << "step " << step;
      expected.update();
      scaler.update();
      EXPECT_EQ(scaler.scale(), expected.scale());
      expect_equal(ddp.named_parameters(), plain.named_parameters());
    }
    EXPECT_EQ(scaler.scale(), 8.0 * 2 / 2 * 2);
    parallel::DistributedDataParallel<nn::Linear> other(fresh(), group);
    ZeroDdpSgd overlapped({{other.named_parameters(), options}}, group);
    other.register_comm_hook(overlapped.overlap(other.managed_parameters(), parallel::allreduce_hook()));
    EXPECT_THROW(scaler.unscale(overlapped), StateError) << "its gradients are used while they are scaled";
  });
}

TEST(ZeroStage2, RefusesWhatWouldBeWrong) {
  comm::run_ranks(1, [](comm::Group& group) {
    const Tensor x = full({2, 12}, 1, DType::kF32);
    parallel::DistributedDataParallel<FourLayers> ddp(four_layers(), group);
    ZeroDdpSgd optimizer({{ddp.named_parameters(), {}}}, group);
    optimizer.shard_gradients(ddp);
    EXPECT_NE(message_of<StateError>([&] { ddp.register_comm_hook(parallel::allreduce_hook()); }).find("have owners"),
              std::string::npos);
    EXPECT_THROW(ddp.set_gradient_owners(std::vector<int>(8, 1)), InvalidArgument) << "there is one rank";
    EXPECT_THROW(ddp.set_gradient_owners({0}), InvalidArgument) << "there are eight parameters";
    backward(mean(square(ddp(x, true))));
    optimizer.step();
    EXPECT_THROW(ddp.set_gradient_owners(std::vector<int>(8, 0)), StateError) << "training has begun";
    // Without zero_grad() an owner would add to the average, and the others to nothing.
    EXPECT_NE(message_of<StateError>([&] { backward(mean(square(ddp(x, true)))); }).find("call zero_grad()"),
              std::string::npos);

    parallel::DistributedDataParallel<FourLayers> hooked(four_layers(), group);
    hooked.register_comm_hook(parallel::allreduce_hook());
    ZeroDdpSgd other({{hooked.named_parameters(), {}}}, group);
    EXPECT_THROW(other.shard_gradients(hooked), StateError);
    ZeroDdpSgd stranger({{four_layers().named_parameters(), {}}}, group);
    EXPECT_THROW(stranger.shard_gradients(hooked), InvalidArgument);
  });
}

}  // namespace
}  // namespace chorale::zero
