#include "chorale/elastic/parts.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/comm/objects.h"

namespace chorale::elastic {
namespace {

using snapshot::Region;
using snapshot::TensorChunk;
using snapshot::WriteItem;

constexpr int64_t kAlignment = 64;  // of each part in a packed state
constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

comm::Value value_of(const Shape& sizes) {
  comm::List list;
  for (const int64_t size : sizes) list.emplace_back(size);
  return {std::move(list)};
}
Shape shape_of(const comm::Value& value) {
  Shape sizes;
  for (const comm::Value& size : value.as<comm::List>()) sizes.push_back(size.as<int64_t>());
  return sizes;
}

WriteItem item_of(const TensorChunk& chunk) {
  return {.key = chunk.key, .dtype = chunk.local.dtype(), .whole = chunk.whole, .region = chunk.region()};
}
comm::Value value_of(const WriteItem& item) {
  return comm::List{item.key, static_cast<int64_t>(item.dtype), value_of(item.whole), value_of(item.region.offsets),
                    value_of(item.region.sizes)};
}
WriteItem item_of(const comm::Value& value) {
  const auto& fields = value.as<comm::List>();
  return {.key = fields[0].as<std::string>(),
          .dtype = static_cast<DType>(fields[1].as<int64_t>()),
          .whole = shape_of(fields[2]),
          .region = {shape_of(fields[3]), shape_of(fields[4])}};
}

int64_t bytes_of(const Region& region, DType dtype) { return region.volume() * static_cast<int64_t>(size_of(dtype)); }

// The bytes of a tensor of any layout, one behind the other.
void write_bytes(const Tensor& x, std::byte* to_where) {
  const Tensor straight = contiguous(x.device() == kCpu ? x : to(x, kCpu));
  if (straight.elems() > 0)
    std::memcpy(to_where, straight.raw(), static_cast<size_t>(straight.elems()) * straight.elem_bytes());
}
void read_bytes(const Tensor& x, const std::byte* from) {
  const Tensor straight = Tensor::empty(x.sizes(), x.dtype());
  if (straight.elems() == 0) return;
  std::memcpy(straight.raw(), from, static_cast<size_t>(straight.elems()) * straight.elem_bytes());
  copy_(x, straight);
}

}  // namespace

// The size of what describes the parts, that, and the parts.
Tensor packed(const snapshot::State& state, const Tensor& room) {
  const NoGrad quiet;
  comm::List parts;
  comm::Map rest;
  int64_t size = 0;
  for (const TensorChunk& chunk : state.chunks) {
    const WriteItem item = item_of(chunk);
    parts.emplace_back(comm::List{value_of(item), size});
    size = aligned(size + item.bytes());
  }
  for (const auto& [key, bytes] : state.bytes) rest[key] = bytes;
  const std::string head = comm::encode(comm::List{std::move(parts), std::move(rest)});
  const auto head_size = static_cast<int64_t>(head.size());
  const int64_t begin = aligned(static_cast<int64_t>(sizeof head_size) + head_size);
  Tensor all = room.defined() && room.elems() == begin + size ? room : Tensor::empty({begin + size}, DType::kU8);
  auto* bytes = static_cast<std::byte*>(all.raw());
  std::memcpy(bytes, &head_size, sizeof head_size);
  std::memcpy(bytes + sizeof head_size, head.data(), head.size());
  int64_t at = begin;
  for (const TensorChunk& chunk : state.chunks) {
    write_bytes(chunk.local, bytes + at);
    at = aligned(at + item_of(chunk).bytes());
  }
  return all;
}

snapshot::State unpacked(const Tensor& bytes) {
  int64_t head_size = 0;
  std::memcpy(&head_size, bytes.raw(), sizeof head_size);
  const comm::Value head =
      comm::decode({static_cast<const char*>(bytes.raw()) + sizeof head_size, static_cast<size_t>(head_size)});
  const int64_t begin = bytes.offset() + aligned(static_cast<int64_t>(sizeof head_size) + head_size);
  snapshot::State state;
  for (const comm::Value& part : head.as<comm::List>()[0].as<comm::List>()) {
    const auto& fields = part.as<comm::List>();
    const WriteItem item = item_of(fields[0]);
    const Shape& sizes = item.region.sizes;
    const int64_t at = begin + fields[1].as<int64_t>();
    state.chunks.push_back({item.key, item.whole, item.region.offsets,
                            Tensor::on(bytes.storage(), sizes, contiguous_strides(sizes),
                                       at / static_cast<int64_t>(size_of(item.dtype)), item.dtype)});
  }
  for (const auto& [key, text] : head.as<comm::List>()[1].as<comm::Map>()) state.bytes[key] = text.as<std::string>();
  return state;
}

Holdings::Holdings(const comm::Group& group, std::vector<Source> sources)
    : group_(group), sources_(std::move(sources)) {
  comm::List mine;
  for (const Source& source : sources_) {
    comm::List items;
    for (const TensorChunk& chunk : source.state.chunks) items.push_back(value_of(item_of(chunk)));
    mine.emplace_back(
        comm::List{source.cut.moment.step, source.cut.moment.epoch, source.cut.split, source.is_own, std::move(items)});
  }
  for (const comm::Value& of_rank : comm::all_gather_object(group, comm::Value(std::move(mine)))) {
    std::vector<Listed>& lists = listed_.emplace_back();
    for (const comm::Value& value : of_rank.as<comm::List>()) {
      const auto& fields = value.as<comm::List>();
      Listed& one = lists.emplace_back();
      one.cut = {{fields[0].as<int64_t>(), fields[1].as<int64_t>()}, fields[2].as<int64_t>()};
      one.is_own = fields[3].as<bool>();
      for (const comm::Value& item : fields[4].as<comm::List>()) one.items.push_back(item_of(item));
    }
  }
}

std::vector<std::vector<WriteItem>> Holdings::items_of(const Cut& cut) const {
  std::vector<std::vector<WriteItem>> items(listed_.size());
  for (size_t rank = 0; rank < listed_.size(); ++rank) {
    for (const Listed& list : listed_[rank]) {
      if (list.cut == cut) items[rank].insert(items[rank].end(), list.items.begin(), list.items.end());
    }
  }
  return items;
}

std::optional<Cut> Holdings::newest_whole(const std::vector<std::string>& keys) const {
  std::set<Cut, std::greater<>> cuts;
  for (const auto& lists : listed_) {
    for (const Listed& list : lists) cuts.insert(list.cut);
  }
  for (const Cut& cut : cuts) {
    try {
      snapshot::plan_save(items_of(cut));
    } catch (const InvalidArgument&) {  // parts of it went with ranks
      continue;
    }
    const Outlines found = outlines(cut);
    if (std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return found.contains(key); })) return cut;
  }
  return std::nullopt;
}

Outlines Holdings::outlines(const Cut& cut) const {
  Outlines all;
  for (const auto& items : items_of(cut)) {
    for (const WriteItem& item : items) all.emplace(item.key, Outline{item.dtype, item.whole});
  }
  return all;
}

std::vector<int> Holdings::owners(const Moment& moment) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < listed_.size(); ++rank) {
    if (std::any_of(listed_[rank].begin(), listed_[rank].end(),
                    [&](const Listed& list) { return list.is_own && list.cut.moment == moment; }))
      ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

const snapshot::State* Holdings::own(const Moment& moment) const {
  for (const Source& source : sources_) {
    if (source.is_own && source.cut.moment == moment) return &source.state;
  }
  return nullptr;
}

// Each part is sent by one rank that has it, to all that need some of it; all know the whole plan, so bytes travel
// without a description.
void Holdings::fill(const Cut& cut, const snapshot::State& wanted) const {
  const NoGrad quiet;
  comm::List needs;
  for (const TensorChunk& chunk : wanted.chunks) needs.push_back(value_of(item_of(chunk)));
  struct Need {
    size_t rank, place;
    WriteItem item;
  };
  std::map<std::string, std::vector<Need>> needed;
  const std::vector<comm::Value> of_ranks = comm::all_gather_object(group_, comm::Value(std::move(needs)));
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    size_t place = 0;
    for (const comm::Value& value : of_ranks[rank].as<comm::List>()) {
      const WriteItem item = item_of(value);
      needed[item.key].push_back({rank, place++, item});
    }
  }
  std::vector<const TensorChunk*> own;
  for (const Source& source : sources_) {
    if (source.cut != cut) continue;
    for (const TensorChunk& chunk : source.state.chunks) own.push_back(&chunk);
  }

  const auto self = static_cast<size_t>(group_.rank());
  struct Piece {
    size_t place;  // of what this rank gives, or needs
    Region of, region;
    int64_t bytes;
  };
  const size_t ranks = listed_.size();
  std::vector<std::vector<Piece>> given(ranks), taken(ranks);  // by peer
  const auto items = items_of(cut);
  const snapshot::SavePlan plan = snapshot::plan_save(items);
  for (size_t giver = 0; giver < ranks; ++giver) {
    for (const size_t place : plan.writes[giver]) {
      const WriteItem& item = items[giver][place];
      for (const Need& need : needed[item.key]) {
        if (giver != self && need.rank != self) continue;
        CHORALE_CHECK_STATE(need.item.dtype == item.dtype && need.item.whole == item.whole, "[elastic] ", item.key,
                            " was ", item.dtype, " ", item.whole, " and is ", need.item.dtype, " ", need.item.whole,
                            " for the ranks that there are now");
        const auto common = snapshot::intersection(item.region, need.item.region);
        if (!common) continue;
        const int64_t bytes = bytes_of(*common, item.dtype);
        if (giver == self) given[need.rank].push_back({place, item.region, *common, bytes});
        if (need.rank == self) taken[giver].push_back({need.place, need.item.region, *common, bytes});
      }
    }
  }
  const auto sizes = [](const std::vector<std::vector<Piece>>& pieces) {
    std::vector<int64_t> bytes;
    for (const auto& of_peer : pieces) {
      int64_t& sum = bytes.emplace_back();
      for (const Piece& piece : of_peer) sum += piece.bytes;
    }
    return bytes;
  };
  const std::vector<int64_t> out_sizes = sizes(given), in_sizes = sizes(taken);
  const auto room = [](const std::vector<int64_t>& bytes) {
    int64_t all = 0;
    for (const int64_t size : bytes) all += size;
    return Tensor::empty({all}, DType::kU8);
  };
  const Tensor out = room(out_sizes), in = room(in_sizes);
  auto* to_where = static_cast<std::byte*>(out.raw());
  for (const auto& of_peer : given) {
    for (const Piece& piece : of_peer) {
      write_bytes(snapshot::part_of(own[piece.place]->local, piece.of, piece.region), to_where);
      to_where += piece.bytes;
    }
  }
  group_.all_to_all_single(in, out, in_sizes, out_sizes).wait();
  const auto* from = static_cast<const std::byte*>(in.raw());
  for (const auto& of_peer : taken) {
    for (const Piece& piece : of_peer) {
      read_bytes(snapshot::part_of(wanted.chunks[piece.place].local, piece.of, piece.region), from);
      from += piece.bytes;
    }
  }
}

}  // namespace chorale::elastic
