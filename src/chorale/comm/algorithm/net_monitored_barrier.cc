// The barrier that finds out who is missing, between hosts; and which algorithm runs which call.
//
// Rank 0 hears from every other rank and then tells all to go on; the others wait for nobody but rank 0. Neighbours of
// rank 0 talk to it through the engine of their host, the others through the fabric.
#include <algorithm>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/algorithm/net_algorithms.h"

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
  for (operation.seen = 1; operation.seen < group.size(); ++operation.seen) {
    if (!call.hear(operation.seen, operation.deadline)) note_absence(group.membership, operation);
  }
  if (!operation.absent.empty()) note_absence(group.membership, operation);
  for (int peer = 1; peer < group.size(); ++peer) call.tell(peer);
  call.await_all();
}

void run_call_between_hosts(NetCall& call) {
  switch (call.operation.kind) {
    case CallKind::kBarrier:
      return net_barrier(call);
    case CallKind::kMonitoredBarrier:
      return net_monitored_barrier(call);
    case CallKind::kBroadcast:
      return net_broadcast(call);
    case CallKind::kReduce:
      return net_reduce(call);
    case CallKind::kAllReduce:
      return net_all_reduce(call);
    case CallKind::kAllGather:
    case CallKind::kNewGroup:
      return net_all_gather(call);
    case CallKind::kGather:
      return net_gather(call);
    case CallKind::kScatter:
      return net_scatter(call);
    case CallKind::kReduceScatter:
      return net_reduce_scatter(call);
    case CallKind::kAllToAll:
      return net_all_to_all(call);
    case CallKind::kNone:
    case CallKind::kSend:
    case CallKind::kRecv:
      break;
  }
  CHORALE_INVARIANT(false, name_of(call.operation.kind), " is no call between hosts");
}

}  // namespace chorale::comm
