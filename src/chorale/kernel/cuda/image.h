// Pooling and resizing of images on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void interpolate(const KernelArgs& args);
void interpolate_backward(const KernelArgs& args);
void max_pool(const KernelArgs& args);
void adaptive_max_pool(const KernelArgs& args);
void max_pool_backward(const KernelArgs& args);
void avg_pool(const KernelArgs& args);
void avg_pool_backward(const KernelArgs& args);
void adaptive_avg_pool(const KernelArgs& args);
void adaptive_avg_pool_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
