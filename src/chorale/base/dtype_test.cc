#include "chorale/base/dtype.h"

#include <gtest/gtest.h>

namespace chorale {
namespace {

TEST(DType, NameRoundTripsForEveryDType) {
  for (const DType dtype : kAllDTypes) EXPECT_EQ(dtype_from_name(name_of(dtype)), dtype);
}

TEST(DType, UnknownNameIsAnErrorThatQuotesIt) {
  try {
    dtype_from_name("f33");
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string_view(error.what()).find("'f33'"), std::string_view::npos) << error.what();
  }
}

TEST(DType, SizeIsThatOfTheCppType) {
  for (const DType dtype : kAllDTypes) {
    visit_dtype(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      EXPECT_EQ(size_of(dtype), sizeof(T)) << dtype;
      EXPECT_EQ(dtype_of<T>, dtype);
    });
  }
}

}  // namespace
}  // namespace chorale
