#include "chorale/comm/call.h"

namespace chorale::comm {

std::string_view name_of(CallKind kind) {
  switch (kind) {
    case CallKind::kNone:
      return "nothing";
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kMonitoredBarrier:
      return "monitored_barrier";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kReduce:
      return "reduce";
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kGather:
      return "gather";
    case CallKind::kScatter:
      return "scatter";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kNewGroup:
      return "new_group";
    case CallKind::kSend:
      return "send";
    case CallKind::kRecv:
      return "recv";
  }
  return "an unknown call";
}

std::string_view name_of(Reduce reduce) {
  switch (reduce) {
    case Reduce::kNone:
      return "none";
    case Reduce::kSum:
      return "sum";
    case Reduce::kProduct:
      return "product";
    case Reduce::kMin:
      return "min";
    case Reduce::kMax:
      return "max";
    case Reduce::kAverage:
      return "average";
    case Reduce::kBitAnd:
      return "bit_and";
    case Reduce::kBitOr:
      return "bit_or";
    case Reduce::kBitXor:
      return "bit_xor";
  }
  return "an unknown reduction";
}

}  // namespace chorale::comm
