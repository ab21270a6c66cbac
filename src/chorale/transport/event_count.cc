#include "chorale/transport/event_count.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

namespace chorale::transport {

// A sleeping thread says so before its last look at the count (the kernel looks for it), and a counting thread looks
// for sleepers after it has counted: one of the two sees the other.
void EventCount::add() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void EventCount::wait(uint32_t seen, Deadline deadline) {
  if (now() != seen) return;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (now() == seen && !deadline.passed()) {
    const auto left = std::min<Deadline::Clock::duration>(deadline.left(), std::chrono::hours(1));
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace chorale::transport
