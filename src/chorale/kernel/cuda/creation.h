// Tensors out of nothing, and elements arranged anew, on a GPU.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void full(const KernelArgs& args);
void full_like(const KernelArgs& args);
void arange(const KernelArgs& args);
void linspace(const KernelArgs& args);
void eye(const KernelArgs& args);
void cat(const KernelArgs& args);
void stack(const KernelArgs& args);
void flip(const KernelArgs& args);
void slice_backward(const KernelArgs& args);
void diagonal_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
