// How a rank takes what others give on one host: copied, or combined, from their places or slots.
//
// With checksums (GroupOptions::checksum) every call goes this way, reductions too: each chunk that a rank gives has a
// row in its table with the CRC, and the receiver verifies what arrived, in its own copy, before the call succeeds.
#include "chorale/comm/algorithm/shm_take.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {

bool result_waits(const ShmCall& call) {
  const CallKind kind = call.operation().kind;
  return (kind == CallKind::kAllReduce || kind == CallKind::kReduce) &&
         call.own_slot().exposure != shm::Exposure::kSlot && call.takes_from(call.group.rank);
}

namespace {

using shm::CallSlot;
using shm::PlacedChunk;
using shm::PlaceKind;

// With hands up, a failure is looked for after every so many bytes.
constexpr size_t kCheckBytes = 256 << 10;
// Chunks from this size on do not stay in the caches of all ranks: two that copy 8 MiB from each other and 8 MiB from
// themselves take 1.43 ms by stream() and 1.95 ms by memcpy; with 512 KiB each there is no difference.
constexpr size_t kStreamBytes = 2 << 20;

bool reduces(CallKind kind) {
  return kind == CallKind::kAllReduce || kind == CallKind::kReduce || kind == CallKind::kReduceScatter;
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

void verify(const ShmGroup& group, int peer, uint32_t found, uint32_t expected) {
  if (found != expected) [[unlikely]]
    raise_damage(group, peer, "the data");
}

struct Given {
  const std::byte* data = nullptr;
  uint32_t crc = 0;  // with checksums
};

// Where `peer` has what this rank takes from it.
Given given_by(const ShmCall& call, int peer, size_t bytes) {
  ShmGroup& group = call.group;
  const Operation& operation = call.operation();
  if (peer == group.rank) {
    const Chunk& own = operation.give[gives_one_chunk(operation.kind) ? 0 : static_cast<size_t>(peer)];
    CHORALE_INVARIANT(own.bytes == bytes, "a rank's own chunk has ", own.bytes, " bytes, not ", bytes);
    return {own.data};
  }
  CallSlot& slot = call.slot(peer);
  PlacedChunk chunk{slot.place, bytes};
  if (call.has_table()) {
    const size_t row = gives_one_chunk(operation.kind) ? 0 : static_cast<size_t>(group.rank);
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

Chunk place_of_result(ShmCall& call) {
  const Chunk& to = call.operation().take[0];
  if (!result_waits(call)) return to;
  return {call.has_checksums() ? call.scratch(to.bytes).data : call.own_slot().payload, to.bytes};
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

void combine_all(const ShmCall& call, const Chunk& to) {
  const ShmGroup& group = call.group;
  const Operation& operation = call.operation();
  const size_t elem = size_of(operation.dtype);
  const auto size = static_cast<size_t>(group.size);
  const void* at[shm::kMostRanks];
  SmallVector<Given, 8> sources;
  for (int peer = 0; peer < group.size; ++peer) sources.push_back(given_by(call, peer, to.bytes));
  if (call.has_checksums()) return combine_verified(group, operation, sources.data(), to);
  for (size_t begin = 0; begin < to.bytes; begin += kCheckBytes) {
    if (begin > 0) check_not_failed(group);
    for (size_t r = 0; r < size; ++r) at[r] = sources[r].data + begin;
    void* out[] = {to.data + begin};
    const size_t bytes = std::min(kCheckBytes, to.bytes - begin);
    vec::combine(operation.reduction.op, operation.dtype, {at, size}, out, static_cast<int64_t>(bytes / elem),
                 operation.reduction.factor);
  }
}

}  // namespace

void take_what_others_give(ShmCall& call) {
  const ShmGroup& group = call.group;
  const Operation& operation = call.operation();
  if (reduces(operation.kind)) {
    if (call.takes_from(group.rank)) combine_all(call, place_of_result(call));
    return;
  }
  SmallVector<Given, 8> from(static_cast<size_t>(group.size));
  const auto to = [&](int peer) -> const Chunk& {
    return operation.take[operation.take.size() == 1 ? 0 : static_cast<size_t>(peer)];
  };
  for (int peer = 0; peer < group.size; ++peer) {
    if (call.takes_from(peer)) from[static_cast<size_t>(peer)] = given_by(call, peer, to(peer).bytes);
  }
  // Each rank starts with its neighbour, so that not all read the same rank's memory at once.
  for (int step = 1; step <= group.size; ++step) {
    const int peer = (group.rank + step) % group.size;
    const Given& given = from[static_cast<size_t>(peer)];
    if (!given.data) continue;
    copy(group, to(peer).data, given.data, to(peer).bytes);
    if (call.has_checksums() && peer != group.rank)
      verify(group, peer, crc32c({to(peer).data, to(peer).bytes}), given.crc);
  }
}

void fetch_result(const ShmCall& call) {
  const Chunk& to = call.operation().take[0];
  std::memcpy(to.data, call.has_checksums() ? call.last_scratch().data : call.own_slot().payload, to.bytes);
}

}  // namespace chorale::comm
