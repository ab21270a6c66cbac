// Convolutions on the CPU, in one to three dimensions. Like product_engine.h: pointers and sizes, no tensors.
#pragma once

#include <array>
#include <cstdint>

#include "chorale/base/dtype.h"

namespace chorale::kernel::cpu {

// Shape letters: x is [batch, in_channels, in...], y is [batch, out_channels, out...], w is [out_channels, in_channels
// / groups, kernel...]. x and y are contiguous in that order, or with the channels last; w is always contiguous in that
// order. Only the first `spatial` entries of the arrays count. `pad` is what precedes the first element; what follows
// the last is whatever `out` asks for. out may be any size whose windows reach into x and its padding, so the caller
// decides about rounding.
struct Convolution {
  DType dtype;  // f32, f64, bf16, f16
  int spatial;  // 1, 2 or 3
  int64_t batch, groups, in_channels, out_channels;
  std::array<int64_t, 3> in, out, kernel, stride, pad, dilation;
  bool channels_last = false;
};

// Bias is [out_channels] or null. A transposed convolution is backward_data with x in the place of dy.
// Uses up to thread_count() threads. All results are overwritten. Throws InvalidArgument for other dtypes.
void convolution_forward(const Convolution& c, const void* x, const void* w, const void* bias, void* y);
void convolution_backward_data(const Convolution& c, const void* dy, const void* w, void* dx);
// Either of dw and dbias may be null.
void convolution_backward_weights(const Convolution& c, const void* x, const void* dy, void* dw, void* dbias);

}  // namespace chorale::kernel::cpu
