// Images lie in row-major order, or with their channels last; kernels that read one of these orders copy what lies
// otherwise.
#pragma once

#include "chorale/kernel/cuda/pointwise.h"
#include "chorale/kernel/kernel_args.h"

namespace chorale::kernel::cuda {

inline bool lies_in(bool last, const Tensor& x) { return last ? x.is_channels_last() : x.is_contiguous(); }
inline Strides strides_in(bool last, const Shape& sizes) {
  return last ? channels_last_strides(sizes) : contiguous_strides(sizes);
}
inline Tensor in_image_order(const Tensor& x, bool last, DType dtype, Stream stream) {
  if (lies_in(last, x) && x.dtype() == dtype) return x;
  Tensor copy = Tensor::empty_strided(x.sizes(), strides_in(last, x.sizes()), dtype, x.device());
  copy_into(x, copy, stream);
  return copy;
}

// A result that kernels write in one of the orders, and that is copied to where it belongs if it lies otherwise.
struct DenseResult {
  DenseResult(const Tensor& to, DType dtype, Stream its_stream, bool last = false)
      : target(to),
        made(lies_in(last, to) && to.dtype() == dtype
                 ? to
                 : Tensor::empty_strided(to.sizes(), strides_in(last, to.sizes()), dtype, to.device())),
        stream(its_stream) {}
  void store() const {
    if (!made.is(target)) copy_into(made, target, stream);
  }
  Tensor target, made;
  Stream stream;
};

}  // namespace chorale::kernel::cuda
