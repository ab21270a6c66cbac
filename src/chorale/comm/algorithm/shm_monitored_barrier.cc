// The barrier that finds the missing ranks, on one host: rank 0 waits for everybody, and everybody else only for rank
// 0, so that rank 0 finds out. All pass or none: rank 0 counts the piece when it has seen everybody.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/shm/shm_call.h"

namespace chorale::comm {

bool shm_monitored_barrier(ShmCall& call) {
  const ShmGroup& group = call.group;
  if (call.phase == ShmCall::Phase::kEntered) {
    call.begin_piece();
    call.roll_call = {};
    call.phase = ShmCall::Phase::kLeaving;
  }
  if (group.rank != 0) {
    const uint32_t acted = group.segment.control(0).acted.load(std::memory_order_acquire);
    return static_cast<int32_t>(acted - call.piece) >= 0;
  }
  const auto has_come = [&](int peer) { return call.has_entered(peer); };
  if (!call.roll_call.all_have_come(group.membership, call.operation(), has_come)) return false;
  if (!call.check_fingerprints()) return false;
  group.segment.publish(group.own().acted, call.piece);
  return true;
}

}  // namespace chorale::comm
