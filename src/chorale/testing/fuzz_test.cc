#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "chorale/base/error.h"
#include "chorale/testing/fuzz_test_util.h"

namespace chorale::fuzz {
namespace {

std::multiset<std::string> seen;

TEST(Fuzz, ReportsTheInputOfAnUnexpectedException) {
  const Target target{.run =
                          [](std::string_view input) {
                            CHORALE_CHECK(input.size() == 4, "an expected answer");
                            if (input != "seed") throw std::out_of_range("crash");
                          },
                      .seeds = [] { return std::vector<std::string>{"seed"}; }};
  EXPECT_THAT(replay(target), testing::HasSubstr("a mutation of 4 bytes, \""));
}

TEST(Fuzz, WantsSeedsThatAreAccepted) {
  const Target target{.run = [](std::string_view) { CHORALE_CHECK(false, "no"); },
                      .seeds = [] { return std::vector<std::string>{"s\"\x01"}; }};
  EXPECT_EQ(replay(target), "a seed of 3 bytes, \"s\\x22\"\"\\x01\"\"\": no");
}

TEST(Fuzz, TriesEveryPrefixAndTheSameManyMutationsEachTime) {
  const Target target{.run = [](std::string_view input) { seen.emplace(input); },
                      .seeds =
                          [] {
                            return std::vector<std::string>{"0123456789", "abcdef"};
                          }};
  EXPECT_EQ(replay(target, 500), "");
  const std::multiset<std::string> first = std::exchange(seen, {});
  EXPECT_EQ(first.size(), 2u + 16u + 500u);
  EXPECT_TRUE(first.contains("0123"));
  EXPECT_GT(std::set<std::string>(first.begin(), first.end()).size(), 400u);
  EXPECT_EQ(replay(target, 500), "");
  EXPECT_EQ(seen, first);
}

}  // namespace
}  // namespace chorale::fuzz
