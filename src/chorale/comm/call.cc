#include "chorale/comm/call.h"

#include <sstream>

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

std::string describe(const Fingerprint& print) {
  const CallKind kind = kind_of(print);
  std::ostringstream text;
  text << name_of(kind);
  const char* const checksums = print.variant == transport::shm::kChecksummed ? ", with checksums" : "";
  if (kind == CallKind::kBarrier || kind == CallKind::kMonitoredBarrier || kind == CallKind::kNone) {
    text << checksums;
    return text.str();
  }
  if (kind == CallKind::kNewGroup) {
    text << " (members " << std::hex << print.detail << ')';
    return text.str();
  }
  text << " of ";
  if (print.count > 0 || print.detail == 0) {
    text << print.count;
  } else {
    text << "uneven chunks (" << std::hex << print.detail << std::dec << ") of";
  }
  // A rank of another build could hold anything here.
  if (print.dtype < kDTypeCount) text << ' ' << static_cast<DType>(print.dtype);
  const auto reduce = static_cast<Reduce>(print.reduce);
  if (reduce != Reduce::kNone) {
    text << " (" << name_of(reduce);
    if (print.count > 0 && print.detail != 0) text << ", factor or sizes " << std::hex << print.detail << std::dec;
    text << ')';
  }
  if (print.root >= 0) text << ", root " << print.root;
  if (print.tag != 0) text << ", tag " << print.tag;
  text << checksums;
  return text.str();
}

}  // namespace chorale::comm
