// All-to-all between hosts. Everybody hears from everybody: that is greeting enough.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {

void net_all_to_all(NetCall& call) {
  const Operation& operation = call.operation;
  NetCall::Here exchange{.kind = CallKind::kAllToAll, .give = {}, .take = {}};
  for (int peer = 0; peer < call.group.size(); ++peer) {
    const Chunk &from = operation.give[static_cast<size_t>(peer)], &to = operation.take[static_cast<size_t>(peer)];
    if (call.layout.is_here(peer)) {
      exchange.give.push_back(from);
      exchange.take.push_back(to);
    } else {
      call.send(peer, from);
      call.receive(peer, to);
    }
  }
  call.here(exchange);
  call.await_all();
  call.meet_here();
}

}  // namespace chorale::comm
