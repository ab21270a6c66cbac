// The two memory orders of images [N, C, H, W].
#pragma once

#include "chorale/kernel/cpu/support/copy.h"

namespace chorale::kernel::cpu {

// x with its elements in this order and dtype; x itself when it is so already.
inline Tensor in_order(const Tensor& x, bool channels_last, DType dtype) {
  const bool fits = channels_last ? x.is_channels_last() : x.is_contiguous();
  if (fits && x.dtype() == dtype) return x;
  const Strides strides = channels_last ? channels_last_strides(x.sizes()) : contiguous_strides(x.sizes());
  const Tensor copy = Tensor::empty_strided(x.sizes(), strides, dtype, x.device());
  copy_into(x, copy);
  return copy;
}

// The order of all operands. A result of one place per channel has both orders at once, and the input decides.
inline bool is_channels_last(const KernelArgs& args) {
  const Tensor &in = args.in[0], &out = args.out[0];
  return !out.is_contiguous() || (out.is_channels_last() && in.is_channels_last() && !in.is_contiguous());
}

// Brings the first input and the first output into one order and into a type to compute with, and calls f(in, out, T())
// with that type.
template <class F>
void with_images(const KernelArgs& args, F&& f) {
  const Tensor& result = args.out[0];
  const DType compute = compute_of(result.dtype());
  const Tensor in = in_order(args.in[0], is_channels_last(args), compute);
  const Tensor out =
      compute == result.dtype() ? result : Tensor::empty_strided(result.sizes(), result.strides(), compute);
  if (compute == DType::kF32) {  // NOLINT(bugprone-branch-clone): of different types
    f(in, out, float());
  } else {
    f(in, out, double());
  }
  if (!out.is(result)) copy_into(out, result);
}

}  // namespace chorale::kernel::cpu
