#include <cmath>

#include "chorale/autograd/autograd.h"
#include "chorale/base/parallel_for.h"
#include "chorale/op/builder.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/nn_test_util.h"
#include "chorale/op/nn.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"

namespace chorale {
namespace {

using testing::HasSubstr;

// (x - mean) / sqrt(variance + eps) over `dims`, by ops that are proved elsewhere, in f64.
Tensor standardized(const Tensor& any, const IntList& dims, double eps) {
  const Tensor x = as(any, DType::kF64);
  const Tensor centered = x - mean(x, dims, true);
  return centered / sqrt(mean(square(centered), dims, true) + eps);
}

TEST(LayerNorm, StandardizesRowsExactly) {
  // Mean 2.5, variance 1.25; with eps 1 the root is 1.5.
  const Tensor x = Tensor::from<double>({1, 2, 3, 4, 4, 3, 2, 1}, {2, 4});
  expect_values(layer_norm(x, 4, {}, {}, 1), {-1, -1.0 / 3, 1.0 / 3, 1, 1, 1.0 / 3, -1.0 / 3, -1});
  const Tensor weight = Tensor::from<double>({3, 3, 6, 6}, {4}), bias = Tensor::from<double>({1, 0, 0, 1}, {4});
  expect_values(layer_norm(x, 4, weight, bias, 1), {-2, -1, 2, 7, 4, 1, -2, -5});
}

TEST(LayerNorm, AgreesWithItsDefinitionForAwkwardSizes) {
  for (const Shape& sizes : {Shape{1, 1}, Shape{3, 17}, Shape{130, 33}, Shape{2, 3, 257}}) {
    const Tensor x = op::sample(sizes, 1);
    const Tensor weight = op::sample({sizes.back()}, 2), bias = op::sample({sizes.back()}, 3);
    const Tensor expected = standardized(x, {-1}, 1e-5) * weight + bias;
    for (auto [dtype, tolerance] : {std::pair{DType::kF64, 1e-12}, {DType::kF32, 3e-5}, {DType::kBF16, 5e-2}}) {
      expect_near(layer_norm(as(x, dtype), sizes.back(), as(weight, dtype), as(bias, dtype)), expected, tolerance);
    }
  }
}

TEST(LayerNorm, ALargeMeanCostsNoAccuracy) {
  const Tensor x = op::sample({4, 100}, 1), shifted = as(x, DType::kF32) + 1000.0;
  expect_near(layer_norm(shifted, 100), standardized(shifted, {-1}, 1e-5), 1e-4);
}

TEST(LayerNorm, TakesParametersOfAnotherDtype) {
  const Tensor x = as(op::sample({3, 8}), DType::kBF16), weight = as(op::sample({8}, 1), DType::kF32);
  const Tensor y = layer_norm(x, 8, weight);
  EXPECT_EQ(y.dtype(), DType::kBF16);
  expect_near(y, standardized(x, {-1}, 1e-5) * weight, 2e-2);
}

TEST(LayerNorm, RefusesShapesThatDoNotFit) {
  const Tensor x = op::sample({2, 3, 4});
  EXPECT_THAT(message_of([&] { layer_norm(x, 3); }), HasSubstr("[2, 3, 4], must be the normalised shape [3]"));
  EXPECT_THAT(message_of([&] { layer_norm(x, IntList{}); }), HasSubstr("normalised shape"));
  EXPECT_THAT(message_of([&] { layer_norm(x, 4, op::sample({3})); }),
              HasSubstr("weight must be a floating tensor of shape [4]"));
  EXPECT_THAT(message_of([&] { layer_norm(x, 4, {}, Tensor::from<int64_t>({1, 2, 3, 4}, {4})); }), HasSubstr("bias"));
  EXPECT_THAT(message_of([&] { rms_norm(x, {2, 4}); }), HasSubstr("rms_norm"));
}

TEST(RmsNorm, DividesByTheRootOfTheMeanSquare) {
  // Mean square 12.5 + eps 3.5 = 16.
  const Tensor x = Tensor::from<double>({3, 4}, {1, 2});
  expect_values(rms_norm(x, 2, Tensor::from<double>({4, 8}, {2}), 3.5), {3, 8});
  // The default eps is the dtype's.
  expect_values(rms_norm(Tensor::from<float>({0x1p-12f}, {1, 1}), 1), {0x1p-12 / std::sqrt(0x1p-24 + 0x1p-23)}, 1e-6);
}

TEST(GroupNorm, AgreesWithItsDefinition) {
  for (const Shape& sizes : {Shape{2, 6}, Shape{3, 6, 5}, Shape{2, 6, 3, 7}, Shape{1, 6, 2, 2, 3}}) {
    for (int64_t groups : {1, 2, 3, 6}) {
      const Tensor x = op::sample(sizes, 1), weight = op::sample({6}, 2), bias = op::sample({6}, 3);
      Shape channels(sizes.size() - 1, 1);
      channels[0] = 6;
      const Tensor expected =
          reshape(standardized(reshape(x, {sizes[0], groups, -1}), {-1}, 1e-5), sizes) * reshape(weight, channels) +
          reshape(bias, channels);
      expect_near(group_norm(x, groups, weight, bias), expected, 1e-12);
      expect_near(group_norm(as(x, DType::kF16), groups, weight, bias), expected, 2e-2);
    }
  }
  EXPECT_THAT(message_of([] {
                group_norm(op::sample({2, 6, 3}), 4);
              }),
              HasSubstr("6 channels cannot be divided into 4"));
}

TEST(InstanceNorm, IsGroupNormWithOneChannelPerGroup) {
  const Tensor x = op::sample({2, 3, 4, 5});
  expect_near(instance_norm(x), standardized(x, {2, 3}, 1e-5), 1e-12);
  EXPECT_THAT(message_of([] { instance_norm(op::sample({2, 3, 1})); }), HasSubstr("one value per channel"));
}

TEST(InstanceNorm, MovesRunningStatisticsTowardsTheAverageOverSamples) {
  const Tensor x = op::sample({2, 3, 8}), running_mean = op::sample({3}, 1), running_var = op::sample({3}, 2, 1, 2);
  const Tensor expected_mean = running_mean * 0.75 + mean(x, {0, 2}) * 0.25;
  const Tensor unbiased = mean(square(x - mean(x, 2, true)), {2}) * (8.0 / 7);
  const Tensor expected_var = running_var * 0.75 + mean(unbiased, 0) * 0.25;
  const Tensor before_mean = clone(running_mean), before_var = clone(running_var);
  expect_near(instance_norm(x, running_mean, running_var, {}, {}, true, 0.25), standardized(x, 2, 1e-5), 1e-12);
  expect_near(running_mean, expected_mean, 1e-12);
  expect_near(running_var, expected_var, 1e-12);
  const auto per_channel = [](const Tensor& t) { return reshape(t, {3, 1}); };
  expect_near(instance_norm(x, before_mean, before_var, {}, {}, false),
              (x - per_channel(before_mean)) / sqrt(per_channel(before_var) + 1e-5), 1e-12);
}

TEST(BatchNorm, StandardizesChannelsInBothMemoryLayouts) {
  for (const Shape& sizes :
       {Shape{5, 3}, Shape{4, 3, 7}, Shape{2, 3, 5, 6}, Shape{2, 2, 3, 2, 4}, Shape{300, 1}, Shape{90, 40, 2, 2}}) {
    const Tensor x = op::sample(sizes, 1), weight = op::sample({sizes[1]}, 2), bias = op::sample({sizes[1]}, 3);
    IntList places{0};
    for (size_t d = 2; d < sizes.size(); ++d) places.values[places.count++] = static_cast<int64_t>(d);
    Shape channels(sizes.size() - 1, 1);
    channels[0] = sizes[1];
    const Tensor expected = standardized(x, places, 1e-5) * reshape(weight, channels) + reshape(bias, channels);
    for (auto [dtype, tolerance] : {std::pair{DType::kF64, 1e-12}, {DType::kF32, 3e-5}, {DType::kF16, 2e-2}}) {
      const Tensor cast = as(x, dtype);
      expect_near(batch_norm(cast, {}, {}, weight, bias, true), expected, tolerance);
      if (sizes.size() < 3) continue;
      const Tensor y = batch_norm(channels_last(cast), {}, {}, weight, bias, true);
      expect_near(y, expected, tolerance);
      EXPECT_TRUE(y.is_channels_last());
    }
  }
}

TEST(BatchNorm, MovesRunningStatisticsByMomentumWithTheUnbiasedVariance) {
  // Channel 0: mean 2, population variance 1, unbiased 4 / 3. Channel 1: mean 0, variance 4, unbiased 16 / 3.
  const Tensor x = Tensor::from<double>({1, 3, 2, -2, 1, 3, 2, -2}, {2, 2, 2});
  const Tensor running_mean = Tensor::from<double>({10, 20}, {2}), running_var = Tensor::from<double>({1, 1}, {2});
  batch_norm(x, running_mean, running_var, {}, {}, true, 0.5);
  expect_values(running_mean, {6, 10});
  expect_values(running_var, {0.5 + 2.0 / 3, 0.5 + 8.0 / 3});
}

TEST(BatchNorm, UsesRunningStatisticsOutsideOfTraining) {
  const Tensor x = Tensor::from<float>({1, 2, 3, 4}, {2, 2}), mean = Tensor::from<float>({1, 1}, {2});
  const Tensor variance = Tensor::from<float>({3, 8}, {2}), weight = Tensor::from<float>({2, 3}, {2});
  const Tensor y = batch_norm(x, mean, variance, weight, Tensor::from<float>({10, 20}, {2}), false, 0.1, 1);
  expect_values(y, {10, 21, 12, 23}, 1e-6);
  expect_values(mean, {1, 1});
  EXPECT_EQ(batch_norm(as(x, DType::kBF16), mean, variance).dtype(), DType::kBF16);
}

TEST(BatchNorm, RefusesWhatItCannotNormalise) {
  const Tensor x = op::sample({2, 3, 4});
  const Tensor running = op::sample({3});
  EXPECT_THAT(message_of([&] { batch_norm(x, {}, {}); }), HasSubstr("running statistics must be given"));
  EXPECT_THAT(message_of([&] { batch_norm(x, running, {}, {}, {}, true); }), HasSubstr("only the mean"));
  EXPECT_THAT(message_of([&] { batch_norm(x, op::sample({4}), op::sample({4})); }),
              HasSubstr("shape [3], not f64 [4]"));
  EXPECT_THAT(message_of([&] {
                batch_norm(op::sample({1, 3}), {}, {}, {}, {}, true);
              }),
              HasSubstr("one value per channel"));
  EXPECT_THAT(message_of([&] { batch_norm(op::sample({3}), {}, {}, {}, {}, true); }), HasSubstr("[N, C, …]"));
}

TEST(RmsNorm, TheUsualEpsIsThatOfTheDTypeInWhichItIsComputed) {
  // x^2 is about as large as f32's eps: another eps shows.
  const double x = 0x1p-12;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    const double expected = x / std::sqrt(x * x + 0x1p-23);
    EXPECT_NEAR(values(rms_norm(full({4}, x, dtype), {4}))[0], expected, expected * 0x1p-8) << dtype;
  }
  const double wide = 0x1p-26, expected = wide / std::sqrt(wide * wide + 0x1p-52);
  EXPECT_NEAR(values(rms_norm(full({4}, wide, DType::kF64), {4}))[0], expected, 1e-12);
}

TEST(LayerNorm, OverOneElementHasNoGradient) {
  // y is the bias, whatever x is; a tiny eps makes rstd huge, and any rounding error beside it.
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Tensor x = as(op::sample({5, 1}, 1), dtype), weight = as(op::sample({1}, 2), dtype);
    set_requires_grad(x);
    set_requires_grad(weight);
    const Tensor y = layer_norm(x, {1}, weight, {}, 1e-20);
    backward(sum(mul(y, as(op::sample({5, 1}, 3), dtype))));
    EXPECT_EQ(values(gradient(x)), std::vector<double>(5, 0));
    EXPECT_EQ(values(gradient(weight)), std::vector<double>(1, 0));
  }
}

TEST(RmsNorm, OverOneElementHasTheGradientOfASign) {
  // y = x / sqrt(x^2 + eps): dy/dx = eps / (x^2 + eps)^1.5, and not what is left of 1 - x^2 / (x^2 + eps).
  for (const double eps : {1e-20, 1e-6, 0.5}) {
    const Tensor x = as(op::sample({5, 1}, 1, 0.5, 2), DType::kF32);
    set_requires_grad(x);
    backward(sum(rms_norm(x, {1}, {}, eps)));
    const auto at = values(x), got = values(gradient(x));
    for (size_t i = 0; i < at.size(); ++i) {
      const double expected = eps / std::pow(at[i] * at[i] + eps, 1.5);
      EXPECT_NEAR(got[i], expected, expected * 1e-5) << eps;
    }
  }
}

TEST(LayerNorm, TheGradientOfItsGradientMayBeAskedOfOneOutputAlone) {
  const auto second = [](int which) {
    const Tensor x = op::sample({3, 5}, 1), weight = op::sample({5}, 2), bias = op::sample({5}, 3);
    for (const Tensor& t : {x, weight, bias}) set_requires_grad(t);
    const Tensor y = sum(square(layer_norm(x, {5}, weight, bias)));
    const std::vector<Tensor> wanted = {x, weight, bias};
    const Tensor first = grad({y}, {wanted[static_cast<size_t>(which)]}, {.create_graph = true})[0];
    return grad({sum(mul(first, first))}, wanted);
  };
  for (int which = 0; which < 3; ++which) {
    SCOPED_TRACE(which);
    for (const Tensor& gradient : second(which)) EXPECT_TRUE(gradient.defined());
  }
}

TEST(Norms, BitsDoNotDependOnTheNumberOfThreads) {
  // Large enough for several pieces of work.
  const Tensor x = as(op::sample({513, 129}, 1), DType::kF32), weight = as(op::sample({129}, 2), DType::kF32);
  const Tensor image = as(op::sample({9, 10, 31, 33}, 3), DType::kF32), dy = as(op::sample({513, 129}, 4), DType::kF32);
  const auto run = [&] {
    const auto [y, m, rstd] = op::call_many<3>(op::kLayerNorm, kernel::LayerNormAttrs{129, 1e-5}, x, weight, Tensor());
    const auto [dx, dw, db] =
        op::call_many<3>(op::kLayerNormBackward, kernel::LayerNormBackwardAttrs{129, true}, dy, x, m, rstd, weight);
    const auto [z, bm, bv] =
        op::call_many<3>(op::kBatchNorm, kernel::BatchNormAttrs{}, channels_last(image), Tensor(), Tensor());
    const auto [dz, dbw, dbb] =
        op::call_many<3>(op::kBatchNormBackward, kernel::BatchNormAttrs{}, z, channels_last(image), bm, bv, Tensor());
    std::vector<std::vector<double>> all;
    for (const Tensor& t : {y, m, rstd, dx, dw, db, z, bm, bv, dz, dbw, dbb}) all.push_back(values(t));
    return all;
  };
  const int before = thread_count();
  set_thread_count(1);
  const auto one = run();
  set_thread_count(4);
  EXPECT_EQ(run(), one);
  set_thread_count(before);
}

}  // namespace
}  // namespace chorale
