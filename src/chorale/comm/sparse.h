// Inside comm: the sum of sparse tensors. Ranks have different numbers of entries: all entries are gathered, and each
// rank adds up those with equal indices, in the order of ranks (Note [Order of sums]), so that all get the same bits.
#pragma once

#include "chorale/comm/group.h"

namespace chorale::comm {

// Does what Group::sparse_all_reduce does, in a group that this rank is in.
Tensor sparse_all_reduce(const Group& group, const Tensor& tensor, const CallOptions& options);

}  // namespace chorale::comm
