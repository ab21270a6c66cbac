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

// beta * c + alpha * a b.
struct AddmmAttrs {
  Scalar beta = 1;
  Scalar alpha = 1;
};
CHORALE_FIELDS(AddmmAttrs, beta, alpha)

}  // namespace chorale::kernel
