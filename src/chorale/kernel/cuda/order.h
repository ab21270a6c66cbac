// Sorting on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

// Lines of `width` pairs of 64 bits, a power of two: sorted by the first number, then the second, unsigned.
void sort_pairs(const Tensor& pairs, int64_t width, Stream stream);

void sort(const KernelArgs& args);
void topk(const KernelArgs& args);
void searchsorted(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
