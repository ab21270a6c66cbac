#include "chorale/base/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <set>

#include "chorale/base/env_number.h"
#include "chorale/base/error.h"
#include "chorale/testing/environment_test_util.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::config {
namespace {

// Tests run in processes of their own or one after the other, so the environment is theirs to change; it is put back.
class ConfigTest : public testing::Test {
 protected:
  void set(const char* name, const char* value) { variables_.emplace_back(name, value); }
  void SetUp() override {
    for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "SLURM_STEP_ID", "RANK"})
      set(name, nullptr);
  }
  void TearDown() override {
    while (!variables_.empty()) variables_.pop_back();  // a variable that was set twice, too, is as it was before
  }

 private:
  std::deque<EnvironmentVariable> variables_;
};

TEST_F(ConfigTest, AnEmptyVariableCountsAsUnset) {
  set("CHORALE_CONFIG_TEST", "x y");
  EXPECT_EQ(env("CHORALE_CONFIG_TEST"), "x y");
  set("CHORALE_CONFIG_TEST", "");
  EXPECT_EQ(env("CHORALE_CONFIG_TEST"), std::nullopt);
  set("CHORALE_CONFIG_TEST", nullptr);
  EXPECT_EQ(env("CHORALE_CONFIG_TEST"), std::nullopt);
}

TEST_F(ConfigTest, TheEnvironmentOfAChildHasTheChangesAndTheRest) {
  set("CHORALE_CONFIG_TEST", "kept");
  set("CHORALE_CONFIG_TEST_2", "old");
  set("CHORALE_CONFIG_TEST_3", "taken away");
  const auto lines = environment_with({{"CHORALE_CONFIG_TEST_2", "new"}, {"CHORALE_CONFIG_TEST_3", ""}, {"A", "b=c"}});
  std::set<std::string> ours;
  for (const std::string& line : lines) {
    if (line.starts_with("CHORALE_CONFIG_TEST") || line.starts_with("A=")) {
      EXPECT_TRUE(ours.insert(line).second);
    }
  }
  EXPECT_EQ(ours, (std::set<std::string>{"A=b=c", "CHORALE_CONFIG_TEST=kept", "CHORALE_CONFIG_TEST_2=new"}));
}

TEST_F(ConfigTest, EveryLaunchersSizeAboveOneMeansSeveralRanks) {
  EXPECT_FALSE(one_of_several_ranks());
  set("SLURM_STEP_ID", "0");
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
    set(name, "2");
    EXPECT_TRUE(one_of_several_ranks()) << name;
    for (const char* alone : {"1", ""}) {
      set(name, alone);
      EXPECT_FALSE(one_of_several_ranks()) << name << "=" << alone;
    }
    // An int would keep 1 of 2^32 + 1.
    for (const char* wrong : {"0", "-2", "many", "2x", " 2", "1000001", "4294967297", "18446744073709551618"}) {
      set(name, wrong);
      EXPECT_EQ(message_of([] { one_of_several_ranks(); }),
                concat("[environment] ", name, " is '", wrong,
                       "'; it takes a whole number from 1 to 1000000. Correct it, or unset it"));
    }
    set(name, nullptr);
  }
}

TEST_F(ConfigTest, ASwitchIsZeroOrOne) {
  EXPECT_TRUE(is_on("CHORALE_CONFIG_TEST", true));
  EXPECT_FALSE(is_on("CHORALE_CONFIG_TEST", false));
  for (const bool otherwise : {false, true}) {
    set("CHORALE_CONFIG_TEST", "1");
    EXPECT_TRUE(is_on("CHORALE_CONFIG_TEST", otherwise));
    set("CHORALE_CONFIG_TEST", "0");
    EXPECT_FALSE(is_on("CHORALE_CONFIG_TEST", otherwise));
    for (const char* wrong : {"2", "-1", "yes", "on", "01", "1 "}) {
      set("CHORALE_CONFIG_TEST", wrong);
      EXPECT_EQ(message_of([&] { is_on("CHORALE_CONFIG_TEST", otherwise); }),
                concat("[environment] CHORALE_CONFIG_TEST is '", wrong, "'; it takes 0 or 1. Correct it, or unset it"));
    }
  }
}

TEST_F(ConfigTest, ABatchScriptOfSlurmIsNoRank) {
  set("SLURM_PROCID", "0");
  set("SLURM_NTASKS", "8");
  EXPECT_FALSE(one_of_several_ranks());
  set("SLURM_STEP_ID", "0");  // srun has started it
  EXPECT_TRUE(one_of_several_ranks());
}

TEST_F(ConfigTest, TheRankIsThatOfAnyLauncher) {
  EXPECT_EQ(launched_rank(), 0);
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    set(name, "3");
    EXPECT_EQ(launched_rank(), 3) << name;
    set(name, nullptr);
  }
  for (const char* wrong : {"-1", "1000000", "first"}) {
    set("RANK", wrong);
    EXPECT_THAT(message_of([] { launched_rank(); }), testing::HasSubstr("a whole number from 0 to 999999"));
  }
  set("RANK", nullptr);
  set("SLURM_PROCID", "5");
  EXPECT_EQ(launched_rank(), 0);
  set("SLURM_STEP_ID", "0");
  EXPECT_EQ(launched_rank(), 5);
}

}  // namespace
}  // namespace chorale::config
