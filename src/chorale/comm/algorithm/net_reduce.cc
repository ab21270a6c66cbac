// Reduce between hosts: the sum of each host travels to the root, or, where sums by host do not follow the tree of all
// sums, the values of all ranks do.
#include <optional>

#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/net_partial_sum.h"

namespace chorale::comm {

void net_reduce(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Operation& operation = call.operation;
  const int rank = call.group.rank(), root = operation.root;
  const bool with_root = layout.is_here(root);
  const Chunk& data = operation.give[0];
  if (!layout.follows_tree) {
    std::optional<Leaves> leaves;
    if (rank == root) leaves.emplace(call, data);
    if (with_root) {
      NetCall::Here gather{
          .kind = CallKind::kGather, .give = {data}, .take = {}, .root = layout.index_of[static_cast<size_t>(root)]};
      for (int peer : layout.neighbours()) {
        if (rank == root) gather.take.push_back(leaves->of(peer));
      }
      if (gather.take.size() != 1) call.here(gather);
    } else {
      call.meet_here();
    }
    call.greet();
    if (!with_root) call.send(root, data);
    for (int peer = 0; peer < call.group.size() && rank == root; ++peer) {
      if (!layout.is_here(peer)) call.receive(peer, leaves->of(peer));
    }
    call.await_all();
    if (rank == root) combine_leaves(call, leaves->all(), operation.take[0]);
    return call.meet_here();
  }
  // The sum of each host meets at its leader, or at the root where that is.
  const int place = with_root ? layout.index_of[static_cast<size_t>(root)] : 0;
  const bool sums_here = layout.index == place;
  const PartialSum partial(call, data, sums_here && rank != root);
  const size_t elem = partial.elem();
  const std::vector<Slice> pieces = pieces_of({0, partial.elems()}, elem);
  const auto hosts = static_cast<size_t>(layout.host_count());
  std::vector<Chunk> sums(hosts, partial.values());          // on the root, by host
  std::vector<std::vector<NetCall::Ticket>> tickets(hosts);  // likewise, of the pieces
  for (size_t p = 0; p < pieces.size(); ++p) {
    const Chunk piece = part(partial.values(), pieces[p], elem);
    if (partial.has_first_step()) {
      call.here({.kind = CallKind::kReduce,
                 .give = {piece},
                 .take = sums_here ? std::vector<Chunk>{piece} : std::vector<Chunk>(),
                 .root = place,
                 .dtype = partial.dtype(),
                 .reduction = partial.first_step()});
    }
    if (p == 0) call.greet();
    if (sums_here && rank != root) call.send(root, piece);
    for (size_t host = 0; host < hosts && rank == root; ++host) {
      if (static_cast<int>(host) == layout.host) continue;
      if (p == 0) sums[host] = chunk_of(call.buffer(partial.elems(), partial.dtype()));
      tickets[host].push_back(
          call.receive(layout.leader_of(static_cast<int>(host)), part(sums[host], pieces[p], elem)));
    }
  }
  std::vector<const void*> sources(hosts);
  for (size_t p = 0; p < pieces.size() && rank == root; ++p) {
    for (size_t host = 0; host < hosts; ++host) {
      if (!tickets[host].empty()) call.await(tickets[host][p]);
      sources[host] = part(sums[host], pieces[p], elem).data;
    }
    partial.last_step(sources, part(operation.take[0], pieces[p], size_of(operation.dtype)),
                      pieces[p].end - pieces[p].begin);
  }
  call.await_all();
  call.meet_here();
}

}  // namespace chorale::comm
