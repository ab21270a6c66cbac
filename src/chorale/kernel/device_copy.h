// The kernel of to_device(), the same for every device.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel {

void move_to_device(const KernelArgs& args);

}  // namespace chorale::kernel
