// Attributes of the ops that make tensors out of nothing.
#pragma once

#include "chorale/device/device.h"
#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

struct FullAttrs {
  IntList sizes;
  Scalar value;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int64_t device_index = 0;
};
CHORALE_FIELDS(FullAttrs, sizes, value, dtype, device, device_index)

// start, start + step, …: `count` values.
struct RangeAttrs {
  Scalar start;
  Scalar step;
  int64_t count = 0;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int64_t device_index = 0;
};
CHORALE_FIELDS(RangeAttrs, start, step, count, dtype, device, device_index)

struct LinspaceAttrs {
  double start = 0;
  double end = 0;
  int64_t count = 0;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int64_t device_index = 0;
};
CHORALE_FIELDS(LinspaceAttrs, start, end, count, dtype, device, device_index)

struct EyeAttrs {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int64_t device_index = 0;
};
CHORALE_FIELDS(EyeAttrs, rows, cols, dtype, device, device_index)

}  // namespace chorale::kernel
