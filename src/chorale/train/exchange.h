// Named tensors between ranks: only rank 0 reads and writes checkpoints, so that ranks need no common file system.
#pragma once

#include <vector>

#include "chorale/comm/group.h"
#include "chorale/tensor/named_tensors.h"

namespace chorale::train {

// Those of rank 0, on all ranks.
NamedTensors broadcast_tensors(const comm::Group& group, const NamedTensors& tensors);
// Those of all ranks, on rank 0; elsewhere nothing.
std::vector<NamedTensors> gather_tensors(const comm::Group& group, const NamedTensors& tensors);
// Those that rank 0 has for this rank; elsewhere `tensors` is not looked at.
NamedTensors scatter_tensors(const comm::Group& group, const std::vector<NamedTensors>& tensors);

}  // namespace chorale::train
