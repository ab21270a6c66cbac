#include "chorale/optim/grad_scaler.h"

#include <limits>

#include "chorale/optim/clip.h"
#include "chorale/optim/optim_test_util.h"
#include "chorale/optim/sgd.h"

namespace chorale::optim {
namespace {

TEST(GradScaler, UnscaledGradientsCanBeClippedBeforeTheStep) {
  const Tensor a = leaf({1, 1});
  Sgd optimizer({{"a", a}}, {.lr = 1});
  GradScaler scaler({.scale = 1024});
  backward(scaler.scale(sum(a * Tensor::from<double>({3, 4}, {2}))));
  EXPECT_EQ(values(gradient(a)), (Values{3072, 4096}));
  scaler.unscale(optimizer);
  EXPECT_EQ(values(gradient(a)), (Values{3, 4}));
  EXPECT_NEAR(clip_grad_norm(optimizer.parameters(), 1), 5, 1e-12);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_NEAR(values(a)[0], 1 - 3.0 / 5, 1e-6);
}

TEST(GradScaler, OneOptimizerWithBadGradientsLowersTheScaleForAll) {
  const Tensor a = leaf({1}), b = leaf({1});
  Sgd first({{"a", a}}, {.lr = 1}), second({{"b", b}}, {.lr = 1});
  GradScaler scaler({.scale = 8});
  set_gradient(a, Tensor::from<double>({8}, {1}));
  set_gradient(b, Tensor::from<double>({std::numeric_limits<double>::infinity()}, {1}));
  EXPECT_TRUE(scaler.step(first));
  EXPECT_FALSE(scaler.step(second));
  scaler.update();
  EXPECT_EQ(values(a), (Values{0}));
  EXPECT_EQ(values(b), (Values{1}));
  EXPECT_EQ(scaler.scale(), 4);
}

TEST(GradScaler, TheScaleGrowsNoFurtherThanF32) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}}, {.lr = 0});
  GradScaler scaler({.scale = 0x1p126, .interval = 1});
  for (int step = 0; step < 5; ++step) {
    set_gradient(a, Tensor::from<double>({0}, {1}));
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(scaler.scale(), 0x1p127);
}

TEST(GradScaler, SwitchedOffItIsNotThere) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}}, {.lr = 1});
  GradScaler scaler({.enabled = false});
  const Tensor loss = sum(a);
  EXPECT_TRUE(scaler.scale(loss).is(loss));
  backward(loss);
  scaler.unscale(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(values(a), (Values{0}));
}

TEST(GradScaler, CallsInTheWrongOrderAreErrors) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}});
  GradScaler scaler;
  EXPECT_MESSAGE(StateError, "without a step()", scaler.update());
  set_gradient(a, Tensor::from<double>({1}, {1}));
  scaler.unscale(optimizer);
  EXPECT_MESSAGE(StateError, "unscaled before", scaler.unscale(optimizer));
  scaler.step(optimizer);
  EXPECT_MESSAGE(StateError, "called twice", scaler.step(optimizer));
  EXPECT_MESSAGE(InvalidArgument, "growth > 1", GradScaler({.growth = 1}));
  EXPECT_MESSAGE(InvalidArgument, "missing: scale, growth", scaler.load_state_dict({}));

  const Tensor half = set_requires_grad(to(Tensor::from<double>({1}, {1}), DType::kF16));
  Sgd low({{"half", half}});
  set_gradient(half, detach(half));
  GradScaler other;
  EXPECT_MESSAGE(InvalidArgument, "keep parameters in f32", other.step(low));

  const Tensor b = leaf({1});
  Sgd early({{"b", b}});
  early.update_in_backward();
  EXPECT_MESSAGE(StateError, "updates in backward", other.step(early));
}

}  // namespace
}  // namespace chorale::optim
