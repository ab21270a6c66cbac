// Copies and sums through views: flip, and the gradients of views.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void flip(const KernelArgs& args);
void slice_backward(const KernelArgs& args);
void diagonal_backward(const KernelArgs& args);
void unfold_backward(const KernelArgs& args);
// in[1] is only asked how it lies in memory. Where several of its elements share one place, each gets its part of the
// sum.
void as_strided_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
