#include "chorale/launch/cores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <map>
#include <set>

#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

using testing::ElementsAre;

// A machine that is only described; hwloc numbers its processors from left to right.
class CoresTest : public testing::Test {
 protected:
  static std::vector<RankCores> share(const char* machine, int ranks) {
    setenv("HWLOC_SYNTHETIC", machine, 1);
    auto shares = share_cores(ranks);
    unsetenv("HWLOC_SYNTHETIC");
    return shares;
  }
};

TEST_F(CoresTest, RanksGetWholeCoresBeforeHyperThreads) {
  const char* machine = "pack:1 core:4 pu:2";
  const auto two = share(machine, 2);
  EXPECT_THAT(two[0].cpus, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(two[1].cpus, ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(two[0].threads, 2);  // one for each core, not for each hyper-thread
  const auto four = share(machine, 4);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(four[static_cast<size_t>(rank)].cpus, ElementsAre(2 * rank, 2 * rank + 1));
    EXPECT_EQ(four[static_cast<size_t>(rank)].threads, 1);
  }
}

TEST_F(CoresTest, MoreRanksThanCoresShareThemByHyperThread) {
  const auto eight = share("pack:1 core:4 pu:2", 8);
  for (int rank = 0; rank < 8; ++rank) EXPECT_THAT(eight[static_cast<size_t>(rank)].cpus, ElementsAre(rank));
  const auto six = share("pack:1 core:4 pu:2", 6);
  std::set<int> used;
  for (const auto& rank : six) {
    EXPECT_EQ(rank.threads, 1);
    for (const int cpu : rank.cpus) EXPECT_TRUE(used.insert(cpu).second) << "shared by two ranks";
  }
}

TEST_F(CoresTest, MoreRanksThanHyperThreadsAreNotBound) {
  for (const auto& rank : share("pack:1 core:2 pu:2", 5)) {
    EXPECT_TRUE(rank.cpus.empty());
    EXPECT_EQ(rank.threads, 1);
  }
}

TEST_F(CoresTest, NoRankStraddlesTwoMemories) {
  // Three ranks on two NUMA nodes of four cores.
  for (const int ranks : {2, 3, 4, 5, 8}) {
    for (const auto& rank : share("numa:2 core:4 pu:1", ranks)) {
      ASSERT_FALSE(rank.cpus.empty());
      EXPECT_EQ(rank.cpus.front() / 4, rank.cpus.back() / 4) << ranks << " ranks";
    }
  }
}

TEST_F(CoresTest, NoProcessorIsLeftOutOrSharedByTwo) {
  for (const auto& [machine, processors] : std::map<const char*, size_t>{
           {"pack:1 core:8 pu:1", 8}, {"pack:2 numa:2 l3:2 core:3 pu:2", 48}, {"core:7 pu:1", 7}}) {
    for (const int ranks : {1, 2, 3, 5, 7}) {
      std::multiset<int> used;
      for (const auto& rank : share(machine, ranks)) used.insert(rank.cpus.begin(), rank.cpus.end());
      EXPECT_EQ(used.size(), processors) << machine << ", " << ranks;
      EXPECT_EQ(std::set<int>(used.begin(), used.end()).size(), processors) << machine << ", " << ranks;
    }
  }
}

TEST_F(CoresTest, OnThisMachineOnlyCoresThatWeMayUseAreGiven) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_THAT(share_cores(1)[0].cpus, ElementsAre(first));
  EXPECT_EQ(share_cores(1)[0].threads, 1);
  EXPECT_TRUE(share_cores(2)[0].cpus.empty());
  sched_setaffinity(0, sizeof before, &before);
}

TEST_F(CoresTest, AtLeastOneRankIsNeeded) { EXPECT_THROW(share_cores(0), InvalidArgument); }

}  // namespace
}  // namespace chorale::launch
