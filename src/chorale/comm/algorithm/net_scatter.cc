// Scatter between hosts: neighbours of the root take their chunks through the engine of their host, the others receive
// them from it.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {

void net_scatter(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Operation& operation = call.operation;
  const int rank = call.group.rank(), root = operation.root;
  const auto from = [&](int peer) { return operation.give[static_cast<size_t>(peer)]; };
  if (layout.is_here(root)) {
    NetCall::Here scatter{.kind = CallKind::kScatter,
                          .give = {},
                          .take = {operation.take[0]},
                          .root = layout.index_of[static_cast<size_t>(root)]};
    for (int peer : layout.neighbours()) {
      if (rank == root) scatter.give.push_back(from(peer));
    }
    call.here(scatter);
  } else {
    call.meet_here();
  }
  call.greet();
  if (!layout.is_here(root)) call.receive(root, operation.take[0]);
  for (int peer = 0; peer < call.group.size() && rank == root; ++peer) {
    if (!layout.is_here(peer)) call.send(peer, from(peer));
  }
  call.await_all();
  call.meet_here();
}

}  // namespace chorale::comm
