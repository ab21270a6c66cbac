#include "chorale/comm/fingerprint.h"

#include <sstream>

namespace chorale::comm {

std::string describe(const Fingerprint& print) {
  const CallKind kind = kind_of(print);
  std::ostringstream text;
  text << name_of(kind);
  const char* const checksums = (print.variant & kChecksummed) != 0 ? ", with checksums" : "";
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
  if ((print.variant & kOnDevice) != 0) text << ", by devices";
  return text.str();
}

}  // namespace chorale::comm
