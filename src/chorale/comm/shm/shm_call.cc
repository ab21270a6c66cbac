#include "chorale/comm/shm/shm_call.h"

#include <cstring>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"
#include "chorale/comm/algorithm/algorithms.h"

namespace chorale::comm {

using shm::CallSlot;
using shm::Exposure;
using shm::Place;
using shm::PlacedChunk;
using shm::PlaceKind;
using What = transport::ChaosFault::What;

bool ShmCall::takes_from(int peer) const {
  const int root = operation_->root;
  switch (operation_->kind) {
    case CallKind::kBroadcast:
      return peer == root && group.rank != root;
    case CallKind::kScatter:
      return peer == root;
    case CallKind::kGather:
    case CallKind::kReduce:
      return group.rank == root;
    case CallKind::kBarrier:
    case CallKind::kMonitoredBarrier:
      return false;
    default:
      return true;
  }
}

bool ShmCall::everybody(std::atomic<uint32_t> shm::RankControl::*flag) {
  for (; seen < group.size; ++seen) {
    const uint32_t counted = (group.segment.control(seen).*flag).load(std::memory_order_acquire);
    if (static_cast<int32_t>(counted - piece) < 0) return false;
  }
  seen = 0;
  return true;
}

const memory::Block& ShmCall::scratch(size_t bytes) {
  scratch_.push_back(group.context().scratch().allocate(bytes));
  return scratch_.back();
}

// ---- entering

// A place for a chunk: where it is, or in scratch memory, where it is copied. What may be damaged on purpose is copied
// too: the tensor is the caller's.
Place ShmCall::expose(const Chunk& chunk, transport::Chaos* chaos) {
  if (chunk.bytes == 0) return {};
  if (const auto place = chaos ? std::nullopt : group.place_of(chunk)) return *place;
  std::byte* copy = scratch(chunk.bytes).data;
  std::memcpy(copy, chunk.data, chunk.bytes);
  if (chaos) chaos->touch(What::kPayload, {copy, chunk.bytes});
  return Place::make(PlaceKind::kScratch, group.context().scratch().locate(copy)->source_offset());
}

// Tells peers where the one chunk is that this rank gives to be combined with theirs.
void ShmCall::expose_to_reduce() {
  CallSlot& slot = own_slot();
  const Chunk& chunk = operation_->give[0];
  if (chunk.bytes > group.most_in_slot(operation_->kind)) {
    const auto place = group.is_writable(chunk) ? group.place_of(chunk) : std::nullopt;
    if (place) {
      slot.exposure = Exposure::kWritable;
      slot.place = *place;
      return;
    }
    if (chunk.bytes > shm::kSlotPayloadBytes) {
      slot.exposure = Exposure::kStaged;
      std::memcpy(group.segment.staging(group.rank, pieces_ + 1), chunk.data,
                  std::min(chunk.bytes, shm::kStagingBytes));
      return;
    }
  }
  slot.exposure = Exposure::kSlot;
  slot.place = {};
  if (chunk.bytes > 0) std::memcpy(slot.payload, chunk.data, chunk.bytes);
}

// Whether another rank reads this chunk that the rank gives, and not the rank itself alone.
bool ShmCall::is_read(int chunk) const {
  const CallKind kind = operation_->kind;
  const bool all_to_root = kind == CallKind::kGather || kind == CallKind::kReduce;
  const bool to_itself = gives_one_chunk(kind) ? all_to_root && operation_->root == group.rank : chunk == group.rank;
  return group.size > 1 && !to_itself;
}

void ShmCall::expose_to_read() {
  CallSlot& slot = own_slot();
  const auto& give = operation_->give;
  const bool table = has_table();
  const size_t table_bytes = table ? give.size() * sizeof(PlacedChunk) : 0;
  size_t total = table_bytes;
  for (const Chunk& chunk : give) total += (chunk.bytes + 15) / 16 * 16;
  const bool fits = total <= group.most_in_slot(operation_->kind);
  slot.exposure = fits ? Exposure::kSlot : Exposure::kReadable;
  slot.place = {};
  size_t to = table_bytes;
  for (size_t r = 0; r < give.size(); ++r) {
    const Chunk& chunk = give[r];
    Place place = Place::make(PlaceKind::kSlot, to);
    transport::Chaos* chaos = is_read(static_cast<int>(r)) ? group.context().chaos.get() : nullptr;
    if (!fits) {
      place = expose(chunk, chaos);
    } else if (chunk.bytes > 0) {
      std::memcpy(slot.payload + to, chunk.data, chunk.bytes);
      if (chaos) chaos->touch(What::kPayload, {slot.payload + to, chunk.bytes});
      to += (chunk.bytes + 15) / 16 * 16;
    }
    if (table) {
      PlacedChunk placed{place, chunk.bytes};
      if (has_checksums()) placed.crc = crc32c({chunk.data, chunk.bytes});
      placed.check = placed.right_check();
      std::memcpy(slot.payload + r * sizeof(placed), &placed, sizeof(placed));
    } else {
      slot.place = place;
    }
  }
}

void ShmCall::enter(Operation& operation) {
  operation_ = &operation;
  phase = Phase::kEntered;
  seen = 0;
  at = 0;
  CallSlot& slot = own_slot();
  const Fingerprint::Words print = operation.print.words();
  slot.call = print;
  if ((operation.kind == CallKind::kAllReduce || operation.kind == CallKind::kReduce) && !has_checksums()) {
    expose_to_reduce();
  } else {
    expose_to_read();
  }
  slot.check = slot.right_check(operation.number, print.weight());
  if (group.context().chaos) [[unlikely]]
    group.context().chaos->touch(What::kControl, {reinterpret_cast<std::byte*>(&slot.exposure),
                                                  offsetof(CallSlot, payload) - offsetof(CallSlot, exposure)});
  group.segment.publish(slot.number, operation.number);
}

void ShmCall::leave() {
  for (const memory::Block& block : scratch_) group.context().scratch().deallocate(block);
  scratch_.clear();
  operation_ = nullptr;
}

// ---- running

void ShmCall::look_at_difference() const {
  std::vector<Fingerprint> prints;
  for (int rank = 0; rank < group.size; ++rank) {
    // Words that are damaged say nothing about a call.
    if (slot(rank).check != slot(rank).right_check(operation_->number, slot(rank).call.weight()))
      raise_damage(group, rank, "the control message");
    prints.push_back(Fingerprint::of(slot(rank).call));
  }
  if (!group.inner) raise_difference(group.membership, prints);
}

bool ShmCall::check_fingerprints() const {
  const Fingerprint::Words print = operation_->print.words();
  const uint64_t weight = print.weight();
  for (int peer = 0; peer < group.size; ++peer) {
    const CallSlot& theirs = slot(peer);
    if (!(theirs.call == print) || theirs.check != theirs.right_check(operation_->number, weight)) [[unlikely]] {
      look_at_difference();
      return false;
    }
  }
  return true;
}

bool ShmCall::step() {
  if (operation_->kind == CallKind::kMonitoredBarrier) return shm_monitored_barrier(*this);
  if (phase == Phase::kEntered) {
    for (; seen < group.size; ++seen) {
      if (!has_entered(seen)) return false;
    }
    if (!check_fingerprints()) return false;
    if (group.context().chaos) [[unlikely]]
      group.context().chaos->pause();
    bool outside = false, staged = false, all_writable = true;
    for (int peer = 0; peer < group.size; ++peer) {
      const Exposure exposure = slot(peer).exposure;
      outside = outside || exposure != Exposure::kSlot;
      staged = staged || exposure == Exposure::kStaged;
      all_writable = all_writable && exposure == Exposure::kWritable;
    }
    if (!outside) return shm_slot(*this);
    begin_piece();
    seen = 0;
    return staged || all_writable ? shm_in_place(*this) : shm_read(*this);
  }
  return phase == Phase::kLeaving ? shm_read(*this) : shm_in_place(*this);
}

std::vector<int> ShmCall::missing() const {
  std::vector<int> missing;
  const auto behind = [&](const std::atomic<uint32_t>& flag) {
    return static_cast<int32_t>(flag.load(std::memory_order_acquire) - piece) < 0;
  };
  for (int peer = 0; peer < group.size; ++peer) {
    const shm::RankControl& control = group.segment.control(peer);
    bool is_missing = false;
    if (operation_->kind == CallKind::kMonitoredBarrier) {
      is_missing = group.rank == 0 ? !has_entered(peer) : peer == 0;
    } else if (phase == Phase::kEntered) {
      is_missing = !has_entered(peer);
    } else {
      is_missing = behind(phase == Phase::kStaging ? control.staged : control.acted);
    }
    if (is_missing) missing.push_back(peer);
  }
  return missing;
}

}  // namespace chorale::comm
