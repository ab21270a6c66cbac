// Rows of a table, picked by index, alone or summed into bags.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void embedding(const KernelArgs& args);           // table, indices
void embedding_backward(const KernelArgs& args);  // dy, indices

void embedding_bag(const KernelArgs& args);                   // table, indices, offsets, weights? -> y, picked
void embedding_bag_backward(const KernelArgs& args);          // dy, indices, offsets, weights?, picked?
void embedding_bag_weights_backward(const KernelArgs& args);  // dy, table, indices, offsets

}  // namespace chorale::kernel::cpu
