#include "chorale/launch/lines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace chorale::launch {
namespace {

using testing::ElementsAre;

class LinesTest : public testing::Test {
 protected:
  std::vector<std::string> lines_;
  LineCutter cutter_{[this](std::string_view line) { lines_.emplace_back(line); }};
};

TEST_F(LinesTest, ALineIsGivenWhenItIsWholeHoweverItArrives) {
  const std::string text = "one\n\ntwo three\r\nfour";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    lines_.clear();
    for (size_t at = 0; at < text.size(); at += piece) cutter_.feed(text.substr(at, piece));
    EXPECT_THAT(lines_, ElementsAre("one", "", "two three\r")) << piece;
    cutter_.finish();
    EXPECT_THAT(lines_, ElementsAre("one", "", "two three\r", "four")) << piece;
  }
}

TEST_F(LinesTest, ALineWithoutEndIsCutAtTheBound) {
  const std::string most(LineCutter::kMaxLineBytes, 'x');
  cutter_.feed(most + most + "y\n" + most + "\nz");
  EXPECT_THAT(lines_, ElementsAre(most, most, "y", most));
  cutter_.finish();
  EXPECT_EQ(lines_.back(), "z");
}

TEST(LastLines, KeepsTheLastOnesThatSaySomething) {
  LastLines last;
  for (int i = 0; i < 20; ++i) {
    last.add("line " + std::to_string(i));
    last.add("  ");
  }
  last.add(std::string(10000, 'x'));
  EXPECT_EQ(last.lines().size(), 8U);
  EXPECT_EQ(last.lines().front(), "line 13");
  EXPECT_EQ(last.lines().back().size(), 500U);
}

}  // namespace
}  // namespace chorale::launch
