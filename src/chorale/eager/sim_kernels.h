// Kernels of the simulated device (device/sim/sim_device.h): the CPU's, run by stream threads on the mapping that the
// host does not see.
#pragma once

#include "chorale/device/sim/sim_device.h"

namespace chorale::eager {

// Adds the device and its kernels; a later call does nothing.
void add_sim_device(const sim::Options& options = {});

}  // namespace chorale::eager
