#include "chorale/optim/clip.h"

#include <cmath>
#include <limits>

#include "chorale/base/parallel_for.h"
#include "chorale/op/samples.h"
#include "chorale/optim/adam.h"
#include "chorale/optim/optim_test_util.h"
#include "chorale/optim/sgd.h"

namespace chorale::optim {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Clip, ANormThatIsNotFiniteIsReportedAndChangesNothing) {
  const std::vector<Tensor> leaves{leaf({0, 0}), leaf({0}), leaf({0})};
  for (double bad : {kInf, std::nan("")}) {
    set_gradient(leaves[0], Tensor::from<double>({3, 4}, {2}));
    set_gradient(leaves[2], Tensor::from<double>({bad}, {1}));
    EXPECT_FALSE(std::isfinite(clip_grad_norm(leaves, 1)));
    EXPECT_FALSE(std::isfinite(clip_grad_norm(leaves, 1, {.norm_type = kInf})));
    EXPECT_EQ(values(gradient(leaves[0])), (Values{3, 4}));
    EXPECT_MESSAGE(StateError, "is number 2", clip_grad_norm(leaves, 1, {.error_if_nonfinite = true}));
  }
}

TEST(Clip, TakesParametersThatAreListed) {
  const Tensor a = leaf({0, 0}), b = leaf({0});
  set_gradient(a, Tensor::from<double>({3, 0}, {2}));
  set_gradient(b, Tensor::from<double>({4}, {1}));
  EXPECT_NEAR(clip_grad_norm({a, b}, 1), 5, 1e-12);
  EXPECT_NEAR(values(gradient(b))[0], 0.8, 1e-6);
  EXPECT_NEAR(clip_grad_norm({a}, 10), 0.6, 1e-6);
  clip_grad_value({a, b}, 0.7);
  EXPECT_EQ(values(gradient(b)), Values{0.7});
}

TEST(Clip, TheNormDoesNotDependOnThreads) {
  const std::vector<Tensor> leaves{set_requires_grad(to(op::sample({100'001}, 1), DType::kF32))};
  const auto norm = [&](int threads) {
    set_gradient(leaves[0], to(op::sample({100'001}, 2), DType::kF32));
    set_thread_count(threads);
    return clip_grad_norm(leaves, 1e9);
  };
  const int before = thread_count();
  const double expected = norm(1);
  EXPECT_EQ(norm(2), expected);
  EXPECT_EQ(norm(3), expected);
  set_thread_count(before);
  double squares = 0;
  for (double g : values(gradient(leaves[0]))) squares += g * g;
  EXPECT_NEAR(expected, std::sqrt(squares), 1e-4);
}

TEST(Clip, GradientsWithHolesAndSparseOnesAreScaledToo) {
  const Tensor wide = Tensor::from<double>({3, 100, 4, 100}, {4});
  const std::vector<Tensor> leaves{leaf({0, 0}), set_requires_grad(Tensor::from<double>({0, 0, 0, 0}, {2, 2}))};
  set_gradient(leaves[0], wide.view_as({2}, {2}, 0));
  const Tensor rows = Tensor::from<int64_t>({1, 1}, {1, 2});
  set_gradient(leaves[1], Tensor::sparse_coo(rows, Tensor::from<double>({5, 0, 7, 0}, {2, 2}), {2, 2}));
  EXPECT_NEAR(clip_grad_norm(leaves, 1), 13, 1e-12);
  EXPECT_NEAR(values(gradient(leaves[0]))[1], 4.0 / 13, 1e-6);
  EXPECT_NEAR(values(to_dense(gradient(leaves[1])))[2], 12.0 / 13, 1e-6);
  EXPECT_EQ(values(wide), (Values{3, 100, 4, 100}));
}

TEST(Clip, ByValueLimitsEachElement) {
  for (DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    const std::vector<Tensor> leaves{set_requires_grad(to(Tensor::from<double>({0, 0, 0, 0}, {4}), dtype))};
    set_gradient(leaves[0], to(Tensor::from<double>({-3, 0.25, kInf, -kInf}, {4}), dtype));
    clip_grad_value(leaves, 0.5);
    EXPECT_EQ(values(gradient(leaves[0])), (Values{-0.5, 0.25, 0.5, -0.5}));
  }
}

TEST(Clip, NothingToClipIsAnError) {
  const Tensor a = leaf({1});
  Sgd optimizer({{"a", a}});
  optimizer.update_in_backward();
  backward(sum(a));
  EXPECT_MESSAGE(StateError, "updates in backward", clip_grad_norm(optimizer.parameters(), 1));
  EXPECT_MESSAGE(StateError, "no parameter has a gradient", clip_grad_value(optimizer.parameters(), 1));
  set_gradient(a, detach(a));
  EXPECT_MESSAGE(InvalidArgument, "must be positive, not 0", clip_grad_norm(optimizer.parameters(), 0));
  EXPECT_MESSAGE(InvalidArgument, "norm_type must be above 0 or infinity, not 0",
                 clip_grad_norm(optimizer.parameters(), 1, {.norm_type = 0}));
}

TEST(Clip, BackwardNoticesThatAGradientItNeedsWasClipped) {
  const Tensor a = leaf({2});
  backward(sum(a * a * a), {}, {.create_graph = true});
  const Tensor squares = sum(gradient(a) * gradient(a));
  {
    const NoGrad quiet;
    clip_grad_norm({&a, 1}, 0.1);
  }
  EXPECT_MESSAGE(StateError, "overwritten in place by clip_by_norm", backward(squares));
  set_gradient(a, {});  // it knows where it came from, which is a
}

}  // namespace
}  // namespace chorale::optim
