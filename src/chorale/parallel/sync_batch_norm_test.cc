#include "chorale/parallel/sync_batch_norm.h"

#include <gmock/gmock.h>

#include <numeric>

#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/parallel/parallel_test_util.h"

namespace chorale::parallel {
namespace {

using comm::run_ranks;

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
      for (int r = 0; r < group.size(); ++r) all.push_back(to(input(r), DType::kF64));
      const Tensor whole = cat(all, 2);
      expect_equal(norm.running_mean, to(mean(whole, {0, 2}), DType::kF32), "mean");
      expect_equal(norm.running_var, to(var(whole, {0, 2}), DType::kF32), "variance");
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
      expect_equal(y, chunk(reference(whole), 2)[static_cast<size_t>(group.rank())], concat(sizes));
    };
    check(nn::BatchNorm1d(2), {4, 2});
    check(nn::BatchNorm1d(2), {4, 2, 3});
    check(nn::BatchNorm2d(2), {4, 2, 3, 2});
    check(nn::BatchNorm3d(2), {4, 2, 3, 2, 2});
    // One value per channel on each rank is enough.
    check(nn::BatchNorm1d(2), {2, 2});
  });
}

TEST(SyncBatchNorm, KeepsChannelsLast) {
  run_ranks(2, [](comm::Group& group) {
    const auto check = [&](auto norm, const Shape& sizes) {
      auto reference = clone(norm);
      convert_sync_batchnorm(norm, group);
      const Tensor plain = to(op::sample(sizes, group.rank()), DType::kF32);
      const Tensor x = Tensor::empty_strided(sizes, channels_last_strides(sizes), DType::kF32);
      copy_(x, plain);
      set_requires_grad(x);
      const Tensor y = norm(x);
      EXPECT_TRUE(y.is_channels_last() && !y.is_contiguous()) << sizes;
      const Tensor dx = grad({sum(square(y))}, {x})[0];
      EXPECT_TRUE(dx.is_channels_last() && !dx.is_contiguous()) << sizes;
    };
    check(nn::BatchNorm2d(2), {4, 2, 4, 4});
    check(nn::BatchNorm3d(2), {4, 2, 4, 4, 4});
  });
}

TEST(SyncBatchNorm, GivesHalfForHalf) {
  run_ranks(2, [](comm::Group& group) {
    nn::BatchNorm1d norm(4);
    norm.to(DType::kF16);
    convert_sync_batchnorm(norm, group);
    const Tensor x = set_requires_grad(to(op::sample({3, 4}, group.rank()), DType::kF16));
    const Tensor y = norm(x);
    backward(sum(square(y)));
    EXPECT_EQ(y.dtype(), DType::kF16);
    for (const Tensor& t : {x, Tensor(norm.weight), Tensor(norm.bias)}) EXPECT_EQ(gradient(t).dtype(), DType::kF16);
    EXPECT_EQ(norm.running_var.dtype(), DType::kF16);
  });
}

TEST(SyncBatchNorm, CommunicatesInTrainingOnly) {
  run_ranks(2, [](comm::Group& group) {
    nn::BatchNorm2d norm(2, {.track_running_stats = false});
    convert_sync_batchnorm(norm, group);
    const comm::Group& own = dynamic_cast<const SyncStatistics&>(*norm.statistics()).group();
    const Tensor x = set_requires_grad(to(op::sample({10, 2, 4, 4}), DType::kF32));
    const int64_t before = own.sequence_number();
    for (int i = 0; i < 6; ++i) backward(sum(norm(x)));
    EXPECT_EQ(own.sequence_number(), before + 12);  // an all-gather and an all-reduce each
    group.barrier().wait();
    if (group.rank() == 0) {
      norm.eval();
      for (int i = 0; i < 6; ++i) backward(sum(norm(x)));
    }
    EXPECT_EQ(own.sequence_number(), before + 12);
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
