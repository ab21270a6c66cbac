// Bytes between devices.
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale {

// Overwrites `to` with the elements of `from`: equal sizes and dtypes, any strides, any two devices that have memory,
// in the order of the current streams of both. The host waits where ordinary host memory takes part; with pinned memory
// it does not.
void copy_between_devices(const Tensor& from, const Tensor& to);
// x itself on the CPU, else a copy there that is complete.
Tensor on_host(const Tensor& x);
// Memory of the host from and to which this device copies asynchronously; ordinary memory where it has no such.
Tensor empty_pinned(const Shape& sizes, DType dtype, Device for_device);
// The tensor's memory is used on this stream, too (device/stream.h).
void record_stream(const Tensor& x, Stream stream);

}  // namespace chorale
