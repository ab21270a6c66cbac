// Reductions that leave out what is no number.
#pragma once

#include <optional>

#include "chorale/op/op_def.h"

namespace chorale {

// sum() of reduce.h where NaN counts as 0 and gets no gradient.
Tensor nansum(const Tensor& x, const IntList& dims = {}, bool keepdim = false, std::optional<DType> dtype = {});

}  // namespace chorale
