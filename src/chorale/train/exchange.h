// Named tensors between ranks: only rank 0 reads and writes checkpoints, so that ranks need no common file system.
#pragma once

#include <vector>

#include "chorale/comm/group.h"
#include "chorale/io/safetensors.h"

namespace chorale::train {

// Those of rank 0, on all ranks.
io::NamedTensors broadcast_tensors(const comm::Group& group, const io::NamedTensors& tensors);
// Those of all ranks, on rank 0; elsewhere nothing.
std::vector<io::NamedTensors> gather_tensors(const comm::Group& group, const io::NamedTensors& tensors);
// Those that rank 0 has for this rank; elsewhere `tensors` is not looked at.
io::NamedTensors scatter_tensors(const comm::Group& group, const std::vector<io::NamedTensors>& tensors);

}  // namespace chorale::train
