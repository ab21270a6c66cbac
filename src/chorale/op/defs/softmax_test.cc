#include <limits>

#include "chorale/op/defs/nn_test_util.h"
#include "chorale/op/nn.h"

namespace chorale {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Softmax, IsTheShareOfEachExponential) {
  const Tensor x = Tensor::from<double>({0, std::log(2), std::log(5)}, {3});
  expect_values(softmax(x), {0.125, 0.25, 0.625});
  expect_values(log_softmax(x), {std::log(0.125), std::log(0.25), std::log(0.625)});
}

TEST(Softmax, WorksAlongAnyDimension) {
  // Columns of (0, ln 3) and (ln 3, 0).
  const Tensor x = Tensor::from<double>({0, std::log(3), std::log(3), 0}, {2, 2});
  expect_values(softmax(x, 0), {0.25, 0.75, 0.75, 0.25});
  const Tensor wide = op::sample({3, 5, 40});
  expect_near(softmax(wide, 1), transpose(softmax(contiguous(transpose(wide, 1, 2)), 2), 1, 2), 1e-14);
  expect_near(log_softmax(as(wide, DType::kBF16), 0),
              permute(log_softmax(as(permute(wide, {1, 2, 0}), DType::kBF16)), {2, 0, 1}), 0);
}

TEST(Softmax, DoesNotOverflow) {
  expect_values(softmax(Tensor::from<float>({1000, 1000}, {2})), {0.5, 0.5});
  expect_values(log_softmax(Tensor::from<float>({-1000, 1000}, {2})), {-2000, 0});
  expect_values(softmax(Tensor::from<double>({-kInf, 0}, {2})), {0, 1});
}

TEST(Softmax, RefusesADimensionThatIsNotThere) {
  const Tensor x = op::sample({2, 3});
  EXPECT_THAT(message_of([&] { softmax(x, 2); }), testing::HasSubstr("softmax"));
  EXPECT_THAT(message_of([&] { log_softmax(x, -3); }), testing::HasSubstr("-3"));
  EXPECT_THAT(message_of([&] { softmax(Tensor::from<int64_t>({1, 2}, {2})); }), testing::HasSubstr("i64"));
}

}  // namespace
}  // namespace chorale
