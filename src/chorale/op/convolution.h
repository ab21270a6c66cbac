// Convolutions. x is [N, C, …] or, without a batch, [C, …]; weight is [out, in / groups, kernel…]; lists have one
// entry, or one per dimension. Results have x's memory layout (row-major or channels last).
#pragma once

#include "chorale/op/op_def.h"

namespace chorale {

Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const IntList& stride = 1,
              const IntList& padding = 0, const IntList& dilation = 1, int64_t groups = 1);
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const IntList& stride = 1,
              const IntList& padding = 0, const IntList& dilation = 1, int64_t groups = 1);
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const IntList& stride = 1,
              const IntList& padding = 0, const IntList& dilation = 1, int64_t groups = 1);

// The transposes: weight is [in, out / groups, kernel…]. output_padding makes the result larger at one end, to choose
// among the sizes that a strided convolution would shrink to x's.
Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const IntList& stride = 1,
                        const IntList& padding = 0, const IntList& output_padding = 0, int64_t groups = 1,
                        const IntList& dilation = 1);
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const IntList& stride = 1,
                        const IntList& padding = 0, const IntList& output_padding = 0, int64_t groups = 1,
                        const IntList& dilation = 1);
Tensor conv_transpose3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const IntList& stride = 1,
                        const IntList& padding = 0, const IntList& output_padding = 0, int64_t groups = 1,
                        const IntList& dilation = 1);

namespace op {
extern const OpDef kConvolution, kConvolutionTranspose, kConvolutionWeight;
}

}  // namespace chorale
