#include "chorale/comm/algorithm/algorithms.h"

#include "chorale/base/error.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {
namespace {

Algorithm choose(NetCall& call, uint64_t bytes) {
  Algorithm chosen = call.group.table.between_hosts(call.operation.kind, bytes);
  if (chosen == Algorithm::kShards && !call.layout.follows_tree) chosen = Algorithm::kDirect;
  call.set_algorithm(chosen);
  return chosen;
}

void run_all_reduce(NetCall& call) {
  switch (choose(call, call.operation.take[0].bytes)) {
    case Algorithm::kShards:
      return net_all_reduce_by_shards(call);
    case Algorithm::kDirect:
      return net_all_reduce_directly(call);
    default:
      return net_all_reduce_by_leaders(call);
  }
}

void run_reduce_scatter(NetCall& call) {
  uint64_t bytes = 0;
  for (const Chunk& chunk : call.operation.give) bytes += chunk.bytes;
  if (choose(call, bytes) == Algorithm::kShards) {
    net_reduce_scatter_by_shards(call);
  } else {
    net_reduce_scatter_directly(call);
  }
}

}  // namespace

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
      return run_all_reduce(call);
    case CallKind::kAllGather:
    case CallKind::kNewGroup:
      return net_all_gather(call);
    case CallKind::kGather:
      return net_gather(call);
    case CallKind::kScatter:
      return net_scatter(call);
    case CallKind::kReduceScatter:
      return run_reduce_scatter(call);
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
