// What functions over rows ask of their arguments before they look at them. Rows need not: every call of one is checked
// (op/prepare.h).
#pragma once

#include "chorale/tensor/tensor.h"

namespace chorale::op {

[[noreturn]] void raise_undefined_argument(const char* function, const char* argument);

// Throws InvalidArgument, with the names, when x is undefined.
inline void need_defined(const char* function, const char* argument, const Tensor& x) {
  if (!x.defined()) [[unlikely]]
    raise_undefined_argument(function, argument);
}

}  // namespace chorale::op
