// Attributes of random ops. Each names its stretch of a stream, so that the same call gives the same numbers.
#pragma once

#include "chorale/base/philox.h"
#include "chorale/device/device.h"
#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

// a and b are what the distribution makes of them: bounds, or mean and standard deviation.
struct RandomAttrs {
  IntList sizes;
  double a = 0;
  double b = 1;
  int64_t seed = 0;
  int64_t offset = 0;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int64_t device_index = 0;

  RandomStream stream() const { return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)}; }
};
CHORALE_FIELDS(RandomAttrs, sizes, a, b, seed, offset, dtype, device, device_index)

struct RandintAttrs {
  IntList sizes;
  int64_t low = 0;
  int64_t high = 1;
  int64_t seed = 0;
  int64_t offset = 0;
  DType dtype = DType::kI64;
  DeviceType device = DeviceType::kCpu;
  int64_t device_index = 0;

  RandomStream stream() const { return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)}; }
};
CHORALE_FIELDS(RandintAttrs, sizes, low, high, seed, offset, dtype, device, device_index)

// Of ops whose shape comes from an input.
struct DrawAttrs {
  int64_t count = 1;
  bool replacement = false;
  int64_t seed = 0;
  int64_t offset = 0;

  RandomStream stream() const { return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)}; }
};
CHORALE_FIELDS(DrawAttrs, count, replacement, seed, offset)

}  // namespace chorale::kernel
