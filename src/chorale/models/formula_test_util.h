// The weights that tools/oracle gives a model: matrices in +-1 / sqrt(fan in), factors of norms in [0.5, 1.5),
// everything else in +-0.1.
#pragma once

#include "chorale/nn/module.h"

namespace chorale::models {

void fill_by_formula(const nn::Module& model);

}  // namespace chorale::models
