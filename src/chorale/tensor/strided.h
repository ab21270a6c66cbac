// A tensor's elements for loops that know no tensors.
#pragma once

#include "chorale/tensor/tensor.h"
#include "chorale/vec/strided.h"

namespace chorale {

// It points into the tensor, which must outlive it.
inline vec::StridedView strided(const Tensor& x) {
  return {x.raw(), x.dtype(), {x.sizes().data(), x.sizes().size()}, {x.strides().data(), x.strides().size()}};
}

}  // namespace chorale
