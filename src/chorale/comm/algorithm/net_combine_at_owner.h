// Direct reductions between hosts, each rank its own slice: everybody sends every owner its values of the owner's
// slice, unsummed, and the owner combines them in the order of ranks. Volume: the same as a ring.
#pragma once

#include "chorale/comm/algorithm/net_partial_sum.h"

namespace chorale::comm {

// Rank r's values of every chunk go to the chunk's owner, which combines them into `to`.
template <class ChunkOf>
void combine_at_owner(NetCall& call, const ChunkOf& chunk, const Chunk& to) {
  const int rank = call.group.rank();
  const Leaves leaves(call, chunk(rank));
  for (int peer = 0; peer < call.group.size(); ++peer) {
    if (call.layout.is_here(peer)) continue;
    call.send(peer, chunk(peer));
    call.receive(peer, leaves.of(peer));
  }
  NetCall::Here exchange{.kind = CallKind::kAllToAll, .give = {}, .take = {}};
  for (int peer : call.layout.neighbours()) {
    exchange.give.push_back(chunk(peer));
    exchange.take.push_back(leaves.of(peer));
  }
  if (exchange.give.size() > 1) call.here(exchange);
  call.await_all();
  combine_leaves(call, leaves.all(), to);
}

}  // namespace chorale::comm
