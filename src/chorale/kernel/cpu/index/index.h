// Kernels that pick and place elements by index. Every index is checked before anything is written.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void index_select(const KernelArgs& args);           // x, index
void index_select_backward(const KernelArgs& args);  // dy, index
void index_add(const KernelArgs& args);              // x, index, source
void index_copy(const KernelArgs& args);             // x, index, source
void index_fill(const KernelArgs& args);             // x, index

void index(const KernelArgs& args);           // x, indices…
void index_backward(const KernelArgs& args);  // dy, indices…
void index_put(const KernelArgs& args);       // x, values, indices…

void gather(const KernelArgs& args);           // x, index
void gather_backward(const KernelArgs& args);  // dy, index
void scatter(const KernelArgs& args);          // x, index, source
void scatter_fill(const KernelArgs& args);     // x, index
void scatter_add(const KernelArgs& args);      // x, index, source

void masked_select(const KernelArgs& args);   // x, mask
void masked_scatter(const KernelArgs& args);  // x, mask, source
void nonzero(const KernelArgs& args);         // x

}  // namespace chorale::kernel::cpu
