#include "chorale/op/linalg.h"

#include <cmath>

#include "chorale/op/copy.h"
#include "chorale/op/defs/gradient_test_util.h"
#include "chorale/op/defs/layouts_test_util.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/product.h"
#include "chorale/op/reduce.h"
#include "chorale/op/samples.h"
#include "chorale/op/shape.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

void expect_within(const Tensor& actual, const Tensor& expected, double tolerance) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  ASSERT_EQ(actual.dtype(), expected.dtype());
  EXPECT_THAT(values(actual), testing::Pointwise(testing::DoubleNear(tolerance), values(expected)));
}

Tensor flipped(const Tensor& x) { return transpose(x, -2, -1); }

// Symmetric, positive definite, no two elements alike otherwise.
Tensor definite(const Shape& sizes, int seed = 0) {
  const Tensor x = op::sample(sizes, seed, -1, 1);
  return matmul(x, flipped(x)) + eye(sizes.back(), -1, DType::kF64);
}

// Differences of f along every element of x, for a given gradient of f's result.
Tensor differences(const std::function<Tensor(const Tensor&)>& f, const Tensor& x, const Tensor& dy) {
  constexpr double kStep = 1e-6;
  const Tensor slopes = Tensor::empty(x.sizes(), DType::kF64);
  for (int64_t i = 0; i < x.elems(); ++i) {
    const auto moved = [&](double by) {
      const Tensor there = clone(x);
      there.data<double>()[i] += by;
      return sum(f(there) * dy).item<double>();
    };
    slopes.data<double>()[i] = (moved(kStep) - moved(-kStep)) / (2 * kStep);
  }
  return slopes;
}

void expect_gradient(const std::function<Tensor(const Tensor&)>& f, const Tensor& x) {
  set_requires_grad(x);
  const Tensor y = f(x);
  const Tensor dy = op::sample(y.sizes(), 77);
  expect_within(grad({y}, {x}, {.grad_outputs = {dy}})[0], differences(f, detach(x), dy), 1e-6);
}

TEST(Cholesky, MultipliesBackForEverySizeAndLayout) {
  for (int64_t n : {1, 3, 64, 150}) {
    for (const Tensor& a : layouts(definite({2, n, n}))) {
      const Tensor l = cholesky(a), u = cholesky(a, true);
      expect_within(matmul(l, flipped(l)), contiguous(a), 1e-10);
      expect_within(matmul(flipped(u), u), contiguous(a), 1e-10);
      expect_equal(l, tril(l));
      expect_within(u, contiguous(flipped(l)), 1e-12);
    }
  }
  const Tensor a = to(definite({70, 70}), DType::kF32);
  const Tensor l = cholesky(a);
  expect_within(matmul(l, flipped(l)), a, 1e-4);
}

TEST(Cholesky, ByHand) {
  const Tensor a = Tensor::from<double>({4, 2, -6, 2, 10, 9, -6, 9, 26}, {3, 3});
  expect_tensor(cholesky(a), {3, 3}, {2, 0, 0, 1, 3, 0, -3, 4, 1});
  // The other triangle is not read.
  expect_tensor(cholesky(tril(a)), {3, 3}, {2, 0, 0, 1, 3, 0, -3, 4, 1});
}

TEST(Cholesky, NamesTheMinorThatIsNotPositive) {
  const Tensor bad = Tensor::from<double>({1, 0, 0, 0, 1, 2, 0, 2, 4}, {3, 3});
  EXPECT_EQ(message_of([&] { cholesky(bad); }),
            "[cholesky] matrix 0 of 1 is not positive definite: its leading minor of order 3 is not positive");
  const Tensor two = stack({eye(3, -1, DType::kF64), full({3, 3}, NAN, DType::kF64)});
  EXPECT_EQ(message_of([&] { cholesky(two); }),
            "[cholesky] matrix 1 of 2 is not positive definite: its leading minor of order 1 is not positive");
  EXPECT_EQ(message_of([&] {
              cholesky(zeros({2, 3}));
            }),
            "[cholesky] needs square matrices in the last two dimensions, found shape [2, 3]");
  EXPECT_THROW(cholesky(zeros({3})), InvalidArgument);
  EXPECT_THROW(cholesky(ones({2, 2}, DType::kI64)), InvalidArgument);
  EXPECT_EQ(cholesky(zeros({0, 3, 3})).sizes(), (Shape{0, 3, 3}));
  EXPECT_EQ(cholesky(zeros({2, 0, 0})).sizes(), (Shape{2, 0, 0}));
}

TEST(Cholesky, GradientForSymmetricChanges) {
  const Tensor x = op::sample({2, 4, 4}, 3, -1, 1);
  for (bool upper : {false, true}) {
    expect_gradient([&](const Tensor& y) { return cholesky(matmul(y, flipped(y)) + eye(4, -1, DType::kF64), upper); },
                    clone(x));
  }
}

TEST(SolveTriangular, SolvesFromBothSidesInEveryLayout) {
  for (int64_t n : {1, 3, 65, 130}) {
    for (int64_t columns : {1, 9}) {
      const Tensor a = op::sample({2, n, n}, 1, -1, 1) / static_cast<double>(n) + eye(n, -1, DType::kF64) * 2;
      const Tensor b = op::sample({2, n, columns}, 2);
      for (const Tensor& matrix : layouts(a)) {
        for (const Tensor& right : layouts(b)) {
          for (bool upper : {false, true}) {
            const Tensor triangle = upper ? triu(a) : tril(a);
            expect_within(matmul(triangle, solve_triangular(matrix, right, upper)), b, 1e-11);
            expect_within(matmul(solve_triangular(matrix, flipped(right), upper, false), triangle),
                          contiguous(flipped(b)), 1e-11);
            const Tensor unit = (upper ? triu(a, 1) : tril(a, -1)) + eye(n, -1, DType::kF64);
            expect_within(matmul(unit, solve_triangular(matrix, right, upper, true, true)), b, 1e-11);
          }
        }
      }
    }
  }
}

TEST(SolveTriangular, BroadcastsBatchesAndNamesBadInput) {
  const Tensor a = Tensor::from<double>({2, 0, 1, 4}, {2, 2}), b = Tensor::from<double>({2, 9, 4, 6}, {2, 2, 1});
  expect_tensor(solve_triangular(a, b, false), {2, 2, 1}, {1, 2, 2, 1});
  EXPECT_EQ(message_of([&] {
              solve_triangular(a, zeros({3, 1}, DType::kF64), false);
            }),
            "[solve_triangular] a of shape [2, 2] does not fit b of shape [3, 1]");
  EXPECT_THROW(solve_triangular(a, zeros({2, 1}), false), InvalidArgument);
  EXPECT_THROW(solve_triangular(a, zeros({2}, DType::kF64), false), InvalidArgument);
  EXPECT_THROW(solve_triangular(zeros({2, 3}), zeros({2, 1}), false), InvalidArgument);
}

TEST(SolveTriangular, GradientsFromBothSides) {
  const Tensor a = op::sample({3, 3}, 1, -1, 1) + eye(3, -1, DType::kF64) * 3, b = op::sample({2, 3, 2}, 2);
  for (bool left : {true, false}) {
    const Tensor right = left ? b : contiguous(flipped(b));
    expect_gradient([&](const Tensor& x) { return solve_triangular(x, right, true, left); }, clone(a));
    expect_gradient([&](const Tensor& x) { return solve_triangular(a, x, false, left, true); }, clone(right));
  }
}

TEST(Qr, IsOrthonormalTimesTriangularForEveryShapeAndLayout) {
  for (const Shape& sizes : {Shape{1, 1}, Shape{5, 3}, Shape{3, 5}, Shape{4, 4}, Shape{2, 100, 7}, Shape{300, 80},
                             Shape{2, 0, 3}, Shape{3, 0}}) {
    for (const Tensor& a : layouts(op::sample(sizes))) {
      const auto [q, r] = qr(a);
      expect_within(matmul(q, r), contiguous(a), 1e-12);
      expect_equal(r, triu(r));
      const int64_t k = q.size(-1);
      const Tensor unit = matmul(flipped(q), q);
      expect_within(unit, contiguous(expand(eye(k, -1, DType::kF64), unit.sizes())), 1e-12);
    }
  }
}

TEST(Qr, HasTheSignsOfLapack) {
  // numpy.linalg.qr([[3, 1], [4, 2]])
  const auto [q, r] = qr(Tensor::from<double>({3, 1, 4, 2}, {2, 2}));
  expect_within(q, Tensor::from<double>({-0.6, -0.8, -0.8, 0.6}, {2, 2}), 1e-15);
  expect_within(r, Tensor::from<double>({-5, -2.2, 0, 0.4}, {2, 2}), 1e-15);
  expect_tensor(qr(eye(2)).q, {2, 2}, {1, 0, 0, 1});  // nothing to reflect
}

TEST(Qr, NeitherOverflowsNorVanishes) {
  for (float scale : {1e30f, 1e-30f}) {
    const Tensor a = full({3, 1}, scale);
    EXPECT_NEAR(std::abs(qr(a).r.item<float>()) / (scale * std::sqrt(3.f)), 1, 1e-6);
    expect_within(qr(a).q, full({3, 1}, -1 / std::sqrt(3.0)), 1e-6);
  }
}

TEST(Qr, GradientsOfBothFactors) {
  const Tensor a = op::sample({2, 4, 3}, 5);
  expect_gradient([](const Tensor& x) { return qr(x).q; }, clone(a));
  expect_gradient([](const Tensor& x) { return qr(x).r; }, clone(a));
  expect_gradient(
      [](const Tensor& x) {
        const auto [q, r] = qr(x);
        return matmul(q, sin(r));
      },
      clone(a));
  const Tensor wide = op::sample({2, 3}, 6);
  set_requires_grad(wide);
  EXPECT_THROW(backward(sum(qr(wide).r)), InvalidArgument);
}

}  // namespace
}  // namespace chorale
