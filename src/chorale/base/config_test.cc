#include "chorale/base/config.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>

namespace chorale::config {
namespace {

// Tests run in processes of their own or one after the other, so the environment is theirs to change; it is put back.
class ConfigTest : public testing::Test {
 protected:
  void set(const char* name, const char* value) {
    if (!before_.contains(name)) before_[name] = env(name);
    if (value) {
      setenv(name, value, 1);
    } else {
      unsetenv(name);
    }
  }
  void SetUp() override {
    for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) set(name, nullptr);
  }
  void TearDown() override {
    for (const auto& [name, value] : before_) {
      if (value) {
        setenv(name.c_str(), value->c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
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
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
    set(name, "2");
    EXPECT_TRUE(one_of_several_ranks()) << name;
    for (const char* alone : {"1", "0", "", "many"}) {
      set(name, alone);
      EXPECT_FALSE(one_of_several_ranks()) << name << "=" << alone;
    }
    set(name, nullptr);
  }
}

}  // namespace
}  // namespace chorale::config
