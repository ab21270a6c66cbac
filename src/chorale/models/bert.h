// BERT: an encoder of post-norm transformer layers with a masked-language-model head, with the names of Hugging Face's
// checkpoints.
#pragma once

#include <vector>

#include "chorale/nn/container.h"
#include "chorale/nn/linear.h"
#include "chorale/nn/norm.h"
#include "chorale/nn/pool.h"

namespace chorale::models {

// Field names are those of config.json. The defaults are the base model's (110 million parameters).
struct BertConfig {
  int64_t vocab_size = 30522;
  int64_t hidden_size = 768;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t intermediate_size = 3072;
  int64_t max_position_embeddings = 512;
  int64_t type_vocab_size = 2;
  int64_t pad_token_id = 0;
  double hidden_dropout_prob = 0.1;
  double attention_probs_dropout_prob = 0.1;
  double layer_norm_eps = 1e-12;
  double initializer_range = 0.02;
};

struct BertInput {
  Tensor input_ids;         // [batch, tokens]
  Tensor attention_mask{};  // [batch, tokens]: 0 where there is only padding; by default ones
  Tensor token_type_ids{};  // [batch, tokens]: which sentence; by default zeros
  CHORALE_TENSORS(BertInput, input_ids, attention_mask, token_type_ids)
};

struct BertEmbeddings : nn::Module {
  nn::Embedding word_embeddings, position_embeddings, token_type_embeddings;
  nn::LayerNorm norm;
  nn::Dropout dropout;
  CHORALE_MODULE(BertEmbeddings, word_embeddings, position_embeddings, token_type_embeddings,
                 nn::named("LayerNorm", norm), dropout)

  explicit BertEmbeddings(const BertConfig& config);
  Tensor forward(const Tensor& ids, const Tensor& types);
};

struct BertLayer : nn::Module {
  nn::Identity attention_input;  // what query, key and value read: where tensor parallel gathers it once for all three
  nn::Linear query, key, value, attention_out;
  nn::LayerNorm attention_norm;
  nn::Linear intermediate, output;
  nn::LayerNorm output_norm;
  nn::Dropout dropout;
  CHORALE_MODULE(BertLayer, nn::named("attention.self", attention_input), nn::named("attention.self.query", query),
                 nn::named("attention.self.key", key), nn::named("attention.self.value", value),
                 nn::named("attention.output.dense", attention_out),
                 nn::named("attention.output.LayerNorm", attention_norm), nn::named("intermediate.dense", intermediate),
                 nn::named("output.dense", output), nn::named("output.LayerNorm", output_norm), dropout)

  explicit BertLayer(const BertConfig& config);
  // The mask is [batch, 1, 1, tokens], true for keys that count; undefined when all do.
  Tensor forward(const Tensor& x, const Tensor& mask);

 private:
  Tensor attend(const Tensor& input, const Tensor& mask);
  int64_t heads_;
  double attention_dropout_;
};

// The model without a head.
struct BertModel : nn::Module {
  BertEmbeddings embeddings;
  std::vector<BertLayer> layers;
  CHORALE_MODULE(BertModel, embeddings, nn::named("encoder.layer", layers))

  explicit BertModel(const BertConfig& config);
  Tensor forward(const BertInput& input);  // [batch, tokens, hidden_size]
};

struct BertHead : nn::Module {
  nn::Linear transform;
  nn::LayerNorm norm;
  nn::Linear decoder;
  nn::Parameter bias;  // the decoder's, by its other name
  CHORALE_MODULE(BertHead, bias, nn::named("transform.dense", transform), nn::named("transform.LayerNorm", norm),
                 decoder)

  // The decoder's weight is the word embedding's.
  BertHead(const BertConfig& config, const nn::Parameter& word_embedding);
  Tensor forward(const Tensor& x);
};

// Guesses tokens: logits [batch, tokens, vocab_size].
struct BertForMaskedLM : nn::Module {
  BertConfig config;
  BertModel bert;
  BertHead head;
  CHORALE_MODULE(BertForMaskedLM, bert, nn::named("cls.predictions", head))

  explicit BertForMaskedLM(const BertConfig& config = {});
  // Draws them anew, as Gpt2's does, in the order in which the constructor draws them.
  void reset_parameters();
  Tensor forward(const BertInput& input) { return head(bert(input)); }
};

}  // namespace chorale::models
