// Rows of logits on a GPU. Where classes are many, of 16 bits, and no multiple of 8, rows begin at multiples of 64
// elements, with nothing in between: products that write or read rows at other addresses are several times as slow.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale::op {

constexpr int64_t kRowMultiple = 64, kLeastPadded = 1024;

inline int64_t padded_row(int64_t size) { return (size + kRowMultiple - 1) / kRowMultiple * kRowMultiple; }

// Gives the result padded rows.
inline void pad_rows(OutSpec& out) {
  Shape padded = out.sizes;
  padded.back() = padded_row(padded.back());
  out.strides = contiguous_strides(padded);
  out.strided = true;
}
inline bool wants_padded_rows(const OutSpec& out) {
  return out.device.type == DeviceType::kCuda && is_half(out.dtype) && out.sizes.size() > 1 &&
         out.sizes.back() % 8 != 0 && out.sizes.back() >= kLeastPadded;
}
inline bool has_padded_rows(const Tensor& x) {
  return x.device().type == DeviceType::kCuda && x.dims() == 2 && x.stride(1) == 1 &&
         x.stride(0) == padded_row(x.size(1)) && x.stride(0) != x.size(1);
}

}  // namespace chorale::op
