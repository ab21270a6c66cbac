// Convolutions of f16 and bf16 images with their channels last, by cuDNN's graphs, which have the fast kernels for
// them.
#pragma once

#include "chorale/kernel/cuda/cudnn_graph.h"
#include "chorale/kernel/nn_attrs.h"

namespace chorale::kernel::cuda {

// Whether this tensor asks for it: four dimensions, 16 bits, channels last and not row-major as well.
bool asks_for_channels_last(const Tensor& x);
// Computes that of the three tensors which is `wanted`: x is [N, I, H, W], w [O, I / groups, h, w], y [N, O, …]. All of
// x's dtype; other orders are copied. False: cuDNN has no plan, and nothing was done.
bool convolve_channels_last(CudnnGraph::Convolves wanted, const Tensor& x, const Tensor& w, const Tensor& y,
                            const Tensor& bias, const ConvolutionAttrs& attrs, Stream stream);

}  // namespace chorale::kernel::cuda
