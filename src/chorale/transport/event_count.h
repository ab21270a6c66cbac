// A count of what has happened, to sleep on.
#pragma once

#include <atomic>
#include <cstdint>

#include "chorale/base/deadline.h"

namespace chorale::transport {

class EventCount {
 public:
  uint32_t now() const { return count_.load(std::memory_order_seq_cst); }
  void add();
  // Waits until the count differs from `seen`, or for the deadline.
  void wait(uint32_t seen, Deadline deadline);

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace chorale::transport
