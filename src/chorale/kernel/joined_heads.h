// The gradients of queries, keys and values in one tensor, as kernels of every device see them.
#pragma once

#include <array>

#include "chorale/tensor/tensor.h"

namespace chorale::kernel {

// [B, T, 3, H, D] as three views [B, H, T, D].
inline std::array<Tensor, 3> joined_heads(const Tensor& all) {
  const Shape sizes = {all.size(0), all.size(3), all.size(1), all.size(4)};
  std::array<Tensor, 3> parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = all.view_as(sizes, {all.stride(0), all.stride(3), all.stride(1), all.stride(4)},
                           all.offset() + static_cast<int64_t>(i) * all.stride(2));
  }
  return parts;
}

}  // namespace chorale::kernel
