// Collectives on one host by reading: a rank takes what it needs where the others have it, and waits until everybody
// has read what it gave itself.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/shm_take.h"

namespace chorale::comm {

bool shm_read(ShmCall& call) {
  ShmGroup& group = call.group;
  if (call.phase == ShmCall::Phase::kEntered) {
    {
      const Hands hands(group);
      check_not_failed(group);
      take_what_others_give(call);
      check_not_failed(group);
    }
    group.segment.publish(group.own().acted, call.piece);
    call.phase = ShmCall::Phase::kLeaving;
  }
  // A rank that gave nothing that peers read outside of the segment has nothing to wait for.
  if (call.own_slot().exposure == shm::Exposure::kSlot) return true;
  if (!call.everybody(&shm::RankControl::acted)) return false;
  if (result_waits(call)) fetch_result(call);
  return true;
}

}  // namespace chorale::comm
