// A contiguous tensor seen around one dimension: [outer, length, inner].
#pragma once

#include "chorale/tensor/shape.h"

namespace chorale::kernel::cpu {

struct Blocks {
  int64_t outer = 1;
  int64_t length = 1;
  int64_t inner = 1;

  // `dim` is not negative. A scalar counts as one element along dimension 0.
  static Blocks around(const Shape& sizes, int64_t dim) {
    Blocks blocks;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      (at < dim ? blocks.outer : at == dim ? blocks.length : blocks.inner) *= sizes[i];
    }
    return blocks;
  }
};

}  // namespace chorale::kernel::cpu
