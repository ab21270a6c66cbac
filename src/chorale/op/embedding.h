// Rows of a table, picked by index. Indices are i64 or i32.
#pragma once

#include <optional>

#include "chorale/kernel/index_attrs.h"
#include "chorale/op/op_def.h"

namespace chorale {

using kernel::BagMode;
using kernel::kNoPadding;

// The rows of `table` [rows, columns] at `indices`, of any shape: [shape…, columns]. The row `padding` (negative ones
// count from the end) gets no gradient. With `sparse` the gradient is a sparse tensor with one entry per index.
Tensor embedding(const Tensor& indices, const Tensor& table, std::optional<int64_t> padding = {}, bool sparse = false);

struct EmbeddingBagOptions {
  BagMode mode = BagMode::kMean;
  Tensor weights{};                  // a factor per index; kSum only
  std::optional<int64_t> padding{};  // indices that are left out of their bag
  bool include_last_offset = false;  // offsets end with the number of indices
};
// Sums, means or maxima of the rows in each bag: [bags, columns]. `indices` is a vector and bag b begins at offsets[b];
// or a matrix with a bag per row, without offsets. An empty bag gives zeros.
Tensor embedding_bag(const Tensor& indices, const Tensor& table, const Tensor& offsets,
                     const EmbeddingBagOptions& options = {});
Tensor embedding_bag(const Tensor& indices, const Tensor& table, const EmbeddingBagOptions& options = {});

namespace op {
using kernel::EmbeddingAttrs;
using kernel::EmbeddingBackwardAttrs;
using kernel::EmbeddingBagAttrs;
using kernel::EmbeddingBagBackwardAttrs;

extern const OpDef kEmbedding, kEmbeddingBackward;
extern const OpDef kEmbeddingBag, kEmbeddingBagBackward, kEmbeddingBagWeightsBackward;
}  // namespace op

}  // namespace chorale
