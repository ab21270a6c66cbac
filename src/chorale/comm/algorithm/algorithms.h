// Inside comm: the algorithms, one file each, and their one interface. Each runs one call of one rank (Note [Give and
// take]).
//
// On one host (shm_*.cc) an algorithm moves the call as far as it goes without waiting, and is called again until it
// says that the call is done. Between hosts (net_*.cc) it is plain blocking code (Note [Frame of a call between
// hosts]). Which one runs a call says the table (table.h), where there is a choice.
#pragma once

namespace chorale::comm {

class NetCall;
class ShmCall;

// ---- on one host

bool shm_slot(ShmCall& call);
bool shm_read(ShmCall& call);
bool shm_in_place(ShmCall& call);
bool shm_monitored_barrier(ShmCall& call);

// ---- between hosts

void net_barrier(NetCall& call);
void net_monitored_barrier(NetCall& call);
void net_broadcast(NetCall& call);
void net_all_gather(NetCall& call);
void net_gather(NetCall& call);
void net_scatter(NetCall& call);
void net_all_to_all(NetCall& call);
void net_reduce(NetCall& call);
// Three ways, the same bits (Note [Order of sums] in vec/combine.h).
void net_all_reduce_by_leaders(NetCall& call);
void net_all_reduce_by_shards(NetCall& call);
void net_all_reduce_directly(NetCall& call);
void net_reduce_scatter_by_shards(NetCall& call);
void net_reduce_scatter_directly(NetCall& call);

// Picks one by kind, size and layout, and runs it.
void run_call_between_hosts(NetCall& call);

}  // namespace chorale::comm
