// Running results along a dimension, on a GPU. Not of complex numbers.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void cumsum(const KernelArgs& args);
void cumprod(const KernelArgs& args);
void recurrence(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
