// What ranks can do together, and how a call looks to the others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "chorale/base/dtype.h"
#include "chorale/base/reduce.h"
#include "chorale/transport/shm/group_segment.h"

namespace chorale::comm {

using transport::shm::Fingerprint;

enum class CallKind : uint8_t {
  kNone,
  kBarrier,
  kMonitoredBarrier,
  kBroadcast,
  kReduce,
  kAllReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kNewGroup,
  kSend,
  kRecv,
};
std::string_view name_of(CallKind kind);
std::string_view name_of(Reduce reduce);

// A reduction, and for a sum the factor that every rank's values are multiplied with first.
struct Reduction {
  Reduce op = Reduce::kSum;
  double factor = 1;

  Reduction() = default;
  Reduction(Reduce reduce) : op(reduce) {}  // NOLINT(google-explicit-constructor): group.all_reduce(x, Reduce::kMax)
};
inline Reduction premultiplied_sum(double factor) {
  Reduction reduction;
  reduction.factor = factor;
  return reduction;
}

inline CallKind kind_of(const Fingerprint& print) { return static_cast<CallKind>(print.kind); }
// "all_reduce of 1000 f32 (sum)", with what distinguishes calls.
std::string describe(const Fingerprint& print);

}  // namespace chorale::comm
