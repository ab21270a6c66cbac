// Layers that are matrix products, and tables of rows.
#pragma once

#include <optional>

#include "chorale/nn/fp8.h"
#include "chorale/nn/module.h"
#include "chorale/op/embedding.h"

namespace chorale::nn {

struct LinearOptions {
  bool bias = true;
};
// x weight^T + bias over the last dimension.
class Linear : public Module, public TakesFp8 {
 public:
  Linear(int64_t in_features, int64_t out_features, const LinearOptions& options = {});
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;
  // Weight and bias uniform in +-1 / sqrt(in_features).
  void reset_parameters();

  Parameter weight;  // [out, in]
  Parameter bias;    // [out]
  CHORALE_MODULE(Linear, weight, bias)
};

// y_k = x1 weight_k x2^T + bias_k.
class Bilinear : public Module {
 public:
  Bilinear(int64_t in1_features, int64_t in2_features, int64_t out_features, const LinearOptions& options = {});
  Tensor forward(const Tensor& x1, const Tensor& x2) const;
  std::string describe() const override;

  Parameter weight;  // [out, in1, in2]
  Parameter bias;    // [out]
  CHORALE_MODULE(Bilinear, weight, bias)
};

struct EmbeddingOptions {
  std::optional<int64_t> padding_idx{};  // a row of zeros that is not trained; negative ones count from the end
  bool sparse = false;                   // the weight's gradient has one entry per index
  // Rows that are looked up are first scaled, in the table, to at most this norm. Not for a sharded table.
  std::optional<double> max_norm{};
  double norm_type = 2;
};
// Rows of a table by index.
class Embedding : public Module {
 public:
  Embedding(int64_t num_embeddings, int64_t embedding_dim, const EmbeddingOptions& options = {});
  Tensor forward(const Tensor& indices) const;
  std::string describe() const override;
  const EmbeddingOptions& options() const { return options_; }

  Parameter weight;  // [num_embeddings, embedding_dim], normal
  CHORALE_MODULE(Embedding, weight)

 private:
  EmbeddingOptions options_;
};

struct EmbeddingBagLayerOptions {
  BagMode mode = BagMode::kMean;
  std::optional<int64_t> padding_idx{};  // indices that are left out of their bag
  bool include_last_offset = false;      // offsets end with the number of indices
};
// Sums, means or maxima of the rows in each bag. Indices are a matrix with a bag per row, or a vector with the places
// where bags begin; with kSum there may be a factor per index.
class EmbeddingBag : public Module {
 public:
  EmbeddingBag(int64_t num_embeddings, int64_t embedding_dim, const EmbeddingBagLayerOptions& options = {});
  Tensor forward(const Tensor& indices, const Tensor& offsets = {}, const Tensor& per_sample_weights = {}) const;
  std::string describe() const override;

  Parameter weight;  // [num_embeddings, embedding_dim], normal
  CHORALE_MODULE(EmbeddingBag, weight)

 private:
  EmbeddingBagLayerOptions options_;
};

}  // namespace chorale::nn
