// Reduce-scatter between hosts in which each chunk is combined at its owner.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/net_combine_at_owner.h"

namespace chorale::comm {

void net_reduce_scatter_directly(NetCall& call) {
  const Operation& operation = call.operation;
  combine_at_owner(
      call, [&](int rank) { return operation.give[static_cast<size_t>(rank)]; }, operation.take[0]);
  call.meet_here();
}

}  // namespace chorale::comm
