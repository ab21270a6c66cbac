// Reductions over any dimensions of a strided tensor.
#pragma once

#include "chorale/kernel/cpu/reduce/fold.h"
#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/reduce_attrs.h"

namespace chorale::kernel::cpu {

// Folds the dimensions `reduced` of x into `out`, which is contiguous, has dtype fold.out and one element for each
// position in the other dimensions. The order of folding depends on shapes and strides only, never on the number of
// threads.
void reduce(const Tensor& x, DimMask reduced, const Fold& fold, const Tensor& out);

// The kernels of the rows.
void sum(const KernelArgs& args);
void mean(const KernelArgs& args);
void prod(const KernelArgs& args);
void amax(const KernelArgs& args);
void amin(const KernelArgs& args);
void any(const KernelArgs& args);
void all(const KernelArgs& args);
void count_nonzero(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
