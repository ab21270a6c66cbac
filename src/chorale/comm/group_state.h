// Inside comm: what a Group's handle refers to.
#pragma once

#include "chorale/comm/group.h"
#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {

class GroupDevices;

struct GroupState {
  std::shared_ptr<RankContext> context;
  std::shared_ptr<Engine> engine;
  std::vector<ShmIdentity> identities;  // of the members
  std::chrono::milliseconds timeout{};
  Operations* collecting = nullptr;       // of the open Coalescing scope
  std::shared_ptr<GroupDevices> devices;  // Note [Calls by devices]

  const Membership& membership() const { return engine->membership(); }
  int size() const { return membership().size(); }
  int rank() const { return membership().rank; }
  // Throws InvalidArgument, naming the call, for a global rank that is not a member.
  int group_rank(const char* call, int global_rank) const;
};

}  // namespace chorale::comm
