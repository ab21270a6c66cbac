// Broadcast between hosts: the root sends to the leader of every other host; each host shares what its leader, or the
// root, has.
#include <algorithm>

#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/net/net_call.h"

namespace chorale::comm {
namespace {

// Pieces of a broadcast: neighbours share one while the next ones travel.
constexpr size_t kBroadcastPieceBytes = 1 << 20;

// There is at least one, even if it is empty.
std::vector<Chunk> pieces_of(const Chunk& data) {
  std::vector<Chunk> pieces;
  size_t at = 0;
  do {
    pieces.push_back({data.data + at, std::min(kBroadcastPieceBytes, data.bytes - at)});
    at += pieces.back().bytes;
  } while (at < data.bytes);
  return pieces;
}

}  // namespace

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

}  // namespace chorale::comm
