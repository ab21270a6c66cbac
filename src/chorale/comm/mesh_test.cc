#include "chorale/comm/mesh.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/mesh_drawing.h"
#include "chorale/comm/run_ranks_test_util.h"

namespace chorale::comm {
namespace {

using Ranks = std::vector<int>;

// spec: test_device_mesh_2d, DeviceMeshTestNDim.test_device_mesh_nd, test_get_local_rank{,_3d}
TEST(Mesh, HasAGroupAlongEachDimension) {
  run_ranks(6, [](Group& group) {
    const Mesh mesh(group, {2, 3}, {"replica", "shard"});
    const int r = group.rank();
    EXPECT_EQ(mesh.coordinate(0), r / 3);
    EXPECT_EQ(mesh.coordinate("shard"), r % 3);
    EXPECT_EQ(mesh.group("replica").members(), (Ranks{r % 3, r % 3 + 3}));
    EXPECT_EQ(mesh.group(1).members(), (Ranks{r / 3 * 3, r / 3 * 3 + 1, r / 3 * 3 + 2}));
    int32_t sum = r;
    mesh.group("shard").all_reduce(std::span(&sum, 1)).wait();
    EXPECT_EQ(sum, r < 3 ? 3 : 12);
    EXPECT_EQ(concat(mesh), "mesh of 2 x 3 ranks (replica, shard)");
  });
  run_ranks(4, [](Group& group) {
    // [[0, 1], [2, 3]]: along dimension 0 {0, 2} and {1, 3}, along dimension 1 {0, 1} and {2, 3}.
    const Mesh mesh(group, {2, 2});
    const int r = group.rank();
    EXPECT_EQ(mesh.group(0).members(), (Ranks{r % 2, r % 2 + 2}));
    EXPECT_EQ(mesh.group(1).members(), (Ranks{r / 2 * 2, r / 2 * 2 + 1}));
    EXPECT_EQ(mesh.group(1).rank(), mesh.coordinate(1));
  });
  run_ranks(8, [](Group& group) {
    const Mesh cube(group, {2, 2, 2}, {"a", "b", "c"});
    const int r = group.rank();
    EXPECT_EQ(cube.coordinates(), (Ranks{r / 4, r / 2 % 2, r % 2}));
    EXPECT_EQ(cube.group("a").members(), (Ranks{r % 4, r % 4 + 4}));
    EXPECT_EQ(cube.group("b").members(), (Ranks{r / 4 * 4 + r % 2, r / 4 * 4 + r % 2 + 2}));
    EXPECT_EQ(cube.group("c").members(), (Ranks{r / 2 * 2, r / 2 * 2 + 1}));
    for (size_t d = 0; d < 3; ++d) EXPECT_EQ(cube.group(d).rank(), cube.coordinate(d));
  });
}

// spec: test_init_device_mesh, test_raises_{duplicate_mesh_dim_names,mesh_shape_mesh_dim_names_mismatch}
// spec: test_raises_{no_mesh_dim_found,invalid_mesh_dim_name}
TEST(Mesh, IsComparedByRanksShapeAndNamesAndRefusesBadOnes) {
  run_ranks(8, [](Group& group) {
    const Mesh mesh(group, {2, 4}, {"dp", "tp"}), same(group, {2, 4}, {"dp", "tp"}), other(group, {2, 4}),
        line(group, {8});
    EXPECT_TRUE(mesh == same);
    EXPECT_EQ(mesh.hash(), same.hash());
    EXPECT_FALSE(mesh == other);
    EXPECT_FALSE(other == line);
    EXPECT_THROW(Mesh(group, {4}), InvalidArgument);
    EXPECT_THROW(Mesh(group, {2, 4}, {"dp", "dp"}), InvalidArgument);
    EXPECT_THROW(Mesh(group, {8}, {"dp", "tp"}), InvalidArgument);
    EXPECT_THROW(Mesh(group, {2}, {}, {3, 1}), InvalidArgument) << "ranks ascend";
    EXPECT_THROW(mesh.group("host"), InvalidArgument);
    EXPECT_THROW(mesh["pp"], InvalidArgument);
    EXPECT_THROW(other["dp"], InvalidArgument) << "it has no names";
    EXPECT_THROW(mesh.group(2), InvalidArgument);
  });
}

TEST(Mesh, KnowsWhichDimensionsLeaveAHost) {
  run_hosts({0, 0, 1, 1}, [](Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    EXPECT_TRUE(mesh.spans_hosts(0));
    EXPECT_FALSE(mesh.spans_hosts(1));
    EXPECT_FALSE(mesh["tp"].spans_hosts(0));
    EXPECT_TRUE(mesh["dp"].spans_hosts(0));
    EXPECT_TRUE(mesh.flatten().spans_hosts(0));
    EXPECT_THROW(mesh.spans_hosts(2), InvalidArgument);
  });
  // Only some lines leave a host; every rank must say the same.
  run_hosts({0, 0, 0, 1}, [](Group& group) {
    const Mesh mesh(group, {2, 2});
    EXPECT_TRUE(mesh.spans_hosts(0));
    EXPECT_TRUE(mesh.spans_hosts(1));
  });
  run_ranks(2, [](Group& group) { EXPECT_FALSE(Mesh(group, {2}).spans_hosts(0)); });
}

// spec: test_raises_invalid_device_type
TEST(Mesh, IsForAKindOfDevice) {
  run_ranks(2, [](Group& group) {
    const Mesh mesh(group, {2}, {"tp"});
    EXPECT_EQ(mesh.device_type(), DeviceType::kCpu);
    EXPECT_EQ(mesh.device(), kCpu);
    const Mesh other = mesh.on("null");
    EXPECT_EQ(other.device(), kNull);
    EXPECT_FALSE(mesh == other);
    EXPECT_NE(mesh.hash(), other.hash());
    EXPECT_TRUE(other.on("cpu") == mesh);
    EXPECT_EQ(&other.group(0), &mesh.group(0)) << "no group is made";
    EXPECT_EQ(other["tp"].device_type(), DeviceType::kNull);
    EXPECT_THROW(mesh.on("cuda:0"), InvalidArgument) << "which one follows from the rank";
    EXPECT_THROW(mesh.on("gpu"), InvalidArgument);
  });
}

// spec: test_get_item_{1d,2d,3d,3d_noncontiguous_slicing}, test_cache_and_reuse_submesh_slice_result
TEST(Mesh, SlicesShareTheGroups) {
  run_ranks(8, [](Group& group) {
    const Mesh line(group, {8}, {"dp"}), grid(group, {2, 4}, {"dp", "tp"}), cube(group, {2, 2, 2}, {"pp", "dp", "tp"});
    const int r = group.rank();
    EXPECT_TRUE(line["dp"] == line);
    const CommCounter counter;
    EXPECT_EQ(grid["dp"].ranks(), (Ranks{r % 4, r % 4 + 4}));
    EXPECT_EQ(grid["tp"].ranks(), r < 4 ? (Ranks{0, 1, 2, 3}) : (Ranks{4, 5, 6, 7}));
    EXPECT_EQ(cube["dp"].ranks(), (Ranks{r / 4 * 4 + r % 2, r / 4 * 4 + r % 2 + 2}));
    const Mesh far = cube.slice({"pp", "tp"});
    EXPECT_EQ(far.shape(), (Ranks{2, 2}));
    EXPECT_EQ(far.ranks(), r / 2 % 2 == 0 ? (Ranks{0, 1, 4, 5}) : (Ranks{2, 3, 6, 7}));
    EXPECT_EQ(far["tp"].ranks(), (Ranks{r / 2 * 2, r / 2 * 2 + 1}));
    EXPECT_EQ(&far.group("tp"), &cube.group("tp")) << "no new group";
    EXPECT_EQ(&cube["tp"].group(0), &cube["tp"].group(0));
    EXPECT_TRUE(far.root() == cube);
    EXPECT_TRUE(far["tp"].root() == cube);
    EXPECT_EQ(counter.count(CallKind::kNewGroup), 0);
    EXPECT_THROW(cube.slice({"tp", "pp"}), InvalidArgument) << "in the order of the mesh";
    EXPECT_THROW(cube.slice({}), InvalidArgument);
  });
}

// spec: test_flatten_mesh_{1d,3d,4d}
TEST(Mesh, FlattensDimensionsOnce) {
  run_ranks(8, [](Group& group) {
    const int r = group.rank();
    const Mesh line(group, {8}, {"dp"});
    EXPECT_TRUE(line.flatten() == line);
    const Mesh cube(group, {2, 2, 2}, {"dp", "cp", "tp"});
    const Mesh flat = cube.slice({"dp", "cp"}).flatten();
    EXPECT_EQ(flat.names(), std::vector<std::string>{"dp_cp"});
    EXPECT_EQ(flat.ranks(), r % 2 == 0 ? (Ranks{0, 2, 4, 6}) : (Ranks{1, 3, 5, 7}));
    EXPECT_EQ(flat.group(0).members(), flat.ranks());
    EXPECT_EQ(flat.coordinate(0), r / 2);
    EXPECT_EQ(&cube.slice({"dp", "cp"}).flatten().group(0), &flat.group(0)) << "once";
    EXPECT_EQ(&cube["dp_cp"].group(0), &flat.group(0)) << "the root knows the name";
    const Mesh far = cube.slice({"dp", "tp"}).flatten("dp_tp");
    EXPECT_EQ(far.ranks(), r / 2 % 2 == 0 ? (Ranks{0, 1, 4, 5}) : (Ranks{2, 3, 6, 7}));
    EXPECT_THROW(cube.slice({"cp", "tp"}).flatten("dp"), InvalidArgument) << "the name of a dimension";
    EXPECT_THROW(cube.slice({"cp", "tp"}).flatten("dp_cp"), InvalidArgument) << "stands for others";
    const Mesh four(group, {2, 2, 2, 1}, {"a", "b", "c", "d"});
    EXPECT_EQ(four.slice({"a", "c", "d"}).flatten().ranks(),
              r / 2 % 2 == 0 ? (Ranks{0, 1, 4, 5}) : (Ranks{2, 3, 6, 7}));
  });
}

TEST(Mesh, RanksOutsideHaveNoPlaceInIt) {
  run_ranks(4, [](Group& group) {
    const Mesh mesh(group, {2}, {"tp"}, {1, 3});
    const bool inside = group.rank() % 2 == 1;
    EXPECT_EQ(mesh.is_member(), inside);
    EXPECT_EQ(mesh.ranks(), (Ranks{1, 3}));
    if (inside) {
      EXPECT_EQ(mesh.coordinate(0), group.rank() / 2);
      EXPECT_EQ(mesh.group(0).members(), (Ranks{1, 3}));
    } else {
      EXPECT_THROW(mesh.coordinate(0), InvalidArgument);
      EXPECT_FALSE(mesh.group(0).is_member());
    }
  });
}

TEST(Mesh, ThatWasMovedFromSaysSo) {
  run_ranks(1, [](Group& group) {
    Mesh mesh(group, {1}, {"data"});
    const Mesh taken = std::move(mesh);
    // NOLINTBEGIN(bugprone-use-after-move)
    EXPECT_THROW(mesh.shape(), InvalidArgument);
    EXPECT_THROW(mesh.group(0), InvalidArgument);
    EXPECT_THROW((void)(mesh == taken), InvalidArgument);
    Future future = group.all_reduce(Tensor::from({1.0f}, {1})).future();
    const Future result = std::move(future);
    EXPECT_THROW(future.wait(), InvalidArgument);
    // NOLINTEND(bugprone-use-after-move)
    EXPECT_EQ(result.wait()[0].item<float>(), 1);
  });
}

TEST(CommCounter, CountsWhatItsThreadStarts) {
  run_ranks(2, [](Group& group) {
    const CommCounter outer;
    std::vector<float> x(4, 1), all(8);
    group.all_reduce(std::span(x)).wait();
    {
      CommCounter inner;
      group.all_reduce(std::span(x)).wait();
      group.all_gather_into(std::span(all), std::span<const float>(x)).wait();
      group.barrier().wait();
      EXPECT_EQ(inner.all_reduces(), 1);
      EXPECT_EQ(inner.total(), 2) << "a barrier moves nothing";
      EXPECT_EQ(concat(inner), "1 all_reduce, 1 all_gather");
      inner.reset();
      EXPECT_EQ(inner.total(), 0);
      EXPECT_EQ(concat(inner), "nothing");
    }
    EXPECT_EQ(outer.total(), 3);
  });
}

TEST(MeshDrawing, ShowsRanksHostsAndGroups) {
  EXPECT_EQ(draw_mesh({2, 2}, {"dp", "tp"}, {"a", "a", "b", "b"}),
            "mesh of 2 x 2 ranks (dp, tp) on 2 hosts\n\n"
            "        tp 0  tp 1\n"
            "  dp 0     0     1   a\n"
            "  dp 1     2     3   b\n\n"
            "dp   2 groups of 2, between hosts: {0, 2} {1, 3}\n"
            "tp   2 groups of 2, inside a host: {0, 1} {2, 3}\n");
  EXPECT_EQ(draw_mesh({3}, {}, {"a", "a", "b"}),
            "mesh of 3 ranks on 2 hosts\n\n"
            "    dim 0 0  dim 0 1  dim 0 2\n"
            "          0        1        2   a, b\n\n"
            "dim 0   1 group of 3, between hosts: {0, 1, 2}\n");
  const std::string cube = draw_mesh({2, 1, 2}, {"x", "y", "z"}, std::vector<std::string>(4, "h"));
  EXPECT_NE(cube.find("x 1\n       z 0  z 1\n  y 0    2    3   h\n"), std::string::npos) << cube;
  EXPECT_NE(cube.find("x   2 groups of 2, inside a host: {0, 2} {1, 3}\n"), std::string::npos) << cube;
  EXPECT_THROW(draw_mesh({2}, {}, {"a"}), InvalidArgument);
  EXPECT_THROW(draw_mesh({1}, {"a", "b"}, {"a"}), InvalidArgument);
  EXPECT_THROW(draw_mesh({0}, {}, {}), InvalidArgument);
}

}  // namespace
}  // namespace chorale::comm
