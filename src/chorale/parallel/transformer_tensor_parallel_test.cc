// The transformer of section B3 of spec/tensor-parallel.md: what is sent, and that training equals one rank's.
#include <gtest/gtest.h>

#include <algorithm>

#include "chorale/comm/comm_counter.h"
#include "chorale/comm/mesh_scope.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/transformer_test_util.h"

namespace chorale::parallel {
namespace {

using comm::CommCounter;

using catalogue::kVocabulary;
using catalogue::make;
using catalogue::plan_of;
using catalogue::Transformer;

void expect_near(const Tensor& a, const Tensor& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_NEAR(x[i], y[i], tolerance * (1 + std::abs(y[i]))) << what << " element " << i;
}

// spec: test_transformer_training
TEST(TransformerTensorParallel, SendsNoMoreThanItMustAndTrainsAsOneRank) {
  const Tensor ids = to(op::sample_ints({8, 8}, 0, kVocabulary, 1), DType::kI64);
  for (const bool sequence : {false, true}) {
    SCOPED_TRACE(sequence ? "sequence parallel" : "plain");
    comm::run_ranks(4, [&](comm::Group& group) {
      const Mesh mesh(group, {4}, {"tp"});
      Transformer reference = make(), model = make();
      tensor_parallel(model, mesh, plan_of(sequence));
      ASSERT_TRUE(model.output.weight.is(model.tok_embeddings.weight));
      optim::Adam one(reference.named_parameters(), {.lr = 0.25}), many(model.named_parameters(), {.lr = 0.25});
      CommCounter counter;
      const Tensor y = model(ids), z = reference(ids);
      expect_near(y, z, 1e-10, "logits");
      if (sequence) {
        EXPECT_EQ(counter.reduce_scatters(), 6) << counter;
        EXPECT_EQ(counter.all_gathers(), 6) << counter;
        EXPECT_EQ(counter.total(), 12) << counter;
      } else {
        EXPECT_EQ(counter.all_reduces(), 6) << counter;
        EXPECT_EQ(counter.all_gathers(), 1) << counter;
        EXPECT_EQ(counter.total(), 7) << counter;
      }
      const Tensor weights = op::sample(z.sizes(), 9);
      counter.reset();
      backward(y, weights);
      if (sequence) {
        EXPECT_EQ(counter.reduce_scatters(), 5) << counter;
        EXPECT_EQ(counter.all_gathers(), 6) << counter;
        EXPECT_EQ(counter.total(), 11) << counter;
      } else {
        EXPECT_EQ(counter.all_reduces(), 9) << counter;
        EXPECT_EQ(counter.total(), 9) << counter;
      }
      backward(z, weights);
      const auto p = model.named_parameters(), q = reference.named_parameters();
      ASSERT_EQ(p.size(), q.size());
      for (size_t i = 0; i < p.size(); ++i)
        expect_near(full_tensor(gradient(p[i].second)), gradient(q[i].second), 1e-9, p[i].first);
      counter.reset();
      many.step();
      // The gradients of ten tensors of norms are partial; each is reduced once (upstream: three times).
      EXPECT_EQ(counter.all_reduces(), sequence ? 10 : 0) << counter;
      EXPECT_EQ(counter.total(), sequence ? 10 : 0) << counter;
      one.step();
      for (size_t i = 0; i < p.size(); ++i)
        expect_near(full_tensor(detach(p[i].second)), q[i].second, 1e-7, p[i].first);
    });
    if (HasFailure()) return;
  }
}

// spec: test_transformer_req_grad
TEST(TransformerTensorParallel, SendsNothingForWhatIsNotTrained) {
  struct Case {
    bool sequence;
    std::vector<std::string> trained;  // none: all
    int64_t scatters, gathers, all_reduces;
    // Gradients of norms that are partial sums: upstream reduces each three times in its optimizer, ours once.
    int64_t in_optimizer;
  };
  const std::vector<Case> cases = {
      {true, {}, 5, 6, 0, 10},
      {false, {}, 0, 0, 9, 0},
      {true, {"output.weight", "norm.weight", "norm.bias"}, 1, 0, 0, 2},
      {true, {"tok_embeddings.weight", "output.weight"}, 5, 5, 0, 0},
      {true, {"tok_embeddings.weight", "output.weight", "norm.weight", "norm.bias"}, 5, 5, 0, 2},
      {true,
       {"tok_embeddings.weight", "output.weight", "norm.weight", "norm.bias", "layers.1.ffn_norm.weight",
        "layers.1.ffn_norm.bias"},
       5,
       5,
       0,
       4},
      {true,
       {"tok_embeddings.weight", "layers.0.attention.wv.weight", "layers.0.feed_forward.w1.bias",
        "layers.1.ffn_norm.bias", "layers.0.feed_forward.w2.weight", "output.weight"},
       5,
       5,
       0,
       1},
  };
  const Tensor ids = to(op::sample_ints({8, 8}, 0, kVocabulary, 1), DType::kI64);
  comm::run_ranks(4, [&](comm::Group& group) {
    const Mesh mesh(group, {4}, {"tp"});
    for (size_t c = 0; c < cases.size(); ++c) {
      SCOPED_TRACE(concat("case ", c));
      const Case& now = cases[c];
      Transformer reference = make(false), model = make(false);
      size_t trained = 0;
      for (Transformer* each : {&reference, &model}) {
        for (auto& [name, p] : each->named_parameters()) {
          const bool on = now.trained.empty() || std::count(now.trained.begin(), now.trained.end(), name) > 0;
          set_requires_grad(p, on);
          trained += on;
        }
      }
      ASSERT_EQ(trained, 2 * (now.trained.empty() ? reference.parameters().size() : now.trained.size()));
      tensor_parallel(model, mesh, plan_of(now.sequence));
      optim::Adam one(reference.named_parameters(), {.lr = 0.25}), many(model.named_parameters(), {.lr = 0.25});
      const Tensor y = model(ids), z = reference(ids), weights = op::sample(z.sizes(), 9);
      CommCounter counter;
      backward(y, weights);
      EXPECT_EQ(counter.reduce_scatters(), now.scatters) << counter;
      EXPECT_EQ(counter.all_gathers(), now.gathers) << counter;
      EXPECT_EQ(counter.all_reduces(), now.all_reduces) << counter;
      EXPECT_EQ(counter.total(), now.scatters + now.gathers + now.all_reduces) << counter;
      backward(z, weights);
      const auto p = model.named_parameters(), q = reference.named_parameters();
      ASSERT_EQ(p.size(), q.size());
      for (size_t i = 0; i < p.size(); ++i) {
        ASSERT_EQ(gradient(p[i].second).defined(), gradient(q[i].second).defined()) << p[i].first;
        if (!gradient(q[i].second).defined()) continue;
        expect_near(full_tensor(gradient(p[i].second)), gradient(q[i].second), 1e-9, p[i].first);
      }
      counter.reset();
      many.step();
      EXPECT_EQ(counter.all_reduces(), now.in_optimizer) << counter;
      EXPECT_EQ(counter.total(), now.in_optimizer) << counter;
      one.step();
      for (size_t i = 0; i < p.size(); ++i)
        expect_near(full_tensor(detach(p[i].second)), q[i].second, 1e-7, p[i].first);
    }
  });
}

// spec: test_under_devicemesh_context
TEST(TransformerTensorParallel, TheMeshMayBeThatOfAScope) {
  const Tensor ids = to(op::sample_ints({8, 8}, 0, kVocabulary, 1), DType::kI64);
  comm::run_ranks(4, [&](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    Transformer reference = make(), model = make();
    EXPECT_THROW(tensor_parallel(model, plan_of(true)), StateError) << "there is none";
    {
      const comm::MeshScope outer(mesh["dp"]);
      const comm::MeshScope scope(mesh["tp"]);
      tensor_parallel(model, plan_of(true));
      EXPECT_EQ(comm::MeshScope::current(), mesh["tp"]);
    }
    EXPECT_THROW(comm::MeshScope::current(), StateError);
    EXPECT_EQ(mesh_of(model.norm.weight), mesh["tp"]);
    expect_near(model(ids), reference(ids), 1e-10, "logits");
  });
}

}  // namespace
}  // namespace chorale::parallel
