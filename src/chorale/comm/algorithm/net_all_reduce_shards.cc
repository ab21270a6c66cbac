// All-reduce between hosts by shards: neighbours reduce their shards, each rail reduces its shard with the other hosts,
// neighbours share the results. Least data between hosts.
#include <algorithm>

#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/net_partial_sum.h"

namespace chorale::comm {
namespace {

// So many pieces wait to be summed at most, in memory that is used again while it is in a cache.
constexpr size_t kPiecesAhead = 2;

// One rail: shard `values` is cut among the hosts; each sums its part of it and sends the sum to the others, piece by
// piece. The sums go to `to`, in the call's dtype.
//
// To each host go, in this order on both sides: the first kPiecesAhead pieces of its part; then, again and again, the
// sum of a piece of this rank's part and one more piece of that host's.
void reduce_rail(NetCall& call, const PartialSum& partial, const Slice& shard, const Chunk& to) {
  const NetLayout& layout = call.layout;
  const size_t elem = partial.elem(), result_elem = size_of(call.operation.dtype);
  const auto hosts = static_cast<size_t>(layout.host_count());
  const auto peer = [&](size_t host) { return layout.hosts[host][static_cast<size_t>(layout.index)]; };
  const auto own = static_cast<size_t>(layout.host);
  // The pieces of a host's part, in elements of the whole.
  std::vector<std::vector<Slice>> pieces(hosts);
  size_t most = 0;
  for (size_t host = 0; host < hosts; ++host) {
    const Slice slice = slice_of(shard.end - shard.begin, elem, static_cast<int>(host), static_cast<int>(hosts));
    pieces[host] = pieces_of({shard.begin + slice.begin, shard.begin + slice.end}, elem);
    most = std::max(most, pieces[host].size());
  }
  const std::vector<Slice>& own_pieces = pieces[own];
  const size_t room = static_cast<size_t>(own_pieces[0].end - own_pieces[0].begin) * elem;  // the first is the largest
  const size_t ahead = std::min(kPiecesAhead, own_pieces.size());
  const Chunk theirs = chunk_of(call.buffer(static_cast<int64_t>(hosts * ahead * room)));
  const auto place = [&](size_t host, size_t p) {
    if (host == own) return part(partial.values(), own_pieces[p], elem);
    return part({theirs.data + (host * ahead + p % ahead) * room, room}, 0, own_pieces[p].end - own_pieces[p].begin,
                elem);
  };
  std::vector<std::vector<NetCall::Ticket>> tickets(hosts);
  const auto send_piece = [&](size_t host, size_t p) {
    if (p < pieces[host].size()) call.send(peer(host), part(partial.values(), pieces[host][p], elem));
  };
  const auto receive_piece = [&](size_t host, size_t p) {
    if (p < own_pieces.size()) tickets[host].push_back(call.receive(peer(host), place(host, p)));
  };
  // A sum comes after everything that this rank gives to it was received there: its place is free by then.
  const auto receive_sum = [&](size_t host, size_t p) {
    if (p < pieces[host].size()) call.receive(peer(host), part(to, pieces[host][p], result_elem));
  };
  for (size_t host = 0; host < hosts; ++host) {
    if (host == own) continue;
    for (size_t p = 0; p < kPiecesAhead; ++p) send_piece(host, p);
    for (size_t p = 0; p < kPiecesAhead; ++p) receive_piece(host, p);
    receive_sum(host, 0);
  }
  std::vector<const void*> sources(hosts);
  for (size_t p = 0; p < most; ++p) {
    const bool sums = p < own_pieces.size();
    for (size_t host = 0; host < hosts && sums; ++host) {
      if (host != own) call.await(tickets[host][p]);
      sources[host] = place(host, p).data;
    }
    const Chunk sum = sums ? part(to, own_pieces[p], result_elem) : Chunk{};
    if (sums) partial.last_step(sources, sum, own_pieces[p].end - own_pieces[p].begin);
    for (size_t host = 0; host < hosts; ++host) {
      if (host == own) continue;
      if (sums) call.send(peer(host), sum);
      send_piece(host, p + kPiecesAhead);
      receive_piece(host, p + kPiecesAhead);
      receive_sum(host, p + 1);
    }
  }
  call.await_all();
}

}  // namespace

void net_all_reduce_by_shards(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Operation& operation = call.operation;
  const Chunk& data = operation.take[0];
  const PartialSum partial(call, data);
  const auto members = layout.local_size();
  // Members beyond the rails have no shard.
  const auto shard = [&](int rail) {
    return rail < layout.rails ? slice_of(partial.elems(), partial.elem(), rail, layout.rails) : Slice{};
  };
  if (partial.has_first_step()) {
    NetCall::Here scatter{.kind = CallKind::kReduceScatter,
                          .give = {},
                          .take = {part(partial.values(), shard(layout.index), partial.elem())},
                          .root = -1,
                          .dtype = partial.dtype(),
                          .reduction = partial.first_step()};
    for (int member = 0; member < members; ++member)
      scatter.give.push_back(part(partial.values(), shard(member), partial.elem()));
    call.here(scatter);
  }
  if (layout.index < layout.rails) reduce_rail(call, partial, shard(layout.index), data);
  if (members == 1) return;
  const size_t elem = size_of(operation.dtype);
  NetCall::Here gather{.kind = CallKind::kAllGather, .give = {part(data, shard(layout.index), elem)}, .take = {}};
  for (int member = 0; member < members; ++member) gather.take.push_back(part(data, shard(member), elem));
  call.here(gather);
}

}  // namespace chorale::comm
