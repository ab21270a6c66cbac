// Samples of rows that take indices.
#pragma once

#include <initializer_list>

#include "chorale/tensor/tensor.h"

namespace chorale::op {

// These i64 values.
inline Tensor sample_indices(std::initializer_list<int64_t> list, const Shape& sizes) {
  return Tensor::from(list, sizes);
}

}  // namespace chorale::op
