// What ranks can do together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "chorale/base/dtype.h"
#include "chorale/base/reduce.h"

namespace chorale::comm {

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
inline constexpr size_t kCallKinds = static_cast<size_t>(CallKind::kRecv) + 1;
std::string_view name_of(CallKind kind);
// True when a rank gives the same chunk to everybody, or nothing; else it gives one chunk per rank.
inline bool gives_one_chunk(CallKind kind) {
  return kind != CallKind::kScatter && kind != CallKind::kReduceScatter && kind != CallKind::kAllToAll;
}
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

}  // namespace chorale::comm
