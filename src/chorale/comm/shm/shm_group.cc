#include "chorale/comm/shm/shm_group.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/device/pages.h"
#include "chorale/device/shared_pages.h"
#include "chorale/transport/host_identity.h"

namespace chorale::comm {
namespace {

const SharedPages* shared_source() { return dynamic_cast<const SharedPages*>(&cpu_allocator().source()); }

}  // namespace

ShmIdentity own_identity(RankContext& context) {
  ShmIdentity identity;
  identity.process = shm::this_process();
  identity.host = std::hash<std::string>{}(transport::host_identity());
  if (const SharedPages* pages = shared_source()) identity.arena = shm::shared_file(pages->shared_descriptor());
  identity.scratch = shm::shared_file(context.scratch().source().shared_descriptor());
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof(cores), &cores);
  static_assert(sizeof(cores) == sizeof(identity.cores));
  std::memcpy(identity.cores, &cores, sizeof(cores));
  return identity;
}

bool has_core_each(const std::vector<ShmIdentity>& ranks) {
  int cores = 0;
  for (size_t word = 0; word < 16; ++word) {
    uint64_t any = 0;
    for (const ShmIdentity& rank : ranks) any |= rank.cores[word];
    cores += std::popcount(any);
  }
  return cores >= static_cast<int>(ranks.size());
}

bool share_this_process(const std::vector<ShmIdentity>& ranks) {
  const auto is_own = [](const ShmIdentity& rank) { return rank.process == shm::this_process(); };
  return std::count_if(ranks.begin(), ranks.end(), is_own) > 1;
}

ShmGroup::ShmGroup(RankContext& context, const Membership& whose, shm::GroupSegment group_segment,
                   const std::vector<ShmIdentity>& identities, bool is_inner)
    : membership(whose),
      rank(whose.rank),
      size(whose.size()),
      segment(std::move(group_segment)),
      inner(is_inner),
      context_(context) {
  for (size_t kind = 0; kind < kCallKinds; ++kind) {
    const uint64_t most = context.algorithms.most_by_slot(static_cast<CallKind>(kind));
    most_in_slot_[kind] = static_cast<size_t>(std::min<uint64_t>(most, shm::kSlotPayloadBytes));
  }
  for (const ShmIdentity& identity : identities) {
    Peer peer{.id = identity.process, .process = nullptr, .arena = identity.arena, .scratch = identity.scratch};
    if (identity.process != shm::this_process()) {
      peer.process = shm::PeerProcess::find(identity.process);
      one_process_ = false;
    }
    peers_.push_back(std::move(peer));
  }
}

std::optional<shm::Place> ShmGroup::place_of(const Chunk& chunk) const {
  if (one_process_) return shm::Place::make(shm::PlaceKind::kPointer, reinterpret_cast<uint64_t>(chunk.data));
  const SharedPages* pages = shared_source();
  if (!pages) return std::nullopt;
  const auto location = cpu_allocator().locate(chunk.data);
  if (!location) return std::nullopt;
  const auto offset = pages->offset_of(location->arena, chunk.data, chunk.bytes);
  if (!offset) return std::nullopt;
  return shm::Place::make(shm::PlaceKind::kArena, *offset);
}

bool ShmGroup::is_writable(const Chunk& chunk) const { return one_process_ || owns_pages(chunk.data, chunk.bytes); }

void ShmGroup::take_back(const Chunk& chunk) const {
  if (one_process_ || chunk.bytes == 0) return;
  if (auto* pages = dynamic_cast<SharedPages*>(&cpu_allocator().source())) pages->renew(chunk.data, chunk.bytes);
}

std::byte* ShmGroup::reach(int peer_rank, shm::Place place, size_t bytes) {
  return find(peer_rank, place, bytes, shm::Access::kWrite);
}

const std::byte* ShmGroup::view(int peer_rank, shm::Place place, size_t bytes) {
  return find(peer_rank, place, bytes, shm::Access::kRead);
}

std::byte* ShmGroup::find(int peer_rank, shm::Place place, size_t bytes, shm::Access access) {
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  if (place.kind() == shm::PlaceKind::kPointer) {
    CHORALE_INVARIANT(one_process_, "a pointer of another process");
    return reinterpret_cast<std::byte*>(place.offset());
  }
  const bool in_arena = place.kind() == shm::PlaceKind::kArena;
  auto& [memory, extents] = (in_arena ? peer.arena_mapped : peer.scratch_mapped)[static_cast<size_t>(access)];
  for (const auto& extent : extents) {
    if (extent.holds(place.offset(), bytes)) return extent.at(place.offset());
  }
  try {
    if (!memory) memory = shm::PeerMemory::open(in_arena ? peer.arena : peer.scratch, access);
    extents.push_back(memory->map(place.offset(), bytes));
  } catch (const CommError& error) {
    // Most likely it has just ended: because the group has failed, or the group fails because of that.
    if (failed()) throw GroupFailed{};
    throw CallFailed{concat("rank ", global(peer_rank), " (", condition(peer_rank), "): ", error.what()),
                     global(peer_rank)};
  }
  return extents.back().at(place.offset());
}

bool ShmGroup::is_dead(int peer) const {
  const auto& process = peers_[static_cast<size_t>(peer)].process;
  return process && !process->alive();
}

bool ShmGroup::is_stopped(int peer) const {
  const auto& process = peers_[static_cast<size_t>(peer)].process;
  return process && process->condition().starts_with("stopped");
}

std::string ShmGroup::condition(int peer) const {
  const auto& process = peers_[static_cast<size_t>(peer)].process;
  if (!process) return "a thread of this process";
  return concat("process ", process->id().pid, ", ", process->condition());
}

void raise_damage(const ShmGroup& group, int peer, const char* what) {
  throw CallFailed{concat(what, " of rank ", group.global(peer), " (", group.condition(peer),
                          ") is damaged: its checksum is wrong; bad memory, or something wrote where it must not"),
                   group.global(peer)};
}

}  // namespace chorale::comm
