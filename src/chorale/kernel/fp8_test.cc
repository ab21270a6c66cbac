#include "chorale/kernel/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace chorale::kernel {
namespace {

TEST(Fp8Numbers, AreThoseOfTheStandard) {
  constexpr auto e4m3 = Fp8::kE4m3, e5m2 = Fp8::kE5m2;
  EXPECT_EQ(from_fp8(0x38, e4m3), 1);
  EXPECT_EQ(from_fp8(0x7e, e4m3), 448);
  EXPECT_EQ(from_fp8(0x08, e4m3), 0x1p-6f);
  EXPECT_EQ(from_fp8(0x01, e4m3), 0x1p-9f);
  EXPECT_EQ(from_fp8(0xbc, e4m3), -1.5f);
  EXPECT_TRUE(std::isnan(from_fp8(0x7f, e4m3)));
  EXPECT_EQ(from_fp8(0x3c, e5m2), 1);
  EXPECT_EQ(from_fp8(0x7b, e5m2), 57344);
  EXPECT_EQ(from_fp8(0x04, e5m2), 0x1p-14f);
  EXPECT_EQ(from_fp8(0x01, e5m2), 0x1p-16f);
  EXPECT_EQ(from_fp8(0x7c, e5m2), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(from_fp8(0x7d, e5m2)));
}

// The finite numbers of a format in order; codes without sign rise with them.
class Fp8Rounding : public testing::TestWithParam<Fp8> {
 protected:
  uint8_t last() const { return GetParam() == Fp8::kE4m3 ? 0x7e : 0x7b; }
  float value(int code) const { return from_fp8(static_cast<uint8_t>(code), GetParam()); }
};

TEST_P(Fp8Rounding, GivesEveryNumberBackAndItsNeighboursTheNearest) {
  for (int code = 0; code <= last(); ++code) {
    EXPECT_EQ(to_fp8(value(code), GetParam()), code);
    EXPECT_EQ(to_fp8(-value(code), GetParam()), code | 0x80);
    if (code == last()) continue;
    const float middle = (value(code) + value(code + 1)) / 2;  // exact
    EXPECT_LT(value(code), value(code + 1));
    EXPECT_EQ(to_fp8(middle, GetParam()), code % 2 == 0 ? code : code + 1) << "ties go to even";
    EXPECT_EQ(to_fp8(std::nextafter(middle, 0.0f), GetParam()), code);
    EXPECT_EQ(to_fp8(std::nextafter(middle, 1e9f), GetParam()), code + 1);
  }
  EXPECT_EQ(to_fp8(1e30f, GetParam()), last());
  EXPECT_EQ(to_fp8(-std::numeric_limits<float>::infinity(), GetParam()), last() | 0x80);
  EXPECT_EQ(to_fp8(std::nanf(""), GetParam()), 0x7f);
}

TEST_P(Fp8Rounding, HasTheLargestScaleWithWhichAllFits) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponent(-110, 120);
  const float most = value(last());
  for (int i = 0; i < 1000; ++i) {
    const float x = std::exp2(exponent(random));
    const auto [up, down] = fp8_scale(x, GetParam());
    EXPECT_LE(x * up, most);
    EXPECT_GT(x * up * 2, most);
    EXPECT_EQ(up * down, 1);
  }
  EXPECT_EQ(fp8_scale(most, GetParam()).up, 1);
  EXPECT_EQ(fp8_scale(std::nextafter(most, 1e9f), GetParam()).up, 0.5f);
  EXPECT_EQ(fp8_scale(0, GetParam()).up, 1);
  EXPECT_EQ(fp8_scale(1e-42f, GetParam()).up, 0x1p126f);
  for (const float x : {std::numeric_limits<float>::infinity(), std::nanf("")})
    EXPECT_TRUE(std::isnan(fp8_scale(x, GetParam()).down));
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8Rounding, testing::Values(Fp8::kE4m3, Fp8::kE5m2),
                         [](const auto& named) { return named.param == Fp8::kE4m3 ? "e4m3" : "e5m2"; });

}  // namespace
}  // namespace chorale::kernel
