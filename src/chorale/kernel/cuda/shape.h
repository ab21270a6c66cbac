// Elements arranged anew on a GPU: triangles, padding, rolling, and gradients of windows.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void roll(const KernelArgs& args);
void tril(const KernelArgs& args);
void triu(const KernelArgs& args);
void pad(const KernelArgs& args);
// These two take no complex numbers.
void pad_backward(const KernelArgs& args);
void unfold_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
