// Attributes of the ops that arrange elements anew (op/shape.h).
#pragma once

#include "chorale/kernel/attrs.h"
#include "chorale/kernel/view.h"

namespace chorale::kernel {

enum class PadMode : uint8_t { kConstant, kReflect, kReplicate };

// Two entries per padded dimension, from the last dimension backwards: before, after.
struct PadAttrs {
  IntList pads;
  PadMode mode = PadMode::kConstant;
  Scalar value = 0;
};
CHORALE_FIELDS(PadAttrs, pads, mode, value)

struct RollAttrs {
  int64_t dim = 0;
  int64_t shift = 0;
};
CHORALE_FIELDS(RollAttrs, dim, shift)

struct TriangleAttrs {
  int64_t diagonal = 0;
};
CHORALE_FIELDS(TriangleAttrs, diagonal)

struct OneHotAttrs {
  int64_t classes = 0;
};
CHORALE_FIELDS(OneHotAttrs, classes)

}  // namespace chorale::kernel
