// Attributes of the ops that pick and place elements by index (op/index.h, op/embedding.h).
#pragma once

#include "chorale/kernel/attrs.h"
#include "chorale/kernel/view.h"

namespace chorale::kernel {

struct IndexAddAttrs {
  int64_t dim = 0;
  Scalar alpha = 1;
};
CHORALE_FIELDS(IndexAddAttrs, dim, alpha)

struct FillAttrs {
  int64_t dim = 0;
  Scalar value = 0;
};
CHORALE_FIELDS(FillAttrs, dim, value)

// The gradients of index_select and gather, which need the sizes of what was read.
struct DimBackwardAttrs {
  IntList sizes;
  int64_t dim = 0;
};
CHORALE_FIELDS(DimBackwardAttrs, sizes, dim)

struct IndexPutAttrs {
  bool accumulate = false;
};
CHORALE_FIELDS(IndexPutAttrs, accumulate)

// No row has this index.
inline constexpr int64_t kNoPadding = -1;

struct EmbeddingAttrs {
  int64_t padding = kNoPadding;  // a row of the table that gets no gradient
  bool sparse = false;           // the gradient is a sparse tensor
  // Where the table is a part of a larger one: its first row in that, and how many rows that has. Rows that are
  // elsewhere count as 0.
  int64_t first = 0, total = 0;
};
CHORALE_FIELDS(EmbeddingAttrs, padding, sparse, first, total)

struct EmbeddingBackwardAttrs {
  int64_t rows = 0;
  int64_t padding = kNoPadding;
  int64_t first = 0, total = 0;  // as above
};
CHORALE_FIELDS(EmbeddingBackwardAttrs, rows, padding, first, total)

enum class BagMode : uint8_t { kSum, kMean, kMax };

struct EmbeddingBagAttrs {
  BagMode mode = BagMode::kMean;
  int64_t padding = kNoPadding;  // indices that are left out of their bag
  bool last_offset = false;      // offsets end with the number of indices
};
CHORALE_FIELDS(EmbeddingBagAttrs, mode, padding, last_offset)

struct EmbeddingBagBackwardAttrs {
  int64_t rows = 0;
  BagMode mode = BagMode::kMean;
  int64_t padding = kNoPadding;
  bool last_offset = false;
};
CHORALE_FIELDS(EmbeddingBagBackwardAttrs, rows, mode, padding, last_offset)

}  // namespace chorale::kernel
