// Convolutions of tensors, in one to three dimensions: convolution.cc reads shapes and layouts and hands the work to
// convolution_engine.h.
#pragma once

#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel {

// Lists have one entry per spatial dimension and purpose, one purpose after the other.
struct ConvolutionAttrs {
  IntList step;   // stride, padding
  IntList reach;  // dilation; and where shapes cannot tell, the spatial sizes of the result
  int64_t groups = 1;
};
CHORALE_FIELDS(ConvolutionAttrs, step, reach, groups)

namespace cpu {
void convolution(const KernelArgs& args);            // x, w, bias? -> y
void convolution_transpose(const KernelArgs& args);  // y, w -> x: spreads y where convolution gathers
void convolution_weight(const KernelArgs& args);     // x, y -> w: the gradient of w is this product of x and dy
}  // namespace cpu
}  // namespace chorale::kernel
