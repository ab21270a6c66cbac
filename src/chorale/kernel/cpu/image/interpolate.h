// Images [N, C, H, W] resized; row-major or with the channels last.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

void interpolate(const KernelArgs& args);           // x -> y; InterpolateAttrs
void interpolate_backward(const KernelArgs& args);  // dy -> dx; height and width are those of dx

}  // namespace chorale::kernel::cpu
