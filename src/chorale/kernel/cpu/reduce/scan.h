// Running sums, products and linear recurrences along one dimension.
#pragma once

#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/reduce_attrs.h"

namespace chorale::kernel::cpu {

void cumsum(const KernelArgs& args);
void cumprod(const KernelArgs& args);
// in: a, b. out[i] = b[i - 1] + a[i - 1] * out[i - 1], starting from 0 (reverse: i + 1 for i - 1).
void recurrence(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
