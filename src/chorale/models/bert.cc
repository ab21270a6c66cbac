#include "chorale/models/bert.h"

#include "chorale/api/api.h"
#include "chorale/nn/init.h"
#include "chorale/sharding/sharded.h"

namespace chorale::models {
namespace {

nn::Linear dense(int64_t in, int64_t out, const BertConfig& config) {
  nn::Linear layer(in, out);
  nn::init::normal_(layer.weight, 0, config.initializer_range);
  nn::init::zeros_(layer.bias);
  return layer;
}
nn::LayerNorm norm_of(const BertConfig& config) {
  return nn::LayerNorm(config.hidden_size, {.eps = config.layer_norm_eps});
}
nn::Embedding table(int64_t rows, const BertConfig& config, std::optional<int64_t> padding = {}) {
  nn::Embedding result(rows, config.hidden_size, {.padding_idx = padding});
  nn::init::normal_(result.weight, 0, config.initializer_range);
  if (padding) nn::init::zeros_(select(detach(result.weight), 0, *padding));
  return result;
}

}  // namespace

BertEmbeddings::BertEmbeddings(const BertConfig& config)
    : word_embeddings(table(config.vocab_size, config, config.pad_token_id)),
      position_embeddings(table(config.max_position_embeddings, config)),
      token_type_embeddings(table(config.type_vocab_size, config)),
      norm(norm_of(config)),
      dropout(config.hidden_dropout_prob) {}

Tensor BertEmbeddings::forward(const Tensor& ids, const Tensor& types) {
  CHORALE_CHECK(ids.dims() == 2 && ids.size(1) <= position_embeddings.weight.size(0),
                "[Bert] expected input_ids [batch, at most ", position_embeddings.weight.size(0),
                " tokens], found shape ", ids.sizes());
  // One by one: compilers differ in which operand of a sum they compute first, and graphs are cut by that order.
  const Tensor words = word_embeddings(ids);
  const Tensor type = types.defined() ? token_type_embeddings(types) : select(token_type_embeddings.weight, 0, 0);
  const Tensor positions = position_embeddings(arange(ids.size(1), DType::kI64, ids.device()));
  return dropout(norm(words + type + positions));
}

BertLayer::BertLayer(const BertConfig& config)
    : query(dense(config.hidden_size, config.hidden_size, config)),
      key(dense(config.hidden_size, config.hidden_size, config)),
      value(dense(config.hidden_size, config.hidden_size, config)),
      attention_out(dense(config.hidden_size, config.hidden_size, config)),
      attention_norm(norm_of(config)),
      intermediate(dense(config.hidden_size, config.intermediate_size, config)),
      output(dense(config.intermediate_size, config.hidden_size, config)),
      output_norm(norm_of(config)),
      dropout(config.hidden_dropout_prob),
      heads_(config.num_attention_heads),
      attention_dropout_(config.attention_probs_dropout_prob) {
  CHORALE_CHECK(heads_ > 0 && config.hidden_size % heads_ == 0, "[Bert] hidden_size ", config.hidden_size,
                " cannot be cut into ", heads_, " heads");
}

Tensor BertLayer::attend(const Tensor& input, const Tensor& mask) {
  const Tensor x = attention_input(input);
  const int64_t B = x.size(0), T = x.size(1), D = x.size(2);  // batch, tokens, width
  const auto split_heads = [&](const Tensor& part) { return transpose(view(part, {B, T, heads_, D / heads_}), 1, 2); };
  const Tensor mixed =
      scaled_dot_product_attention(split_heads(query(x)), split_heads(key(x)), split_heads(value(x)),
                                   {.mask = mask, .dropout_p = is_training() ? attention_dropout_ : 0});
  return attention_out(reshape(transpose(mixed, 1, 2), {B, T, D}));
}

Tensor BertLayer::forward(const Tensor& x, const Tensor& mask) {
  const Tensor y = attention_norm(dropout(attend(x, mask)) + x);
  return output_norm(dropout(output(gelu(intermediate(y)))) + y);
}

BertModel::BertModel(const BertConfig& config) : embeddings(config) {
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) layers.emplace_back(config);
}

Tensor BertModel::forward(const BertInput& input) {
  Tensor mask;
  if (input.attention_mask.defined()) {
    CHORALE_CHECK(input.attention_mask.sizes() == input.input_ids.sizes(), "[Bert] input_ids have shape ",
                  input.input_ids.sizes(), ", but the attention_mask ", input.attention_mask.sizes());
    mask = view(ne(input.attention_mask, 0), {input.input_ids.size(0), 1, 1, input.input_ids.size(1)});
  }
  Tensor x = embeddings(input.input_ids, input.token_type_ids);
  for (BertLayer& layer : layers) x = layer(x, mask);
  return x;
}

BertHead::BertHead(const BertConfig& config, const nn::Parameter& word_embedding)
    : transform(dense(config.hidden_size, config.hidden_size, config)),
      norm(norm_of(config)),
      decoder(dense(config.hidden_size, config.vocab_size, config)),
      bias(decoder.bias) {
  decoder.weight = word_embedding;
}

Tensor BertHead::forward(const Tensor& x) { return decoder(norm(gelu(transform(x)))); }

BertForMaskedLM::BertForMaskedLM(const BertConfig& with)
    : config(with), bert(with), head(with, bert.embeddings.word_embeddings.weight) {}

namespace {
// Where a table is sharded, a row of it is no view of it.
void clear_row(const Tensor& table, int64_t row) {
  const NoGrad quiet;
  if (!table.is_sharded()) {
    zero_(select(table, 0, row));
    return;
  }
  const sharding::Layout& layout = *sharding::sharded(table).layout;
  int64_t at = 0;
  for (const op::Chunk& run : sharding::runs_of(table.size(0), 0, layout.mesh, layout.placements, layout.mesh.dims(),
                                                layout.mesh.coordinates())) {
    if (row >= run.first && row < run.first + run.size)
      zero_(select(sharding::local_of(table), 0, at + row - run.first));
    at += run.size;
  }
}
}  // namespace

void BertForMaskedLM::reset_parameters() {
  const double range = config.initializer_range;
  const auto norm = [](nn::LayerNorm& layer) {
    nn::init::ones_(layer.weight);
    nn::init::zeros_(layer.bias);
  };
  const auto table = [&](nn::Embedding& rows) {  // twice: first what a table draws itself
    nn::init::normal_(rows.weight);
    nn::init::normal_(rows.weight, 0, range);
  };
  const auto draw_dense = [&](nn::Linear& layer) {
    layer.reset_parameters();
    nn::init::normal_(layer.weight, 0, range);
    nn::init::zeros_(layer.bias);
  };
  table(bert.embeddings.word_embeddings);
  clear_row(bert.embeddings.word_embeddings.weight, config.pad_token_id);
  table(bert.embeddings.position_embeddings);
  table(bert.embeddings.token_type_embeddings);
  norm(bert.embeddings.norm);
  for (BertLayer& layer : bert.layers) {
    for (nn::Linear* linear :
         {&layer.query, &layer.key, &layer.value, &layer.attention_out, &layer.intermediate, &layer.output})
      draw_dense(*linear);
    norm(layer.attention_norm);
    norm(layer.output_norm);
  }
  draw_dense(head.transform);
  norm(head.norm);
  nn::init::zeros_(head.decoder.bias);  // its weight is the table of words; the constructor drew its own last
}

}  // namespace chorale::models
