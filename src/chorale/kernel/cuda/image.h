// Batch normalisation and pooling on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void batch_norm(const KernelArgs& args);
void batch_norm_backward(const KernelArgs& args);
void interpolate(const KernelArgs& args);
void interpolate_backward(const KernelArgs& args);
void running_average(const KernelArgs& args);
void max_pool(const KernelArgs& args);
void adaptive_max_pool(const KernelArgs& args);
void max_pool_backward(const KernelArgs& args);
void avg_pool(const KernelArgs& args);
void avg_pool_backward(const KernelArgs& args);
void adaptive_avg_pool(const KernelArgs& args);
void adaptive_avg_pool_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
