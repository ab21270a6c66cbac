#include "chorale/parallel/sync_batch_norm.h"

#include <gmock/gmock.h>

#include <numeric>

#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

// The parts of ranks of an [N, …] batch.
struct Split {
  std::vector<int64_t> sizes;
  int64_t begin(int rank) const { return std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0}); }
  int64_t total() const { return begin(static_cast<int>(sizes.size())); }
  Tensor part(const Tensor& whole, int rank) const {
    return clone(narrow(whole, 0, begin(rank), sizes[static_cast<size_t>(rank)]));
  }
};
Split equal_parts(int ranks, int64_t each) { return {std::vector<int64_t>(static_cast<size_t>(ranks), each)}; }

nn::BatchNorm2d filled_norm(DType dtype, const nn::BatchNormOptions& options = {}) {
  nn::BatchNorm2d norm(3, options);
  norm.to(dtype);
  const NoGrad quiet;
  int seed = 1;
  for (const Tensor& p : norm.parameters()) copy_(p, op::sample(p.sizes(), seed++, 0.5, 1.5));
  return norm;
}

// Output, gradients and running statistics of all ranks together are those of one rank that sees the whole batch.
void expect_same_as_one_rank(const Split& split, DType dtype, const nn::BatchNormOptions& options = {}) {
  const auto ranks = static_cast<int>(split.sizes.size());
  const Shape sizes{split.total(), 3, 2, 5};
  // A mean far from 0 shows what a sum of squares would lose; f32 loses it all the same.
  const double offset = dtype == DType::kF64 ? 1000 : 1;
  const Tensor whole = to(op::sample(sizes, 3) + offset, dtype), dy = to(op::sample(sizes, 4), dtype);
  nn::BatchNorm2d reference = filled_norm(dtype, options);
  const Tensor x_all = set_requires_grad(clone(whole));
  const Tensor y_all = reference(x_all);
  backward(y_all, dy);
  run_ranks(ranks, [&](comm::Group& group) {
    nn::BatchNorm2d norm = filled_norm(dtype, options);
    convert_sync_batchnorm(norm, group);
    const Tensor x = set_requires_grad(split.part(whole, group.rank()));
    const Tensor y = norm(x);
    backward(y, split.part(dy, group.rank()));
    const auto expect_close = [&](const Tensor& a, const Tensor& b, const char* what) {
      ASSERT_EQ(a.sizes(), b.sizes());
      ASSERT_EQ(a.dtype(), b.dtype());
      if (a.elems() == 0) return;
      EXPECT_LE(max(abs(a - b)).item<double>(), dtype == DType::kF64 ? 1e-10 : 2e-5) << what;
    };
    expect_close(y, split.part(y_all, group.rank()), "y");
    expect_close(gradient(x), split.part(gradient(x_all), group.rank()), "dx");
    // Those of the parameters are this rank's share.
    for (size_t i = 0; i < norm.parameters().size(); ++i) {
      const Tensor total = clone(gradient(norm.parameters()[i]));
      group.all_reduce(total).wait();
      expect_close(total, gradient(reference.parameters()[i]), "parameter");
    }
    const auto buffers = norm.named_buffers(), expected = reference.named_buffers();
    ASSERT_EQ(buffers.size(), expected.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      expect_close(to(buffers[i].second, dtype), to(expected[i].second, dtype), buffers[i].first.c_str());
    }
  });
}

TEST(SyncBatchNorm, IsBatchNormOverTheBatchesOfAllRanks) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const int ranks : {1, 2, 3, 4}) expect_same_as_one_rank(equal_parts(ranks, 4), dtype);
  }
  expect_same_as_one_rank(equal_parts(2, 4), DType::kF64, {.momentum = {}});
  expect_same_as_one_rank(equal_parts(2, 4), DType::kF64, {.affine = false, .track_running_stats = false});
}

TEST(SyncBatchNorm, WeighsRanksByTheirCountsAndLetsEmptyOnesTakePart) {
  expect_same_as_one_rank({{1, 5}}, DType::kF64);
  expect_same_as_one_rank({{2, 0, 3}}, DType::kF64);
  expect_same_as_one_rank({{0, 1, 0, 7}}, DType::kF64);
}

// spec: test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
TEST(SyncBatchNorm, RunningVarianceIsUnbiasedOverAllRanks) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [](comm::Group& group) {
      const auto input = [](int rank) {
        const auto length = static_cast<int64_t>(std::pow(10, rank + 1));
        const Tensor x = empty({2, 2, length});
        fill_(select(x, 1, 0), std::pow(0.1, rank - 1));
        fill_(select(x, 1, 1), std::pow(0.3, rank - 1));
        return x;
      };
      nn::BatchNorm1d norm(2, {.momentum = 0.99});
      convert_sync_batchnorm(norm, group);
      const Tensor x = input(group.rank());
      // After 30 passes 0.01^30 of the initial values is left.
      for (int i = 0; i < 30; ++i) backward(mean(norm(x)));
      std::vector<Tensor> all;
      all.reserve(static_cast<size_t>(group.size()));
      for (int r = 0; r < group.size(); ++r) all.push_back(to(input(r), DType::kF64));
      const Tensor whole = cat(all, 2);
      expect_close(norm.running_mean, to(mean(whole, {0, 2}), DType::kF32), "mean");
      expect_close(norm.running_var, to(var(whole, {0, 2}), DType::kF32), "variance");
    });
  }
}

TEST(SyncBatchNorm, TakesTwoToFiveDimensions) {
  run_ranks(2, [](comm::Group& group) {
    const auto check = [&](auto norm, const Shape& sizes) {
      auto reference = clone(norm);
      convert_sync_batchnorm(norm, group);
      const Tensor whole = to(op::sample(sizes, 1), DType::kF32);
      const Tensor y = norm(chunk(whole, 2)[static_cast<size_t>(group.rank())]);
      expect_close(y, chunk(reference(whole), 2)[static_cast<size_t>(group.rank())], concat(sizes));
    };
    check(nn::BatchNorm1d(2), {4, 2});
    check(nn::BatchNorm1d(2), {4, 2, 3});
    check(nn::BatchNorm2d(2), {4, 2, 3, 2});
    check(nn::BatchNorm3d(2), {4, 2, 3, 2, 2});
    // One value per channel on each rank is enough.
    check(nn::BatchNorm1d(2), {2, 2});
  });
}

Tensor as_channels_last(const Tensor& x) {
  const Tensor copy = Tensor::empty_strided(x.sizes(), channels_last_strides(x.sizes()), x.dtype());
  return copy_(copy, x);
}

TEST(SyncBatchNorm, KeepsChannelsLast) {
  run_ranks(2, [](comm::Group& group) {
    const auto check = [&](auto norm, const Shape& sizes) {
      convert_sync_batchnorm(norm, group);
      const Tensor x = set_requires_grad(as_channels_last(to(op::sample(sizes, group.rank()), DType::kF32)));
      const Tensor y = norm(x);
      EXPECT_TRUE(y.is_channels_last() && !y.is_contiguous()) << sizes;
      const Tensor dx = grad({sum(square(y))}, {x})[0];
      EXPECT_TRUE(dx.is_channels_last() && !dx.is_contiguous()) << sizes;
    };
    check(nn::BatchNorm2d(2), {4, 2, 4, 4});
    check(nn::BatchNorm3d(2), {4, 2, 4, 4, 4});
  });
}

// Training the converted module on the ranks' parts equals training the plain one on the whole batch.
template <class M>
void expect_parity(const M& module, const Shape& sizes, const Shape& target_sizes, const Split& split) {
  run_ranks(static_cast<int>(split.sizes.size()), [&](comm::Group& group) {
    M reference = nn::clone(module), synced = nn::clone(module);
    convert_sync_batchnorm(synced, group);
    DistributedDataParallel ddp(std::move(synced), group);
    EXPECT_TRUE(ddp.log().has_sync_bn);
    const int64_t local = split.sizes[static_cast<size_t>(group.rank())];
    const Tensor x = to(op::sample(sizes, 1), DType::kF32), target = to(op::sample(target_sizes, 2), DType::kF32);
    // Means over parts of different sizes become the mean over all of it.
    const double scale = static_cast<double>(group.size() * local) / static_cast<double>(split.total());
    parity_loop(ddp, reference, x, target, local, split.begin(group.rank()), scale);
  });
}

// spec: test_DistributedDataParallel_SyncBatchNorm
// spec: test_DistributedDataParallel_SyncBatchNorm_No_Affine
// spec: test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
TEST(SyncBatchNorm, TrainsLikeOneRankOnTheWholeBatch) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t local : {1, 2}) {
      const int64_t N = ranks * local;
      expect_parity(seeded(BatchNormNet(true), 1), {N, 2}, {N, 4}, equal_parts(ranks, local));
      expect_parity(seeded(BatchNormNet(false), 1), {N, 2}, {N, 4}, equal_parts(ranks, local));
    }
  }
}

// spec: test_DistributedDataParallel_SyncBatchNorm_2D_Input
TEST(SyncBatchNorm, TrainsOnInputsWithoutPlaces) {
  for (const int ranks : {2, 3, 4}) {
    expect_parity(nn::BatchNorm1d(2), {2 * ranks, 2}, {2 * ranks, 2}, equal_parts(ranks, 2));
    expect_parity(nn::BatchNorm1d(2), {ranks, 2}, {ranks, 2}, equal_parts(ranks, 1));
  }
}

// spec: test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
TEST(SyncBatchNorm, TrainsOnPartsOfDifferentSizes) {
  for (const int ranks : {2, 3, 4}) {
    Split split;
    for (int r = 0; r < ranks; ++r) split.sizes.push_back(r + 2);
    const int64_t N = split.total();
    expect_parity(seeded(BatchNormNet(true), 1), {N, 2}, {N, 4}, split);
  }
}

// A norm that sees nothing but channels-last data, and gives it: what the loop takes out of a batch is row-major.
template <class Norm>
struct OnlyChannelsLast : nn::Module {
  Norm norm{2};
  CHORALE_MODULE(OnlyChannelsLast, norm)
  Tensor forward(const Tensor& rows) {
    const Tensor x = as_channels_last(rows);
    EXPECT_TRUE(x.is_channels_last() && !x.is_contiguous()) << x.sizes();
    const Tensor y = norm(x);
    EXPECT_TRUE(y.is_channels_last() && !y.is_contiguous()) << y.sizes();
    return y;
  }
};

// spec: test_DistributedDataParallel_SyncBatchNorm_Channels_Last
TEST(SyncBatchNorm, TrainsOnChannelsLast) {
  for (const int ranks : {2, 3, 4}) {
    const int64_t N = 2 * ranks;
    expect_parity(seeded(OnlyChannelsLast<nn::BatchNorm2d>(), 1), {N, 2, 4, 4}, {N, 2, 4, 4}, equal_parts(ranks, 2));
    expect_parity(seeded(OnlyChannelsLast<nn::BatchNorm3d>(), 1), {N, 2, 4, 4, 4}, {N, 2, 4, 4, 4},
                  equal_parts(ranks, 2));
  }
}

// spec: test_DistributedDataParallel_SyncBatchNorm_half
TEST(SyncBatchNorm, GivesHalfForHalf) {
  run_ranks(2, [](comm::Group& group) {
    BatchNormNet net = seeded(BatchNormNet(true), 1);
    net.to(DType::kF16);
    convert_sync_batchnorm(net, group);
    DistributedDataParallel ddp(net, group);
    const Tensor x = set_requires_grad(to(op::sample({2, 2}, group.rank()), DType::kF16));
    const Tensor y = ddp(x);
    backward(sum(square(y)));
    EXPECT_EQ(y.dtype(), DType::kF16);
    EXPECT_EQ(gradient(x).dtype(), DType::kF16);
    for (const auto& [name, p] : net.named_parameters()) {
      ASSERT_TRUE(gradient(p).defined()) << name;
      EXPECT_EQ(gradient(p).dtype(), DType::kF16) << name;
    }
    EXPECT_EQ(net.bn.running_var.dtype(), DType::kF16);
  });
}

// spec: test_ddp_sync_bn_training_vs_eval
TEST(SyncBatchNorm, CommunicatesInTrainingOnly) {
  run_ranks(2, [](comm::Group& group) {
    nn::BatchNorm2d norm(2, {.track_running_stats = false});
    convert_sync_batchnorm(norm, group);
    const comm::Group& own = dynamic_cast<const SyncStatistics&>(*norm.statistics()).group();
    DistributedDataParallel ddp(norm, group);
    const Tensor x = set_requires_grad(to(op::sample({10, 2, 4, 4}), DType::kF32));
    const int64_t before = own.sequence_number();
    for (int i = 0; i < 6; ++i) backward(sum(ddp(x)));
    EXPECT_EQ(own.sequence_number(), before + 12);  // an all-gather and an all-reduce each
    group.barrier().wait();
    const int64_t reductions = ddp.group().sequence_number();
    if (group.rank() == 0) {
      ddp.eval();
      for (int i = 0; i < 6; ++i) ddp(x);
    }
    EXPECT_EQ(own.sequence_number(), before + 12);
    EXPECT_EQ(ddp.group().sequence_number(), reductions);
  });
}

// spec: test_sync_bn_logged
TEST(SyncBatchNorm, IsInTheLog) {
  run_ranks(2, [](comm::Group& group) {
    BatchNormNet net;
    EXPECT_FALSE(DistributedDataParallel(net, group).log().has_sync_bn);
    convert_sync_batchnorm(net, group);
    EXPECT_TRUE(DistributedDataParallel(net, group).log().has_sync_bn);
  });
}

// spec: test_SyncBatchNorm_process_group
TEST(SyncBatchNorm, ConversionReachesNestedLayersAndGivesThemTheGroup) {
  run_ranks(3, [](comm::Group& world) {
    const comm::Group first = world.new_group({0});
    nn::Sequential net(nn::Linear(2, 2), nn::Sequential(nn::BatchNorm1d(2), nn::Sequential(nn::BatchNorm1d(2))));
    EXPECT_FALSE(has_sync_batchnorm(net));
    convert_sync_batchnorm(net, first);
    EXPECT_TRUE(has_sync_batchnorm(net));
    int found = 0;
    for (const auto& [name, part] : net.named_modules()) {
      if (const auto* norm = dynamic_cast<const nn::BatchNorm*>(part)) {
        const auto& group = dynamic_cast<const SyncStatistics&>(*norm->statistics()).group();
        EXPECT_EQ(group.is_member(), world.rank() == 0);
        if (world.rank() == 0) {
          EXPECT_THAT(group.members(), ::testing::ElementsAre(0));
        }
        ++found;
      }
    }
    EXPECT_EQ(found, 2);
    EXPECT_EQ(net(ones({2, 2})).sizes(), (Shape{2, 2}));  // alone with its own batch
  });
}

TEST(SyncBatchNorm, RefusesWhatItCannotDo) {
  run_ranks(2, [](comm::Group& group) {
    nn::BatchNorm1d norm(2);
    convert_sync_batchnorm(norm, group);
    // All see that there is one value in all, so all throw.
    EXPECT_THROW(norm(ones({group.rank(), 2})), InvalidArgument);
    const Tensor x = set_requires_grad(to(op::sample({3, 2}, group.rank()), DType::kF32));
    EXPECT_THROW(grad({sum(square(norm(x)))}, {x}, {.create_graph = true}), StateError);
  });
}

}  // namespace
}  // namespace chorale::parallel
