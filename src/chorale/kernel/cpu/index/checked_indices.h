// Reading and checking index tensors.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::kernel::cpu {

enum class Negative : uint8_t { kError, kFromEnd };

// The indices, contiguous in i64, all of them in [0, bound); with kFromEnd negative ones count from the end. Throws
// InvalidArgument that names the index, its position and the bound, which is the size of dimension `dim`.
Tensor checked_indices(const char* op, const Tensor& index, int64_t bound, int64_t dim,
                       Negative negative = Negative::kError);

}  // namespace chorale::kernel::cpu
