// All-reduce between hosts in which each rank owns a slice: combined at its owner, which then sends it to everybody.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/net_combine_at_owner.h"

namespace chorale::comm {

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

}  // namespace chorale::comm
