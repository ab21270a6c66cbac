#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void full(const KernelArgs& args);  // into any layout and dtype
void arange(const KernelArgs& args);
void linspace(const KernelArgs& args);
void eye(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
