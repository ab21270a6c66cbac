// The transformer of section B3 of spec/tensor-parallel.md: what is sent, and that training equals one rank's.
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/tensor_parallel.h"

namespace chorale::parallel {
namespace {

using comm::CommCounter;

constexpr int64_t kVocabulary = 8, kWidth = 16, kHeads = 4, kLongest = 16;

struct Attention : nn::Module {
  nn::Linear wq{kWidth, kWidth, {.bias = false}}, wk{kWidth, kWidth, {.bias = false}},
      wv{kWidth, kWidth, {.bias = false}}, wo{kWidth, kWidth, {.bias = false}};
  CHORALE_MODULE(Attention, wq, wk, wv, wo)
  Tensor forward(const Tensor& x) {
    const int64_t B = x.size(0), T = x.size(1);
    const auto heads = [&](const Tensor& y) { return transpose(view(y, {B, T, kHeads, kWidth / kHeads}), 1, 2); };
    const Tensor y = scaled_dot_product_attention(heads(wq(x)), heads(wk(x)), heads(wv(x)), {.is_causal = true});
    return wo(reshape(transpose(y, 1, 2), {B, T, kWidth}));
  }
};
struct FeedForward : nn::Module {
  nn::Linear w1{kWidth, 4 * kWidth}, w2{4 * kWidth, kWidth};
  CHORALE_MODULE(FeedForward, w1, w2)
  Tensor forward(const Tensor& x) { return w2(gelu(w1(x))); }
};
struct Layer : nn::Module {
  nn::LayerNorm attention_norm{IntList(kWidth)};
  Attention attention;
  nn::LayerNorm ffn_norm{IntList(kWidth)};
  FeedForward feed_forward;
  CHORALE_MODULE(Layer, attention_norm, attention, ffn_norm, feed_forward)
  Tensor forward(const Tensor& x) {
    const Tensor y = x + attention(attention_norm(x));
    return y + feed_forward(ffn_norm(y));
  }
};
struct Transformer : nn::Module {
  nn::Embedding tok_embeddings{kVocabulary, kWidth}, pos_embeddings{kLongest, kWidth};
  std::vector<Layer> layers;
  nn::LayerNorm norm{IntList(kWidth)};
  nn::Linear output{kWidth, kVocabulary, {.bias = false}};
  CHORALE_MODULE(Transformer, tok_embeddings, pos_embeddings, layers, norm, output)
  Transformer() : layers(2) { output.weight = tok_embeddings.weight; }
  Tensor forward(const Tensor& ids) {
    Tensor x = tok_embeddings(ids) + pos_embeddings(arange(ids.size(1)));
    for (Layer& layer : layers) x = layer(x);
    return output(norm(x));
  }
};

Transformer make() {
  Transformer model;
  model.to(DType::kF64);
  const NoGrad quiet;
  int seed = 1;
  for (const Tensor& p : model.parameters()) copy_(p, mul(op::sample(p.sizes(), seed++), 0.5));
  return model;
}

Plan plan_of(bool sequence) {
  const Placement between = sequence ? shard(1) : replicate();
  const Colwise in = Colwise().keep_sharded();
  const Rowwise out = Rowwise().with_output(between).keep_sharded();
  Plan plan{{"tok_embeddings", out.with_input(replicate())},
            {"pos_embeddings", out.with_input(replicate()).with_output(sequence ? shard(0) : replicate())}};
  for (const char* name : {"wq", "wk", "wv"})
    plan.emplace_back(std::string("layers.*.attention.") + name, sequence ? in.share_gradient() : in);
  plan.emplace_back("layers.*.attention.wo", out);
  plan.emplace_back("layers.*.feed_forward.w1", in.with_input(between));
  plan.emplace_back("layers.*.feed_forward.w2", out);
  for (const char* name : {"layers.*.attention_norm", "layers.*.ffn_norm", "norm"}) {
    if (sequence) {
      plan.emplace_back(name, SequenceParallel(1));
    } else {
      plan.emplace_back(name, Replicated());
    }
  }
  if (sequence) plan.emplace_back("layers.*.attention", PrepareInput({shard(1)}, {replicate()}));
  plan.emplace_back("output", Colwise().with_input(between).with_output(replicate()));
  return plan;
}

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

}  // namespace
}  // namespace chorale::parallel
