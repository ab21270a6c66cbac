// Kernels that arrange elements anew: each is a pattern of block copies.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void cat(const KernelArgs& args);
void stack(const KernelArgs& args);
void roll(const KernelArgs& args);
void tril(const KernelArgs& args);
void triu(const KernelArgs& args);
void one_hot(const KernelArgs& args);
// The indices of a repeat: i stands repeats[i] times.
void repeat_interleave(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
