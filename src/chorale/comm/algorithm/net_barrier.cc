// The barrier between hosts.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {

void net_barrier(NetCall& call) {
  call.meet_here();
  call.greet();
  call.await_all();
  call.meet_here();
}

}  // namespace chorale::comm
