// Collectives on one host by reading: each rank enters with the place of what it gives (Note [Give and take]), and then
// takes what it needs from the others' places. Small data travels in the slot itself and is done after one exchange.
//
// With checksums (GroupOptions::checksum) every call goes this way, reductions too: each chunk that a rank gives has a
// row in its table with the CRC, and who takes it verifies what arrived, in its own copy, before the call succeeds.
#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"
#include "chorale/comm/shm/shm_group.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

using shm::CallSlot;
using shm::Exposure;
using shm::Place;
using shm::PlacedChunk;
using shm::PlaceKind;
using Phase = Operation::Phase;
using What = transport::ChaosFault::What;

// With hands up, a failure is looked for after every so many bytes.
constexpr size_t kCheckBytes = 256 << 10;
// Chunks from this size on do not stay in the caches of all ranks: two that copy 8 MiB from each other and 8 MiB from
// themselves take 1.43 ms by stream() and 1.95 ms by memcpy; with 512 KiB each there is no difference.
constexpr size_t kStreamBytes = 2 << 20;
// Up to here, copying a value into the slot beats the second exchange that reducing in place costs.
constexpr size_t kInlineReduceBytes = 1 << 10;

bool reduces(CallKind kind) {
  return kind == CallKind::kAllReduce || kind == CallKind::kReduce || kind == CallKind::kReduceScatter;
}
bool one_for_all(CallKind kind) {
  return kind != CallKind::kScatter && kind != CallKind::kReduceScatter && kind != CallKind::kAllToAll;
}

// True when this rank takes something from `peer`.
bool takes_from(const Operation& operation, int rank, int peer) {
  switch (operation.kind) {
    case CallKind::kBroadcast:
      return peer == operation.root && rank != operation.root;
    case CallKind::kScatter:
      return peer == operation.root;
    case CallKind::kGather:
    case CallKind::kReduce:
      return rank == operation.root;
    case CallKind::kBarrier:
    case CallKind::kMonitoredBarrier:
      return false;
    default:
      return true;
  }
}

// Copies past the caches: what is overwritten as a whole need not be read first.
void stream(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % sizeof(__m128i));
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + 4 * sizeof(__m128i) <= bytes; at += 4 * sizeof(__m128i)) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* destination = reinterpret_cast<__m128i*>(to + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(destination + i, _mm_loadu_si128(source + i));
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();
}

void copy(const ShmGroup& group, std::byte* to, const std::byte* from, size_t bytes) {
  if (to == from) return;
  for (size_t at = 0; at < bytes; at += kCheckBytes) {
    if (at > 0) check_not_failed(group);
    const size_t piece = std::min(kCheckBytes, bytes - at);
    if (bytes < kStreamBytes) {
      std::memcpy(to + at, from + at, piece);
    } else {
      stream(to + at, from + at, piece);
    }
  }
}

bool has_checksums(const Operation& operation) { return operation.print.variant == shm::kChecksummed; }
// True when slots begin with a table of what is given.
bool has_table(const Operation& operation) { return !one_for_all(operation.kind) || has_checksums(operation); }

void verify(const ShmGroup& group, int peer, uint32_t found, uint32_t expected) {
  if (found != expected) [[unlikely]]
    raise_damage(group, peer, "the data");
}

struct Given {
  const std::byte* data = nullptr;
  uint32_t crc = 0;  // with checksums
};

// Where `peer` has what this rank takes from it.
Given given_by(ShmGroup& group, const Operation& operation, int peer, size_t bytes) {
  if (peer == group.rank) {
    const Chunk& own = operation.give[one_for_all(operation.kind) ? 0 : static_cast<size_t>(peer)];
    CHORALE_INVARIANT(own.bytes == bytes, "a rank's own chunk has ", own.bytes, " bytes, not ", bytes);
    return {own.data};
  }
  CallSlot& slot = group.segment.slot(peer, operation.number);
  PlacedChunk chunk{slot.place, bytes};
  if (has_table(operation)) {
    const size_t row = one_for_all(operation.kind) ? 0 : static_cast<size_t>(group.rank);
    std::memcpy(&chunk, slot.payload + row * sizeof(chunk), sizeof(chunk));
    if (chunk.check != chunk.right_check()) [[unlikely]]
      raise_damage(group, peer, "the table of chunks");
  }
  if (chunk.bytes != bytes) {
    throw CallFailed{concat("rank ", group.global(peer), " gives ", chunk.bytes, " bytes where rank ",
                            group.global(group.rank), " takes ", bytes, ": the sizes of the chunks do not fit"),
                     group.global(peer)};
  }
  if (chunk.place.kind() != PlaceKind::kSlot) return {group.reach(peer, chunk.place, bytes), chunk.crc};
  CHORALE_INVARIANT(chunk.place.offset() + bytes <= shm::kSlotPayloadBytes, "chunk outside its slot");
  return {slot.payload + chunk.place.offset(), chunk.crc};
}

// A tensor that peers read in place must not change before they have acted. Until then the result waits in this rank's
// own slot, whose payload nobody reads then; with checksums, which allow any size, in scratch memory.
bool result_waits(const ShmGroup& group, const Operation& operation) {
  return (operation.kind == CallKind::kAllReduce || operation.kind == CallKind::kReduce) &&
         group.segment.slot(group.rank, operation.number).exposure != Exposure::kSlot &&
         takes_from(operation, group.rank, group.rank);
}
Chunk place_of_result(ShmGroup& group, Operation& operation) {
  const Chunk& to = operation.take[0];
  if (!result_waits(group, operation)) return to;
  if (!has_checksums(operation)) return {group.segment.slot(group.rank, operation.number).payload, to.bytes};
  operation.scratch.push_back(group.context().scratch().allocate(to.bytes));
  return {static_cast<std::byte*>(operation.scratch.back().data), to.bytes};
}
void fetch_result(const ShmGroup& group, const Operation& operation) {
  const Chunk& to = operation.take[0];
  const void* from = has_checksums(operation) ? operation.scratch.back().data
                                              : group.segment.slot(group.rank, operation.number).payload;
  std::memcpy(to.data, from, to.bytes);
}

// Combines what arrived in copies of our own, piece by piece, and verifies those.
void combine_verified(const ShmGroup& group, const Operation& operation, const Given* sources, const Chunk& to) {
  const size_t elem = size_of(operation.dtype);
  const auto size = static_cast<size_t>(group.size);
  constexpr size_t kPieceBytes = 64 << 10;
  std::vector<std::byte> pieces(size * std::min(kPieceBytes, to.bytes));
  std::vector<uint32_t> crcs(size);
  const void* at[shm::kMostRanks];
  for (size_t begin = 0; begin < to.bytes; begin += kPieceBytes) {
    check_not_failed(group);
    const size_t bytes = std::min(kPieceBytes, to.bytes - begin);
    for (size_t r = 0; r < size; ++r) {
      std::byte* piece = pieces.data() + r * bytes;
      std::memcpy(piece, sources[r].data + begin, bytes);
      crcs[r] = crc32c({piece, bytes}, crcs[r]);
      at[r] = piece;
    }
    void* out[] = {to.data + begin};
    vec::combine(operation.reduction.op, operation.dtype, {at, size}, out, static_cast<int64_t>(bytes / elem),
                 operation.reduction.factor);
  }
  for (int peer = 0; peer < group.size; ++peer) {
    if (peer != group.rank) verify(group, peer, crcs[static_cast<size_t>(peer)], sources[peer].crc);
  }
}

void combine_all(ShmGroup& group, const Operation& operation, const Chunk& to) {
  const size_t elem = size_of(operation.dtype);
  const auto size = static_cast<size_t>(group.size);
  const void* at[shm::kMostRanks];
  SmallVector<Given, 8> sources;
  for (int peer = 0; peer < group.size; ++peer) sources.push_back(given_by(group, operation, peer, to.bytes));
  if (has_checksums(operation)) return combine_verified(group, operation, sources.data(), to);
  for (size_t begin = 0; begin < to.bytes; begin += kCheckBytes) {
    if (begin > 0) check_not_failed(group);
    for (size_t r = 0; r < size; ++r) at[r] = sources[r].data + begin;
    void* out[] = {to.data + begin};
    const size_t bytes = std::min(kCheckBytes, to.bytes - begin);
    vec::combine(operation.reduction.op, operation.dtype, {at, size}, out, static_cast<int64_t>(bytes / elem),
                 operation.reduction.factor);
  }
}

// Sizes are checked before anything is written: a misfit is an error, not half a result.
void take(ShmGroup& group, Operation& operation) {
  if (reduces(operation.kind)) {
    if (takes_from(operation, group.rank, group.rank)) combine_all(group, operation, place_of_result(group, operation));
    return;
  }
  SmallVector<Given, 8> from(static_cast<size_t>(group.size));
  const auto to = [&](int peer) -> const Chunk& {
    return operation.take[operation.take.size() == 1 ? 0 : static_cast<size_t>(peer)];
  };
  for (int peer = 0; peer < group.size; ++peer) {
    if (takes_from(operation, group.rank, peer))
      from[static_cast<size_t>(peer)] = given_by(group, operation, peer, to(peer).bytes);
  }
  // Each rank starts with its neighbour, so that not all read the same rank's memory at once.
  for (int step = 1; step <= group.size; ++step) {
    const int peer = (group.rank + step) % group.size;
    const Given& given = from[static_cast<size_t>(peer)];
    if (!given.data) continue;
    copy(group, to(peer).data, given.data, to(peer).bytes);
    if (has_checksums(operation) && peer != group.rank)
      verify(group, peer, crc32c({to(peer).data, to(peer).bytes}), given.crc);
  }
}

// A place for a chunk: where it is, or in scratch memory, where it is copied. What may be damaged on purpose is copied
// too: the tensor is the caller's.
Place expose(ShmGroup& group, Operation& operation, const Chunk& chunk, transport::Chaos* chaos) {
  if (chunk.bytes == 0) return {};
  if (const auto place = chaos ? std::nullopt : group.place_of(chunk)) return *place;
  CachingAllocator& scratch = group.context().scratch();
  const memory::Block block = scratch.allocate(chunk.bytes);
  operation.scratch.push_back(block);
  std::memcpy(block.data, chunk.data, chunk.bytes);
  if (chaos) chaos->touch(What::kPayload, {static_cast<std::byte*>(block.data), chunk.bytes});
  const auto location = scratch.locate(block.data);
  return Place::make(PlaceKind::kScratch, location->source_offset());
}

// Tells peers where the one chunk is that this rank gives to be combined with theirs.
void expose_to_reduce(ShmGroup& group, Operation& operation, CallSlot& slot, uint32_t pieces_done) {
  const Chunk& chunk = operation.give[0];
  const bool fits = chunk.bytes <= shm::kSlotPayloadBytes;
  if (chunk.bytes > kInlineReduceBytes) {
    const auto place = group.is_writable(chunk) ? group.place_of(chunk) : std::nullopt;
    if (place) {
      slot.exposure = Exposure::kWritable;
      slot.place = *place;
      return;
    }
    if (!fits) {
      slot.exposure = Exposure::kStaged;
      std::memcpy(group.segment.staging(group.rank, pieces_done + 1), chunk.data,
                  std::min(chunk.bytes, shm::kStagingBytes));
      return;
    }
  }
  slot.exposure = Exposure::kSlot;
  slot.place = {};
  if (chunk.bytes > 0) std::memcpy(slot.payload, chunk.data, chunk.bytes);
}

// Whether anybody looks at this chunk that the rank gives: nobody does at what it gives to itself alone.
bool is_read(const ShmGroup& group, const Operation& operation, int chunk) {
  const bool all_to_root = operation.kind == CallKind::kGather || operation.kind == CallKind::kReduce;
  const bool to_itself =
      one_for_all(operation.kind) ? all_to_root && operation.root == group.rank : chunk == group.rank;
  return group.size > 1 && !to_itself;
}

void expose_to_read(ShmGroup& group, Operation& operation, CallSlot& slot) {
  const bool table = has_table(operation);
  const size_t table_bytes = table ? operation.give.size() * sizeof(PlacedChunk) : 0;
  size_t total = table_bytes;
  for (const Chunk& chunk : operation.give) total += (chunk.bytes + 15) / 16 * 16;
  const bool fits = total <= shm::kSlotPayloadBytes;
  slot.exposure = fits ? Exposure::kSlot : Exposure::kReadable;
  slot.place = {};
  size_t at = table_bytes;
  for (size_t r = 0; r < operation.give.size(); ++r) {
    const Chunk& chunk = operation.give[r];
    Place place = Place::make(PlaceKind::kSlot, at);
    transport::Chaos* chaos = is_read(group, operation, static_cast<int>(r)) ? group.context().chaos.get() : nullptr;
    if (!fits) {
      place = expose(group, operation, chunk, chaos);
    } else if (chunk.bytes > 0) {
      std::memcpy(slot.payload + at, chunk.data, chunk.bytes);
      if (chaos) chaos->touch(What::kPayload, {slot.payload + at, chunk.bytes});
      at += (chunk.bytes + 15) / 16 * 16;
    }
    if (table) {
      PlacedChunk placed{place, chunk.bytes};
      if (has_checksums(operation)) placed.crc = crc32c({chunk.data, chunk.bytes});
      placed.check = placed.right_check();
      std::memcpy(slot.payload + r * sizeof(placed), &placed, sizeof(placed));
    } else {
      slot.place = place;
    }
  }
}

bool everybody_entered(const ShmGroup& group, Operation& operation) {
  for (; operation.seen < group.size; ++operation.seen) {
    const CallSlot& slot = group.segment.slot(operation.seen, operation.number);
    if (slot.number.load(std::memory_order_acquire) != operation.number) return false;
  }
  return true;
}

bool everybody_acted(const ShmGroup& group, Operation& operation) {
  for (; operation.seen < group.size; ++operation.seen) {
    const uint32_t acted = group.segment.control(operation.seen).acted.load(std::memory_order_acquire);
    if (static_cast<int32_t>(acted - operation.piece) < 0) return false;
  }
  return true;
}

}  // namespace

void enter_call(ShmGroup& group, Operation& operation, uint32_t pieces) {
  CallSlot& slot = group.segment.slot(group.rank, operation.number);
  slot.fingerprint = operation.print;
  if ((operation.kind == CallKind::kAllReduce || operation.kind == CallKind::kReduce) && !has_checksums(operation)) {
    expose_to_reduce(group, operation, slot, pieces);
  } else {
    expose_to_read(group, operation, slot);
  }
  slot.check = slot.right_check(operation.number, operation.print.weight());
  if (group.context().chaos) [[unlikely]]
    group.context().chaos->touch(What::kControl, {reinterpret_cast<std::byte*>(&slot.exposure),
                                                  offsetof(CallSlot, payload) - offsetof(CallSlot, exposure)});
  operation.phase = Phase::kEntered;
  group.segment.publish(slot.number, operation.number);
}

namespace {

// Rank 0 waits for everybody, and everybody else only for rank 0, so that it is rank 0 who finds out who is missing.
// All pass or none: rank 0 counts the piece when it has seen everybody.
bool step_monitored_barrier(ShmGroup& group, Operation& operation, uint32_t& pieces) {
  if (operation.phase == Phase::kEntered) {
    operation.piece = ++pieces;
    operation.phase = Phase::kLeaving;
  }
  if (group.rank != 0) {
    const uint32_t acted = group.segment.control(0).acted.load(std::memory_order_acquire);
    return static_cast<int32_t>(acted - operation.piece) >= 0;
  }
  while (!everybody_entered(group, operation)) {
    // Ranks whose time is over are skipped, in the form that names all of them.
    const auto& absent = operation.absent;
    if (std::find(absent.begin(), absent.end(), operation.seen) == absent.end()) return false;
    ++operation.seen;
  }
  if (!operation.absent.empty()) note_absence(group.membership, operation);
  if (!check_fingerprints(group, operation)) return false;
  group.segment.publish(group.own().acted, operation.piece);
  return true;
}

}  // namespace

bool step_call(ShmGroup& group, Operation& operation, uint32_t& pieces) {
  if (operation.kind == CallKind::kMonitoredBarrier) return step_monitored_barrier(group, operation, pieces);
  if (operation.phase == Phase::kEntered) {
    if (!everybody_entered(group, operation) || !check_fingerprints(group, operation)) return false;
    if (group.context().chaos) [[unlikely]]
      group.context().chaos->pause();
    bool outside = false, staged = false, all_writable = true;
    for (int peer = 0; peer < group.size; ++peer) {
      const Exposure exposure = group.segment.slot(peer, operation.number).exposure;
      outside = outside || exposure != Exposure::kSlot;
      staged = staged || exposure == Exposure::kStaged;
      all_writable = all_writable && exposure == Exposure::kWritable;
    }
    if (!outside) {
      take(group, operation);
      return true;
    }
    operation.piece = ++pieces;
    operation.seen = 0;
    if (staged || all_writable) return step_in_place(group, operation, pieces);
    {
      const Hands hands(group);
      check_not_failed(group);
      take(group, operation);
      check_not_failed(group);
    }
    group.segment.publish(group.own().acted, operation.piece);
    operation.phase = Phase::kLeaving;
  }
  if (operation.phase != Phase::kLeaving) return step_in_place(group, operation, pieces);
  // Who gave nothing that peers read outside of the segment has nothing to wait for.
  CallSlot& slot = group.segment.slot(group.rank, operation.number);
  if (slot.exposure == Exposure::kSlot) return true;
  if (!everybody_acted(group, operation)) return false;
  if (result_waits(group, operation)) fetch_result(group, operation);
  return true;
}

std::vector<int> missing_ranks(const ShmGroup& group, const Operation& operation) {
  std::vector<int> missing;
  for (int peer = 0; peer < group.size; ++peer) {
    const shm::RankControl& control = group.segment.control(peer);
    const auto behind = [&](const std::atomic<uint32_t>& flag) {
      return static_cast<int32_t>(flag.load(std::memory_order_acquire) - operation.piece) < 0;
    };
    bool is_missing = false;
    if (operation.kind == CallKind::kMonitoredBarrier) {
      is_missing =
          group.rank == 0 ? group.segment.slot(peer, operation.number).number.load() != operation.number : peer == 0;
    } else if (operation.phase == Phase::kEntered) {
      is_missing = group.segment.slot(peer, operation.number).number.load() != operation.number;
    } else if (operation.phase == Phase::kStaging) {
      is_missing = behind(control.staged);
    } else {
      is_missing = behind(control.acted);
    }
    if (is_missing) missing.push_back(peer);
  }
  return missing;
}

}  // namespace chorale::comm
