// Kernels of sparse tensors, which come as their parts: values [count, dense dims…] and indices [sparse dims, count].
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// values, indices -> values and indices with each place once, in row-major order, and for each entry where it went.
void sparse_coalesce(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
