// Inside comm: what a Group's handle refers to.
#pragma once

#include "chorale/comm/group.h"
#include "chorale/comm/shm/shm_group.h"

namespace chorale::comm {

class DeviceSums;
struct DeviceQuestion;

struct GroupState {
  std::shared_ptr<RankContext> context;
  std::shared_ptr<Engine> engine;
  std::vector<ShmIdentity> identities;  // of the members
  std::chrono::milliseconds timeout{};
  Operations* collecting = nullptr;  // of the open Coalescing scope
  // Note [Sums on a shared device]: which device all have, and what they lend each other if it is one.
  std::shared_ptr<DeviceQuestion> device_question;
  std::shared_ptr<DeviceSums> device_sums;

  const Membership& membership() const { return engine->membership(); }
  int size() const { return membership().size(); }
  int rank() const { return membership().rank; }
  // Throws InvalidArgument, naming the call, for a global rank that is not a member.
  int group_rank(const char* call, int global_rank) const;
};

}  // namespace chorale::comm
