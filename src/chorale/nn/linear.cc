#include "chorale/nn/linear.h"

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/nn/init.h"

namespace chorale::nn {

Linear::Linear(int64_t in_features, int64_t out_features, const LinearOptions& options) {
  CHORALE_CHECK(in_features >= 0 && out_features >= 0, "[Linear] expected sizes of at least 0, found ", in_features,
                " and ", out_features);
  weight = Parameter(empty({out_features, in_features}));
  if (options.bias) bias = Parameter(empty({out_features}));
  reset_parameters();
}

void Linear::reset_parameters() {
  const double bound = weight.size(1) > 0 ? 1 / std::sqrt(static_cast<double>(weight.size(1))) : 0;
  init::uniform_(weight, -bound, bound);
  if (bias.defined()) init::uniform_(bias, -bound, bound);
}

Tensor Linear::forward(const Tensor& x) { return linear(x, weight, bias); }

std::string Linear::describe() const {
  return concat(weight.size(1), ", ", weight.size(0), bias.defined() ? "" : ", bias=false");
}

Bilinear::Bilinear(int64_t in1_features, int64_t in2_features, int64_t out_features, const LinearOptions& options) {
  CHORALE_CHECK(in1_features > 0 && in2_features > 0 && out_features > 0, "[Bilinear] expected positive sizes, found ",
                in1_features, ", ", in2_features, " and ", out_features);
  const double bound = 1 / std::sqrt(static_cast<double>(in1_features));
  weight = Parameter(uniform({out_features, in1_features, in2_features}, -bound, bound));
  if (options.bias) bias = Parameter(uniform({out_features}, -bound, bound));
}

Tensor Bilinear::forward(const Tensor& x1, const Tensor& x2) {
  CHORALE_CHECK(
      x1.rank() == x2.rank() && x1.rank() > 0 && x1.size(-1) == weight.size(1) && x2.size(-1) == weight.size(2),
      "[Bilinear] expected [.., ", weight.size(1), "] and [.., ", weight.size(2), "] of equal rank, found ", x1.sizes(),
      " and ", x2.sizes());
  const Tensor y = einsum("...i,kij,...j->...k", {x1, weight, x2});
  return bias.defined() ? y + bias : y;
}

std::string Bilinear::describe() const {
  return concat(weight.size(1), ", ", weight.size(2), ", ", weight.size(0), bias.defined() ? "" : ", bias=false");
}

Embedding::Embedding(int64_t num_embeddings, int64_t embedding_dim, const EmbeddingOptions& options)
    : options_(options) {
  CHORALE_CHECK(num_embeddings >= 0 && embedding_dim >= 0, "[Embedding] expected sizes of at least 0, found ",
                num_embeddings, " and ", embedding_dim);
  weight = Parameter(normal({num_embeddings, embedding_dim}));
  if (const auto padding = options.padding_idx) {
    CHORALE_CHECK(*padding >= -num_embeddings && *padding < num_embeddings, "[Embedding] padding_idx ", *padding,
                  " is outside of ", num_embeddings, " rows");
    init::zeros_(select(detach(weight), 0, *padding));
  }
}

Tensor Embedding::forward(const Tensor& indices) {
  return embedding(indices, weight, options_.padding_idx, options_.sparse);
}

std::string Embedding::describe() const {
  return concat(weight.size(0), ", ", weight.size(1),
                options_.padding_idx ? concat(", padding_idx=", *options_.padding_idx) : "",
                options_.sparse ? ", sparse=true" : "");
}

}  // namespace chorale::nn
