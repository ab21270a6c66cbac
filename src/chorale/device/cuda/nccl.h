// NCCL, opened when it is first needed: collectives between ranks that have a GPU each (device/collectives.h).
#pragma once

#include "chorale/device/collectives.h"

namespace chorale::cuda {

DeviceCollectives& nccl_collectives();

}  // namespace chorale::cuda
