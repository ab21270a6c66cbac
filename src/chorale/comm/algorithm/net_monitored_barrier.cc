// The barrier that finds the missing ranks, between hosts. Rank 0 hears from every other rank and then tells all to go
// on; the others wait for nobody but rank 0. Neighbours of rank 0 talk to it through the engine of their host, the
// others through the fabric.
#include "chorale/base/error.h"
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/net/net_call.h"
#include "chorale/comm/roll_call.h"

namespace chorale::comm {

void net_monitored_barrier(NetCall& call) {
  const NetGroup& group = call.group;
  Operation& operation = call.operation;
  if (group.rank() != 0) {
    call.tell(0);
    if (!call.hear(0, operation.deadline)) {
      throw CallFailed{concat("timed out: nothing from rank ", group.global(0), " in the monitored barrier"),
                       group.global(0)};
    }
    return call.await_all();
  }
  RollCall roll_call;
  const auto has_come = [&](int peer) { return peer == 0 || call.hear(peer, operation.deadline); };
  while (!roll_call.all_have_come(group.membership, operation, has_come)) roll_call.skip(group.membership, operation);
  for (int peer = 1; peer < group.size(); ++peer) call.tell(peer);
  call.await_all();
}

}  // namespace chorale::comm
