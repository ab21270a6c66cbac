// Batch normalisation on a GPU, with what may stand behind it.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void batch_norm(const KernelArgs& args);
void batch_norm_backward(const KernelArgs& args);
void running_average(const KernelArgs& args);
// Rows of op/joined.h.
void batch_norm_relu(const KernelArgs& args);
void batch_norm_relu_backward(const KernelArgs& args);
void relu_batch_norm_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
