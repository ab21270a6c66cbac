// Losses of single elements and group normalisation, on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void difference_loss(const KernelArgs& args);
void difference_loss_backward(const KernelArgs& args);
void binary_cross_entropy(const KernelArgs& args);
void group_norm(const KernelArgs& args);
void group_norm_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
