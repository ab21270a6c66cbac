// All-reduce and reduce of large tensors on one host: each rank combines its slice of everybody's data and stores the
// result to everybody, in the tensors themselves where peers can write there, else in staging buffers, piece by piece.
// Every byte crosses memory as few times as possible.
//
// A piece goes through three steps: everybody has it in place (entered, or `staged`), everybody has stored its slice of
// the result (`acted`), and a rank that staged copies the result out. Staging of the next piece comes before the wait
// for the results of this one, so that copies hide waits. A rank whose tensor is reduced in place runs the same pieces
// as the others when some rank stages; when none does, there is one piece.
#include <algorithm>
#include <cstring>

#include "chorale/comm/algorithm/algorithms.h"
#include "chorale/comm/algorithm/slice.h"
#include "chorale/comm/shm/shm_call.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

using shm::Exposure;
using Phase = ShmCall::Phase;

constexpr size_t kInPlaceCheckBytes = 256 << 10;  // a failure is looked for after every so many

struct Pieces {
  int64_t elems;  // of a piece; the last one may be shorter
  int64_t begin, end;
  bool last;
};

// Writes to `places` where every rank's data of the current piece is.
void find_places(const ShmCall& call, std::byte** places) {
  ShmGroup& group = call.group;
  const Operation& operation = call.operation();
  const size_t elem = size_of(operation.dtype);
  for (int peer = 0; peer < group.size; ++peer) {
    const shm::CallSlot& slot = call.slot(peer);
    if (slot.exposure == Exposure::kStaged) {
      places[peer] = group.segment.staging(peer, call.piece);
    } else if (peer == group.rank) {
      places[peer] = operation.give[0].data + static_cast<size_t>(call.at) * elem;
    } else {
      places[peer] = group.reach(peer, slot.place, operation.give[0].bytes) + static_cast<size_t>(call.at) * elem;
    }
  }
}

Pieces piece_at(const ShmCall& call, bool staged) {
  const Operation& operation = call.operation();
  const size_t elem = size_of(operation.dtype);
  const auto elems = static_cast<int64_t>(operation.give[0].bytes / elem);
  const int64_t piece = staged ? static_cast<int64_t>(shm::kStagingBytes / elem) : elems;
  const int64_t end = std::min(elems, call.at + piece);
  return {piece, call.at, end, end == elems};
}

bool anybody_stages(const ShmCall& call) {
  for (int peer = 0; peer < call.group.size; ++peer) {
    if (call.slot(peer).exposure == Exposure::kStaged) return true;
  }
  return false;
}

void act(const ShmCall& call, const Pieces& piece) {
  const ShmGroup& group = call.group;
  const Operation& operation = call.operation();
  if (group.size == 1 && operation.reduction.factor == 1) return;  // the data of one rank are the result
  const size_t elem = size_of(operation.dtype);
  const auto size = static_cast<size_t>(group.size);
  std::byte* places[shm::kMostRanks];
  find_places(call, places);
  const Slice slice = slice_of(piece.end - piece.begin, elem, group.rank, group.size);
  const auto step = static_cast<int64_t>(kInPlaceCheckBytes / elem);
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

}  // namespace

bool shm_in_place(ShmCall& call) {
  ShmGroup& group = call.group;
  const Operation& operation = call.operation();
  const bool staged = anybody_stages(call);
  const bool own_staged = call.own_slot().exposure == Exposure::kStaged;
  const size_t elem = size_of(operation.dtype);
  for (;;) {
    const Pieces piece = piece_at(call, staged);
    if (call.phase == Phase::kStaging && !call.everybody(&shm::RankControl::staged)) return false;
    if (call.phase != Phase::kActing) {
      {
        const Hands hands(group);
        check_not_failed(group);
        act(call, piece);
        check_not_failed(group);
      }
      call.phase = Phase::kActing;
      group.segment.publish(group.own().acted, call.piece);
      if (!piece.last) {
        if (own_staged) {
          const auto next = std::min(piece.elems, static_cast<int64_t>(operation.give[0].bytes / elem) - piece.end);
          std::memcpy(group.segment.staging(group.rank, call.piece + 1),
                      operation.give[0].data + static_cast<size_t>(piece.end) * elem, static_cast<size_t>(next) * elem);
        }
        group.segment.publish(group.own().staged, call.piece + 1);
      }
    }
    if (!call.everybody(&shm::RankControl::acted)) return false;
    if (own_staged && (operation.kind == CallKind::kAllReduce || operation.root == group.rank)) {
      std::memcpy(operation.take[0].data + static_cast<size_t>(piece.begin) * elem,
                  group.segment.staging(group.rank, call.piece), static_cast<size_t>(piece.end - piece.begin) * elem);
    }
    if (piece.last) return true;
    call.begin_piece();
    call.at = piece.end;
    call.phase = Phase::kStaging;
  }
}

}  // namespace chorale::comm
