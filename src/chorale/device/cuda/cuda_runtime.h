// The runtime of NVIDIA GPUs (device/runtime.h).
#pragma once

#include <memory>

#include "chorale/device/runtime.h"

namespace chorale::cuda {

// Throws StateError, saying what to do, where there is no driver or no GPU.
std::unique_ptr<Runtime> make_runtime();

}  // namespace chorale::cuda
