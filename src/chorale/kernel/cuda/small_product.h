// Products so small that starting to multiply takes longer than multiplying.
#pragma once

#include "chorale/kernel/cuda/product_engine.h"

namespace chorale::kernel::cuda {

// Launches the product if it is small; false: nothing was done.
bool multiply_small(const Product& p, Stream stream);

}  // namespace chorale::kernel::cuda
