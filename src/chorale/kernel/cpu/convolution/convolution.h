// Convolutions of tensors, in one to three dimensions: convolution.cc reads shapes and layouts and hands the work to
// convolution_engine.h.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cpu {

// Attributes: ConvolutionAttrs.
void convolution(const KernelArgs& args);            // x, w, bias? -> y
void convolution_transpose(const KernelArgs& args);  // y, w -> x: spreads y where convolution gathers
void convolution_weight(const KernelArgs& args);     // x, y -> w: the gradient of w is this product of x and dy

}  // namespace chorale::kernel::cpu
