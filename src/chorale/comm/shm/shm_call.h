// Inside comm: the call that a group on one host runs, as the algorithms (algorithm/shm_*.cc) see it. They move it as
// far as it goes and never wait. Read Notes [Calls in shared memory] and [Hands] in transport/shm/group_segment.h
// first.
#pragma once

#include <vector>

#include "chorale/comm/roll_call.h"
#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {

class ShmCall {
 public:
  ShmCall(ShmGroup& whose, RollCall& who_has_come) : group(whose), roll_call(who_has_come) {}
  ~ShmCall() { leave(); }
  ShmCall(const ShmCall&) = delete;
  ShmCall& operator=(const ShmCall&) = delete;

  ShmGroup& group;
  RollCall& roll_call;

  // Writes this rank's slot: from then on peers can go on.
  void enter(Operation& operation);
  // Runs the call that was entered; true when it is done.
  bool step();
  // It is done, or given up: its memory goes back.
  void leave();
  // Null when no call was entered.
  const Operation* entered() const { return operation_; }
  // The ranks that it waits for.
  std::vector<int> missing() const;

  // ---- for the algorithms

  // How far it is.
  enum class Phase : uint8_t { kEntered, kStaging, kActing, kLeaving };
  Phase phase = Phase::kEntered;
  int seen = 0;  // ranks before this one have done what the phase waits for
  uint32_t piece = 0;
  int64_t at = 0;  // elements before this one are done

  Operation& operation() const { return *operation_; }
  shm::CallSlot& slot(int peer) const { return group.segment.slot(peer, operation_->number); }
  shm::CallSlot& own_slot() const { return slot(group.rank); }
  bool has_checksums() const { return (operation_->print.variant & kChecksummed) != 0; }
  // True when slots begin with a table of what is given.
  bool has_table() const { return !gives_one_chunk(operation_->kind) || has_checksums(); }
  // True when this rank takes something from `peer`.
  bool takes_from(int peer) const;
  // Counts one more piece of all calls of the group.
  void begin_piece() { piece = ++pieces_; }
  bool has_entered(int peer) const { return slot(peer).number.load(std::memory_order_acquire) == operation_->number; }
  // True when everybody has counted the piece, in `staged` or in `acted`.
  bool everybody(std::atomic<uint32_t> shm::RankControl::*flag);
  // Throws CallFailed, naming everybody's call, if they are not the same, or whose words are damaged (Note [Damage] in
  // transport/shm/control_check.h). Where the group is part of one that spans hosts, calls that differ are not raised
  // here: the operation stays where it is (false), and its rank asks the other hosts which call is right.
  bool check_fingerprints() const;
  // Memory that peers can read, until the call is done.
  const memory::Block& scratch(size_t bytes);
  const memory::Block& last_scratch() const { return scratch_.back(); }

 private:
  void expose_to_reduce();
  void expose_to_read();
  shm::Place expose(const Chunk& chunk, transport::Chaos* chaos);
  bool is_read(int chunk) const;
  [[gnu::cold, gnu::noinline]] void look_at_difference() const;

  Operation* operation_ = nullptr;
  uint32_t pieces_ = 0;
  SmallVector<memory::Block, 1> scratch_;
};

}  // namespace chorale::comm
