// Values and gradients at awkward places, against what PyTorch gives there.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <sstream>

#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"

namespace chorale {
namespace {

// The values of a function, and the gradients of their sum by its inputs; lists of numbers.
struct Recorded {
  const char* function;
  DType dtype;
  std::vector<const char*> lists;
};
#include "chorale/op/defs/testdata/pointwise.inc"

using Unary = std::function<Tensor(const Tensor&)>;
using Binary = std::function<Tensor(const Tensor&, const Tensor&)>;

const std::map<std::string, Unary> kUnaryFunctions = {
    {"neg", [](const Tensor& x) { return neg(x); }},
    {"abs", [](const Tensor& x) { return abs(x); }},
    {"sign", [](const Tensor& x) { return sign(x); }},
    {"reciprocal", [](const Tensor& x) { return reciprocal(x); }},
    {"square", [](const Tensor& x) { return square(x); }},
    {"sqrt", [](const Tensor& x) { return sqrt(x); }},
    {"rsqrt", [](const Tensor& x) { return rsqrt(x); }},
    {"floor", [](const Tensor& x) { return floor(x); }},
    {"ceil", [](const Tensor& x) { return ceil(x); }},
    {"round", [](const Tensor& x) { return round(x); }},
    {"trunc", [](const Tensor& x) { return trunc(x); }},
    {"exp", [](const Tensor& x) { return exp(x); }},
    {"exp2", [](const Tensor& x) { return exp2(x); }},
    {"expm1", [](const Tensor& x) { return expm1(x); }},
    {"log", [](const Tensor& x) { return log(x); }},
    {"log2", [](const Tensor& x) { return log2(x); }},
    {"log10", [](const Tensor& x) { return log10(x); }},
    {"log1p", [](const Tensor& x) { return log1p(x); }},
    {"sin", [](const Tensor& x) { return sin(x); }},
    {"cos", [](const Tensor& x) { return cos(x); }},
    {"tan", [](const Tensor& x) { return tan(x); }},
    {"tanh", [](const Tensor& x) { return tanh(x); }},
    {"erf", [](const Tensor& x) { return erf(x); }},
    {"sigmoid", [](const Tensor& x) { return sigmoid(x); }},
    {"relu", [](const Tensor& x) { return relu(x); }},
    {"leaky_relu", [](const Tensor& x) { return leaky_relu(x, 0.1); }},
    {"gelu", [](const Tensor& x) { return gelu(x); }},
    {"gelu_tanh", [](const Tensor& x) { return gelu(x, Gelu::kTanh); }},
    {"silu", [](const Tensor& x) { return silu(x); }},
    {"elu", [](const Tensor& x) { return elu(x, 0.7); }},
    {"softplus", [](const Tensor& x) { return softplus(x, 2, 5); }},
    {"hardtanh", [](const Tensor& x) { return hardtanh(x, -1, 1.5); }},
    {"clamp", [](const Tensor& x) { return clamp(x, -1, 1.5); }},
    {"clamp_min", [](const Tensor& x) { return clamp(x, 0.5); }},
    {"clamp_max", [](const Tensor& x) { return clamp(x, {}, 0.5); }},
    {"isnan", [](const Tensor& x) { return isnan(x); }},
    {"isinf", [](const Tensor& x) { return isinf(x); }},
    {"isfinite", [](const Tensor& x) { return isfinite(x); }},
    {"logical_not", [](const Tensor& x) { return logical_not(x); }},
    {"angle", [](const Tensor& x) { return angle(x); }},
    {"add_scalar", [](const Tensor& x) { return x + 0.1; }},
    {"rsub", [](const Tensor& x) { return 0.1 - x; }},
    {"mul_scalar", [](const Tensor& x) { return x * 0.1; }},
    {"div_scalar", [](const Tensor& x) { return x / 3; }},
    {"rdiv", [](const Tensor& x) { return 3 / x; }},
    {"floor_divide_scalar", [](const Tensor& x) { return floor_divide(x, 3); }},
    {"remainder_scalar", [](const Tensor& x) { return remainder(x, -3); }},
    {"pow_0", [](const Tensor& x) { return pow(x, 0); }},
    {"pow_half", [](const Tensor& x) { return pow(x, 0.5); }},
    {"pow_2", [](const Tensor& x) { return pow(x, 2); }},
    {"pow_3", [](const Tensor& x) { return pow(x, 3); }},
    {"pow_minus_1", [](const Tensor& x) { return pow(x, -1.0); }},
    {"pow_minus_2_5", [](const Tensor& x) { return pow(x, -2.5); }},
    {"rpow_2", [](const Tensor& x) { return pow(2.0, x); }},
    {"rpow_0", [](const Tensor& x) { return pow(0.0, x); }},
    {"eq_scalar", [](const Tensor& x) { return eq(x, 0.5); }},
    {"lt_scalar", [](const Tensor& x) { return lt(x, 0.5); }},
};
const std::map<std::string, Binary> kBinaryFunctions = {
    {"add", [](const Tensor& x, const Tensor& y) { return x + y; }},
    {"sub", [](const Tensor& x, const Tensor& y) { return x - y; }},
    {"mul", [](const Tensor& x, const Tensor& y) { return x * y; }},
    {"div", [](const Tensor& x, const Tensor& y) { return x / y; }},
    {"floor_divide", [](const Tensor& x, const Tensor& y) { return floor_divide(x, y); }},
    {"div_trunc", [](const Tensor& x, const Tensor& y) { return div(x, y, Rounding::kTrunc); }},
    {"remainder", [](const Tensor& x, const Tensor& y) { return remainder(x, y); }},
    {"pow", [](const Tensor& x, const Tensor& y) { return pow(x, y); }},
    {"minimum", [](const Tensor& x, const Tensor& y) { return minimum(x, y); }},
    {"maximum", [](const Tensor& x, const Tensor& y) { return maximum(x, y); }},
    {"eq", [](const Tensor& x, const Tensor& y) { return eq(x, y); }},
    {"ne", [](const Tensor& x, const Tensor& y) { return ne(x, y); }},
    {"lt", [](const Tensor& x, const Tensor& y) { return lt(x, y); }},
    {"le", [](const Tensor& x, const Tensor& y) { return le(x, y); }},
    {"gt", [](const Tensor& x, const Tensor& y) { return gt(x, y); }},
    {"ge", [](const Tensor& x, const Tensor& y) { return ge(x, y); }},
    {"logical_and", [](const Tensor& x, const Tensor& y) { return logical_and(x, y); }},
    {"logical_or", [](const Tensor& x, const Tensor& y) { return logical_or(x, y); }},
    {"logical_xor", [](const Tensor& x, const Tensor& y) { return logical_xor(x, y); }},
    {"lerp", [](const Tensor& x, const Tensor& y) { return lerp(x, y, 0.25); }},
    {"add_scaled", [](const Tensor& x, const Tensor& y) { return add(x, y, 3); }},
    {"where", [](const Tensor& x, const Tensor& y) { return where(gt(x, 0), x, y); }},
};

std::vector<double> numbers(const std::string& list) {
  std::istringstream words(list);
  std::vector<double> result;
  for (std::string word; words >> word;) result.push_back(std::strtod(word.c_str(), nullptr));
  return result;
}

// PyTorch's erf and tanh forms of gelu cancel for negative x, and overflow for large ones; ours do not.
bool is_known_better(const std::string& what, double x) { return what.rfind("gelu", 0) == 0 && (x < -2 || x > 1e38); }
// 1 - tanh(x)^2 magnifies the last place of tanh(x).
double absolute_tolerance(const std::string& what) { return what == "tanh's gradient 0" ? 1e-15 : 0; }

// A few units in the last place; NaN, infinities and the sign of zero exactly.
void expect_like_torch(const std::vector<double>& found, const std::string& list, DType dtype, const std::string& what,
                       const std::vector<std::vector<double>>& in) {
  const std::vector<double> expected = numbers(list);
  ASSERT_EQ(found.size(), expected.size()) << what;
  const double tolerance = dtype == DType::kF64 ? 4e-15 : is_floating(dtype) ? 2e-6 : 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double a = found[i], b = expected[i];
    const bool same = std::isnan(b)             ? std::isnan(a)
                      : std::isinf(b) || b == 0 ? a == b && std::signbit(a) == std::signbit(b)
                      : dtype == DType::kF32 && std::abs(b) < 1.2e-38
                          ? std::abs(a - b) <= 3e-45  // denormal
                          : std::abs(a - b) <= tolerance * std::abs(b) + absolute_tolerance(what);
    if (same || is_known_better(what, in[0][i])) continue;
    std::ostringstream at;
    for (const auto& x : in) at << " " << x[i];
    ADD_FAILURE() << what << " in " << dtype << " at" << at.str() << " is " << a << ", in PyTorch " << b;
  }
}

void compare(const Recorded& recorded, const std::vector<Tensor>& in, const std::function<Tensor()>& f) {
  std::vector<std::vector<double>> values;
  values.reserve(in.size());
  for (const Tensor& x : in) values.push_back(x.to_vector<double>());
  if (is_floating(recorded.dtype)) {
    for (const Tensor& x : in) set_requires_grad(x);
  }
  const Tensor y = f();
  expect_like_torch(y.to_vector<double>(), recorded.lists[0], y.dtype(), recorded.function, values);
  if (recorded.lists.size() == 1) return;
  const std::vector<Tensor> gradients = grad({sum(y)}, in);
  for (size_t i = 0; i < in.size(); ++i) {
    expect_like_torch(gradients[i].to_vector<double>(), recorded.lists[i + 1], recorded.dtype,
                      std::string(recorded.function) + "'s gradient " + std::to_string(i), values);
  }
}

TEST(PointwiseOracle, FunctionsOfOneTensorAreThoseOfPyTorch) {
  const std::vector<double> points = numbers(kPoints);
  for (const Recorded& recorded : kUnary) {
    const Tensor x = to(Tensor::from(points, {static_cast<int64_t>(points.size())}), recorded.dtype);
    compare(recorded, {x}, [&] { return kUnaryFunctions.at(recorded.function)(x); });
  }
}

TEST(PointwiseOracle, FunctionsOfTwoTensorsAreThoseOfPyTorch) {
  for (const Recorded& recorded : kBinary) {
    const std::vector<double> points = numbers(is_floating(recorded.dtype) ? kPairs : kIntegers);
    std::vector<double> first, second;
    for (double a : points) {
      for (double b : points) {
        first.push_back(a);
        second.push_back(b);
      }
    }
    // Values go through i64: a negative number as an unsigned one is taken modulo 256.
    const auto made = [&](const std::vector<double>& list) {
      const Tensor x = Tensor::from(list, {static_cast<int64_t>(list.size())});
      return is_floating(recorded.dtype) ? to(x, recorded.dtype) : to(to(x, DType::kI64), recorded.dtype);
    };
    const Tensor x = made(first), y = made(second);
    compare(recorded, {x, y}, [&] { return kBinaryFunctions.at(recorded.function)(x, y); });
  }
}

DType nth_name(const char* list, size_t n) {
  std::istringstream words(list);
  std::string word;
  for (size_t i = 0; i <= n; ++i) words >> word;
  return dtype_from_name(word);
}

TEST(PointwiseOracle, TensorsWithoutDimensionsPromoteAsInPyTorch) {
  for (size_t i = 0; i < kDTypeCount; ++i) {
    const Tensor dims = Tensor::empty({2}, kAllDTypes[i], kNull), none = Tensor::empty({}, kAllDTypes[i], kNull);
    for (size_t j = 0; j < kDTypeCount; ++j) {
      const Tensor other = Tensor::empty({}, kAllDTypes[j], kNull);
      EXPECT_EQ(add(dims, other).dtype(), nth_name(kDimsAndNone[i], j)) << kAllDTypes[i] << " " << kAllDTypes[j];
      EXPECT_EQ(add(other, dims).dtype(), nth_name(kDimsAndNone[i], j)) << kAllDTypes[i] << " " << kAllDTypes[j];
      EXPECT_EQ(add(none, other).dtype(), promote(kAllDTypes[i], kAllDTypes[j]));
    }
    const Scalar scalars[] = {true, 1, 1.5, std::complex<double>(0, 1)};
    for (size_t j = 0; j < 4; ++j) {
      EXPECT_EQ(add(none, scalars[j]).dtype(), nth_name(kNoneAndNumber[i], j)) << kAllDTypes[i] << " " << scalars[j];
      EXPECT_EQ(add(dims, scalars[j]).dtype(), promote(kAllDTypes[i], scalars[j].kind()));
    }
  }
}

}  // namespace
}  // namespace chorale
