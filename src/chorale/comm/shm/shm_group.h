// Inside comm: what the algorithms of a group on one host see. Read Notes [Calls in shared memory] and [Hands] in
// transport/shm/group_segment.h first.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "chorale/comm/failure.h"
#include "chorale/comm/rank_context.h"
#include "chorale/transport/shm/group_segment.h"

namespace chorale::comm {

namespace shm = transport::shm;

// How a rank introduces itself to the others of its host. Travels as bytes.
struct ShmIdentity {
  shm::ProcessId process;
  shm::SharedFile arena, scratch;  // descriptor -1: not there
  uint64_t host = 0;               // a hash of the boot's id and of the network namespace
  uint64_t cores[16] = {};         // bit mask of the cores it may run on
};
ShmIdentity own_identity(RankContext& context);
// True when there is a core for each of them.
bool has_core_each(const std::vector<ShmIdentity>& ranks);
// True when several of them are threads of this process.
bool share_this_process(const std::vector<ShmIdentity>& ranks);

class ShmGroup {
 public:
  ShmGroup(RankContext& context, const Membership& membership, shm::GroupSegment segment,
           const std::vector<ShmIdentity>& identities, bool inner);

  const Membership& membership;  // the engine's
  const int rank, size;
  const shm::GroupSegment segment;
  const bool inner;  // part of a group that spans hosts

  int global(int peer) const { return membership.global(peer); }

  // The most bytes that travel in the slot where there is another way, as the table says (algorithm/table.h).
  size_t most_in_slot(CallKind kind) const { return most_in_slot_[static_cast<size_t>(kind)]; }

  // ---- own memory

  // A place where every peer can read it, if there is one.
  std::optional<shm::Place> place_of(const Chunk& chunk) const;
  // True when peers may write there: the pages can be taken away from a peer that must not write any more, because
  // nothing else lies in them. (A rank in our own process can be waited for instead.)
  bool is_writable(const Chunk& chunk) const;
  // Takes pages back from peers whose hands stay up. Nothing to do for peers of this process and for the dead.
  void take_back(const Chunk& chunk) const;

  // ---- peers' memory

  // Where this process sees `bytes` at a place of a peer. Throws CallFailed when there is no such place (any more).
  std::byte* reach(int peer, shm::Place place, size_t bytes);
  // The same where it only reads: what a message or a parcel says of its place cannot make this process write there.
  const std::byte* view(int peer, shm::Place place, size_t bytes);
  bool same_process(int peer) const { return peers_[static_cast<size_t>(peer)].process == nullptr; }
  bool all_in_one_process() const { return one_process_; }
  const shm::ProcessId& process_of(int peer) const { return peers_[static_cast<size_t>(peer)].id; }
  bool is_dead(int peer) const;
  bool is_stopped(int peer) const;  // by a signal or a debugger
  std::string condition(int peer) const;
  // Looks for a failure after everything that was read before.
  bool failed() const {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    return segment.failed();
  }

  shm::RankControl& own() const { return segment.control(rank); }
  RankContext& context() const { return context_; }

 private:
  struct Mapped {
    std::shared_ptr<shm::PeerMemory> memory{};
    std::vector<shm::PeerMemory::Extent> extents{};  // copies, read without a lock
  };
  struct Peer {
    shm::ProcessId id;
    std::shared_ptr<shm::PeerProcess> process;  // null: ours
    shm::SharedFile arena, scratch;
    std::array<Mapped, 2> arena_mapped{}, scratch_mapped{};  // by access
  };
  std::byte* find(int peer, shm::Place place, size_t bytes, shm::Access access);

  RankContext& context_;
  std::array<size_t, kCallKinds> most_in_slot_{};
  std::vector<Peer> peers_;
  bool one_process_ = true;
};

// Raised hands (Note [Hands]); lowered at the end of the scope. The caller looks at `failed` first.
class Hands {
 public:
  explicit Hands(const ShmGroup& group) : group_(group) { group_.own().hands.store(1, std::memory_order_seq_cst); }
  ~Hands() { group_.own().hands.store(0, std::memory_order_release); }
  Hands(const Hands&) = delete;
  Hands& operator=(const Hands&) = delete;

 private:
  const ShmGroup& group_;
};

inline void check_not_failed(const ShmGroup& group) {
  if (group.failed()) [[unlikely]]
    throw GroupFailed{};
}

[[noreturn]] void raise_damage(const ShmGroup& group, int peer, const char* what);

}  // namespace chorale::comm
