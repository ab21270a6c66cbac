#include "chorale/nn/linear.h"

#include <cmath>

#include "chorale/api/api.h"
#include "chorale/nn/init.h"
#include "chorale/op/fp8.h"
#include "chorale/op/need_defined.h"

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

Tensor Linear::forward(const Tensor& x) const { return fp8() ? fp8_linear(x, weight, bias) : linear(x, weight, bias); }

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

Tensor Bilinear::forward(const Tensor& x1, const Tensor& x2) const {
  op::need_defined("Bilinear", "x1", x1);
  op::need_defined("Bilinear", "x2", x2);
  CHORALE_CHECK(
      x1.dims() == x2.dims() && x1.dims() > 0 && x1.size(-1) == weight.size(1) && x2.size(-1) == weight.size(2),
      "[Bilinear] expected [.., ", weight.size(1), "] and [.., ", weight.size(2),
      "] with equally many dimensions, found ", x1.sizes(), " and ", x2.sizes());
  const Tensor y = einsum("...i,kij,...j->...k", {x1, weight, x2});
  return bias.defined() ? y + bias : y;
}

std::string Bilinear::describe() const {
  return concat(weight.size(1), ", ", weight.size(2), ", ", weight.size(0), bias.defined() ? "" : ", bias=false");
}

namespace {
// A table of normal numbers, with zeros for the padding.
Parameter make_table(const char* type, int64_t rows, int64_t columns, std::optional<int64_t> padding) {
  CHORALE_CHECK(rows >= 0 && columns >= 0, "[", type, "] expected sizes of at least 0, found ", rows, " and ", columns);
  const Tensor table = normal({rows, columns});
  if (padding) {
    CHORALE_CHECK(*padding >= -rows && *padding < rows, "[", type, "] padding_idx ", *padding, " is outside of ", rows,
                  " rows");
    init::zeros_(select(table, 0, *padding));
  }
  return Parameter(table);
}
}  // namespace

Embedding::Embedding(int64_t num_embeddings, int64_t embedding_dim, const EmbeddingOptions& options)
    : weight(make_table("Embedding", num_embeddings, embedding_dim, options.padding_idx)), options_(options) {}

namespace {
// Rows are written in place: an index that comes several times writes the same row again.
void limit_rows(const Tensor& table, const Tensor& indices, double most, double p) {
  CHORALE_CHECK(!table.is_sharded(), "[Embedding] max_norm is not implemented for a sharded table (", table.sizes(),
                "): a row's norm would need all of its parts; leave max_norm out, or keep the table whole");
  const NoGrad quiet;
  const Tensor chosen = flatten(indices), rows = index_select(table, 0, chosen);
  const Tensor lengths = norm(rows, p, 1, true);
  const Tensor factors = where(gt(lengths, most), div(full_like(lengths, most), add(lengths, 1e-7)), Scalar(1));
  index_copy_(table, 0, chosen, mul(rows, factors));
}
}  // namespace

Tensor Embedding::forward(const Tensor& indices) const {
  if (options_.max_norm) limit_rows(weight, indices, *options_.max_norm, options_.norm_type);
  return embedding(indices, weight, options_.padding_idx, options_.sparse);
}

std::string Embedding::describe() const {
  return concat(
      weight.size(0), ", ", weight.size(1), options_.padding_idx ? concat(", padding_idx=", *options_.padding_idx) : "",
      options_.max_norm ? concat(", max_norm=", *options_.max_norm) : "", options_.sparse ? ", sparse=true" : "");
}

EmbeddingBag::EmbeddingBag(int64_t num_embeddings, int64_t embedding_dim, const EmbeddingBagLayerOptions& options)
    : weight(make_table("EmbeddingBag", num_embeddings, embedding_dim, options.padding_idx)), options_(options) {}

Tensor EmbeddingBag::forward(const Tensor& indices, const Tensor& offsets, const Tensor& per_sample_weights) const {
  const EmbeddingBagOptions options{.mode = options_.mode,
                                    .weights = per_sample_weights,
                                    .padding = options_.padding_idx,
                                    .include_last_offset = options_.include_last_offset};
  return offsets.defined() ? embedding_bag(indices, weight, offsets, options) : embedding_bag(indices, weight, options);
}

std::string EmbeddingBag::describe() const {
  const char* modes[] = {"sum", "mean", "max"};
  return concat(weight.size(0), ", ", weight.size(1), ", mode=", modes[static_cast<size_t>(options_.mode)]);
}

}  // namespace chorale::nn
