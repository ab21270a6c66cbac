#include "chorale/base/scalar.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>

namespace chorale {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::string text(const Scalar& scalar) {
  std::ostringstream out;
  out << scalar;
  return out.str();
}

TEST(Scalar, RemembersItsCategory) {
  EXPECT_EQ(Scalar(true).kind(), Scalar::Kind::kBool);
  EXPECT_EQ(Scalar(int8_t{1}).kind(), Scalar::Kind::kInt);
  EXPECT_EQ(Scalar(1u).kind(), Scalar::Kind::kInt);
  EXPECT_EQ(Scalar(1.0f).kind(), Scalar::Kind::kFloat);
  EXPECT_EQ(Scalar(complex64(1, 0)).kind(), Scalar::Kind::kComplex);
  EXPECT_EQ(Scalar(), Scalar(0));
}

TEST(Scalar, KeepsEveryI64Exactly) {
  for (const int64_t value : {kMin, kMin + 1, int64_t{-1}, int64_t{0}, (int64_t{1} << 53) + 1, kMax}) {
    EXPECT_EQ(Scalar(value).integer(), value);
    EXPECT_EQ(Scalar(value).to<int64_t>(), value);
  }
}

TEST(Scalar, AnUnsignedNumberBeyondI64IsAnErrorThatShowsIt) {
  EXPECT_EQ(Scalar(static_cast<uint64_t>(kMax)).integer(), kMax);
  try {
    const Scalar scalar(std::numeric_limits<uint64_t>::max());
    FAIL() << "no error for " << scalar;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::strstr(error.what(), "18446744073709551615"), nullptr) << error.what();
  }
}

TEST(Scalar, AnIntegerIsRoundedToFloatOnce) {
  // Just above the middle of two floats, so close that rounding to double first lands on the middle, and then on the
  // even neighbour below.
  const int64_t value = (int64_t{1} << 60) + (int64_t{1} << 36) + 1;
  EXPECT_EQ(Scalar(value).to<float>(), static_cast<float>(value));
  EXPECT_NE(static_cast<float>(static_cast<double>(value)), static_cast<float>(value));
  EXPECT_EQ(Scalar(value).to<complex64>(), complex64(static_cast<float>(value), 0));
}

TEST(Scalar, FloatingNumbersTruncateAndSaturateToIntegers) {
  EXPECT_EQ(Scalar(2.9).integer(), 2);
  EXPECT_EQ(Scalar(-2.9).integer(), -2);
  EXPECT_EQ(Scalar(1e300).integer(), kMax);
  EXPECT_EQ(Scalar(kInf).integer(), kMax);
  EXPECT_EQ(Scalar(-kInf).integer(), kMin);
  EXPECT_EQ(Scalar(kNaN).integer(), 0);
  EXPECT_EQ(Scalar(0x1p63).integer(), kMax);
  EXPECT_EQ(Scalar(-0x1p63).integer(), kMin);
  EXPECT_EQ(Scalar(std::nextafter(0x1p63, 0)).integer(), (int64_t{1} << 62) + ((int64_t{1} << 62) - 1024));
}

TEST(Scalar, ConvertsToEveryDType) {
  for (const DType dtype : kAllDTypes) {
    visit_dtype(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_same_v<T, bool>) {
        EXPECT_TRUE(Scalar(0.5).to<bool>());
        EXPECT_TRUE(Scalar(kNaN).to<bool>());
        EXPECT_TRUE(Scalar(complex128(0, 1)).to<bool>());
        EXPECT_FALSE(Scalar(-0.0).to<bool>());
      } else {
        EXPECT_EQ(Scalar(3).to<T>(), Scalar(3.0).to<T>()) << dtype;
        EXPECT_EQ(Scalar(complex128(3, 0)).to<T>(), Scalar(3).to<T>()) << dtype;
        EXPECT_NE(Scalar(3).to<T>(), Scalar(4).to<T>()) << dtype;
      }
    });
  }
  EXPECT_EQ(Scalar(300).to<uint8_t>(), 44);
  EXPECT_EQ(Scalar(200).to<int8_t>(), -56);
  EXPECT_EQ(Scalar(complex128(1, 2)).to<double>(), 1.0);
  EXPECT_EQ(Scalar(complex128(1, 2)).to<complex64>(), complex64(1, 2));
  EXPECT_EQ(static_cast<float>(Scalar(1.0009765625).to<float16>()), 1.0009765625f);
}

TEST(Scalar, EqualityIsOfCategoryAndBits) {
  EXPECT_EQ(Scalar(kNaN), Scalar(kNaN));
  EXPECT_NE(Scalar(0.0), Scalar(-0.0));
  EXPECT_NE(Scalar(1), Scalar(1.0));
  EXPECT_NE(Scalar(1), Scalar(true));
  // As doubles these are one number.
  EXPECT_NE(Scalar(kMax), Scalar(kMax - 1));
  EXPECT_NE(Scalar(complex128(1, 2)), Scalar(complex128(1, 3)));
}

TEST(Scalar, PrintsShortestTextThatShowsItsCategory) {
  EXPECT_EQ(text(true), "true");
  EXPECT_EQ(text(-7), "-7");
  EXPECT_EQ(text(kMax), "9223372036854775807");
  EXPECT_EQ(text(1.0), "1.0");
  EXPECT_EQ(text(0.1), "0.1");
  EXPECT_EQ(text(1e-5), "1e-05");
  EXPECT_EQ(text(1e22), "1e+22");
  EXPECT_EQ(text(-0.0), "-0.0");
  EXPECT_EQ(text(kNaN), "nan");
  EXPECT_EQ(text(-kInf), "-inf");
  EXPECT_EQ(text(complex128(1, -2.5)), "1.0-2.5j");
  EXPECT_EQ(text(complex128(-1, kInf)), "-1.0+infj");
}

TEST(Scalar, TextOfADoubleReadsBackExactly) {
  for (const double value : {1.0 / 3, 0x1p-1074, 1.7976931348623157e308, 123456789.125, -2e-7}) {
    EXPECT_EQ(std::strtod(to_text(value).c_str(), nullptr), value);
  }
}

}  // namespace
}  // namespace chorale
