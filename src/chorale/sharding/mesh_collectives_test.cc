// Collectives along the dimensions of a mesh, with chunks that are short or empty: section B7 of
// spec/tensor-parallel.md; and when those of a redistribution are begun and waited for.
#include "chorale/autograd/function.h"
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

// ---- when redistributions begin and end

// Runs ops as ever, and notes what was run on this rank's parts, with "start" and "wait" for collectives.
class Noting final : public op::Builder {
 public:
  Noting() : Builder(op::Place::kBottom), eager_(*op::current_stack().at(op::Place::kBottom)) {}
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override {
    note(op.name);
    eager_.call(op, in, attrs, out, rest);
  }
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override {
    note(op.name);
    eager_.call_into(op, in, attrs, out, rest);
  }
  // What was noted since the last time, of these.
  std::vector<std::string> take(const std::vector<std::string>& wanted) {
    std::vector<std::string> found;
    for (const std::string& name : std::exchange(calls_, {})) {
      if (std::find(wanted.begin(), wanted.end(), name) != wanted.end()) found.push_back(name);
    }
    return found;
  }

 private:
  void note(const std::string& name) {
    calls_.push_back(name == "collective_start" ? "start" : name == "collective_wait" ? "wait" : name);
  }

  op::Builder& eager_;
  std::vector<std::string> calls_;
};

using Names = std::vector<std::string>;

TEST(Overlap, RedistributionsBeginEarlyAndAreWaitedForAtFirstUse) {
  run_ranks(2, [](comm::Group& group) {
    Noting noting;
    const op::Under scope(op::current_stack().with(noting));
    const Mesh mesh(group, {2});
    const Tensor x = distribute(numbers({4, 6}), mesh, {shard(0)}, std::nullopt);
    const Tensor w = distribute(numbers({6, 6}, 3), mesh, {shard(0)}, std::nullopt);
    noting.take({});
    // The next layer's weight is gathered while this layer runs.
    const Tensor gathered = redistribute(w, {replicate()}, {.async = true});
    const Tensor turned = transpose(gathered, 0, 1);
    const Tensor y = sin(exp(x));
    EXPECT_EQ(noting.take({"start", "exp", "sin", "wait", "matmul"}), (Names{"start", "exp", "sin"}));
    const Tensor z = matmul(y, turned);
    EXPECT_EQ(noting.take({"start", "wait", "matmul"}), (Names{"wait", "matmul"}));
    matmul(y, turned);
    EXPECT_EQ(noting.take({"start", "wait", "matmul"}), (Names{"matmul"})) << "waited for once";
    const Tensor whole = numbers({4, 6});
    expect_near(full_tensor(z), matmul(sin(exp(whole)), transpose(numbers({6, 6}, 3), 0, 1)), 1e-12);

    // Where an op needs two of its operands elsewhere, both begin before either is waited for.
    const Tensor rows = cat({w, x}, 0);
    EXPECT_EQ(noting.take({"start", "wait", "cat"}), (Names{"start", "start", "wait", "wait", "cat"}));
    expect_same(full_tensor(rows), cat({numbers({6, 6}, 3), whole}, 0));
  });
}

// Backward goes on with other parts of the graph while a gradient is on its way, and waits where it meets another one.
TEST(Overlap, BackwardGoesOnWhileGradientsAreOnTheirWay) {
  run_ranks(2, [](comm::Group& group) {
    Noting noting;
    const op::Under scope(op::current_stack().with(noting));
    const Mesh mesh(group, {2});
    const auto loss_of = [](const Tensor& x, const auto& gather) {
      const Tensor other = sum(sin(x));   // recorded first: backward comes to it last
      const Tensor gathered = gather(x);  // its gradient goes back by a reduce-scatter
      return add(other, sum(exp(gathered)));
    };
    for (const bool async : {false, true}) {
      const Tensor x = distribute(mul(numbers({4, 3}), 0.1), mesh, {shard(0)}, std::nullopt);
      set_requires_grad(x);
      const Tensor loss = loss_of(x, [&](const Tensor& y) {
        // Each rank has computed all of it; with the hint each one's gradient is a part of the sum.
        const Tensor local = to_local(redistribute(y, {replicate()}, {.async = async}), Placements{partial()});
        return from_local(local, mesh, {replicate()});
      });
      noting.take({});
      backward(loss);
      // The gradient of sin is cos; it is computed between.
      EXPECT_EQ(noting.take({"start", "wait", "cos"}), (Names{"start", "cos", "wait"}));
      // Every rank sent the same exp: the sum is twice that.
      const Tensor whole = mul(numbers({4, 3}), 0.1);
      expect_near(full_tensor(gradient(x)), add(cos(whole), mul(exp(whole), 2)), 1e-12);
    }
  });
}

// A gradient that arrives at a leaf while it is on its way is waited for there. Ranks that are threads share the locks
// of leaves, which nobody may hold meanwhile: so many leaves that some of two ranks have the same lock.
TEST(Overlap, NobodyWaitsForOtherRanksUnderALock) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2});
    const Tensor whole = numbers({4, 6});
    std::vector<Tensor> leaves, others;
    for (int i = 0; i < 400; ++i) {
      const Tensor x = set_requires_grad(distribute(whole, mesh, {shard(0)}, std::nullopt));
      // Ranks so have leaves at other places of memory.
      for (int k = 0; k < (3 * i + 5 * group.rank()) % 11; ++k) others.push_back(full({}, k));
      const Tensor w = set_requires_grad(distribute(whole, mesh, {shard(1)}, std::nullopt));
      leaves.push_back(x);
      others.push_back(w);
      // The gradient of w comes first, and then that of x, which is exchanged.
      backward(sum(mul(redistribute(x, {shard(1)}, {.async = true}), w)));
    }
    expect_same(full_tensor(gradient(leaves.back())), whole);
  });
}

}  // namespace
}  // namespace chorale
