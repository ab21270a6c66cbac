// Attributes of the op that makes a tensor like another.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

struct FullLikeAttrs {
  Scalar value;
};
CHORALE_FIELDS(FullLikeAttrs, value)

}  // namespace chorale::kernel
