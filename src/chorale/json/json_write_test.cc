#include "chorale/json/json_write.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chorale/base/error.h"

namespace chorale::json {
namespace {

TEST(JsonWrite, ALineReadsBackAsTheSameText) {
  const std::string text =
      R"({"a": null, "b": [true, false, []], "c": {"d": -7, "e": 18446744073709551615, "f": {}}, "g": "ü\"\n", "h": 0.1})";
  EXPECT_EQ(write(parse("a test", text)), text);
}
TEST(JsonWrite, PagesBreakTheOutermostTwoLevels) {
  EXPECT_EQ(write(parse("a test", R"({"a": 1, "b": [1, {"x": 2}], "c": {}})"), Layout::kPages),
            "{\n  \"a\": 1,\n  \"b\": [\n    1,\n    {\"x\": 2}\n  ],\n  \"c\": {}\n}");
}
TEST(JsonWrite, NumbersThatJsonHasNoWordForAreNull) {
  EXPECT_EQ(write(Value(Array{Value(NAN), Value(INFINITY), Value(1e300), Value(0.25)})), "[null, null, 1e+300, 0.25]");
}
TEST(JsonWrite, TextThatIsNotUtf8IsAnError) { EXPECT_THROW(write(Value(std::string("\xff"))), InvalidArgument); }

}  // namespace
}  // namespace chorale::json
