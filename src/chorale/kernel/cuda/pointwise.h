// Pointwise rows on a GPU: kernels written from the rows' expressions, and copies between any layouts and dtypes.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void pointwise(const KernelArgs& args);
// dy, x -> the gradient of an activation, and its sums over all but the last dimension
void gelu_erf_backward_summed(const KernelArgs& args);
void gelu_tanh_backward_summed(const KernelArgs& args);
// The kernel of to().
void copy(const KernelArgs& args);

// Overwrites `to` with the values of `from`, converted. Shapes are equal; the memory must not overlap.
void copy_into(const Tensor& from, const Tensor& to, Stream stream);
// x itself when it is contiguous and of that dtype already, otherwise a copy that is.
Tensor contiguous(const Tensor& x, Stream stream);
Tensor contiguous(const Tensor& x, DType dtype, Stream stream);
// All bytes of a contiguous tensor become zero.
void set_zero(const Tensor& x, Stream stream);

}  // namespace chorale::kernel::cuda
