#include "chorale/comm/net/net_layout.h"

#include <gtest/gtest.h>

namespace chorale::comm {
namespace {

NetLayout layout_of(const std::vector<uint64_t>& hosts, int own = 0) { return {hosts, own}; }

TEST(NetLayout, HostsAreInTheOrderOfTheirFirstMemberAndRailsAreTheSmallestHost) {
  const NetLayout layout = layout_of({7, 3, 7, 7, 3}, 3);
  EXPECT_EQ(layout.hosts, (std::vector<std::vector<int>>{{0, 2, 3}, {1, 4}}));
  EXPECT_EQ(layout.host, 0);
  EXPECT_EQ(layout.index, 2);
  EXPECT_EQ(layout.rails, 2);
  EXPECT_FALSE(layout.is_leader());
  EXPECT_EQ(layout.leader_of(1), 1);
  EXPECT_TRUE(layout.is_here(2));
  EXPECT_FALSE(layout.is_here(4));
}

TEST(NetLayout, SumsByHostFollowTheTreeWhereHostsAreBranchesOfIt) {
  EXPECT_TRUE(layout_of({1, 1, 2, 2}).follows_tree);
  EXPECT_TRUE(layout_of({1, 2}).follows_tree);
  EXPECT_TRUE(layout_of({1, 2, 3}).follows_tree);           // (0 1) 2 over ranks and over hosts
  EXPECT_TRUE(layout_of({1, 1, 2}).follows_tree);           // (0 1) 2
  EXPECT_TRUE(layout_of({1, 1, 2, 2, 3, 3}).follows_tree);  // ((0 1) (2 3)) (4 5)
  EXPECT_TRUE(layout_of({1, 1, 1, 1, 2, 2}).follows_tree);
  EXPECT_FALSE(layout_of({1, 2, 2}).follows_tree);     // the tree takes 0 and 1 together
  EXPECT_FALSE(layout_of({1, 1, 2, 3}).follows_tree);  // (0 1) (2 3), but three hosts are summed as (a b) c
  EXPECT_FALSE(layout_of({1, 1, 1, 2, 2}).follows_tree);
  EXPECT_FALSE(layout_of({1, 2, 1, 2}).follows_tree);
}

}  // namespace
}  // namespace chorale::comm
