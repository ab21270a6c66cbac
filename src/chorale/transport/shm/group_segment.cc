#include "chorale/transport/shm/group_segment.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace chorale::transport::shm {

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
