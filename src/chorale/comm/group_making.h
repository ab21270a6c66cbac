// Inside comm: how groups come to be. Ranks meet at a store, or in a group that they are all in, and tell each other
// their names and where their memory is; then those of one host attach to a segment of shared memory, and hosts
// connect.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chorale/comm/group_state.h"

namespace chorale::comm {

// Does what Group::connect does.
std::shared_ptr<GroupState> connect_group(transport::Store& store, const std::string& name, int rank, int size,
                                          const GroupOptions& options);

// Ranks of a group to be, in ascending order. Throws InvalidArgument unless they are in `parent`, each once, and in one
// of the lists.
std::vector<int> checked_ranks(const Membership& parent, std::vector<int> ranks);
std::vector<std::vector<int>> checked_lists(const Membership& parent, const std::vector<std::vector<int>>& lists);

// Groups out of one, by lists of global ranks; every member of `state` calls this with the same lists.
struct MadeGroups {
  int own = -1;                       // the list that this rank is in; -1: none
  std::shared_ptr<GroupState> state;  // of that group
};
MadeGroups make_groups(const std::shared_ptr<GroupState>& state, const std::vector<std::vector<int>>& lists,
                       const GroupOptions& options);

}  // namespace chorale::comm
