#include <complex>
#include <functional>
#include <limits>

#include "chorale/op/defs/gradient_test_util.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/reduce.h"
#include "chorale/op/shape.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

using testing::ElementsAre;

TEST(Scan, RunsAlongAnyDimension) {
  const Tensor x = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  expect_tensor(cumsum(x, 1), {2, 3}, {1, 3, 6, 4, 9, 15});
  expect_tensor(cumsum(x, 0), {2, 3}, {1, 2, 3, 5, 7, 9});
  expect_tensor(cumprod(x, -1), {2, 3}, {1, 2, 6, 4, 20, 120});
  expect_tensor(cumsum(transpose(x, 0, 1), 0), {3, 2}, {1, 4, 3, 9, 6, 15});
  for (const Shape& sizes : {Shape{9, 100}, Shape{300, 7}, Shape{2, 50, 300}}) {
    const Tensor big = build(sizes, [](const Shape& i) { return static_cast<double>((i[0] * 7 + i[1] * 3) % 5 - 2); });
    for (int64_t dim = 0; dim < big.dims(); ++dim) {
      const Tensor sums = cumsum(big, dim);
      expect_equal(select(sums, dim, -1), sum(big, dim));
      for_each_index(sizes, [&](const Shape& index) {
        Shape before = index;
        const bool first = before[static_cast<size_t>(dim)]-- == 0;
        EXPECT_EQ(at(sums, index), (first ? 0 : at(sums, before)) + at(big, index));
      });
    }
  }
}

TEST(Scan, RunningSumsAreKeptInMoreDigits) {
  const Tensor sums = cumsum(full({1 << 20}, 0.1f), 0);
  EXPECT_EQ(select(sums, 0, -1).item<float>(), static_cast<float>((1 << 20) * static_cast<double>(0.1f)));
}

// Every element against a loop in f64, of a scan alone and of two side by side. Lengths near 1 keep products in range.
TEST(Scan, ComplexNumbersAreAsNearToF64AsTheirDigitsAllow) {
  std::vector<complex64> elements(20'000);
  for (int i = 0; i < 20'000; ++i)
    elements[static_cast<size_t>(i)] = complex64(std::polar(1 + (i * 37 % 101 - 50) / 5e3, i * 53 % 997 / 1e2));
  const Tensor x = Tensor::from(elements, {static_cast<int64_t>(elements.size())});
  const auto expect_near = [&](const Tensor& y, complex128 state, auto step) {
    const std::vector<complex128> found = y.to_vector<complex128>();
    double worst = 0;
    for (size_t i = 0; i < elements.size(); ++i) {
      state = step(state, complex128(elements[i]));
      worst = std::max(worst, std::abs(found[i] - state) / std::abs(state));
    }
    EXPECT_LE(worst, std::numeric_limits<float>::epsilon());
  };
  const Tensor two = stack({x, x}, 1);
  expect_near(cumsum(x, 0), 0, std::plus<>());
  expect_near(select(cumsum(two, 0), 1, 1), 0, std::plus<>());
  expect_near(cumprod(x, 0), 1, std::multiplies<>());
  expect_near(select(cumprod(two, 0), 1, 1), 1, std::multiplies<>());
}

TEST(Scan, GradientsOfProductsAreRightWithZeros) {
  EXPECT_THAT(slope([](const Tensor& x) { return prod(x); }, vector({2, 3, 4})), ElementsAre(12, 8, 6));
  EXPECT_THAT(slope([](const Tensor& x) { return prod(x); }, vector({2, 0, 4})), ElementsAre(0, 8, 0));
  EXPECT_THAT(slope([](const Tensor& x) { return prod(x); }, vector({0, 2, 0})), ElementsAre(0, 0, 0));
  // y = (a, ab, abc, abcd)
  EXPECT_THAT(slope([](const Tensor& x) { return cumprod(x, 0); }, vector({0, 2, 0, 3})), ElementsAre(3, 0, 0, 0));
  EXPECT_THAT(slope([](const Tensor& x) { return cumprod(x, 0); }, vector({1, 2, 3, 4})), ElementsAre(33, 16, 10, 6));
  EXPECT_THAT(slope([](const Tensor& x) { return cumsum(x, 0); }, vector({1, 2, 3})), ElementsAre(3, 2, 1));
  const Tensor x = Tensor::from<double>({1, 2, 3, 0, 5, 6, 7, 8}, {2, 2, 2});
  EXPECT_THAT(slope([](const Tensor& y) { return prod(y, {0, 2}); }, x), ElementsAre(60, 30, 0, 168, 12, 10, 0, 0));
}

TEST(Scan, SecondDerivativesOfProductsAreRightWithZeros) {
  const Tensor x = vector({2, 0, 5});
  set_requires_grad(x);
  const Tensor dx = grad({prod(x)}, {x}, {.create_graph = true})[0];  // (bc, ac, ab)
  const Tensor ddx = grad({dx}, {x}, {.grad_outputs = {vector({1, 10, 100})}})[0];
  EXPECT_THAT(values(ddx), ElementsAre(10 * 5 + 100 * 0, 1 * 5 + 100 * 2, 1 * 0 + 10 * 2));
}

TEST(Scan, BadInputIsNamed) {
  EXPECT_THAT(message_of([&] { cumsum(zeros({2, 3}), 2); }), testing::HasSubstr("[cumsum]"));
  expect_tensor(cumsum(Tensor::scalar(3, DType::kF32), 0), {}, {3});
  expect_tensor(cumprod(zeros({0, 3}), 0), {0, 3}, {});
}

}  // namespace
}  // namespace chorale
