// Collectives between hosts that move chunks as they are.
#include <algorithm>

#include "chorale/comm/algorithm/net_algorithms.h"

namespace chorale::comm {

void net_barrier(NetCall& call) {
  call.meet_here();
  call.greet();
  call.await_all();
  call.meet_here();
}

namespace {

// Pieces of a broadcast: neighbours share one while the next ones travel.
constexpr size_t kPieceBytes = 1 << 20;

// At least one, be it empty.
std::vector<Chunk> pieces_of(const Chunk& data) {
  std::vector<Chunk> pieces;
  size_t at = 0;
  do {
    pieces.push_back({data.data + at, std::min(kPieceBytes, data.bytes - at)});
    at += pieces.back().bytes;
  } while (at < data.bytes);
  return pieces;
}

}  // namespace

// The root sends to the leader of every other host; each host shares what its leader, or the root, has.
void net_broadcast(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Operation& operation = call.operation;
  const int root = operation.root;
  const bool is_root = call.group.rank() == root, with_root = layout.is_here(root);
  const bool receives = layout.is_leader() && !with_root;
  const std::vector<Chunk> pieces = pieces_of(is_root ? operation.give[0] : operation.take[0]);
  std::vector<NetCall::Ticket> received;
  call.meet_here();
  call.greet();
  for (const Chunk& piece : pieces) {
    for (int host = 0; host < layout.host_count() && is_root; ++host) {
      if (host != layout.host) call.send(layout.leader_of(host), piece);
    }
    if (receives) received.push_back(call.receive(root, piece));
  }
  const int place = with_root ? layout.index_of[static_cast<size_t>(root)] : 0;
  const bool gives = layout.index == place;
  for (size_t p = 0; p < pieces.size() && layout.local_size() > 1; ++p) {
    if (receives) call.await(received[p]);
    // Neighbours end with the last piece: not before their leader has heard from the other hosts.
    if (p + 1 == pieces.size()) call.await_all();
    call.here({.kind = CallKind::kBroadcast,
               .give = gives ? std::vector<Chunk>{pieces[p]} : std::vector<Chunk>(),
               .take = gives ? std::vector<Chunk>() : std::vector<Chunk>{pieces[p]},
               .root = place});
  }
  call.await_all();
}

// A rank's chunk goes to one member of every other host, in turn, who then shares it with its neighbours.
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
  // By neighbour: the ranks elsewhere whose chunks it receives.
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

// Everybody hears from everybody: that is greeting enough.
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
