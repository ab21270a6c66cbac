#include "chorale/nn/attention.h"

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/nn/init.h"
#include "chorale/op/need_defined.h"

namespace chorale::nn {

MultiheadAttention::MultiheadAttention(int64_t embed_dim, int64_t num_heads, const MultiheadAttentionOptions& options)
    : out_proj(embed_dim, embed_dim, {.bias = options.bias}), width_(embed_dim), heads_(num_heads), options_(options) {
  CHORALE_CHECK(num_heads > 0 && embed_dim > 0 && embed_dim % num_heads == 0, "[MultiheadAttention] a width of ",
                embed_dim, " cannot be cut into ", num_heads, " heads");
  const auto make = [&](int64_t rows, int64_t columns) {
    Parameter weight(empty({rows, columns}));
    init::xavier_uniform_(weight);
    return weight;
  };
  const int64_t kdim = options.kdim.value_or(embed_dim), vdim = options.vdim.value_or(embed_dim);
  if (kdim == embed_dim && vdim == embed_dim) {
    in_proj_weight = make(3 * embed_dim, embed_dim);
  } else {
    q_proj_weight = make(embed_dim, embed_dim);
    k_proj_weight = make(embed_dim, kdim);
    v_proj_weight = make(embed_dim, vdim);
  }
  if (options.bias) {
    in_proj_bias = Parameter(zeros({3 * embed_dim}));
    init::zeros_(out_proj.bias);
  }
}

std::string MultiheadAttention::describe() const { return concat(width_, ", heads=", heads_); }

// 0: query, 1: key, 2: value.
Tensor MultiheadAttention::project(const Tensor& x, int64_t which) const {
  const Tensor* own[] = {&q_proj_weight, &k_proj_weight, &v_proj_weight};
  const Tensor weight =
      in_proj_weight.defined() ? narrow(in_proj_weight, 0, which * width_, width_) : *own[static_cast<size_t>(which)];
  return linear(x, weight, in_proj_bias.defined() ? narrow(in_proj_bias, 0, which * width_, width_) : Tensor{});
}

// All the masks in one, as scaled_dot_product_attention takes it: bool (true: look) or floating, and broadcasting to
// [batch, heads, queries, keys]. Causality is part of it where there is another mask or where scores are needed.
Tensor MultiheadAttention::mask_of(const AttentionMasks& masks, const Tensor& q, const Tensor& k) const {
  const int64_t B = q.size(0), L = q.size(2), S = k.size(2);  // batch, queries, keys
  std::vector<Tensor> parts;
  if (const Tensor& mask = masks.attn_mask; mask.defined()) {
    const bool per_head = mask.dims() == 3;
    CHORALE_CHECK(mask.sizes() == (per_head ? Shape{B * heads_, L, S} : Shape{L, S}),
                  "[MultiheadAttention] expected an attn_mask [", L, ", ", S, "] or [", B * heads_, ", ", L, ", ", S,
                  "], found ", mask.sizes());
    parts.push_back(per_head ? reshape(mask, {B, heads_, L, S}) : mask);
  }
  if (const Tensor& mask = masks.key_padding_mask; mask.defined()) {
    CHORALE_CHECK(mask.elems() == B * S && mask.size(-1) == S, "[MultiheadAttention] expected a key_padding_mask [", B,
                  ", ", S, "], found ", mask.sizes());
    parts.push_back(reshape(mask, {B, 1, 1, S}));
  }
  if (masks.is_causal && (!parts.empty() || masks.need_weights)) {
    parts.push_back(gt(arange(S, DType::kI64, q.device()), unsqueeze(arange(L, DType::kI64, q.device()), 1)));
  }
  Tensor hidden, added;
  for (const Tensor& part : parts) {
    if (part.dtype() == DType::kBool) {
      hidden = hidden.defined() ? logical_or(hidden, part) : part;
    } else {
      added = added.defined() ? added + part : part;
    }
  }
  if (!added.defined()) return hidden.defined() ? logical_not(hidden) : Tensor{};
  added = to(added, q.dtype());
  return hidden.defined() ? added + masked_fill(zeros(hidden.sizes(), q.dtype(), q.device()), hidden, -INFINITY)
                          : added;
}

AttentionOutput MultiheadAttention::forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const AttentionMasks& masks) const {
  op::need_defined("MultiheadAttention", "query", query);
  op::need_defined("MultiheadAttention", "key", key);
  op::need_defined("MultiheadAttention", "value", value);
  const bool single = query.dims() == 2;
  const int64_t kdim = options_.kdim.value_or(width_), vdim = options_.vdim.value_or(width_);
  CHORALE_CHECK((single || query.dims() == 3) && key.dims() == query.dims() && value.dims() == query.dims() &&
                    query.size(-1) == width_ && key.size(-1) == kdim && value.size(-1) == vdim,
                "[MultiheadAttention] expected query, key and value with 2 or 3 dimensions each, and widths ", width_,
                ", ", kdim, ", ", vdim, "; found ", query.sizes(), ", ", key.sizes(), ", ", value.sizes());
  // Cuts into [batch, heads, length, width / heads].
  const auto split_heads = [&](const Tensor& projected) {
    const Tensor batched = single                 ? unsqueeze(projected, 0)
                           : options_.batch_first ? projected
                                                  : transpose(projected, 0, 1);
    return transpose(view(batched, {batched.size(0), batched.size(1), heads_, width_ / heads_}), 1, 2);
  };
  Tensor q, k, v;
  if (in_proj_weight.defined() && query.is(key) && key.is(value)) {
    const std::vector<Tensor> parts = chunk(linear(query, in_proj_weight, in_proj_bias), 3, -1);
    q = split_heads(parts[0]), k = split_heads(parts[1]), v = split_heads(parts[2]);
  } else {
    q = split_heads(project(query, 0)), k = split_heads(project(key, 1)), v = split_heads(project(value, 2));
  }
  CHORALE_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(2) == v.size(2),
                "[MultiheadAttention] batches or lengths differ: query ", query.sizes(), ", key ", key.sizes(),
                ", value ", value.sizes());
  const Tensor mask = mask_of(masks, q, k);
  const double p = is_training() ? options_.dropout : 0;
  AttentionOutput result;
  Tensor mixed;
  if (masks.need_weights) {
    Tensor scores = matmul(q * (1 / std::sqrt(static_cast<double>(q.size(3)))), transpose(k, 2, 3));
    if (mask.defined()) {
      scores = mask.dtype() == DType::kBool ? masked_fill(scores, logical_not(mask), -INFINITY) : scores + mask;
    }
    const Tensor weights = dropout(softmax(scores, -1), p);
    mixed = matmul(weights, v);
    result.weights = single ? mean(weights, {0, 1}) : mean(weights, 1);
  } else {
    mixed = scaled_dot_product_attention(
        q, k, v, {.mask = mask, .dropout_p = p, .is_causal = masks.is_causal && !mask.defined()});
  }
  const Tensor joined = reshape(transpose(mixed, 1, 2), {q.size(0), q.size(2), width_});
  const Tensor output = out_proj(joined);
  result.output = single ? select(output, 0, 0) : options_.batch_first ? output : transpose(output, 0, 1);
  return result;
}

namespace {
Tensor activate(TransformerActivation activation, const Tensor& x) {
  return activation == TransformerActivation::kRelu ? relu(x) : gelu(x);
}
MultiheadAttentionOptions attention_options(const TransformerLayerOptions& options) {
  return {.dropout = options.dropout, .bias = options.bias, .batch_first = options.batch_first};
}
LayerNormOptions norm_options(const TransformerLayerOptions& options) {
  return {.eps = options.layer_norm_eps, .bias = options.bias};
}
}  // namespace

TransformerEncoderLayer::TransformerEncoderLayer(int64_t d_model, int64_t nhead, const TransformerLayerOptions& options)
    : self_attn(d_model, nhead, attention_options(options)),
      linear1(d_model, options.dim_feedforward, {.bias = options.bias}),
      linear2(options.dim_feedforward, d_model, {.bias = options.bias}),
      norm1(d_model, norm_options(options)),
      norm2(d_model, norm_options(options)),
      dropout(options.dropout),
      dropout1(options.dropout),
      dropout2(options.dropout),
      options_(options) {}

Tensor TransformerEncoderLayer::forward(const Tensor& src, const AttentionMasks& masks) const {
  const auto attend = [&](const Tensor& x) { return dropout1(self_attn(x, x, x, masks).output); };
  const auto feed = [&](const Tensor& x) {
    return dropout2(linear2(dropout(activate(options_.activation, linear1(x)))));
  };
  if (options_.norm_first) {
    const Tensor x = src + attend(norm1(src));
    return x + feed(norm2(x));
  }
  const Tensor x = norm1(src + attend(src));
  return norm2(x + feed(x));
}

TransformerDecoderLayer::TransformerDecoderLayer(int64_t d_model, int64_t nhead, const TransformerLayerOptions& options)
    : self_attn(d_model, nhead, attention_options(options)),
      multihead_attn(d_model, nhead, attention_options(options)),
      linear1(d_model, options.dim_feedforward, {.bias = options.bias}),
      linear2(options.dim_feedforward, d_model, {.bias = options.bias}),
      norm1(d_model, norm_options(options)),
      norm2(d_model, norm_options(options)),
      norm3(d_model, norm_options(options)),
      dropout(options.dropout),
      dropout1(options.dropout),
      dropout2(options.dropout),
      dropout3(options.dropout),
      options_(options) {}

Tensor TransformerDecoderLayer::forward(const Tensor& tgt, const Tensor& memory, const AttentionMasks& tgt_masks,
                                        const AttentionMasks& memory_masks) const {
  const auto attend = [&](const Tensor& x) { return dropout1(self_attn(x, x, x, tgt_masks).output); };
  const auto look_up = [&](const Tensor& x) {
    return dropout2(multihead_attn(x, memory, memory, memory_masks).output);
  };
  const auto feed = [&](const Tensor& x) {
    return dropout3(linear2(dropout(activate(options_.activation, linear1(x)))));
  };
  if (options_.norm_first) {
    Tensor x = tgt + attend(norm1(tgt));
    x = x + look_up(norm2(x));
    return x + feed(norm3(x));
  }
  Tensor x = norm1(tgt + attend(tgt));
  x = norm2(x + look_up(x));
  return norm3(x + feed(x));
}

}  // namespace chorale::nn
