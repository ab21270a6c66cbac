// Training under autocast, with loss scaling where the dtype needs it, against training in f32.
#include <optional>
#include <set>

#include "chorale/op/samples.h"
#include "chorale/optim/adam.h"
#include "chorale/optim/grad_scaler.h"
#include "chorale/optim/optim_test_util.h"
#include "chorale/optim/sgd.h"

namespace chorale::optim {
namespace {

// Two layers that learn a function of their inputs; parameters stay f32.
struct Network {
  Tensor w1 = parameter({32, 8}, 1), b1 = parameter({32}, 2), w2 = parameter({4, 32}, 3);
  Tensor x = to(op::sample({64, 8}, 4, -1, 1), DType::kF32);
  Tensor target = argmax(matmul(x, to(op::sample({8, 4}, 5), DType::kF32)), 1);

  static Tensor parameter(const Shape& sizes, int seed) {
    return set_requires_grad(to(op::sample(sizes, seed, -0.5, 0.5), DType::kF32));
  }
  NamedTensors named() const { return {{"w1", w1}, {"b1", b1}, {"w2", w2}}; }
  Tensor loss() const { return cross_entropy(linear(gelu(linear(x, w1, b1)), w2), target); }
};

struct Result {
  double first, last;
  std::set<int> skipped;  // steps
};

// `left_out`: steps that are not taken, as a scaler would skip them.
Result train(std::optional<DType> lower, bool scaled, bool early = false, const std::set<int>& left_out = {}) {
  const Network network;
  AdamW optimizer(network.named(), {.lr = 0.02});
  if (early) optimizer.update_in_backward();
  // The first scale is beyond what f16 can hold: it has to back off before anything is learned.
  GradScaler scaler({.scale = 0x1p24, .interval = 20, .enabled = scaled});
  Result result{0, 0, {}};
  for (int step = 0; step < 80; ++step) {
    optimizer.zero_grad();
    Tensor loss;
    {
      const Autocast scope(lower.value_or(DType::kBF16), lower.has_value());
      loss = network.loss();
    }
    backward(scaler.scale(loss));
    if (!left_out.contains(step)) {
      if (!scaler.step(optimizer)) result.skipped.insert(step);
      scaler.update();
    }
    (step == 0 ? result.first : result.last) = loss.item<double>();
  }
  for (const auto& [name, tensor] : network.named()) EXPECT_EQ(tensor.dtype(), DType::kF32);
  return result;
}

TEST(MixedPrecision, LearnsAsF32Does) {
  const Result full = train({}, false), brain = train(DType::kBF16, false), half = train(DType::kF16, true);
  EXPECT_LT(full.last, 0.3 * full.first);
  EXPECT_TRUE(full.skipped.empty());
  EXPECT_NEAR(brain.last, full.last, 0.15 * full.last);
  EXPECT_GT(half.skipped.size(), 0);
  EXPECT_LT(half.skipped.size(), 20);
  const Result full_with_gaps = train({}, false, false, half.skipped);
  EXPECT_NEAR(half.last, full_with_gaps.last, 0.02 * full_with_gaps.last);
}

TEST(MixedPrecision, UpdatesInBackwardGiveTheSameLosses) {
  EXPECT_EQ(train(DType::kBF16, false, true).last, train(DType::kBF16, false, false).last);
}

TEST(MixedPrecision, ScalingSavesGradientsThatF16WouldLose) {
  // A gradient of 2^-30 is below f16's smallest number.
  const auto gradient_under = [](double scale) {
    const Tensor w = set_requires_grad(Tensor::from<float>({1}, {1, 1}));
    Sgd optimizer({{"w", w}}, {.lr = 0});
    GradScaler scaler({.scale = scale});
    Tensor loss;
    {
      const Autocast scope(DType::kF16);
      loss = sum(to(matmul(Tensor::from<float>({1}, {1, 1}), w), DType::kF32)) * 0x1p-30;
    }
    backward(scaler.scale(loss));
    EXPECT_TRUE(scaler.step(optimizer));
    return gradient(w).item<double>();
  };
  EXPECT_EQ(gradient_under(1), 0);
  EXPECT_EQ(gradient_under(0x1p20), 0x1p-30);
}

}  // namespace
}  // namespace chorale::optim
