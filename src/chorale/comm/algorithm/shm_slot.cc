// Collectives on one host whose data travels in the slots themselves: done after one exchange.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/shm_take.h"

namespace chorale::comm {

bool shm_slot(ShmCall& call) {
  take_what_others_give(call);
  return true;
}

}  // namespace chorale::comm
