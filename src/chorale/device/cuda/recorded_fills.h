// Fills of a few bytes in what was recorded: the libraries' products and attention begin with one each.
#pragma once

#include "chorale/device/cuda/driver.h"
#include "chorale/device/device.h"

namespace chorale::cuda {

// Puts a kernel in the place of each. Between two kernels a fill by the driver costs 5 us, a kernel that does it 2.
void fill_by_kernels(CUgraph graph, Device device);

}  // namespace chorale::cuda
