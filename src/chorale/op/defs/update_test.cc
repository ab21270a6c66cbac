// Rows over lists that write into them. What each rule computes is compared in optim (PyTorch's numbers) and in vec
// (formulas); here is what is special to the ops: several tensors at different steps, what they refuse, and that
// numbers which change from step to step are read when the op runs.
#include "chorale/op/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "chorale/base/error.h"
#include "chorale/op/builder.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/lists.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

Tensor number(double value, DType dtype = DType::kF64) { return Tensor::scalar(value, dtype); }
Tensor step(int64_t value) { return Tensor::scalar(value, DType::kI64); }

UpdateLists two_parameters() {
  UpdateLists lists;
  lists.parameters = {Tensor::from<double>({1, 2, 3, 4}, {2, 2}), Tensor::from<double>({5}, {1})};
  lists.gradients = {Tensor::from<double>({1, 1, 2, 2}, {2, 2}), Tensor::from<double>({4}, {1})};
  lists.steps = {step(0), step(7)};
  lists.states[0] = {full({2, 2}, 10, DType::kF64), full({1}, 10, DType::kF64)};
  lists.lr = number(0.5);
  return lists;
}

using Values = std::vector<double>;

TEST(UpdateRows, TensorsOfOneListMayBeAtDifferentSteps) {
  const UpdateLists lists = two_parameters();
  sgd_(lists, {.momentum = 0.5, .dampening = 0.75});
  // The first update of a parameter knows no dampening: b = 5 + g and b = 5 + g / 4.
  EXPECT_EQ(lists.states[0][0].to_vector<double>(), (Values{6, 6, 7, 7}));
  EXPECT_EQ(lists.states[0][1].to_vector<double>(), Values{6});
  EXPECT_EQ(lists.parameters[0].to_vector<double>(), (Values{-2, -1, -0.5, 0.5}));
  EXPECT_EQ(lists.parameters[1].to_vector<double>(), Values{2});
  EXPECT_EQ(lists.steps[0].item<int64_t>(), 1);
  EXPECT_EQ(lists.steps[1].item<int64_t>(), 8);
}

TEST(UpdateRows, TheRateIsReadWhenTheOpRuns) {
  UpdateLists lists = two_parameters();
  const auto run = [&] { sgd_(lists, {}); };  // what is the same each time is all there is to repeat
  run();
  EXPECT_EQ(lists.parameters[1].to_vector<double>(), Values{3});
  fill_(lists.lr, 0.25);
  run();
  EXPECT_EQ(lists.parameters[1].to_vector<double>(), Values{2});
}

TEST(UpdateRows, NothingChangesWhereSomethingInfiniteWasFound) {
  for (const double found : {0.0, 1.0}) {
    UpdateLists lists = two_parameters();
    lists.found_inf = number(found, DType::kF32);
    sgd_(lists, {.momentum = 0.5});
    EXPECT_EQ(lists.parameters[1].item<double>() == 5, found == 1);
    EXPECT_EQ(lists.states[0][1].item<double>() == 10, found == 1);
    EXPECT_EQ(lists.steps[1].item<int64_t>(), found == 1 ? 7 : 8);
  }
}

TEST(UpdateRows, EverythingWrittenCountsAsWritten) {
  const UpdateLists lists = two_parameters();
  sgd_(lists, {.momentum = 0.5});
  for (const Tensor& x : {lists.parameters[1], lists.states[0][1], lists.steps[1]})
    EXPECT_STREQ(x.storage()->last_writer(), "update_sgd");
  EXPECT_EQ(lists.gradients[0].storage()->version(), 0u);
}

TEST(UpdateRows, RefuseWhatDoesNotFitAndChangeNothing) {
  const auto message = [](auto change) {
    UpdateLists lists = two_parameters();
    change(lists);
    const std::string text = message_of<InvalidArgument>([&] { sgd_(lists, {.momentum = 0.5}); });
    EXPECT_EQ(lists.parameters[0].storage()->version(), 0u);
    return text;
  };
  EXPECT_EQ(message([](UpdateLists& x) { x.gradients[1] = number(1); }),
            "[update_sgd] gradient 1 is f64 []; expected f64 [1] as parameter 1 (f64)");
  EXPECT_EQ(message([](UpdateLists& x) { x.states[0][1] = full({1}, 0); }),
            "[update_sgd] state 1 is f32 [1]; expected f64 [1] as parameter 1 (f64)");
  EXPECT_EQ(message([](UpdateLists& x) { x.steps[1] = number(1); }),
            "[update_sgd] step 1 is an i64 tensor without dimensions, not f64 []");
  EXPECT_EQ(message([](UpdateLists& x) { x.lr = full({1}, 1, DType::kF64); }),
            "[update_sgd] lr is a floating tensor without dimensions, not f64 [1]");
  EXPECT_EQ(
      message([](UpdateLists& x) { x.gradients.pop_back(); }),
      "[update_sgd] expects 2 tensors and then 4 lists of one length (lr, found_inf?, parameters..., gradients..., "
      "steps..., momenta..., masters...), found 9 tensors");
  EXPECT_EQ(
      message([](UpdateLists& x) { x.gradients[0] = {}; }),
      "[update_sgd] a tensor of its lists (input 4) is an undefined tensor: default-constructed, moved from, or a "
      "result that is absent");
  EXPECT_EQ(message([](UpdateLists& x) {
              x.states[0][0] = Tensor::empty_strided({2, 2}, {1, 2}, DType::kF64);
            }),
            "[update_sgd] state 0 is laid out otherwise than its parameter, with strides [1, 2] and [2, 1]");
  EXPECT_EQ(message([](UpdateLists& x) {
              x.parameters[1] = full({1}, 0, DType::kBF16);
              x.gradients[1] = full({1}, 0, DType::kBF16);
            }),
            "[update_sgd] parameter 1 is bf16; expected f32 or f64, or masters for f16 and bf16");
}

TEST(UpdateRows, GradientsMayBeLaidOutOtherwise) {
  UpdateLists lists = two_parameters();
  const Tensor turned = Tensor::empty_strided({2, 2}, {1, 2}, DType::kF64);
  copy_(turned, lists.gradients[0]);
  lists.gradients[0] = turned;
  sgd_(lists, {});
  EXPECT_EQ(lists.parameters[0].to_vector<double>(), (Values{0.5, 1.5, 2, 3}));
}

TEST(NormOfAll, IsTheNormOfOneLongVector) {
  const std::vector<Tensor> xs{op::sample({3, 4}), op::sample({5}, 1), op::sample({0}), op::sample({}, 2)};
  for (const double p : {0.5, 1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    double sum = 0, largest = 0;
    for (const Tensor& x : xs) {
      for (const double value : x.to_vector<double>()) {
        sum += std::pow(std::abs(value), p);
        largest = std::max(largest, std::abs(value));
      }
    }
    EXPECT_NEAR(norm_of_all(xs, p).item<double>(), std::isinf(p) ? largest : std::pow(sum, 1 / p), 1e-12) << p;
  }
  EXPECT_THROW(norm_of_all(xs, 0), InvalidArgument);
  EXPECT_THROW(norm_of_all(xs, -1), InvalidArgument);
}

TEST(NextLossScale, FallsAtOnceAndGrowsAfterAnInterval) {
  const Tensor scale = number(8, DType::kF32), steps = step(0), fine = number(0, DType::kF32),
               bad = number(1, DType::kF32);
  const kernel::LossScaleAttrs attrs{.growth = 4, .backoff = 0.5, .interval = 2};
  const auto next = [&](const Tensor& found) {
    next_loss_scale_(scale, steps, found, attrs);
    return scale.item<double>();
  };
  EXPECT_EQ(next(fine), 8);
  EXPECT_EQ(next(bad), 4);
  EXPECT_EQ(next(fine), 4);
  EXPECT_EQ(next(fine), 16);
  EXPECT_EQ(steps.item<int64_t>(), 0);
}

}  // namespace
}  // namespace chorale
