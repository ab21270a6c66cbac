#include "chorale/models/gpt2.h"

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/nn/init.h"
#include "chorale/op/fp8.h"

namespace chorale::models {

Gpt2Cache::Gpt2Cache(const Gpt2Config& config, int64_t batch, int64_t tokens, DType dtype, Device device)
    : capacity(tokens) {
  CHORALE_CHECK(tokens <= config.n_positions, "[Gpt2Cache] the model knows ", config.n_positions, " positions, not ",
                tokens);
  const Shape shape = {batch, config.n_head, tokens, config.n_embd / config.n_head};
  for (int64_t i = 0; i < config.n_layer; ++i)
    layers.push_back({empty(shape, dtype, device), empty(shape, dtype, device)});
}

Gpt2Projection::Gpt2Projection(int64_t in, int64_t out, double stddev, int64_t pieces)
    : weight(normal({in, out}, 0, stddev)), bias(zeros({out})), pieces_(pieces) {}

Tensor Gpt2Projection::forward(const Tensor& x) {
  if (fp8()) return fp8_linear(x, weight, bias, /*in_first=*/true);
  Shape sizes = x.sizes();
  sizes.back() = weight.size(1);
  return view(addmm(bias, flatten(x, 0, -2), weight), sizes);
}

// What is added to the residual stream n times shall not let it grow: its weights are smaller by sqrt(n).
static double residual_stddev(const Gpt2Config& config) {
  return config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.n_layer));
}

Gpt2Block::Gpt2Block(const Gpt2Config& config)
    : ln_1(config.n_embd, {.eps = config.layer_norm_epsilon}),
      attention_in(config.n_embd, 3 * config.n_embd, config.initializer_range, 3),
      attention_out(config.n_embd, config.n_embd, residual_stddev(config)),
      ln_2(config.n_embd, {.eps = config.layer_norm_epsilon}),
      mlp_in(config.n_embd, 4 * config.n_embd, config.initializer_range),
      mlp_out(4 * config.n_embd, config.n_embd, residual_stddev(config)),
      dropout(config.resid_pdrop),
      heads_(config.n_head),
      attention_dropout_(config.attn_pdrop) {}

Tensor Gpt2Block::attend(const Tensor& x, Gpt2Cache::Layer* cache, int64_t past) {
  const int64_t B = x.size(0), T = x.size(1), D = x.size(2);  // batch, tokens, width
  const Tensor qkv = permute(view(attention_in(x), {B, T, 3, heads_, D / heads_}), {2, 0, 3, 1, 4});
  const Tensor q = select(qkv, 0, 0);
  Tensor k = select(qkv, 0, 1), v = select(qkv, 0, 2);
  AttentionOptions options{.dropout_p = is_training() ? attention_dropout_ : 0, .is_causal = true};
  if (cache) {
    copy_(narrow(cache->k, 2, past, T), k);
    copy_(narrow(cache->v, 2, past, T), v);
    k = narrow(cache->k, 2, 0, past + T);
    v = narrow(cache->v, 2, 0, past + T);
    options.is_causal = past == 0;
    // Token i stands at past + i. A single one sees everything.
    if (past > 0 && T > 1)
      options.mask = le(arange(past + T, DType::kI64, x.device()),
                        unsqueeze(arange(past, past + T, 1, DType::kI64, x.device()), 1));
  }
  return attention_out(reshape(transpose(scaled_dot_product_attention(q, k, v, options), 1, 2), {B, T, D}));
}

Tensor Gpt2Block::forward(const Tensor& x, Gpt2Cache::Layer* cache, int64_t past) {
  const Tensor y = x + dropout(attend(ln_1(x), cache, past));
  return y + dropout(mlp_out(gelu(mlp_in(ln_2(y)), Gelu::kTanh)));
}

Gpt2Model::Gpt2Model(const Gpt2Config& config)
    : wte(config.vocab_size, config.n_embd),
      wpe(config.n_positions, config.n_embd),
      drop(config.embd_pdrop),
      ln_f(config.n_embd, {.eps = config.layer_norm_epsilon}) {
  CHORALE_CHECK(config.n_head > 0 && config.n_embd % config.n_head == 0, "[Gpt2] n_embd ", config.n_embd,
                " cannot be cut into ", config.n_head, " heads");
  nn::init::normal_(wte.weight, 0, config.initializer_range);
  nn::init::normal_(wpe.weight, 0, config.initializer_range);
  for (int64_t i = 0; i < config.n_layer; ++i) h.emplace_back(config);
}

Tensor Gpt2Model::forward(const Tensor& ids, Gpt2Cache* cache) {
  const int64_t past = cache ? cache->length : 0, most = cache ? cache->capacity : wpe.weight.size(0);
  CHORALE_CHECK(ids.dims() == 2 && past + ids.size(1) <= most, "[Gpt2] expected ids [batch, tokens] of at most ",
                most - past, " tokens, found shape ", ids.sizes());
  CHORALE_CHECK_STATE(!cache || !grad_enabled(), "[Gpt2] a cache keeps no history: use NoGrad with it");
  Tensor x = drop(wte(ids) + wpe(arange(past, past + ids.size(1), 1, DType::kI64, ids.device())));
  for (size_t i = 0; i < h.size(); ++i) x = h[i](x, cache ? &cache->layers[i] : nullptr, past);
  if (cache) cache->length = past + ids.size(1);
  return ln_f(x);
}

Gpt2::Gpt2(const Gpt2Config& with)
    : config(with), transformer(with), lm_head(with.n_embd, with.vocab_size, {.bias = false}) {
  lm_head.weight = transformer.wte.weight;
}

void Gpt2::reset_parameters() {
  const auto norm = [](nn::LayerNorm& layer) {
    nn::init::ones_(layer.weight);
    nn::init::zeros_(layer.bias);
  };
  const auto project = [](Gpt2Projection& layer, double stddev) {
    nn::init::normal_(layer.weight, 0, stddev);
    nn::init::zeros_(layer.bias);
  };
  const double range = config.initializer_range, residual = residual_stddev(config);
  for (const double stddev : {1.0, range}) {  // first what a table draws itself
    nn::init::normal_(transformer.wte.weight, 0, stddev);
    nn::init::normal_(transformer.wpe.weight, 0, stddev);
  }
  for (Gpt2Block& block : transformer.h) {
    norm(block.ln_1);
    project(block.attention_in, range);
    project(block.attention_out, residual);
    norm(block.ln_2);
    project(block.mlp_in, range);
    project(block.mlp_out, residual);
  }
  norm(transformer.ln_f);
  // The head's own weight, which the constructor draws last, gave way to the table of tokens.
}

Tensor Gpt2::forward(const Tensor& ids, Gpt2Cache* cache) { return lm_head(transformer(ids, cache)); }

Tensor Gpt2::generate(const Tensor& ids, const GenerateOptions& options) {
  CHORALE_CHECK(ids.dims() == 2 && ids.size(1) > 0, "[generate] expected ids [batch, at least one token], found shape ",
                ids.sizes());
  const int64_t total = ids.size(1) + options.max_new_tokens;
  CHORALE_CHECK(options.max_new_tokens >= 0 && total <= config.n_positions, "[generate] ", ids.size(1), " tokens and ",
                options.max_new_tokens, " new ones exceed the model's ", config.n_positions);
  const NoGrad quiet;
  Gpt2Cache cache(config, ids.size(0), total, transformer.wte.weight.dtype(), ids.device());
  std::vector<Tensor> parts = {to(ids, DType::kI64)};
  Tensor ended = zeros({ids.size(0)}, DType::kBool, ids.device());
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    const Tensor hidden = transformer(parts.back(), &cache);
    Tensor token = sample_token(lm_head(select(hidden, 1, hidden.size(1) - 1)), options.sampling);
    if (options.eos_token) {
      token = masked_fill(token, ended, *options.eos_token);
      ended = logical_or(ended, eq(token, *options.eos_token));
    }
    parts.push_back(unsqueeze(token, 1));
    if (options.on_token) options.on_token(token);
    if (all(ended).item<bool>()) break;
  }
  return cat(parts, 1);
}

}  // namespace chorale::models
