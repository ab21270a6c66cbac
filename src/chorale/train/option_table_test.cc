#include "chorale/train/option_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/json/json_write.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::train {
namespace {

using testing::HasSubstr;

struct Options {
  int64_t batch = 128;
  double lr = 0.1;
  std::string optimizer = "adamw";
  std::vector<std::string> text;
  bool quiet = false;
  OptionTable table;

  Options() {
    table.add({.name = "batch", .help = "", .target = &batch, .least = 1, .most = 1e9});
    table.add({.name = "lr", .help = "", .target = &lr, .kind = OptionKind::kFree, .most = 10});
    table.add({.name = "optimizer", .help = "", .target = &optimizer, .choices = {"adamw", "sgd"}});
    table.add({.name = "text", .help = "", .target = &text});
    table.add({.name = "quiet", .help = "", .target = &quiet, .kind = OptionKind::kHere});
  }
  void read(const std::string& json) const { table.read("o.json", json::parse("o.json", json).object("o.json")); }
};

TEST(OptionTable, EveryKindIsReadFromJsonAndWrittenAgain) {
  Options o;
  o.read(R"({"batch": 7, "lr": 1, "optimizer": "sgd", "text": ["a", "b"], "quiet": true})");
  EXPECT_EQ(o.batch, 7);
  EXPECT_EQ(o.lr, 1);
  EXPECT_EQ(o.text, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(o.quiet);
  // What belongs to this start only is not written down.
  EXPECT_EQ(json::write(o.table.values()), R"({"batch": 7, "lr": 1, "optimizer": "sgd", "text": ["a", "b"]})");
}
TEST(OptionTable, WordsOfACommandLineAreParsed) {
  Options o;
  o.table.set("batch", {"8", "16"});
  o.table.set("lr", {"2.5e-3"});
  o.table.set("text", {"a", "b"});
  EXPECT_EQ(o.batch, 16);
  EXPECT_EQ(o.lr, 2.5e-3);
  EXPECT_EQ(o.text, (std::vector<std::string>{"a", "b"}));
}
TEST(OptionTable, AnUnknownKeyGetsTheNearestName) {
  const Options o;
  EXPECT_EQ(message_of([&] { o.read(R"({"bacth": 1})"); }),
            "o.json: there is no option 'bacth'; did you mean 'batch'?");
}
TEST(OptionTable, WrongValuesSayWhatWasExpected) {
  const Options o;
  EXPECT_EQ(message_of([&] { o.read(R"({"batch": 1.5})"); }),
            "o.json: batch should be a whole number, but is a real number");
  EXPECT_EQ(message_of([&] { o.table.set("batch", {"12x"}); }),
            "--batch expects a whole number from 1 to 1000000000, not '12x'");
  for (const char* value : {"0", "-9223372036854775808", "9223372036854775807"})
    EXPECT_EQ(message_of([&] { o.table.set("batch", {value}); }),
              concat("--batch expects a whole number from 1 to 1000000000, not ", value));
  for (const char* value : {"99999999999999999999", "", " 1", "1 ", "nan"})
    EXPECT_EQ(message_of([&] { o.table.set("batch", {value}); }),
              concat("--batch expects a whole number from 1 to 1000000000, not '", value, "'"));
  for (const char* value : {"inf", "nan", "-1"})
    EXPECT_EQ(message_of([&] { o.table.set("lr", {value}); }),
              concat("--lr expects a number from 0 to 10, not ", value));
  EXPECT_EQ(message_of([&] { o.table.set("lr", {"1e999"}); }), "--lr expects a number from 0 to 10, not '1e999'");
  EXPECT_EQ(message_of([&] {
              o.table.set("text", {"a", "b\xff"});
            }),
            "--text is written down and must be UTF-8, which 'b\\xff' is not");
  EXPECT_EQ(message_of([&] { o.table.set("lr", {"11"}); }), "--lr expects a number from 0 to 10, not 11");
  EXPECT_EQ(message_of([&] { o.table.set("optimizer", {"adam"}); }),
            "--optimizer expects one of adamw, sgd, not 'adam'; did you mean 'adamw'?");
  EXPECT_EQ(message_of([&] { o.read(R"({"text": "a"})"); }),
            "o.json: text should be a list of strings, but is a string");
}
TEST(OptionTable, AProductThatIsTooLargeIsAnError) {
  EXPECT_EQ(product("steps", {1'000'000, 1'000'000'000}), 1'000'000'000'000'000);
  EXPECT_THAT(message_of([] {
                product("steps", {int64_t{1} << 32, int64_t{1} << 31});
              }),
              HasSubstr("steps: 4294967296 x 2147483648 is more than there are numbers for"));
}
TEST(OptionTable, ARunKeepsWhatIsPartOfIt) {
  const Options began;
  const json::Object before = began.table.values();
  Options now;
  now.lr = 0.2;
  now.quiet = true;
  EXPECT_NO_THROW(check_unchanged(now.table, before, "runs/a"));
  now.batch = 64;
  EXPECT_THAT(message_of([&] { check_unchanged(now.table, before, "runs/a"); }), HasSubstr("--batch was 128, not 64"));
}

}  // namespace
}  // namespace chorale::train
