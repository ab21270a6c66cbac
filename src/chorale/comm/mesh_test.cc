#include "chorale/comm/mesh.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"

namespace chorale::comm {
namespace {

TEST(Mesh, HasAGroupAlongEachDimension) {
  run_ranks(6, [](Group& group) {
    const Mesh mesh(group, {2, 3}, {"replica", "shard"});
    const int r = group.rank();
    EXPECT_EQ(mesh.coordinate(0), r / 3);
    EXPECT_EQ(mesh.coordinate(1), r % 3);
    EXPECT_EQ(mesh.group("replica").members(), (std::vector<int>{r % 3, r % 3 + 3}));
    EXPECT_EQ(mesh.group(1).members(), (std::vector<int>{r / 3 * 3, r / 3 * 3 + 1, r / 3 * 3 + 2}));
    int32_t sum = r;
    mesh.group("shard").all_reduce(std::span(&sum, 1)).wait();
    EXPECT_EQ(sum, r < 3 ? 3 : 12);
    EXPECT_EQ(concat(mesh), "mesh of 2 x 3 ranks (replica, shard)");
    EXPECT_THROW(mesh.group("host"), InvalidArgument);
    EXPECT_THROW(Mesh(group, {4}), InvalidArgument);
  });
}

}  // namespace
}  // namespace chorale::comm
