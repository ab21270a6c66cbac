// Inside the reducer: where values lie, and moving them from one tensor to another.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::reducer {

// Overwrites `to`, of the same shape, with the values of `from`; dtypes and strides may differ.
void copy_values(const Tensor& from, const Tensor& to);
void fill_zero(const Tensor& dense);
// A new tensor of the same values, strides and device.
Tensor copy_of(const Tensor& view);
// Whether a gradient lies in its place in the bucket.
bool same_place(const Tensor& gradient, const Tensor& view);

}  // namespace chorale::reducer
