#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::reducer {

// What a rank contributes to the average of a sparse gradient: rows of a dense gradient are entries, and where there is
// none there are no entries. They are on the host, wherever the gradient is. Division comes before the sum, as for
// dense ones.
Tensor entries_of(const Tensor& gradient, const Shape& sizes, DType dtype, double factor);

}  // namespace chorale::reducer
