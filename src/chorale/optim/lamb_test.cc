#include "chorale/optim/lamb.h"

#include "chorale/base/parallel_for.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim_test_util.h"

namespace chorale::optim {
namespace {

TEST(Lamb, BitsDoNotDependOnThreads) {
  const auto train = [](int threads) {
    const int before = thread_count();
    set_thread_count(threads);
    const Tensor w = set_requires_grad(to(op::sample({100'003}, 1), DType::kF32));
    Lamb optimizer({{"w", w}}, {.lr = 0.1, .weight_decay = 0.1});
    for (int step = 0; step < 3; ++step) {
      set_gradient(w, to(op::sample({100'003}, 2 + step), DType::kF32));
      optimizer.step();
    }
    set_thread_count(before);
    return w.to_vector<float>();
  };
  const auto expected = train(1);
  EXPECT_EQ(train(2), expected);
  EXPECT_EQ(train(5), expected);
}

TEST(Lamb, AParameterOfZerosTakesThePlainStep) {
  const Tensor w = leaf({0, 0});
  Lamb optimizer({{"w", w}}, {.lr = 0.5, .eps = 0});
  set_gradient(w, Tensor::from<double>({3, -4}, {2}));
  optimizer.step();
  EXPECT_NEAR(values(w)[0], -0.5, 1e-12);
  EXPECT_NEAR(values(w)[1], 0.5, 1e-12);
}

}  // namespace
}  // namespace chorale::optim
