// Inside comm: the ranks of a group.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace chorale::comm {

// A rank without prefix is a group rank: 0 to size - 1 in ascending order of global ranks.
struct Membership {
  std::string name;
  int rank = -1;
  std::vector<int> members;  // global ranks, ascending

  int size() const { return static_cast<int>(members.size()); }
  int global(int peer) const { return members[static_cast<size_t>(peer)]; }
  int own_global() const { return global(rank); }
  // The group rank of a global one; -1: it is not a member.
  int find(int global_rank) const {
    const auto found = std::lower_bound(members.begin(), members.end(), global_rank);
    return found != members.end() && *found == global_rank ? static_cast<int>(found - members.begin()) : -1;
  }
};

}  // namespace chorale::comm
