// Attributes of the op that makes a tensor like another.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

struct FillAttrs {
  Scalar value;
};
CHORALE_FIELDS(FillAttrs, value)

}  // namespace chorale::kernel
