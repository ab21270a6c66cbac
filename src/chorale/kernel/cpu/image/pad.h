// Borders around an image or a signal.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void pad(const KernelArgs& args);
// The gradient of reflect and replicate: each element collects what was copied from it.
void pad_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
