// Linear layers of 8 bits (Note [Scales of 8 bits] in kernel/fp8.h), on GPUs from Ada on.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

// x, weight, bias? -> y; x as bytes [in, rows], weight as bytes [in, out], both e4m3; their scales
void fp8_linear(const KernelArgs& args);
// dy, and what fp8_linear gives besides y -> dx, dweight
void fp8_linear_backward(const KernelArgs& args);

}  // namespace chorale::kernel::cuda
