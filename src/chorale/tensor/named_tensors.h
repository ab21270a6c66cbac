#pragma once

#include <string>
#include <utility>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale {

// Parameters, buffers and states by name, in an order that means something: that of a module's members, or of a file.
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

}  // namespace chorale
