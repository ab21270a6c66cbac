#include "chorale/op/defs/nn_test_util.h"
#include "chorale/op/nn.h"

namespace chorale {
namespace {

using testing::HasSubstr;

TEST(Interpolate, TakesTheNearestPixel) {
  const Tensor x = iota<float>({1, 1, 2, 3});
  expect_tensor(interpolate(x, {.scale_factor = {2}}), {1, 1, 4, 6},
                {0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 3, 3, 4, 4, 5, 5});
  expect_tensor(interpolate(x, {.size = {1, 2}}), {1, 1, 1, 2}, {0, 1});
  expect_tensor(interpolate(iota<float>({1, 1, 5}), {.size = 3}), {1, 1, 3}, {0, 1, 3});
}

TEST(Interpolate, WeighsFourPixels) {
  const Tensor x = Tensor::from<double>({0, 4, 8, 12}, {1, 1, 2, 2});
  expect_values(interpolate(x, {.size = 4, .mode = Interpolation::kLinear}),
                {0, 1, 3, 4, 2, 3, 5, 6, 6, 7, 9, 10, 8, 9, 11, 12});
  expect_values(interpolate(x, {.size = 3, .mode = Interpolation::kLinear, .align_corners = true}),
                {0, 2, 4, 4, 6, 8, 8, 10, 12});
  expect_values(interpolate(iota<double>({1, 1, 4}), {.size = 2, .mode = Interpolation::kLinear}), {0.5, 2.5});
}

TEST(Interpolate, KeepsTheMemoryLayout) {
  const Tensor x = op::sample({2, 5, 6, 7});
  for (Interpolation mode : {Interpolation::kNearest, Interpolation::kLinear}) {
    const InterpolateOptions options{.size = {9, 4}, .mode = mode};
    const Tensor y = interpolate(channels_last(x), options);
    EXPECT_TRUE(y.is_channels_last());
    expect_near(y, interpolate(x, options), 1e-14);
    expect_near(interpolate(as(x, DType::kBF16), options), interpolate(x, options), 2e-2);
  }
}

TEST(Interpolate, RefusesContradictions) {
  const Tensor x = op::sample({1, 1, 2, 3});
  EXPECT_THAT(message_of([&] { interpolate(x, {}); }), HasSubstr("neither"));
  EXPECT_THAT(message_of([&] { interpolate(x, {.size = 3, .scale_factor = {2}}); }), HasSubstr("both"));
  EXPECT_THAT(message_of([&] {
                interpolate(x, {.size = {1, 2, 3}});
              }),
              HasSubstr("3 sizes or factors are given for 2 dimensions"));
  EXPECT_THAT(message_of([&] { interpolate(x, {.size = 0}); }), HasSubstr("to 0 x 0"));
  EXPECT_THAT(message_of([&] { interpolate(x, {.size = 3, .align_corners = true}); }), HasSubstr("align_corners"));
  EXPECT_THAT(message_of([&] { interpolate(op::sample({2, 3}), {.size = 3}); }), HasSubstr("[2, 3]"));
}

}  // namespace
}  // namespace chorale
