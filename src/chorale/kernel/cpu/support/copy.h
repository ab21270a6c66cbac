// Copies between any layouts and dtypes, for kernels (ops have op/copy.h).
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// x itself when it is contiguous already, otherwise a contiguous copy.
Tensor contiguous(const Tensor& x);
// A contiguous tensor of that dtype with the values of x; x itself when it is one.
Tensor contiguous(const Tensor& x, DType dtype);
// Overwrites `to` with the values of `from`, converted. Shapes are equal; the memory must not overlap.
void copy_into(const Tensor& from, const Tensor& to);

// The kernel of to(), and of a list of such copies.
void copy(const KernelArgs& args);
void copy_each(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
