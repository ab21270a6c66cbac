// Reductions between hosts, each rank its own slice: everybody sends every owner its values of the owner's slice,
// unsummed, and the owner combines them in the order of ranks. Volume: the same as a ring.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/net_partial_sum.h"

namespace chorale::comm {
namespace {

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

}  // namespace

void net_all_reduce_directly(NetCall& call) {
  const Chunk& data = call.operation.take[0];
  const size_t elem = size_of(call.operation.dtype);
  const auto elems = static_cast<int64_t>(data.bytes / elem);
  const auto slice = [&](int rank) { return part(data, slice_of(elems, elem, rank, call.group.size()), elem); };
  const Chunk own = slice(call.group.rank());
  combine_at_owner(call, slice, own);
  for (int peer = 0; peer < call.group.size(); ++peer) {
    if (call.layout.is_here(peer)) continue;
    call.send(peer, own);
    call.receive(peer, slice(peer));
  }
  call.await_all();
  if (call.layout.local_size() == 1) return;
  NetCall::Here gather{.kind = CallKind::kAllGather, .give = {own}, .take = {}};
  for (int peer : call.layout.neighbours()) gather.take.push_back(slice(peer));
  call.here(gather);
}

void net_reduce_scatter_directly(NetCall& call) {
  const Operation& operation = call.operation;
  combine_at_owner(
      call, [&](int rank) { return operation.give[static_cast<size_t>(rank)]; }, operation.take[0]);
  call.meet_here();
}

}  // namespace chorale::comm
