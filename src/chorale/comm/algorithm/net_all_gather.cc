// All-gather between hosts: a rank's chunk goes to one member of every other host, in turn, which then shares it with
// its neighbours.
#include <algorithm>

#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {

void net_all_gather(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Operation& operation = call.operation;
  const auto members = static_cast<size_t>(layout.local_size());
  const auto taken = [&](int rank) { return operation.take[static_cast<size_t>(rank)]; };
  NetCall::Here share{.kind = CallKind::kAllGather, .give = {operation.give[0]}, .take = {}};
  for (int rank : layout.neighbours()) share.take.push_back(taken(rank));
  call.here(share);
  call.greet();
  for (int host = 0; host < layout.host_count(); ++host) {
    if (host == layout.host) continue;
    const auto& there = layout.hosts[static_cast<size_t>(host)];
    call.send(there[static_cast<size_t>(layout.index) % there.size()], operation.give[0]);
  }
  // For each neighbour, the ranks elsewhere whose chunks it receives.
  std::vector<std::vector<int>> received(members);
  for (int rank = 0; rank < call.group.size(); ++rank) {
    if (!layout.is_here(rank))
      received[static_cast<size_t>(layout.index_of[static_cast<size_t>(rank)]) % members].push_back(rank);
  }
  for (int rank : received[static_cast<size_t>(layout.index)]) call.receive(rank, taken(rank));
  call.await_all();
  if (members == 1) return;
  size_t rounds = 0;
  for (const auto& ranks : received) rounds = std::max(rounds, ranks.size());
  for (size_t round = 0; round < rounds; ++round) {
    share.take.clear();
    for (const auto& ranks : received) share.take.push_back(round < ranks.size() ? taken(ranks[round]) : Chunk{});
    share.give = {share.take[static_cast<size_t>(layout.index)]};
    call.here(share);
  }
}

}  // namespace chorale::comm
