// Reductions on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

// Sums over one dimension, for kernels that are made of others.
void sum_over(const Tensor& x, int64_t dim, const Tensor& out, Stream stream);

void sum(const KernelArgs& args);
void mean(const KernelArgs& args);
void prod(const KernelArgs& args);
void amax(const KernelArgs& args);
void amin(const KernelArgs& args);
void any(const KernelArgs& args);
void all(const KernelArgs& args);
void count_nonzero(const KernelArgs& args);
void max(const KernelArgs& args);
void min(const KernelArgs& args);
void argmax(const KernelArgs& args);
void argmin(const KernelArgs& args);
void norm(const KernelArgs& args);
void var(const KernelArgs& args);
void std_deviation(const KernelArgs& args);
void logsumexp(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
