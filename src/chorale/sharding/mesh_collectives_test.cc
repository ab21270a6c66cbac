// Collectives along the dimensions of a mesh, with chunks that are short or empty: section B7 of
// spec/tensor-parallel.md.
#include "chorale/op/collective.h"
#include "chorale/sharding/sharding_test_util.h"

namespace chorale {
namespace {

// spec: test_broadcast_{1d,nd}, test_scatter_{1d,nd,uneven}
TEST(MeshCollectives, SendFromTheFirstOfEachLine) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh line(group, {8}), cube(group, {2, 2, 2});
    const auto mine = [&](int rank) { return numbers({3, 3}, 100 * rank); };
    expect_same(broadcast(mine(group.rank()), group_tensor(line.group(0)), 0), mine(0));
    for (size_t d = 0; d < 3; ++d) {
      const comm::Group& along = cube.group(d);
      expect_same(broadcast(mine(group.rank()), group_tensor(along), along.global_rank(0)), mine(along.global_rank(0)));
    }
    // Distributing is a scatter: of what the first rank has, evenly, along every dimension, and unevenly.
    const auto table = [&](int64_t rows) { return numbers({rows, 2}, 1000 * group.rank()); };
    expect_same(to_local(distribute(table(8), line, {shard(0)})), narrow(numbers({8, 2}), 0, group.rank(), 1));
    const Tensor nested = distribute(table(8), cube, {shard(0), shard(0), shard(0)});
    expect_same(to_local(nested), narrow(numbers({8, 2}), 0, group.rank(), 1));
    const Tensor uneven = distribute(table(11), line, {shard(0)});  // 2, 2, 2, 2, 2, 1, 0, 0
    EXPECT_EQ(to_local(uneven).size(0), group.rank() < 5 ? 2 : group.rank() == 5 ? 1 : 0);
    expect_same(to_local(uneven), chunk_of_rank(numbers({11, 2}), 0, group.rank(), 8));
  });
}

// spec: test_all_gather_uneven, test_reduce_scatter_{uneven,contiguous}
TEST(MeshCollectives, GatherAndReduceUnevenChunks) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh(group, {4});
    const Tensor ranks = group_tensor(mesh.group(0));
    for (const int64_t size : {3, 4, 5, 6, 7, 9}) {
      for (const int64_t dim : {0, 1}) {
        const Shape sizes = dim == 0 ? Shape{size, 4} : Shape{4, size};
        const Tensor whole = numbers(sizes);
        const Tensor own = chunk_of_rank(whole, dim, group.rank(), 4);
        expect_same(all_gather(own, ranks, dim, size), whole);
        // Rank r gives r + 1 times the whole: 10 times it all together.
        const Tensor chunk = reduce_scatter(mul(whole, group.rank() + 1), ranks, dim);
        expect_same(chunk, mul(own, 10));
        EXPECT_TRUE(chunk.is_contiguous());
      }
    }
  });
}

}  // namespace
}  // namespace chorale
