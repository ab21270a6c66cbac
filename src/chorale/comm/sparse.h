// Inside comm: the sum of sparse tensors. Ranks have different numbers of entries: all entries are gathered, and each
// rank adds up those with equal indices, in the order of ranks (Note [Order of sums]), so that all get the same bits.
#pragma once

#include "chorale/comm/group.h"

namespace chorale::comm {

// A sparse tensor with its parts on a device: itself where they are there already.
Tensor sparse_on(const Tensor& tensor, Device device);
// Does what Group::sparse_all_reduce does, in a group that this rank is in. Entries of a device are added up on the
// host.
Tensor sparse_all_reduce(const Group& group, const Tensor& tensor, const CallOptions& options);

}  // namespace chorale::comm
