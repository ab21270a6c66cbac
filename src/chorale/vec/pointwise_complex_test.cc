// Values of the complex loops against std::complex<long double>.
#include <gtest/gtest.h>

#include <complex>
#include <functional>

#include "chorale/vec/loops.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

using Z = std::complex<long double>;
using Reference = std::function<Z(Z, Z, Z)>;

const Z kP0(0.75L, -0.25L);

struct Case {
  ScalarOp op;
  Reference reference;
};

std::vector<Case> cases() {
  using enum ScalarOp;
  const Z one(1);
  return {
      {kAdd, [](Z a, Z b, Z) { return a + b; }},
      {kAddScaled, [](Z a, Z b, Z) { return a + kP0 * b; }},
      {kSub, [](Z a, Z b, Z) { return a - b; }},
      {kMul, [](Z a, Z b, Z) { return a * b; }},
      {kDiv, [](Z a, Z b, Z) { return a / b; }},
      {kAddScalar, [](Z x, Z, Z) { return x + kP0; }},
      {kSubScalar, [](Z x, Z, Z) { return x - kP0; }},
      {kRsubScalar, [](Z x, Z, Z) { return kP0 - x; }},
      {kMulScalar, [](Z x, Z, Z) { return x * kP0; }},
      {kDivScalar, [](Z x, Z, Z) { return x / kP0; }},
      {kRdivScalar, [](Z x, Z, Z) { return kP0 / x; }},
      {kNeg, [](Z x, Z, Z) { return -x; }},
      {kSign, [](Z x, Z, Z) { return x / std::abs(x); }},
      {kSquare, [](Z x, Z, Z) { return x * x; }},
      {kCube, [](Z x, Z, Z) { return x * x * x; }},
      {kReciprocal, [one](Z x, Z, Z) { return one / x; }},
      {kSqrt, [](Z x, Z, Z) { return std::sqrt(x); }},
      {kRsqrt, [one](Z x, Z, Z) { return one / std::sqrt(x); }},
      {kAddcmul, [](Z a, Z b, Z c) { return a + kP0 * b * c; }},
      {kAddcdiv, [](Z a, Z b, Z c) { return a + kP0 * b / c; }},
      {kConj, [](Z x, Z, Z) { return std::conj(x); }},
      {kReal, [](Z x, Z, Z) { return Z(x.real()); }},
      {kImag, [](Z x, Z, Z) { return Z(x.imag()); }},
      {kComplexAbs, [](Z x, Z, Z) { return Z(std::abs(x)); }},
      {kAngle, [](Z x, Z, Z) { return Z(std::arg(x)); }},
      {kExp, [](Z x, Z, Z) { return std::exp(x); }},
      {kLog, [](Z x, Z, Z) { return std::log(x); }},
      {kSin, [](Z x, Z, Z) { return std::sin(x); }},
      {kCos, [](Z x, Z, Z) { return std::cos(x); }},
      {kTan, [](Z x, Z, Z) { return std::tan(x); }},
      {kTanh, [](Z x, Z, Z) { return std::tanh(x); }},
      {kPow, [](Z a, Z b, Z) { return std::pow(a, b); }},
      {kPowScalar, [](Z x, Z, Z) { return std::pow(x, kP0); }},
      {kRpowScalar, [](Z x, Z, Z) { return std::pow(kP0, x); }},
      {kTanhBackward, [one](Z dy, Z y, Z) { return dy * (one - y * y); }},
      {kSigmoid, [one](Z x, Z, Z) { return one / (one + std::exp(-x)); }},
      {kSigmoidBackward, [one](Z dy, Z y, Z) { return dy * (y * (one - y)); }},
  };
}

template <class T>
void test_complex() {
  using C = std::complex<T>;
  std::vector<C> a, b, c;
  for (int i = -6; i <= 6; ++i) {
    for (int j = -6; j <= 6; ++j) {
      if (i == 0 && j == 0) continue;
      a.emplace_back(static_cast<T>(i) / 3, static_cast<T>(j) / 4);
      b.emplace_back(static_cast<T>(j) / 5 + T(1.5), static_cast<T>(i) / 2);
      c.emplace_back(static_cast<T>(i) / 7, T(2));
    }
  }
  Params params;
  params.f[0] = static_cast<double>(kP0.real());
  params.f[1] = static_cast<double>(kP0.imag());
  for_each_target([&](const char* target) {
    for (const Case& test : cases()) {
      const bool to_real = info(test.op).kind == ScalarKind::kToReal;
      const void* in[3] = {a.data(), b.data(), c.data()};
      std::vector<C> out(a.size());
      pointwise_loop(test.op, dtype_of<C>)(in, out.data(), static_cast<int64_t>(a.size()), params);
      const T* reals = reinterpret_cast<const T*>(out.data());
      for (size_t i = 0; i < a.size(); ++i) {
        const Z exact = test.reference(Z(a[i]), Z(b[i]), Z(c[i]));
        const Z got = to_real ? Z(reals[i]) : Z(out[i]);
        const long double scale = std::max({1.0L, std::abs(exact), std::abs(Z(a[i]))});
        ASSERT_LE(std::abs(got - exact), 16 * std::numeric_limits<T>::epsilon() * scale)
            << target << " " << info(test.op).name << " of " << a[i] << ", " << b[i] << ": " << got << " instead of "
            << exact;
      }
    }
  });
}
TEST(PointwiseComplex, CloseToTheReferenceC64) { test_complex<float>(); }
TEST(PointwiseComplex, CloseToTheReferenceC128) { test_complex<double>(); }

TEST(PointwiseComplex, DivisionDoesNotOverflowOnTheWay) {
  const complex64 a(1e30f, 1e30f), b(1e30f, 1e30f);
  complex64 out;
  const void* in[2] = {&a, &b};
  pointwise_loop(ScalarOp::kDiv, DType::kC64)(in, &out, 1, Params{});
  EXPECT_EQ(out, complex64(1, 0));
}

TEST(PointwiseComplex, PowScalarTakesShortcuts) {
  const complex64 x(1, 2);
  for (double exponent : {2.0, 3.0, 0.5, -1.0}) {
    complex64 out;
    Params params;
    params.f[0] = exponent;
    const void* in[1] = {&x};
    pointwise_loop(ScalarOp::kPowScalar, DType::kC64)(in, &out, 1, params);
    EXPECT_LE(std::abs(out - std::pow(x, static_cast<float>(exponent))), 1e-5f) << exponent;
  }
}

TEST(PointwiseComplex, SignOfZeroIsZeroAndPredicatesLookAtBothParts) {
  using enum ScalarOp;
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const std::vector<complex64> x = {{0, 0}, {0, 1}, {nan, 0}, {1, inf}};
  const std::vector<complex64> y = {{0, 0}, {0, 2}, {nan, 0}, {1, inf}};
  const void* in[2] = {x.data(), y.data()};
  const auto predicate = [&](ScalarOp op) {
    std::vector<uint8_t> out(4);
    pointwise_loop(op, DType::kC64)(in, out.data(), 4, Params{});
    return out;
  };
  using Truths = std::vector<uint8_t>;
  EXPECT_EQ(predicate(kEq), (Truths{1, 0, 0, 1}));
  EXPECT_EQ(predicate(kNe), (Truths{0, 1, 1, 0}));
  EXPECT_EQ(predicate(kEqScalar), (Truths{1, 0, 0, 0}));
  EXPECT_EQ(predicate(kNeScalar), (Truths{0, 1, 1, 1}));
  EXPECT_EQ(predicate(kLogicalNot), (Truths{1, 0, 0, 0}));
  EXPECT_EQ(predicate(kLogicalAnd), (Truths{0, 1, 1, 1}));
  EXPECT_EQ(predicate(kLogicalOr), (Truths{0, 1, 1, 1}));
  EXPECT_EQ(predicate(kLogicalXor), (Truths{0, 0, 0, 0}));
  EXPECT_EQ(predicate(kIsNan), (Truths{0, 0, 1, 0}));
  EXPECT_EQ(predicate(kIsInf), (Truths{0, 0, 0, 1}));
  EXPECT_EQ(predicate(kIsFinite), (Truths{1, 1, 0, 0}));
  complex64 sign(5, 5);
  pointwise_loop(kSign, DType::kC64)(in, &sign, 1, Params{});
  EXPECT_EQ(sign, complex64(0, 0));
}

}  // namespace
}  // namespace chorale::vec
