// Gather between hosts: neighbours of the root give it their chunks through the engine of their host, the others send
// them to it.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {

void net_gather(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Operation& operation = call.operation;
  const int rank = call.group.rank(), root = operation.root;
  const auto to = [&](int peer) { return operation.take[static_cast<size_t>(peer)]; };
  if (layout.is_here(root)) {
    NetCall::Here gather{.kind = CallKind::kGather,
                         .give = {operation.give[0]},
                         .take = {},
                         .root = layout.index_of[static_cast<size_t>(root)]};
    for (int peer : layout.neighbours()) {
      if (rank == root) gather.take.push_back(to(peer));
    }
    call.here(gather);
  } else {
    call.meet_here();
  }
  call.greet();
  if (!layout.is_here(root)) call.send(root, operation.give[0]);
  for (int peer = 0; peer < call.group.size() && rank == root; ++peer) {
    if (!layout.is_here(peer)) call.receive(peer, to(peer));
  }
  call.await_all();
  call.meet_here();
}

}  // namespace chorale::comm
