// GPT-2: a decoder of pre-norm transformer blocks, with the names and shapes of Hugging Face's checkpoints.
#pragma once

#include <optional>
#include <vector>

#include "chorale/models/sampling.h"
#include "chorale/nn/linear.h"
#include "chorale/nn/norm.h"
#include "chorale/nn/pool.h"
#include "chorale/nn/weight_layout.h"

namespace chorale::models {

// Field names are those of config.json. The defaults are the small model's (124 million parameters).
struct Gpt2Config {
  int64_t vocab_size = 50257;
  int64_t n_positions = 1024;
  int64_t n_embd = 768;
  int64_t n_layer = 12;
  int64_t n_head = 12;
  double layer_norm_epsilon = 1e-5;
  double embd_pdrop = 0.1;   // of the embeddings,
  double resid_pdrop = 0.1;  // of what a block adds,
  double attn_pdrop = 0.1;   // of the attention's weights: dropout in training
  double initializer_range = 0.02;
};

// Keys and values of the tokens seen so far, so that a new token costs one token's work. Not for training.
struct Gpt2Cache {
  // Memory for `capacity` tokens of each of `batch` sequences.
  Gpt2Cache(const Gpt2Config& config, int64_t batch, int64_t capacity, DType dtype = DType::kF32, Device device = kCpu);

  struct Layer {
    Tensor k, v;  // [batch, heads, capacity, depth]
    CHORALE_TENSORS(Layer, k, v)
  };
  std::vector<Layer> layers;
  int64_t length = 0;  // tokens in it
  int64_t capacity;
  CHORALE_TENSORS(Gpt2Cache, layers)
};

// x weight + bias: unlike Linear's, the weight is [in, out]. `pieces`: layers that are one in it.
struct Gpt2Projection : nn::Module, nn::SaysWeightLayout, nn::TakesFp8 {
  nn::Parameter weight, bias;
  CHORALE_MODULE(Gpt2Projection, weight, bias)

  Gpt2Projection(int64_t in, int64_t out, double stddev, int64_t pieces = 1);
  Tensor forward(const Tensor& x);
  nn::WeightLayout weight_layout() const override { return {.output_dim = 1, .pieces = pieces_}; }

 private:
  int64_t pieces_;
};

struct Gpt2Block : nn::Module {
  nn::LayerNorm ln_1;
  Gpt2Projection attention_in, attention_out;
  nn::LayerNorm ln_2;
  Gpt2Projection mlp_in, mlp_out;
  nn::Dropout dropout;
  CHORALE_MODULE(Gpt2Block, ln_1, nn::named("attn.c_attn", attention_in), nn::named("attn.c_proj", attention_out), ln_2,
                 nn::named("mlp.c_fc", mlp_in), nn::named("mlp.c_proj", mlp_out), dropout)

  explicit Gpt2Block(const Gpt2Config& config);
  // With a cache, of which `past` tokens are filled, x's keys and values are added to it.
  Tensor forward(const Tensor& x, Gpt2Cache::Layer* cache, int64_t past);

 private:
  Tensor attend(const Tensor& x, Gpt2Cache::Layer* cache, int64_t past);
  int64_t heads_;
  double attention_dropout_;
};

// The model without the head; "gpt2" checkpoints of the hub have these names.
struct Gpt2Model : nn::Module {
  nn::Embedding wte, wpe;
  nn::Dropout drop;
  std::vector<Gpt2Block> h;
  nn::LayerNorm ln_f;
  CHORALE_MODULE(Gpt2Model, wte, wpe, drop, h, ln_f)

  explicit Gpt2Model(const Gpt2Config& config);
  // ids [batch, tokens] to [batch, tokens, n_embd]; with a cache they follow the tokens that are in it.
  Tensor forward(const Tensor& ids, Gpt2Cache* cache = nullptr);
};

struct Gpt2 : nn::Module {
  Gpt2Config config;
  Gpt2Model transformer;
  nn::Linear lm_head;  // its weight is the token embedding's
  CHORALE_MODULE(Gpt2, transformer, lm_head)

  explicit Gpt2(const Gpt2Config& config = {});
  // Draws all parameters anew, in the order in which the constructor does: a generator in the same state gives the same
  // values. Where they are sharded, each rank draws its part of what one rank would draw.
  void reset_parameters();
  // Logits [batch, tokens, vocab_size] of the token behind each.
  Tensor forward(const Tensor& ids, Gpt2Cache* cache = nullptr);
  // ids [batch, tokens] with up to max_new_tokens more. Uses a cache; the module should be in evaluation mode.
  Tensor generate(const Tensor& ids, const GenerateOptions& options = {});
};

}  // namespace chorale::models
