// Training with tensor parallel: an MLP, tied weights, and the loss of split classes (sections B2 and B3 of
// spec/tensor-parallel.md).
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/parallel/tensor_parallel_test_util.h"

namespace chorale::parallel {
namespace {

using comm::CommCounter;
using comm::run_ranks;

struct Tied : nn::Module {
  nn::Embedding table{16, 8};
  nn::Linear head{8, 16, {.bias = false}};
  CHORALE_MODULE(Tied, table, head)
  Tensor forward(const Tensor& ids) { return head(table(ids)); }
};

// spec: test_mlp_training, test_mlp_inference
TEST(TensorParallel, TrainsAnMlp) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const bool sequence : {false, true}) {
      Mlp reference = filled(Mlp()), model = filled(Mlp());
      const Plan plan = sequence
                            ? Plan{{"net1", Colwise().with_input(shard(0))}, {"net2", Rowwise().with_output(shard(0))}}
                            : Plan{{"net1", Colwise()}, {"net2", Rowwise()}};
      tensor_parallel(model, mesh, plan);
      const auto input = [&](int rank, int step) {
        return op::sample({8, 10}, 60 + 10 * step + (sequence ? rank : 0));
      };
      const auto whole_input = [&](int step) {
        if (!sequence) return input(0, step);
        std::vector<Tensor> all;
        all.reserve(kWorld);
        for (int r = 0; r < kWorld; ++r) all.push_back(input(r, step));
        return cat(all, 0);
      };
      CommCounter counter;
      const Tensor y = model(input(group.rank(), 0)), z = reference(whole_input(0));
      expect_near(y, sequence ? chunk_of_rank(z, 0, group.rank()) : z, 1e-11);
      backward(sum(y));
      if (sequence) {
        EXPECT_EQ(counter.all_gathers(), 2);
        EXPECT_EQ(counter.reduce_scatters(), 1);
        EXPECT_EQ(counter.total(), 3);
      } else {
        EXPECT_EQ(counter.all_reduces(), 1);
        EXPECT_EQ(counter.total(), 1);
      }
      backward(sum(z));
      {
        const NoGrad quiet;
        const auto p = model.named_parameters(), q = reference.named_parameters();
        ASSERT_EQ(p.size(), 4u);
        for (size_t i = 0; i < p.size(); ++i) {
          expect_near(full_tensor(gradient(p[i].second)), gradient(q[i].second), 1e-11, p[i].first);
          sub_(p[i].second, mul(gradient(p[i].second), 0.25));
          sub_(q[i].second, mul(gradient(q[i].second), 0.25));
          expect_near(full_tensor(p[i].second), q[i].second, 1e-11, p[i].first);
        }
      }
      const NoGrad quiet;
      const Tensor y2 = model(input(group.rank(), 1)), z2 = reference(whole_input(1));
      expect_near(y2, sequence ? chunk_of_rank(z2, 0, group.rank()) : z2, 1e-10);
    }
  });
}

// spec: test_weight_tying
TEST(TensorParallel, TiedWeightsStayTied) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Plan plan{{"table", Colwise()}, {"head", Rowwise()}};
    Tied model;
    tensor_parallel(model, mesh, plan);
    EXPECT_FALSE(model.table.weight.is(model.head.weight));
    EXPECT_EQ(placements_of(model.table.weight), placements_of(model.head.weight));
    model.head.weight = model.table.weight;
    EXPECT_TRUE(model.table.weight.is(model.head.weight));
    backward(sum(model(arange(4))));
    EXPECT_TRUE(gradient(model.table.weight).is(gradient(model.head.weight)));
    // Tied before, they stay one.
    Tied before;
    before.head.weight = before.table.weight;
    tensor_parallel(before, mesh, plan);
    EXPECT_TRUE(before.table.weight.is(before.head.weight));
    Tied clash;
    clash.head.weight = clash.table.weight;
    EXPECT_THROW(tensor_parallel(clash, mesh, {{"table", Colwise()}, {"head", Colwise()}}), InvalidArgument);
  });
}

// spec: test_loss_parallel, x_loss_parallel_ignore_index
TEST(TensorParallel, LossOfSplitClasses) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const int64_t classes : {16, 10, 3}) {
      for (const Shape& sizes : {Shape{8, classes}, Shape{8, classes, 12}}) {
        Shape per_sample = sizes;
        per_sample.erase(1);
        const Tensor logits = op::sample(sizes, 3), weights = op::sample({classes}, 5, 0.5, 1.5);
        Tensor target = to(op::sample_ints(per_sample, 0, classes, 6), DType::kI64);
        for (const bool ignoring : {false, true}) {
          if (ignoring) {
            target = clone(target);
            fill_(narrow(target, 0, 1, 2), -100);
          }
          for (const bool weighted : {false, true}) {
            for (const Reduction reduction : {Reduction::kMean, Reduction::kSum, Reduction::kNone}) {
              const Tensor whole = set_requires_grad(clone(logits));
              const Tensor expected = cross_entropy(whole, target, weighted ? weights : Tensor(), reduction);
              const Tensor dy = op::sample(expected.sizes(), 9);
              backward(expected, dy);
              const Tensor x = set_requires_grad(distribute(logits, mesh, {shard(1)}));
              CommCounter counter;
              const Tensor loss =
                  loss_parallel(x, target, {.weight = weighted ? weights : Tensor(), .reduction = reduction});
              EXPECT_EQ(counter.all_reduces(), 3);
              EXPECT_EQ(counter.total(), 3);
              EXPECT_EQ(placements_of(loss), at({replicate()}));
              expect_near(to_local(loss), expected, 1e-11);
              counter.reset();
              backward(loss, from_local(dy, mesh, {replicate()}));
              EXPECT_EQ(counter.total(), 0);
              EXPECT_EQ(placements_of(gradient(x)), at({shard(1)}));
              expect_near(full_tensor(gradient(x)), gradient(whole), 1e-11);
            }
          }
        }
      }
    }
    const Tensor target = zeros({8}, DType::kI64);
    EXPECT_THROW(loss_parallel(distribute(op::sample({8, 16}, 1), mesh, {shard(0)}), target), InvalidArgument);
    EXPECT_THROW(loss_parallel(distribute(op::sample({8, 16}, 1), mesh, {replicate()}), target), InvalidArgument);
  });
}

}  // namespace
}  // namespace chorale::parallel
