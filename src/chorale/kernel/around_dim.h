// A contiguous tensor seen around one of its dimensions, as kernels of every device see it.
#pragma once

#include "chorale/tensor/shape.h"

namespace chorale::kernel {

// [outer, length, inner]: the elements of a line along the dimension are `inner` apart.
struct Around {
  int64_t outer = 1, length = 1, inner = 1;

  int64_t lines() const { return outer * inner; }
};

// `dim` is not negative. A scalar counts as one element along dimension 0.
inline Around around(const Shape& sizes, int64_t dim) {
  Around result;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const auto at = static_cast<int64_t>(d);
    (at < dim ? result.outer : at == dim ? result.length : result.inner) *= sizes[d];
  }
  return result;
}

}  // namespace chorale::kernel
