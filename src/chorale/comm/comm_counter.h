// How many collectives this thread starts, kind by kind, while the scope lasts. One that moves several tensors counts
// once; barriers, messages and the making of groups are left out of the total.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>

#include "chorale/comm/call.h"

namespace chorale::comm {

class CommCounter {
 public:
  CommCounter();
  ~CommCounter();
  CommCounter(const CommCounter&) = delete;
  CommCounter& operator=(const CommCounter&) = delete;

  int64_t count(CallKind kind) const { return counts_[static_cast<size_t>(kind)]; }
  int64_t all_reduces() const { return count(CallKind::kAllReduce); }
  int64_t all_gathers() const { return count(CallKind::kAllGather); }
  int64_t reduce_scatters() const { return count(CallKind::kReduceScatter); }
  int64_t all_to_alls() const { return count(CallKind::kAllToAll); }
  int64_t total() const;
  void reset() { counts_ = {}; }

  // A call was started: every scope of the thread counts it.
  static void note(CallKind kind) {
    for (CommCounter* scope = innermost_; scope; scope = scope->outer_) ++scope->counts_[static_cast<size_t>(kind)];
  }

 private:
  static constinit thread_local CommCounter* innermost_;
  CommCounter* outer_;
  std::array<int64_t, kCallKinds> counts_{};
};

std::ostream& operator<<(std::ostream& out, const CommCounter& counter);  // 2 all_reduce, 1 all_gather

}  // namespace chorale::comm
