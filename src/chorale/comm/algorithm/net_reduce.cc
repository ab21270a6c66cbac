// Reductions between hosts. Three ways (net_table.h) that give the same bits: those of Note [Order of sums] in
// vec/combine.h.
//
// Where sums by host follow the tree, a host's values are summed first, and partial sums travel: as f32 where the
// values are f16 or bf16, because such sums are rounded once, at the end. An average is a sum until the last step, and
// a factor is applied in the first.
#include <algorithm>
#include <cstring>

#include "chorale/comm/algorithm/net_algorithms.h"
#include "chorale/vec/combine.h"
#include "chorale/vec/loops.h"

namespace chorale::comm {
namespace {

// Pieces of what travels: one is summed while the next ones are on their way.
constexpr size_t kPieceBytes = 4 << 20;
// So many of them wait to be summed at most, in memory that is used again while it is in a cache.
constexpr size_t kPiecesAhead = 2;

// At least one piece, be it empty, so that hosts hear from each other.
std::vector<Slice> pieces_of(const Slice& slice, size_t elem) {
  const auto most = static_cast<int64_t>(kPieceBytes / elem);
  std::vector<Slice> pieces;
  int64_t at = slice.begin;
  do {
    pieces.push_back({at, std::min(slice.end, at + most)});
    at = pieces.back().end;
  } while (at < slice.end);
  return pieces;
}

Chunk chunk_of(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.raw()), static_cast<size_t>(tensor.elems()) * tensor.elem_bytes()};
}
Chunk part(const Chunk& whole, int64_t begin, int64_t end, size_t elem) {
  return {whole.data + static_cast<size_t>(begin) * elem, static_cast<size_t>(end - begin) * elem};
}
Chunk part(const Chunk& whole, const Slice& slice, size_t elem) { return part(whole, slice.begin, slice.end, elem); }

// The values of this rank on their way to the sum: the caller's own memory, or a copy in which partial sums fit.
class Partial {
 public:
  // In the caller's memory unless `own` asks for a copy.
  Partial(NetCall& call, const Chunk& data, bool own = false)
      : call_(call), size_(static_cast<size_t>(call.group.size())), elems_(elems_in(data, call.operation.dtype)) {
    const Operation& operation = call.operation;
    const bool half = operation.dtype == DType::kF16 || operation.dtype == DType::kBF16;
    for (const auto& members : call.layout.hosts) leaves_ = leaves_ && members.size() == 1;
    leaves_ = leaves_ && operation.reduction.factor == 1;
    dtype_ = half && !leaves_ ? DType::kF32 : operation.dtype;
    values_ = data;
    if (dtype_ == operation.dtype && !own) return;
    values_ = chunk_of(call.buffer(elems_, dtype_));
    vec::convert_loop(operation.dtype, dtype_)(data.data, values_.data, elems_);
  }

  DType dtype() const { return dtype_; }
  size_t elem() const { return size_of(dtype_); }
  int64_t elems() const { return elems_; }
  const Chunk& values() const { return values_; }
  // False when every host has one value, which travels as it is.
  bool has_first_step() const { return !leaves_; }
  Reduction first_step() const {
    Reduction reduction = call_.operation.reduction;
    if (reduction.op == Reduce::kAverage) reduction.op = Reduce::kSum;
    return reduction;
  }
  // Sums the values of all hosts, element by element. `to` holds elements of the call's dtype, and may be one of them.
  void last_step(std::span<const void* const> hosts, const Chunk& to, int64_t elems) const {
    const Operation& operation = call_.operation;
    if (dtype_ == operation.dtype) {
      void* out[] = {to.data};
      vec::combine(operation.reduction.op, dtype_, hosts, out, elems, 1, size_);
      return;
    }
    const Tensor sum = Tensor::empty({elems}, dtype_);
    void* out[] = {sum.raw()};
    vec::combine(operation.reduction.op, dtype_, hosts, out, elems, 1, size_);
    vec::convert_loop(dtype_, operation.dtype)(sum.raw(), to.data, elems);
  }

 private:
  static int64_t elems_in(const Chunk& data, DType dtype) { return static_cast<int64_t>(data.bytes / size_of(dtype)); }

  const NetCall& call_;
  const size_t size_;
  const int64_t elems_;
  bool leaves_ = true;
  DType dtype_ = DType::kU8;
  Chunk values_;
};

void combine_leaves(const NetCall& call, const std::vector<const void*>& leaves, const Chunk& to) {
  const Operation& operation = call.operation;
  void* out[] = {to.data};
  vec::combine(operation.reduction.op, operation.dtype, leaves, out,
               static_cast<int64_t>(to.bytes / size_of(operation.dtype)), operation.reduction.factor);
}

void broadcast_here(NetCall& call, const Chunk& data) {
  if (call.layout.local_size() == 1) return;
  const bool gives = call.layout.is_leader();
  call.here({.kind = CallKind::kBroadcast,
             .give = gives ? std::vector<Chunk>{data} : std::vector<Chunk>(),
             .take = gives ? std::vector<Chunk>() : std::vector<Chunk>{data},
             .root = 0});
}

// ---- leaders

void all_reduce_by_leaders(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Chunk& data = call.operation.take[0];
  const Partial partial(call, data);
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
void all_reduce_leaves_by_leaders(NetCall& call) {
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

// ---- shards

// One rail: shard `values` is cut among the hosts; each sums its part of it and sends the sum to the others, piece by
// piece. The sums go to `to`, in the call's dtype.
//
// To each host go, in this order on both sides: the first kPiecesAhead pieces of its part; then, again and again, the
// sum of a piece of this rank's part and one more piece of that host's.
void reduce_rail(NetCall& call, const Partial& partial, const Slice& shard, const Chunk& to) {
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

void all_reduce_by_shards(NetCall& call) {
  const NetLayout& layout = call.layout;
  const Operation& operation = call.operation;
  const Chunk& data = operation.take[0];
  const Partial partial(call, data);
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

// ---- direct

// What every rank gives to this one, in the order of ranks; `own` is used where it is.
class Leaves {
 public:
  Leaves(NetCall& call, const Chunk& own) : sources_(static_cast<size_t>(call.group.size())) {
    const Chunk memory = chunk_of(call.buffer(static_cast<int64_t>(sources_.size() * own.bytes)));
    for (size_t r = 0; r < sources_.size(); ++r) sources_[r] = memory.data + r * own.bytes;
    sources_[static_cast<size_t>(call.group.rank())] = own.data;
    bytes_ = own.bytes;
  }
  Chunk of(int rank) const {
    return {static_cast<std::byte*>(const_cast<void*>(sources_[static_cast<size_t>(rank)])), bytes_};
  }
  const std::vector<const void*>& all() const { return sources_; }

 private:
  std::vector<const void*> sources_;
  size_t bytes_ = 0;
};

// Rank r's values of every chunk go to the chunk's owner, who combines them into `to`.
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

void all_reduce_directly(NetCall& call) {
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

}  // namespace

void net_all_reduce(NetCall& call) {
  const NetAlgorithm algorithm =
      call.group.hub->table().choose(CallKind::kAllReduce, call.operation.take[0].bytes, call.layout);
  call.set_algorithm(static_cast<uint32_t>(algorithm));
  if (algorithm == NetAlgorithm::kShards) {
    all_reduce_by_shards(call);
  } else if (algorithm == NetAlgorithm::kDirect) {
    all_reduce_directly(call);
  } else if (call.layout.follows_tree) {
    all_reduce_by_leaders(call);
  } else {
    all_reduce_leaves_by_leaders(call);
  }
}

namespace {

// The sums of a host travel, each rank's from one of the members in turn.
void reduce_scatter_by_shards(NetCall& call) {
  const NetLayout& layout = call.layout;
  const int rank = call.group.rank();
  std::vector<Partial> given;  // by rank
  for (const Chunk& chunk : call.operation.give) given.emplace_back(call, chunk);
  const Partial& own = given[static_cast<size_t>(rank)];
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
}

}  // namespace

void net_reduce_scatter(NetCall& call) {
  const Operation& operation = call.operation;
  uint64_t bytes = 0;
  for (const Chunk& chunk : operation.give) bytes += chunk.bytes;
  const NetAlgorithm algorithm = call.group.hub->table().choose(CallKind::kReduceScatter, bytes, call.layout);
  call.set_algorithm(static_cast<uint32_t>(algorithm));
  if (algorithm == NetAlgorithm::kShards) {
    reduce_scatter_by_shards(call);
  } else {
    combine_at_owner(
        call, [&](int rank) { return operation.give[static_cast<size_t>(rank)]; }, operation.take[0]);
  }
  call.meet_here();
}

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
  const Partial partial(call, data, sums_here && rank != root);
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
