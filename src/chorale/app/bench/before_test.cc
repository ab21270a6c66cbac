#include "chorale/app/bench/before.h"

#include <gtest/gtest.h>

namespace chorale::app {
namespace {

nlohmann::json report(const std::vector<std::pair<std::string, double>>& figures) {
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [name, ours] : figures) rows.push_back({{"case", name}, {"unit", "ns"}, {"ours", ours}});
  return {{"rows", rows}};
}

TEST(Before, IsFoundAmongThePeers) {
  EXPECT_EQ(before_program("torch,memcpy"), "");
  EXPECT_EQ(before_program("before=/old/chorale"), "/old/chorale");
  EXPECT_EQ(before_program("torch,before=build/chorale,memcpy"), "build/chorale");
}

TEST(Before, ComparesMediansOfTheCasesThatBothHave) {
  const auto rows = compared({report({{"add", 10}, {"new", 1}}), report({{"add", 30}}), report({{"add", 12}})},
                             {report({{"old", 5}, {"add", 8}}), report({{"add", 9}}), report({{"add", 100}})});
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].name, "add");
  EXPECT_EQ(rows[0].unit, "ns");
  EXPECT_EQ(rows[0].ours, 12);
  EXPECT_EQ(rows[0].peers.at("before"), 9);
}

}  // namespace
}  // namespace chorale::app
