// Linear layers with ReLU between them.
#pragma once

#include <vector>

#include "chorale/nn/container.h"

namespace chorale::models {

// Goes from widths[0] features over those in between to the last; named "0.weight", "2.weight", ….
nn::Sequential mlp(const std::vector<int64_t>& widths);

}  // namespace chorale::models
