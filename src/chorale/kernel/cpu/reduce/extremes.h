// Where the extremes are.
#pragma once

#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/reduce_attrs.h"

namespace chorale::kernel::cpu {

// out: indices.
void argmax(const KernelArgs& args);
void argmin(const KernelArgs& args);
// out: values, indices.
void max_with_index(const KernelArgs& args);
void min_with_index(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
