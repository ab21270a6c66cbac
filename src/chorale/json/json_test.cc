#include "chorale/json/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::json {
namespace {

std::string error_of(std::string_view text, const Limits& limits = {}) {
  return message_of([&] { parse("the file", text, limits); });
}

TEST(Json, KeepsTheOrderOfKeysAndTheKindsOfNumbers) {
  const Value value = parse("t", R"({"b": [1, -2, 1.5, 18446744073709551615, 1e2], "a": {"x": null, "y": true}})");
  const Object& object = value.object("t");
  ASSERT_EQ(object.size(), 2u);
  EXPECT_EQ(object[0].first, "b");
  EXPECT_EQ(object[1].first, "a");
  const Array& numbers = object[0].second.array("b");
  EXPECT_EQ(numbers[0].size("n"), 1);
  EXPECT_EQ(*numbers[1].as<int64_t>(), -2);
  EXPECT_EQ(*numbers[2].as<double>(), 1.5);
  EXPECT_EQ(*numbers[3].as<uint64_t>(), ~uint64_t{0});
  EXPECT_EQ(*numbers[4].as<double>(), 100);
  EXPECT_NE(find(find(object, "a")->object("a"), "x")->as<std::nullptr_t>(), nullptr);
  EXPECT_TRUE(*find(find(object, "a")->object("a"), "y")->as<bool>());
  EXPECT_EQ(find(object, "c"), nullptr);
}

TEST(Json, ReadsEscapesAndUtf8) { EXPECT_EQ(parse("t", R"("\u00e9\n\ud83d\ude00é")").string("t"), "é\n😀é"); }

TEST(Json, NamesWhatIsWrongAndWhere) {
  EXPECT_THAT(error_of("{\"a\": 1,}"), testing::HasSubstr("the file is not JSON: unexpected"));
  EXPECT_THAT(error_of("{\"a\": 1,}"), testing::HasSubstr("at byte 9"));
  EXPECT_THAT(error_of(""), testing::HasSubstr("unexpected"));
  EXPECT_THAT(error_of("[1] 2"), testing::HasSubstr("unexpected"));
  EXPECT_THAT(error_of("\"\xff\""), testing::HasSubstr("unexpected"));
  EXPECT_THAT(error_of("\"\\ud800\""), testing::HasSubstr("unexpected"));
  EXPECT_THAT(error_of("[1, 2]", {.bytes = 5}), testing::HasSubstr("has 6 bytes; at most 5 are read"));
}

TEST(Json, RefusesDuplicateKeysAtAnyLevel) {
  EXPECT_THAT(error_of(R"({"a": {"k": 1, "l": 2, "k": 3}})"), testing::HasSubstr("has the key \"k\" twice"));
  EXPECT_THAT(error_of(R"({"a": 1, "b": 2, "a": 3})"), testing::HasSubstr("has the key \"a\" twice"));
  EXPECT_EQ(error_of(R"({"a": {"a": 1}, "b": {"a": 1}})"), "");
}

TEST(Json, BoundsNesting) {
  EXPECT_EQ(error_of("[[[]]]", {.depth = 3}), "");
  EXPECT_THAT(error_of("[[[[]]]]", {.depth = 3}), testing::HasSubstr("nested more than 3 levels deep"));
  EXPECT_THAT(error_of(std::string(1'000'000, '[')), testing::HasSubstr("nested more than 16 levels deep"));
}

TEST(Json, SaysWhichKindWasExpected) {
  const Value value = parse("t", R"([{}, -1, 1.0])");
  EXPECT_THROW(value.object("x"), InvalidArgument);
  EXPECT_THROW(value.array("x")[0].string("x"), InvalidArgument);
  EXPECT_THROW(value.array("x")[1].size("x"), InvalidArgument);
  EXPECT_THROW(value.array("x")[2].size("x"), InvalidArgument);
}

TEST(Json, QuotesText) {
  EXPECT_EQ(quote("a\"b\\c\né"), "\"a\\\"b\\\\c\\né\"");
  EXPECT_THROW(quote("\xff"), InvalidArgument);
}

}  // namespace
}  // namespace chorale::json
