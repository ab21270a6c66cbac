// Sorting along a dimension, and what rests on sorting.
#pragma once

#include "chorale/kernel/kernel_args.h"
#include "chorale/kernel/order_attrs.h"

namespace chorale::kernel::cpu {

// out: values, indices. Stable.
void sort(const KernelArgs& args);
// out: values, indices, in order; of equal elements the first ones.
void topk(const KernelArgs& args);
// Makes its outputs: values in order, where each element of x is among them, how often each occurs.
void unique(const KernelArgs& args);
// in: boundaries, values.
void searchsorted(const KernelArgs& args);
// in: x, weights?. Makes its output.
void bincount(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
