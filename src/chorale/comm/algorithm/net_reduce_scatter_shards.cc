// Reduce-scatter between hosts by shards: the sums of a host travel, each rank's from one of the members in turn.
#include <algorithm>

#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/net_partial_sum.h"

namespace chorale::comm {

void net_reduce_scatter_by_shards(NetCall& call) {
  const NetLayout& layout = call.layout;
  const int rank = call.group.rank();
  std::vector<PartialSum> given;  // by rank
  for (const Chunk& chunk : call.operation.give) given.emplace_back(call, chunk);
  const PartialSum& own = given[static_cast<size_t>(rank)];
  // Each member gets the sum of what this host gives to one of `ranks`, -1: to nobody.
  const auto sum_here = [&](const std::vector<int>& ranks) {
    const auto values = [&](int to) { return to < 0 ? Chunk{} : given[static_cast<size_t>(to)].values(); };
    const Chunk mine = values(ranks[static_cast<size_t>(layout.index)]);
    if (!own.has_first_step()) return mine;
    const Chunk sum = chunk_of(call.buffer(static_cast<int64_t>(mine.bytes)));
    NetCall::Here scatter{.kind = CallKind::kReduceScatter,
                          .give = {},
                          .take = {sum},
                          .root = -1,
                          .dtype = own.dtype(),
                          .reduction = own.first_step()};
    for (int to : ranks) scatter.give.push_back(values(to));
    call.here(scatter);
    return sum;
  };
  std::vector<const void*> sources(static_cast<size_t>(layout.host_count()));
  for (size_t host = 0; host < sources.size(); ++host) {
    const auto& there = layout.hosts[host];
    if (static_cast<int>(host) == layout.host) {
      sources[host] = sum_here(there).data;
    } else {
      const Chunk sum = chunk_of(call.buffer(own.elems(), own.dtype()));
      call.receive(there[static_cast<size_t>(layout.index) % there.size()], sum);
      sources[host] = sum.data;
    }
  }
  for (const auto& there : layout.hosts) {
    if (there == layout.neighbours()) continue;
    for (size_t first = 0; first < there.size(); first += layout.neighbours().size()) {
      std::vector<int> ranks(layout.neighbours().size(), -1);
      std::copy_n(there.begin() + static_cast<ptrdiff_t>(first), std::min(ranks.size(), there.size() - first),
                  ranks.begin());
      const Chunk sum = sum_here(ranks);
      const int to = ranks[static_cast<size_t>(layout.index)];
      if (to >= 0) call.send(to, sum);
    }
  }
  call.await_all();
  own.last_step(sources, call.operation.take[0], own.elems());
  call.meet_here();
}

}  // namespace chorale::comm
