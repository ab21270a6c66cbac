// Attention of several heads and the transformer's layers, with PyTorch's names, defaults and masks.
#pragma once

#include <optional>

#include "chorale/nn/linear.h"
#include "chorale/nn/module.h"
#include "chorale/nn/norm.h"
#include "chorale/nn/pool.h"

namespace chorale::nn {

struct MultiheadAttentionOptions {
  double dropout = 0;  // of the weights, in training
  bool bias = true;
  std::optional<int64_t> kdim{}, vdim{};  // of keys and values, when they differ from embed_dim
  bool batch_first = false;               // [batch, length, ..] instead of [length, batch, ..]
};

// A bool mask is true where a query may NOT look, a floating one is added to the scores; mind that
// scaled_dot_product_attention has it the other way round.
struct AttentionMasks {
  Tensor attn_mask{};         // [queries, keys] or [batch * heads, queries, keys]
  Tensor key_padding_mask{};  // [batch, keys]
  bool is_causal = false;     // query i sees keys 0 … i
  bool need_weights = false;  // return them: needs memory for all the scores
  CHORALE_TENSORS(AttentionMasks, attn_mask, key_padding_mask)
};

struct AttentionOutput {
  Tensor output;   // like the query
  Tensor weights;  // [batch, queries, keys], the mean over heads; undefined unless asked for
  CHORALE_TENSORS(AttentionOutput, output, weights)
};

class MultiheadAttention : public Module {
 public:
  MultiheadAttention(int64_t embed_dim, int64_t num_heads, const MultiheadAttentionOptions& options = {});
  // [length, batch, dim] each, or [length, dim].
  AttentionOutput forward(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionMasks& masks = {}) const;
  std::string describe() const override;

  Parameter in_proj_weight;                               // [3 * embed_dim, embed_dim]: query, key, value; or,
  Parameter q_proj_weight, k_proj_weight, v_proj_weight;  // with kdim or vdim, one by one. Xavier-uniform.
  Parameter in_proj_bias;                                 // [3 * embed_dim], zeros
  Linear out_proj;
  CHORALE_MODULE(MultiheadAttention, in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, in_proj_bias,
                 out_proj)

 private:
  Tensor project(const Tensor& x, int64_t which) const;
  Tensor mask_of(const AttentionMasks& masks, const Tensor& q, const Tensor& k) const;
  int64_t width_, heads_;
  MultiheadAttentionOptions options_;
};

enum class TransformerActivation : uint8_t { kRelu, kGelu };
struct TransformerLayerOptions {
  int64_t dim_feedforward = 2048;
  double dropout = 0.1;
  TransformerActivation activation = TransformerActivation::kRelu;
  double layer_norm_eps = 1e-5;
  bool batch_first = false;
  bool norm_first = false;  // norms before attention and network instead of behind them
  bool bias = true;
};

// Self-attention, then a network of two linear layers, each added to what came in.
class TransformerEncoderLayer : public Module {
 public:
  TransformerEncoderLayer(int64_t d_model, int64_t nhead, const TransformerLayerOptions& options = {});
  Tensor forward(const Tensor& src, const AttentionMasks& masks = {}) const;

  MultiheadAttention self_attn;
  Linear linear1, linear2;
  LayerNorm norm1, norm2;
  Dropout dropout, dropout1, dropout2;
  CHORALE_MODULE(TransformerEncoderLayer, self_attn, linear1, dropout, linear2, norm1, norm2, dropout1, dropout2)

 private:
  TransformerLayerOptions options_;
};

// The same with attention to an encoder's result (memory) in between.
class TransformerDecoderLayer : public Module {
 public:
  TransformerDecoderLayer(int64_t d_model, int64_t nhead, const TransformerLayerOptions& options = {});
  Tensor forward(const Tensor& tgt, const Tensor& memory, const AttentionMasks& tgt_masks = {},
                 const AttentionMasks& memory_masks = {}) const;

  MultiheadAttention self_attn, multihead_attn;
  Linear linear1, linear2;
  LayerNorm norm1, norm2, norm3;
  Dropout dropout, dropout1, dropout2, dropout3;
  CHORALE_MODULE(TransformerDecoderLayer, self_attn, multihead_attn, linear1, dropout, linear2, norm1, norm2, norm3,
                 dropout1, dropout2, dropout3)

 private:
  TransformerLayerOptions options_;
};

}  // namespace chorale::nn
