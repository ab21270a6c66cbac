// Memory of a GPU that other processes map (device/peers.h), by CUDA's handles for memory.
#pragma once

#include "chorale/device/peers.h"

namespace chorale::cuda {

PeerMemory& peer_memory();

}  // namespace chorale::cuda
