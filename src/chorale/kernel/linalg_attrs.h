// Attributes of factorisations and solvers.
#pragma once

#include "chorale/kernel/attrs.h"

namespace chorale::kernel {

struct CholeskyAttrs {
  bool upper = false;
};
CHORALE_FIELDS(CholeskyAttrs, upper)

struct TriangularAttrs {
  bool upper = false;
  bool unit = false;  // ones on the diagonal, whatever stands there
};
CHORALE_FIELDS(TriangularAttrs, upper, unit)

}  // namespace chorale::kernel
