// Random numbers and dropout on a GPU, with the words of the CPU's.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

void uniform(const KernelArgs& args);
void normal(const KernelArgs& args);
void randint(const KernelArgs& args);
void bernoulli(const KernelArgs& args);
void dropout(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
