// How far f32 is from f64: sums of many terms, whose order decides. The numbers in comments are PyTorch 2.15's for
// inputs of the same distribution, one thread; functions of one number are in vec/pointwise_float_test.cc.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "chorale/autograd/autograd.h"
#include "chorale/op/functions.h"

namespace chorale {
namespace {

using Tensors = std::vector<Tensor>;

DType wide(DType dtype) {
  if (dtype == DType::kF32) return DType::kF64;
  return dtype == DType::kC64 ? DType::kC128 : dtype;
}

// The largest error of an element, in eps of the largest element.
double error_of(const Tensors& in, const std::function<Tensor(const Tensors&)>& f) {
  Tensors exact_in;
  exact_in.reserve(in.size());
  for (const Tensor& x : in) exact_in.push_back(to(x, wide(x.dtype())));
  const Tensor exact = f(exact_in), found = f(in);
  EXPECT_EQ(wide(found.dtype()), exact.dtype());
  const double most = max(abs(exact)).item<double>();
  return max(abs(to(found, exact.dtype()) - exact)).item<double>() / most / std::numeric_limits<float>::epsilon();
}

Tensor complex_of(const Tensor& real, const Tensor& imaginary) {
  return to(real, DType::kC64) + to(imaginary, DType::kC64) * Scalar(complex64(0, 1));
}

struct Case {
  const char* name;
  Tensors in;
  std::function<Tensor(const Tensors&)> f;
  double bound;
};

class Closeness : public testing::Test {
 protected:
  Tensor draw(const Shape& sizes, double low, double high) {
    return uniform(sizes, low, high, DType::kF32, generator_);
  }
  void expect(const std::vector<Case>& cases) {
    for (const Case& c : cases) {
      const double error = error_of(c.in, c.f);
      EXPECT_LE(error, c.bound) << c.name;
      RecordProperty(c.name, std::to_string(error));
    }
  }

  Generator generator_{1};
};

TEST_F(Closeness, OfSums) {
  const Tensor x = draw({1000, 4000}, 0, 1);
  expect({{"sum", {draw({1 << 20}, 0, 1)}, [](const Tensors& t) { return sum(t[0]); }, 0.5},  // 0.18
          {"sum_of_rows", {x}, [](const Tensors& t) { return sum(t[0], 1); }, 1.0},           // 1.01
          {"sum_of_columns", {x}, [](const Tensors& t) { return sum(t[0], 0); }, 1.7},        // 1.38
          {"mean", {x}, [](const Tensors& t) { return mean(t[0], 0); }, 1.6}});               // 1.55
}

// oneDNN adds 384 products to one sum before it begins the next. Calls for pieces of 192 would be as close as PyTorch
// is, and take 2.5 % longer on one thread; pieces of 256 get half of the way there for 1 %.
TEST_F(Closeness, OfProducts) {
  const Tensor a = draw({256, 1000}, -1, 1), b = draw({1000, 256}, -1, 1), bias = draw({256}, 0, 1);
  const auto product = [](const Tensors& t) { return matmul(t[0], t[1]); };
  expect({{"matmul", {a, b}, product, 5},                                                          // 2.9
          {"addmm", {bias, a, b}, [](const Tensors& t) { return addmm(t[0], t[1], t[2]); }, 5},    // 2.9
          {"matmul_of_positive", {draw({64, 4096}, 0, 1), draw({4096, 64}, 0, 1)}, product, 4}});  // 2.6
}

TEST_F(Closeness, OfTheGradientOfCrossEntropy) {
  const Tensor x = normal({512, 1000}, 0, 3, DType::kF32, generator_),
               target = randint(0, 1000, {512}, DType::kI64, generator_);
  const auto gradient_of = [](const Tensors& t) {
    const Tensor leaf = set_requires_grad(clone(t[0]));
    backward(cross_entropy(leaf, t[1]));
    return gradient(leaf);
  };
  expect({{"cross_entropy", {x, target}, gradient_of, 2.4}});  // 2.4
}

TEST_F(Closeness, OfScansOfComplexNumbers) {
  const Tensor angle = draw({20, 2000}, 0, 6);
  const Tensor x = complex_of(draw({20, 2000}, -0.3, 0.7), draw({20, 2000}, -0.5, 0.5));
  expect({{"cumsum", {x}, [](const Tensors& t) { return cumsum(t[0], 1); }, 0.31},  // 0.31
          {"cumprod",
           {complex_of(cos(angle), sin(angle))},
           [](const Tensors& t) { return cumprod(t[0], 1); },
           0.5}});  // 0.44
}

}  // namespace
}  // namespace chorale
