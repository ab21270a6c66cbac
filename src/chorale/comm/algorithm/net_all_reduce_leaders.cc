// All-reduce between hosts by leaders: each host's values meet at its leader, leaders send each other all they have,
// and every host shares the result.
#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/net_partial_sum.h"

namespace chorale::comm {
namespace {

void broadcast_here(NetCall& call, const Chunk& data) {
  if (call.layout.local_size() == 1) return;
  const bool gives = call.layout.is_leader();
  call.here({.kind = CallKind::kBroadcast,
             .give = gives ? std::vector<Chunk>{data} : std::vector<Chunk>(),
             .take = gives ? std::vector<Chunk>() : std::vector<Chunk>{data},
             .root = 0});
}

// Where sums by host follow the tree of all sums: they travel.
void sum_by_hosts(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Chunk& data = call.operation.take[0];
  const PartialSum partial(call, data);
  if (partial.has_first_step()) {
    call.here({.kind = CallKind::kReduce,
               .give = {partial.values()},
               .take = layout.is_leader() ? std::vector<Chunk>{partial.values()} : std::vector<Chunk>(),
               .root = 0,
               .dtype = partial.dtype(),
               .reduction = partial.first_step()});
  }
  if (layout.is_leader()) {
    const auto hosts = static_cast<size_t>(layout.host_count());
    const Chunk theirs = chunk_of(call.buffer(static_cast<int64_t>(hosts * partial.values().bytes)));
    std::vector<const void*> sources(hosts);
    for (size_t host = 0; host < hosts; ++host) {
      Chunk other{theirs.data + host * partial.values().bytes, partial.values().bytes};
      if (static_cast<int>(host) == layout.host) {
        other = partial.values();
      } else {
        call.send(layout.leader_of(static_cast<int>(host)), partial.values());
        call.receive(layout.leader_of(static_cast<int>(host)), other);
      }
      sources[host] = other.data;
    }
    call.await_all();
    partial.last_step(sources, data, partial.elems());
  }
  broadcast_here(call, data);
}

// Where sums by host do not follow the tree: leaders send each other the values of all members, unsummed.
void sum_all_values(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Chunk& data = call.operation.take[0];
  const auto size = static_cast<size_t>(call.group.size());
  std::vector<Chunk> leaves(size);
  std::vector<const void*> sources(size);
  if (layout.is_leader()) {
    const Chunk all = chunk_of(call.buffer(static_cast<int64_t>(size * data.bytes)));
    // Members of one host are together.
    size_t at = 0;
    for (const auto& members : layout.hosts) {
      for (int member : members) {
        leaves[static_cast<size_t>(member)] = {all.data + at, data.bytes};
        sources[static_cast<size_t>(member)] = all.data + at;
        at += data.bytes;
      }
    }
  }
  std::vector<Chunk> take;
  if (layout.is_leader()) {
    for (int member : layout.neighbours()) take.push_back(leaves[static_cast<size_t>(member)]);
  }
  call.here({.kind = CallKind::kGather, .give = {data}, .take = take, .root = 0, .dtype = call.operation.dtype});
  if (layout.is_leader()) {
    const auto bundle = [&](const std::vector<int>& members) {
      return Chunk{leaves[static_cast<size_t>(members[0])].data, members.size() * data.bytes};
    };
    for (int host = 0; host < layout.host_count(); ++host) {
      if (host == layout.host) continue;
      call.send(layout.leader_of(host), bundle(layout.neighbours()));
      call.receive(layout.leader_of(host), bundle(layout.hosts[static_cast<size_t>(host)]));
    }
    call.await_all();
    combine_leaves(call, sources, data);
  }
  broadcast_here(call, data);
}

}  // namespace

void net_all_reduce_by_leaders(NetCall& call) {
  if (call.layout.follows_tree) {
    sum_by_hosts(call);
  } else {
    sum_all_values(call);
  }
}

}  // namespace chorale::comm
