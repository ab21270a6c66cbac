// Copies and casts between any dtypes and layouts.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale {

namespace op {
struct CopyAttrs {
  DType dtype = DType::kF32;
};
CHORALE_FIELDS(CopyAttrs, dtype)
// to(x; dtype): a contiguous copy of x in that dtype. Its call_into form is how bytes move between existing tensors.
extern const OpDef kTo;
}  // namespace op

// x itself when it has that dtype already.
Tensor to(const Tensor& x, DType dtype);
// Always new memory, contiguous.
Tensor clone(const Tensor& x);
// x itself when it is contiguous already.
Tensor contiguous(const Tensor& x);
// Overwrites x with `source`, broadcast and converted; returns x.
const Tensor& copy_(const Tensor& x, const Tensor& source);

}  // namespace chorale
