// Values of the f32 and f64 loops against references in a wider type: awkward numbers, all pairs of them, and a dense
// sample of all numbers.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>

#include "chorale/vec/loops.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

using Real = long double;
using Reference = std::function<Real(Real, Real, Real)>;

constexpr Real kPi = 3.14159265358979323846264338327950288L;
constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
constexpr Real kP0 = 0.75, kP1 = 20;  // the parameters of every call

Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }
Real sign(Real x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }
Real nan_min(Real a, Real b) { return std::isnan(a) || std::isnan(b) ? kNan : std::min(a, b); }
Real nan_max(Real a, Real b) { return std::isnan(a) || std::isnan(b) ? kNan : std::max(a, b); }
Real python_mod(Real a, Real b) {
  const Real mod = std::fmod(a, b);
  return mod != 0 && (mod < 0) != (b < 0) ? mod + b : mod;
}
Real floor_div(Real a, Real b) {
  if (b == 0) return a / b;
  if (std::isinf(a)) return kNan;
  const Real mod = std::fmod(a, b), rounded = std::round((a - mod) / b);
  return mod != 0 && (mod < 0) != (b < 0) ? rounded - 1 : rounded;
}
Real normal_cdf(Real x) { return std::erfc(-x / std::sqrt(Real(2))) / 2; }
Real normal_pdf(Real x) { return std::exp(-x * x / 2) / std::sqrt(2 * kPi); }
Real gelu_tanh_argument(Real x) { return std::sqrt(2 / kPi) * (x + 0.044715L * x * x * x); }

struct Case {
  ScalarOp op;
  Reference reference;
  double ulp;        // allowed error in units of the last place …
  double slack = 0;  // … or this much relative to the largest magnitude among inputs and result
};

std::vector<Case> cases() {
  using enum ScalarOp;
  return {
      {kAdd, [](Real a, Real b, Real) { return a + b; }, 0.5},
      {kAddScaled, [](Real a, Real b, Real) { return a + kP0 * b; }, 0.5, 1.2e-7},
      {kSub, [](Real a, Real b, Real) { return a - b; }, 0.5},
      {kMul, [](Real a, Real b, Real) { return a * b; }, 0.5},
      {kDiv, [](Real a, Real b, Real) { return a / b; }, 0.5},
      {kRemainder, [](Real a, Real b, Real) { return python_mod(a, b); }, 0.5},
      {kMinimum, [](Real a, Real b, Real) { return nan_min(a, b); }, 0},
      {kMaximum, [](Real a, Real b, Real) { return nan_max(a, b); }, 0},
      {kAddScalar, [](Real x, Real, Real) { return x + kP0; }, 0.5},
      {kSubScalar, [](Real x, Real, Real) { return x - kP0; }, 0.5},
      {kRsubScalar, [](Real x, Real, Real) { return kP0 - x; }, 0.5},
      {kMulScalar, [](Real x, Real, Real) { return x * kP0; }, 0.5},
      {kDivScalar, [](Real x, Real, Real) { return x / kP0; }, 0.5},
      {kRdivScalar, [](Real x, Real, Real) { return kP0 / x; }, 0.5},
      {kFloorDivideScalar, [](Real x, Real, Real) { return floor_div(x, kP0); }, 0.5},
      {kRemainderScalar, [](Real x, Real, Real) { return python_mod(x, kP0); }, 0.5},
      {kMinScalar, [](Real x, Real, Real) { return nan_min(x, kP0); }, 0},
      {kMaxScalar, [](Real x, Real, Real) { return nan_max(x, kP0); }, 0},
      {kClamp, [](Real x, Real, Real) { return nan_min(nan_max(x, kP0), kP1); }, 0},
      {kClampBackward, [](Real dy, Real x, Real) { return x > kP0 && x < kP1 ? dy : 0; }, 0},
      {kClampMinBackward, [](Real dy, Real x, Real) { return x > kP0 ? dy : 0; }, 0},
      {kClampMaxBackward, [](Real dy, Real x, Real) { return x < kP0 ? dy : 0; }, 0},
      {kMinimumBackward, [](Real dz, Real x, Real y) { return x > y    ? 0
                                                              : x == y ? dz / 2
                                                                       : dz; }, 0.5},
      {kMaximumBackward, [](Real dz, Real x, Real y) { return x < y    ? 0
                                                              : x == y ? dz / 2
                                                                       : dz; }, 0.5},
      {kNeg, [](Real x, Real, Real) { return -x; }, 0},
      {kAbs, [](Real x, Real, Real) { return std::abs(x); }, 0},
      {kAbsBackward, [](Real dy, Real x, Real) { return dy * sign(x); }, 0},
      {kSign, [](Real x, Real, Real) { return sign(x); }, 0},
      {kSquare, [](Real x, Real, Real) { return x * x; }, 0.5},
      {kCube, [](Real x, Real, Real) { return x * x * x; }, 1.5},
      {kReciprocal, [](Real x, Real, Real) { return 1 / x; }, 0.5},
      {kSqrt, [](Real x, Real, Real) { return std::sqrt(x); }, 0.5},
      {kRsqrt, [](Real x, Real, Real) { return 1 / std::sqrt(x); }, 1.5},
      {kFloor, [](Real x, Real, Real) { return std::floor(x); }, 0},
      {kCeil, [](Real x, Real, Real) { return std::ceil(x); }, 0},
      {kRound, [](Real x, Real, Real) { return std::nearbyint(x); }, 0},
      {kTrunc, [](Real x, Real, Real) { return std::trunc(x); }, 0},
      {kAngle, [](Real x, Real, Real) { return std::isnan(x) ? x
                                               : x < 0       ? kPi
                                                             : 0; }, 0.5},
      {kExp, [](Real x, Real, Real) { return std::exp(x); }, 1.5},
      {kExp2, [](Real x, Real, Real) { return std::exp2(x); }, 1.5},
      {kExpm1, [](Real x, Real, Real) { return std::expm1(x); }, 1},
      {kLog, [](Real x, Real, Real) { return std::log(x); }, 1.5},
      {kLog2, [](Real x, Real, Real) { return std::log2(x); }, 1.5},
      {kLog10, [](Real x, Real, Real) { return std::log10(x); }, 1.5},
      {kLog1p, [](Real x, Real, Real) { return std::log1p(x); }, 1},
      {kSin, [](Real x, Real, Real) { return std::sin(x); }, 1.5},
      {kCos, [](Real x, Real, Real) { return std::cos(x); }, 1.5},
      {kTan, [](Real x, Real, Real) { return std::tan(x); }, 1.5},
      {kTanh, [](Real x, Real, Real) { return std::tanh(x); }, 1},
      {kErf, [](Real x, Real, Real) { return std::erf(x); }, 1.5},
      {kPow, [](Real a, Real b, Real) { return std::pow(a, b); }, 1.5},
      {kPowScalar, [](Real x, Real, Real) { return std::pow(x, kP0); }, 1.5},
      {kRpowScalar, [](Real x, Real, Real) { return std::pow(kP0, x); }, 1.5},
      {kRelu, [](Real x, Real, Real) { return x < 0 ? 0 : x; }, 0},
      {kReluBackward, [](Real dy, Real y, Real) { return y <= 0 ? 0 : dy; }, 0},
      {kLeakyRelu, [](Real x, Real, Real) { return x > 0 ? x : x * kP0; }, 0.5},
      {kLeakyReluBackward, [](Real dy, Real x, Real) { return x > 0 ? dy : dy * kP0; }, 0.5},
      {kSigmoid, [](Real x, Real, Real) { return sigmoid(x); }, 2.5, 1e-37},
      {kElu, [](Real x, Real, Real) { return x > 0 ? x : kP0 * std::expm1(x); }, 2},
      {kEluBackward, [](Real dy, Real x, Real) { return x <= 0 ? dy * kP0 * std::exp(x) : dy; }, 2.5, 1.2e-7},
      {kHardtanh, [](Real x, Real, Real) { return nan_min(nan_max(x, kP0), kP1); }, 0},
      {kHardtanhBackward, [](Real dy, Real x, Real) { return x <= kP0 || x >= kP1 ? 0 : dy; }, 0},
  };
}

// The formulas below subtract nearly equal terms for some inputs, as PyTorch's do, so they get an absolute bound and
// moderate inputs: |error| <= bound * max(1, |inputs|).
struct SmoothCase {
  ScalarOp op;
  Reference reference;
};
std::vector<SmoothCase> smooth_cases() {
  using enum ScalarOp;
  return {
      {kFloorDivide, [](Real a, Real b, Real) { return floor_div(a, b); }},
      {kTanhBackward, [](Real dy, Real y, Real) { return dy * (1 - y * y); }},
      {kSigmoidBackward, [](Real dy, Real y, Real) { return dy * (y * (1 - y)); }},
      {kLerp, [](Real a, Real b, Real w) { return a + w * (b - a); }},
      {kLerpScalar, [](Real a, Real b, Real) { return a + kP0 * (b - a); }},
      {kAddcmul, [](Real a, Real b, Real c) { return a + kP0 * b * c; }},
      {kAddcdiv, [](Real a, Real b, Real c) { return a + kP0 * b / c; }},
      {kSilu, [](Real x, Real, Real) { return x * sigmoid(x); }},
      {kSiluBackward, [](Real dy, Real x, Real) { return dy * sigmoid(x) * (1 + x * (1 - sigmoid(x))); }},
      {kGeluErf, [](Real x, Real, Real) { return x * normal_cdf(x); }},
      {kGeluErfBackward, [](Real dy, Real x, Real) { return dy * (normal_cdf(x) + x * normal_pdf(x)); }},
      {kGeluTanh, [](Real x, Real, Real) { return x / 2 * (1 + std::tanh(gelu_tanh_argument(x))); }},
      {kGeluTanhBackward,
       [](Real dy, Real x, Real) {
         const Real t = std::tanh(gelu_tanh_argument(x));
         return dy * ((1 + t) / 2 + x / 2 * (1 - t * t) * std::sqrt(2 / kPi) * (1 + 3 * 0.044715L * x * x));
       }},
      {kSoftplus, [](Real x, Real, Real) { return x * kP0 > kP1 ? x : std::log1p(std::exp(x * kP0)) / kP0; }},
      {kSoftplusBackward, [](Real dy, Real x, Real) { return x * kP0 > kP1 ? dy : dy * sigmoid(x * kP0); }},
  };
}

template <class T>
std::vector<T> run(ScalarOp op, const std::vector<T>& a, const std::vector<T>& b, const std::vector<T>& c) {
  Params params;
  params.f[0] = static_cast<double>(kP0);
  params.f[1] = static_cast<double>(kP1);
  std::vector<T> out(a.size());
  const void* in[3] = {a.data(), b.data(), c.data()};
  pointwise_loop(op, dtype_of<T>)(in, out.data(), static_cast<int64_t>(a.size()), params);
  return out;
}

// Without FMA the polynomials lose about one place more.
double widened(double ulp, const char* target) {
  return ulp > 1 && std::strcmp(target, "SSE4") == 0 ? 2 * ulp + 1 : ulp;
}

template <class T>
void expect_close(const Case& test, const std::vector<T>& a, const std::vector<T>& b, const char* target) {
  const std::vector<T> out = run(test.op, a, b, b);
  int failures = 0;
  for (size_t i = 0; i < a.size() && failures < 1; ++i) {
    const Real exact = test.reference(a[i], b[i], b[i]);
    const double distance = ulp_distance(out[i], exact);
    if (distance <= widened(test.ulp, target)) continue;
    const Real scale = std::max({Real(1e-30), std::abs(Real(a[i])), std::abs(Real(b[i])), std::abs(exact)});
    const Real unit = std::numeric_limits<T>::epsilon() / Real(std::numeric_limits<float>::epsilon());
    const Real slack = test.slack < 1e-30 ? Real(test.slack) : Real(test.slack) * unit * scale;
    if (std::abs(out[i] - exact) <= slack) continue;
    ++failures;
    ADD_FAILURE() << target << " " << info(test.op).name << " " << dtype_of<T> << " of " << a[i] << ", " << b[i] << ": "
                  << out[i] << " instead of " << exact << ", " << distance << " ulp off";
  }
}

template <class T>
void test_awkward() {
  const std::vector<T> values = awkward<T>();
  std::vector<T> a, b;
  for (T x : values) {
    for (T y : values) {
      a.push_back(x);
      b.push_back(y);
    }
  }
  for_each_target([&](const char* target) {
    for (const Case& test : cases()) {
      SCOPED_TRACE(info(test.op).name);
      expect_close(test, a, b, target);
    }
  });
}
TEST(PointwiseFloat, AwkwardPairsAreWithinTheirBoundF32) { test_awkward<float>(); }
TEST(PointwiseFloat, AwkwardPairsAreWithinTheirBoundF64) { test_awkward<double>(); }

TEST(PointwiseFloat, DenseSampleOfAllF32IsWithinItsBound) {
  // Every 20011th bit pattern: 210,000 numbers of all magnitudes and signs, NaNs included.
  std::vector<float> x;
  for (uint64_t bits = 0; bits < 1ull << 32; bits += 20011)
    x.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  for_each_target([&](const char* target) {
    for (const Case& test : cases()) {
      if (info(test.op).input_count == 1 && test.ulp > 1) expect_close(test, x, x, target);
    }
  });
}

template <class T>
void test_moderate(Real bound) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, 3);
  std::vector<T> a(20001), b(a.size()), c(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<T>(normal(random));
    b[i] = static_cast<T>(normal(random));
    c[i] = static_cast<T>(std::abs(normal(random)) + 0.5);
  }
  for_each_target([&](const char* target) {
    for (const SmoothCase& test : smooth_cases()) {
      const std::vector<T> out = run(test.op, a, b, c);
      for (size_t i = 0; i < a.size(); ++i) {
        const Real exact = test.reference(a[i], b[i], c[i]);
        const Real scale = std::max({Real(1), std::abs(Real(a[i])), std::abs(Real(b[i])), std::abs(exact)});
        ASSERT_LE(std::abs(out[i] - exact), bound * scale)
            << target << " " << info(test.op).name << " of " << a[i] << ", " << b[i] << ", " << c[i] << ": " << out[i]
            << " instead of " << exact;
      }
    }
  });
}
TEST(PointwiseFloat, ModerateInputsAreWithinTheirBoundF32) { test_moderate<float>(4e-6L); }
TEST(PointwiseFloat, ModerateInputsAreWithinTheirBoundF64) { test_moderate<double>(8e-15L); }

// They must be as close to f64 as PyTorch's. Without FMA what rounding takes from a product is not known.
TEST(PointwiseFloat, FunctionsThatCarryTheirRoundingAreAsCloseAsPyTorchs) {
  using enum ScalarOp;
  const std::pair<ScalarOp, double (*)(double)> functions[] = {
      {kTanh, std::tanh}, {kExpm1, std::expm1}, {kLog1p, std::log1p}};
  std::vector<float> x;
  for (float magnitude = 1e-9f; magnitude < 80; magnitude *= 1.0001f) {
    x.push_back(magnitude);
    x.push_back(-magnitude);
  }
  for_each_target([&](const char* target) {
    if (std::strcmp(target, "SSE4") == 0) return;
    for (const auto& [op, exact] : functions) {
      const std::vector<float> y = run(op, x, x, x);
      double worst = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const double expected = exact(static_cast<double>(x[i]));
        if (!std::isfinite(expected)) continue;
        worst = std::max(worst, std::abs(static_cast<double>(y[i]) - expected) / std::abs(expected));
      }
      EXPECT_LE(worst, 0.58 * std::numeric_limits<float>::epsilon()) << target << " " << info(op).name;
    }
  });
}

TEST(PointwiseFloat, GeluIsAccurateOnItsWholeRange) {
  std::vector<float> x;
  for (int i = -13000; i <= 13000; ++i) x.push_back(static_cast<float>(i) / 1000);
  for (float far : {50.0f, 1e10f, 1e30f, -50.0f, -1e10f, -1e30f}) x.push_back(far);
  for_each_target([&](const char* target) {
    const std::vector<float> y = run(ScalarOp::kGeluErf, x, x, x);
    for (size_t i = 0; i < x.size(); ++i) {
      const Real bound = 1.5e-7L * std::max(Real(1), std::abs(Real(x[i])));
      ASSERT_LE(std::abs(y[i] - x[i] * normal_cdf(x[i])), x[i] < -10 ? Real(1e-22) : bound) << target << " " << x[i];
    }
  });
}

template <class T>
void test_predicates() {
  using enum ScalarOp;
  const std::vector<T> values = awkward<T>();
  const auto check = [&](ScalarOp op, auto reference) {
    Params params;
    params.f[0] = 0.5;
    for (T y : values) {
      std::vector<T> b(values.size(), y);
      std::vector<uint8_t> out(values.size(), 77);
      const void* in[2] = {values.data(), b.data()};
      pointwise_loop(op, dtype_of<T>)(in, out.data(), static_cast<int64_t>(values.size()), params);
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(out[i], reference(values[i], y) ? 1 : 0) << info(op).name << " of " << values[i] << ", " << y;
      }
    }
  };
  for_each_target([&](const char* target) {
    SCOPED_TRACE(target);
    check(kEq, [](T a, T b) { return a == b; });
    check(kNe, [](T a, T b) { return a != b; });
    check(kLt, [](T a, T b) { return a < b; });
    check(kLe, [](T a, T b) { return a <= b; });
    check(kGt, [](T a, T b) { return a > b; });
    check(kGe, [](T a, T b) { return a >= b; });
    check(kEqScalar, [](T a, T) { return a == T(0.5); });
    check(kNeScalar, [](T a, T) { return a != T(0.5); });
    check(kLtScalar, [](T a, T) { return a < T(0.5); });
    check(kLeScalar, [](T a, T) { return a <= T(0.5); });
    check(kGtScalar, [](T a, T) { return a > T(0.5); });
    check(kGeScalar, [](T a, T) { return a >= T(0.5); });
    check(kLogicalAnd, [](T a, T b) { return a != 0 && b != 0; });
    check(kLogicalOr, [](T a, T b) { return a != 0 || b != 0; });
    check(kLogicalXor, [](T a, T b) { return (a != 0) != (b != 0); });
    check(kLogicalNot, [](T a, T) { return a == 0; });
    check(kIsNan, [](T a, T) { return std::isnan(a); });
    check(kIsInf, [](T a, T) { return std::isinf(a); });
    check(kIsFinite, [](T a, T) { return std::isfinite(a); });
  });
}
TEST(PointwiseFloat, PredicatesOfAwkwardPairsF32) { test_predicates<float>(); }
TEST(PointwiseFloat, PredicatesOfAwkwardPairsF64) { test_predicates<double>(); }

TEST(PointwiseFloat, PowScalarTakesShortcutsThatAgreeWithPow) {
  std::vector<float> x = {0.5f, 1.0f, 2.25f, 3.0f, 1e-3f, 1e3f};
  for (double exponent : {2.0, 3.0, 0.5, -0.5, -1.0, 1.0, 0.0, -2.0, 4.0, 2.5}) {
    Params params;
    params.f[0] = exponent;
    std::vector<float> out(x.size());
    const void* in[1] = {x.data()};
    pointwise_loop(ScalarOp::kPowScalar, DType::kF32)(in, out.data(), static_cast<int64_t>(x.size()), params);
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_LE(ulp_distance(out[i], std::pow(Real(x[i]), Real(exponent))), 1.5) << exponent;
  }
}

// The rounded quotient is truncated, as in PyTorch.
TEST(PointwiseFloat, TruncatedDivisionIsExact) {
  std::vector<float> a, b;
  for (float x : awkward<float>()) {
    for (float y : awkward<float>()) {
      a.push_back(x);
      b.push_back(y);
    }
  }
  const std::vector<float> by_tensor = run(ScalarOp::kTruncDivide, a, b, b);
  const std::vector<float> by_number = run(ScalarOp::kTruncDivideScalar, a, b, b);
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(ulp_distance(by_tensor[i], std::trunc(a[i] / b[i])), 0) << a[i] << " / " << b[i];
    EXPECT_EQ(ulp_distance(by_number[i], std::trunc(a[i] / static_cast<float>(kP0))), 0) << a[i];
  }
}

TEST(PointwiseFloat, EveryFloatingOperationIsTested) {
  std::vector<bool> tested(kScalarOpCount, false);
  for (const Case& test : cases()) tested[static_cast<size_t>(test.op)] = true;
  for (const SmoothCase& test : smooth_cases()) tested[static_cast<size_t>(test.op)] = true;
  for (ScalarOp op : {ScalarOp::kTruncDivide, ScalarOp::kTruncDivideScalar}) tested[static_cast<size_t>(op)] = true;
  for (int i = 0; i < kScalarOpCount; ++i) {
    const ScalarInfo& row = info(static_cast<ScalarOp>(i));
    if ((row.dtypes & domain::F) == 0 || row.kind == ScalarKind::kPredicate || row.kind == ScalarKind::kMasked)
      continue;
    EXPECT_TRUE(tested[static_cast<size_t>(i)]) << row.name;
  }
}

}  // namespace
}  // namespace chorale::vec
