// The transformer of sections B3 and B8 of spec/tensor-parallel.md, and its plan.
#pragma once

#include <string>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/parallel/tensor_parallel.h"

namespace chorale::parallel::catalogue {

inline constexpr int64_t kVocabulary = 8, kWidth = 16, kHeads = 4, kLongest = 16;

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
  explicit Transformer(bool tied, size_t depth = 2) : layers(depth) {
    if (tied) output.weight = tok_embeddings.weight;
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = tok_embeddings(ids) + pos_embeddings(arange(ids.size(1)));
    for (Layer& layer : layers) x = layer(x);
    return output(norm(x));
  }
};

// The same numbers on every rank, in f64.
inline Transformer make(bool tied = true, size_t depth = 2) {
  Transformer model(tied, depth);
  model.to(DType::kF64);
  const NoGrad quiet;
  int seed = 1;
  for (const Tensor& p : model.parameters()) copy_(p, mul(op::sample(p.sizes(), seed++), 0.5));
  return model;
}

inline Plan plan_of(bool sequence) {
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

}  // namespace chorale::parallel::catalogue
