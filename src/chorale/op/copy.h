// Copies and casts between any dtypes and layouts.
#pragma once

#include "chorale/op/op_def.h"

namespace chorale {

namespace op {
struct CopyAttrs {
  DType dtype = DType::kF32;
  bool keep_layout = false;  // of dense tensors: transposed and channels-last ones stay what they are
};
CHORALE_FIELDS(CopyAttrs, dtype, keep_layout)
struct ToDeviceAttrs {
  DeviceType device = DeviceType::kCpu;
  int64_t device_index = 0;
};
CHORALE_FIELDS(ToDeviceAttrs, device, device_index)
// to_device(x; device): a copy of x there, of the same layout where x is dense.
extern const OpDef kToDevice;
// to(x; dtype): a copy of x in that dtype, contiguous. Its call_into form is how bytes move between existing tensors.
extern const OpDef kTo;
}  // namespace op

// x itself when it has that dtype already; otherwise a copy, of the same layout where x is dense. Floating to integer
// truncates, anything to bool is != 0, complex to real drops the imaginary part.
Tensor to(const Tensor& x, DType dtype);
// x itself when it is on that device already; otherwise a copy there, in the order of the current streams of both
// devices. The host waits for it where ordinary host memory takes part.
Tensor to(const Tensor& x, Device device);
// Always new memory, contiguous.
Tensor clone(const Tensor& x);
// x itself when it is contiguous already.
Tensor contiguous(const Tensor& x);
// Overwrites x with `source`, broadcast, converted and from whatever device; returns x.
const Tensor& copy_(const Tensor& x, const Tensor& source);
// Makes x, and every handle on it, look at the bytes, shape and dtype of another tensor: for parameters that move.
void set_data(const Tensor& x, const Tensor& other);

}  // namespace chorale
