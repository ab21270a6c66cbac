// Inside comm: the collectives between hosts, each as one rank runs it (Note [Give and take], Note [Frame of a call
// between hosts]).
#pragma once

#include "chorale/comm/net/net_call.h"

namespace chorale::comm {

// net_reduce.cc
void net_all_reduce(NetCall& call);
void net_reduce(NetCall& call);
void net_reduce_scatter(NetCall& call);
// net_move.cc
void net_barrier(NetCall& call);
void net_broadcast(NetCall& call);
void net_all_gather(NetCall& call);
void net_gather(NetCall& call);
void net_scatter(NetCall& call);
void net_all_to_all(NetCall& call);
// net_monitored_barrier.cc
void net_monitored_barrier(NetCall& call);

}  // namespace chorale::comm
