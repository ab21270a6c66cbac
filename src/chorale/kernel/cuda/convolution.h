// Convolutions on a GPU, by cuDNN.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void convolution(const KernelArgs& args);
void convolution_transpose(const KernelArgs& args);
void convolution_weight(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
