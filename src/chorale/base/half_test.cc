#include "chorale/base/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace chorale {
namespace {

// The value of a small floating format by the definition of IEEE 754: sign, exponent of `exponent_bits`, the rest
// mantissa.
double value_of(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

template <class T>
struct Format;
template <>
struct Format<float16> {
  static constexpr int exponent_bits = 5;
};
template <>
struct Format<bfloat16> {
  static constexpr int exponent_bits = 8;
};

template <class T>
T from_bits(uint32_t bits) {
  T value;
  value.bits = static_cast<uint16_t>(bits);
  return value;
}

template <class T>
class HalfTest : public testing::Test {
 protected:
  static constexpr int kExponentBits = Format<T>::exponent_bits;
  static constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << (15 - kExponentBits);
};
using Halves = testing::Types<float16, bfloat16>;
TYPED_TEST_SUITE(HalfTest, Halves);

TYPED_TEST(HalfTest, EveryValueReadsAsTheStandardDefinesIt) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double expected = value_of(static_cast<uint16_t>(bits), this->kExponentBits);
    const auto found = static_cast<float>(from_bits<TypeParam>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found)) << std::hex << bits;
    } else {
      ASSERT_EQ(static_cast<double>(found), expected) << std::hex << bits;
      ASSERT_EQ(std::signbit(found), (bits & 0x8000) != 0) << std::hex << bits;
    }
  }
}

TYPED_TEST(HalfTest, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = from_bits<TypeParam>(bits);
    const TypeParam back(static_cast<float>(value));
    if ((bits & 0x7fff) > this->kInfinity) {
      ASSERT_GT(back.bits & 0x7fffu, this->kInfinity) << std::hex << bits;  // still NaN, perhaps a quiet one
      ASSERT_EQ(back.bits >> 15, bits >> 15);
    } else {
      ASSERT_EQ(back.bits, bits);
    }
  }
}

// Rounding is a staircase: it is right everywhere if it is right on both sides of every step. A step lies at the middle
// of two neighbours, which belongs to the even one.
TYPED_TEST(HalfTest, RoundsToNearestEvenOnBothSidesOfEveryStep) {
  for (uint32_t bits = 0; bits < this->kInfinity; ++bits) {
    const auto below = static_cast<double>(static_cast<float>(from_bits<TypeParam>(bits)));
    // Beyond the largest number the staircase goes on as if infinity were the next one.
    const double above = bits + 1 < this->kInfinity
                             ? value_of(static_cast<uint16_t>(bits + 1), this->kExponentBits)
                             : 2 * below - value_of(static_cast<uint16_t>(bits - 1), this->kExponentBits);
    const auto middle = static_cast<float>((below + above) / 2);
    ASSERT_EQ(static_cast<double>(middle), (below + above) / 2) << "the middle must be a float, " << std::hex << bits;
    for (const float sign : {1.0f, -1.0f}) {
      const uint32_t sign_bit = sign < 0 ? 0x8000 : 0;
      const auto rounded = [&](float magnitude) { return TypeParam(sign * magnitude).bits - sign_bit; };
      ASSERT_EQ(rounded(std::nextafter(middle, 0.0f)), bits) << std::hex << bits;
      ASSERT_EQ(rounded(middle), bits % 2 == 0 ? bits : bits + 1) << std::hex << bits;
      ASSERT_EQ(rounded(std::nextafter(middle, HUGE_VALF)), bits + 1) << std::hex << bits;
    }
  }
}

TYPED_TEST(HalfTest, InfinityAndTheLargestFloatBecomeInfinity) {
  for (const float value : {HUGE_VALF, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(TypeParam(value).bits, this->kInfinity);
    EXPECT_EQ(TypeParam(-value).bits, 0x8000 | this->kInfinity);
  }
}

TYPED_TEST(HalfTest, EveryNaNStaysOne) {
  // One bit of the payload at a time, and a signalling one among them.
  for (int bit = 0; bit < 23; ++bit) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const auto nan = std::bit_cast<float>(sign | 0x7f800000u | 1u << bit);
      const TypeParam half(nan);
      EXPECT_GT(half.bits & 0x7fffu, this->kInfinity) << bit;
      EXPECT_EQ(half.bits >> 15, sign >> 31);
      EXPECT_FALSE(half == half);
    }
  }
}

TYPED_TEST(HalfTest, ZerosAreEqualWhateverTheirSign) {
  EXPECT_TRUE(TypeParam(0.0f) == TypeParam(-0.0f));
  EXPECT_EQ(TypeParam(-0.0f).bits, 0x8000);
}

}  // namespace
}  // namespace chorale
