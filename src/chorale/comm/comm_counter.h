// How many collectives this thread starts, kind by kind, while the scope lasts, and how many bytes it gives to them.
// One that moves several tensors counts once; barriers, messages and the making of groups are left out of the totals.
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
  // What this rank handed over, each chunk once however many ranks it goes to: its part for an all-gather, all of its
  // values for an all-reduce.
  int64_t bytes() const { return bytes_; }
  void reset() {
    counts_ = {};
    bytes_ = 0;
  }

  // A call was started: every scope of the thread counts it.
  static bool listens() { return innermost_ != nullptr; }
  static void note(CallKind kind, size_t bytes);

 private:
  static constinit thread_local CommCounter* innermost_;
  CommCounter* outer_;
  std::array<int64_t, kCallKinds> counts_{};
  int64_t bytes_ = 0;
};

std::ostream& operator<<(std::ostream& out, const CommCounter& counter);  // 2 all_reduce, 1 all_gather

}  // namespace chorale::comm
