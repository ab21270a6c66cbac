// Attributes of random ops: what is drawn. Where in a stream is an input (kernel/stretch.h), so that a call that is run
// again draws anew where it gets another stretch, and the same where it gets the same.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

// a and b are what the distribution makes of them: bounds, or mean and standard deviation.
struct RandomAttrs {
  IntList sizes;
  double a = 0;
  double b = 1;
  DType dtype = DType::kF32;
};
CHORALE_FIELDS(RandomAttrs, sizes, a, b, dtype)

struct RandintAttrs {
  IntList sizes;
  int64_t low = 0;
  int64_t high = 1;
  DType dtype = DType::kI64;
};
CHORALE_FIELDS(RandintAttrs, sizes, low, high, dtype)

// Attributes of ops whose shape comes from an input.
struct DrawAttrs {
  int64_t count = 1;
  bool replacement = false;
};
CHORALE_FIELDS(DrawAttrs, count, replacement)

}  // namespace chorale::kernel
