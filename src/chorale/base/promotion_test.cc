// Promotion, against what PyTorch answers.
#include <gtest/gtest.h>

#include <sstream>

#include "chorale/base/dtype.h"
#include "chorale/base/scalar.h"

namespace chorale {
namespace {

#include "chorale/base/testdata/promotion.inc"

TEST(Promotion, OfTwoTensorsIsPyTorchs) {
  for (const DType a : kAllDTypes) {
    std::istringstream row(kTorchPromotion[static_cast<size_t>(a)]);
    for (const DType b : kAllDTypes) {
      std::string expected;
      row >> expected;
      EXPECT_EQ(name_of(promote(a, b)), expected) << a << " with " << b;
    }
  }
}

TEST(Promotion, OfATensorAndANumberIsPyTorchs) {
  const Scalar numbers[] = {true, 1, 1.5, complex128(0, 1)};
  for (const DType a : kAllDTypes) {
    std::istringstream row(kTorchScalarPromotion[static_cast<size_t>(a)]);
    for (const Scalar& number : numbers) {
      std::string expected;
      row >> expected;
      EXPECT_EQ(name_of(promote(a, number.kind())), expected) << a << " with " << number;
    }
  }
}

}  // namespace
}  // namespace chorale
