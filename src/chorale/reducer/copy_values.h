// Inside the reducer: values from one tensor to another.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::reducer {

// Overwrites `to`, of the same shape, with the values of `from`; dtypes and strides may differ.
void copy_values(const Tensor& from, const Tensor& to);
void fill_zero(const Tensor& dense);

}  // namespace chorale::reducer
