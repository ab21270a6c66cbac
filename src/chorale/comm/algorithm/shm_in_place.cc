// All-reduce and reduce of large tensors on one host: each rank combines its slice of everybody's data and stores the
// result to everybody, in the tensors themselves where peers can write there, else in staging buffers, piece by piece.
// Every byte crosses memory as few times as possible.
//
// A piece goes through three steps: everybody has it in place (entered, or `staged`), everybody has stored its slice of
// the result (`acted`), and who staged copies the result out. Staging of the next piece comes before the wait for the
// results of this one, so that copies hide waits. A rank whose tensor is reduced in place runs the same pieces as the
// others when somebody stages; when nobody does, there is one piece.
#include <algorithm>
#include <cstring>

#include "chorale/comm/shm/shm_group.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

using shm::Exposure;
using Phase = Operation::Phase;

constexpr size_t kCheckBytes = 256 << 10;  // a failure is looked for after every so many

struct Pieces {
  int64_t elems;  // of a piece; the last one may be shorter
  int64_t begin, end;
  bool last;
};

// Writes to `places` where every rank's data of the current piece is.
void find_places(ShmGroup& group, const Operation& operation, std::byte** places) {
  const size_t elem = size_of(operation.dtype);
  for (int peer = 0; peer < group.size; ++peer) {
    const shm::CallSlot& slot = group.segment.slot(peer, operation.number);
    if (slot.exposure == Exposure::kStaged) {
      places[peer] = group.segment.staging(peer, operation.piece);
    } else if (peer == group.rank) {
      places[peer] = operation.give[0].data + static_cast<size_t>(operation.at) * elem;
    } else {
      places[peer] = group.reach(peer, slot.place, operation.give[0].bytes) + static_cast<size_t>(operation.at) * elem;
    }
  }
}

Pieces piece_at(const Operation& operation, bool staged) {
  const size_t elem = size_of(operation.dtype);
  const auto elems = static_cast<int64_t>(operation.give[0].bytes / elem);
  const int64_t piece = staged ? static_cast<int64_t>(shm::kStagingBytes / elem) : elems;
  const int64_t end = std::min(elems, operation.at + piece);
  return {piece, operation.at, end, end == elems};
}

bool anybody_stages(const ShmGroup& group, const Operation& operation) {
  for (int peer = 0; peer < group.size; ++peer) {
    if (group.segment.slot(peer, operation.number).exposure == Exposure::kStaged) return true;
  }
  return false;
}

void act(ShmGroup& group, const Operation& operation, const Pieces& piece) {
  if (group.size == 1 && operation.reduction.factor == 1) return;  // the data of one rank are the result
  const size_t elem = size_of(operation.dtype);
  const auto size = static_cast<size_t>(group.size);
  std::byte* places[shm::kMostRanks];
  find_places(group, operation, places);
  const Slice slice = slice_of(piece.end - piece.begin, elem, group.rank, group.size);
  const auto step = static_cast<int64_t>(kCheckBytes / elem);
  const void* sources[shm::kMostRanks];
  void* destinations[shm::kMostRanks];
  for (int64_t at = slice.begin; at < slice.end; at += step) {
    check_not_failed(group);
    const size_t offset = static_cast<size_t>(at) * elem;
    for (size_t r = 0; r < size; ++r) {
      sources[r] = places[r] + offset;
      // Our own first: its lines are nearest.
      destinations[r] = places[(static_cast<size_t>(group.rank) + r) % size] + offset;
    }
    if (operation.kind == CallKind::kReduce) destinations[0] = places[operation.root] + offset;
    vec::combine(operation.reduction.op, operation.dtype, {sources, size},
                 {destinations, operation.kind == CallKind::kReduce ? 1 : size}, std::min(step, slice.end - at),
                 operation.reduction.factor);
  }
}

template <class Flag>
bool everybody(const ShmGroup& group, Operation& operation, Flag shm::RankControl::*flag) {
  for (; operation.seen < group.size; ++operation.seen) {
    const uint32_t number = (group.segment.control(operation.seen).*flag).load(std::memory_order_acquire);
    if (static_cast<int32_t>(number - operation.piece) < 0) return false;
  }
  operation.seen = 0;
  return true;
}

}  // namespace

Slice slice_of(int64_t elems, size_t elem_bytes, int rank, int size) {
  // Whole cache lines, so that no two ranks write to one.
  const auto line = static_cast<int64_t>(std::max<size_t>(shm::kCacheLineBytes / elem_bytes, 1));
  const int64_t each = ((elems + size - 1) / size + line - 1) / line * line;
  return {std::min(elems, each * rank), std::min(elems, each * (rank + 1))};
}

bool step_in_place(ShmGroup& group, Operation& operation, uint32_t& pieces) {
  const bool staged = anybody_stages(group, operation);
  const bool own_staged = group.segment.slot(group.rank, operation.number).exposure == Exposure::kStaged;
  const size_t elem = size_of(operation.dtype);
  for (;;) {
    const Pieces piece = piece_at(operation, staged);
    if (operation.phase == Phase::kStaging && !everybody(group, operation, &shm::RankControl::staged)) return false;
    if (operation.phase != Phase::kActing) {
      {
        const Hands hands(group);
        check_not_failed(group);
        act(group, operation, piece);
        check_not_failed(group);
      }
      operation.phase = Phase::kActing;
      group.segment.publish(group.own().acted, operation.piece);
      if (!piece.last) {
        if (own_staged) {
          const auto next = std::min(piece.elems, static_cast<int64_t>(operation.give[0].bytes / elem) - piece.end);
          std::memcpy(group.segment.staging(group.rank, operation.piece + 1),
                      operation.give[0].data + static_cast<size_t>(piece.end) * elem, static_cast<size_t>(next) * elem);
        }
        group.segment.publish(group.own().staged, operation.piece + 1);
      }
    }
    if (!everybody(group, operation, &shm::RankControl::acted)) return false;
    if (own_staged && (operation.kind == CallKind::kAllReduce || operation.root == group.rank)) {
      std::memcpy(operation.take[0].data + static_cast<size_t>(piece.begin) * elem,
                  group.segment.staging(group.rank, operation.piece),
                  static_cast<size_t>(piece.end - piece.begin) * elem);
    }
    if (piece.last) return true;
    operation.piece = ++pieces;
    operation.at = piece.end;
    operation.phase = Phase::kStaging;
  }
}

}  // namespace chorale::comm
