// Linear layers of 8 bits, in software: what a GPU computes, within the rounding of sums.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// x, weight, bias? -> y; x as bytes [in, rows], weight as bytes [in, out], both e4m3; their scales
void fp8_linear(const KernelArgs& args);
// dy, and what fp8_linear gives besides y -> dx, dweight
void fp8_linear_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cpu
