#include "chorale/transport/shm/group_segment.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "chorale/base/deadline.h"

namespace chorale::transport::shm {

void GroupSegment::record_failure(const Failure& failure) const {
  GroupHeader& record = header();
  auto none = FailureState::kNone;
  if (!record.failure.compare_exchange_strong(none, FailureState::kClaimed, std::memory_order_seq_cst)) return;
  record.reporter = failure.reporter;
  record.culprit = failure.culprit;
  const size_t length = std::min(failure.text.size(), kFailureTextBytes - 1);
  std::memcpy(record.text, failure.text.data(), length);
  record.text[length] = 0;
  record.failure.store(FailureState::kWritten, std::memory_order_seq_cst);
  ring_all();
}

GroupSegment::Failure GroupSegment::recorded_failure() const {
  const GroupHeader& record = header();
  // The rank that claimed it may have died before it wrote.
  const Deadline patience = within(std::chrono::milliseconds(100));
  while (record.failure.load(std::memory_order_acquire) != FailureState::kWritten) {
    if (patience.passed()) return {-1, -1, "a rank failed and ended before it could say why"};
    sched_yield();
  }
  if (record.reporter < 0 || record.reporter >= size_) return {-1, -1, "the record of the failure is damaged"};
  return {record.reporter, record.culprit, std::string(record.text, strnlen(record.text, kFailureTextBytes))};
}

// Futexes of shared memory, not of one process: no FUTEX_PRIVATE_FLAG.
void GroupSegment::ring_all() const {
  for (int rank = 0; rank < size_; ++rank) {
    RankControl& peer = control(rank);
    if (peer.sleeping.load(std::memory_order_seq_cst) == 0) continue;
    peer.doorbell.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &peer.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void GroupSegment::wait_for_bell(std::atomic<uint32_t>& bell, uint32_t seen, int64_t nanoseconds) {
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, &bell, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace chorale::transport::shm
