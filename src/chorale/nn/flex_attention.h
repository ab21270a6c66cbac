// Attention whose scores and masks are functions that users write:
//
//   const auto alibi = [&](const Tensor& score, const FlexPlace& at) {
//     return score + sub(at.q, at.kv) * reshape(index_select(slopes, 0, flatten(at.head)), at.head.sizes());
//   };
//   const BlockMask causal = block_mask([](const FlexPlace& at) { return ge(at.q, at.kv); }, 1, 1, L, L);
//   y = flex_attention(q, k, v, {.score = alibi, .mask = &causal});
//
// The functions are written with ops, for all places at once; compiled functions fuse them into the loops over the
// scores. Tensors that they capture are inputs like others, and have gradients.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale {

// Where scores stand: tensors of i64 that broadcast to [batch, heads, queries, keys].
struct FlexPlace {
  Tensor batch;  // [batch, 1, 1, 1]
  Tensor head;   // [1, heads, 1, 1]
  Tensor q;      // [1, 1, queries, 1]
  Tensor kv;     // [1, 1, 1, keys]
};
// The scores that are used instead of these.
using FlexScore = std::function<Tensor(const Tensor& score, const FlexPlace& at)>;
// True where a query may look.
using FlexMask = std::function<Tensor(const FlexPlace& at)>;

// Which tiles of the scores are needed. Those of which nothing is are never computed; of those that are needed as a
// whole the mask is not asked.
struct BlockMask {
  FlexMask mask;
  int64_t batch = 1, heads = 1;  // 1: the same for all
  int64_t queries = 0, keys = 0;
  int64_t tile = 128;
  // Indexed by batch, head and row of tiles, in this order: tiles of keys in ascending order that need the mask, and
  // those that do not.
  std::vector<std::vector<int64_t>> partial, full;
  int64_t tile_rows() const { return (queries + tile - 1) / tile; }
  int64_t tile_columns() const { return (keys + tile - 1) / tile; }
  // The same by batch, head and column of tiles: the rows of tiles that look at the column.
  std::vector<std::vector<int64_t>> partial_by_column() const { return by_column(partial); }
  std::vector<std::vector<int64_t>> full_by_column() const { return by_column(full); }

 private:
  std::vector<std::vector<int64_t>> by_column(const std::vector<std::vector<int64_t>>& rows) const;
};
// Asks the mask at every place, now.
BlockMask block_mask(const FlexMask& mask, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                     int64_t tile = 128);

struct FlexOptions {
  FlexScore score{};
  const BlockMask* mask = nullptr;
  std::optional<double> scale{};  // 1 / sqrt(features)
  bool grouped_query = false;     // several heads of queries look at one head of keys and values
};

// softmax(score(q kᵀ scale)) v, with q [batch, heads, queries, features], k [batch, heads, keys, features], v [batch,
// heads, keys, features of values]. A query that may look nowhere gives zeros.
Tensor flex_attention(const Tensor& q, const Tensor& k, const Tensor& v, const FlexOptions& options = {});

struct FlexResult {
  Tensor output;
  Tensor log_sum_exp;  // of the scores of each query: [batch, heads, queries]
};
FlexResult flex_attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const FlexOptions& options = {});

}  // namespace chorale
