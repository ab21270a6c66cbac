// The gradients of many parameters, for ops over all of them (op/update.h).
#pragma once

#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::optim {

struct GradientList {
  std::vector<Tensor> tensors;
  std::vector<size_t> parameters;  // whose they are: indices into the parameters
};

// Memory without holes that holds the gradients and stays them: gradients with holes are replaced by contiguous ones,
// sparse ones by coalesced ones, whose values count. Parameters without a gradient have none. `caller` is for messages:
// InvalidArgument for a gradient that is not floating, StateError when no parameter has a gradient at all.
GradientList gradients_of(const char* caller, std::span<const Tensor> parameters);

}  // namespace chorale::optim
