// Inside comm: on which hosts the members of a group are, and what follows from it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chorale::comm {

// Ranks are group ranks. The first member of a host is its leader; rail k is the k-th member of every host.
struct NetLayout {
  NetLayout(std::span<const uint64_t> host_of_rank, int own_rank);

  std::vector<std::vector<int>> hosts;  // members, ascending; hosts in the order of their first member
  std::vector<int> host_of, index_of;   // of a rank: its host, its number among the members of that host
  int host = 0, index = 0;              // of this rank
  int rails = 0;                        // the smallest number of members on any host

  // True when sums of each host's members, summed over hosts, are the sum of Note [Order of sums] in vec/combine.h:
  // each host is a whole branch of the tree over all ranks, and what is above them is the tree over as many hosts.
  bool follows_tree = false;

  int host_count() const { return static_cast<int>(hosts.size()); }
  int local_size() const { return static_cast<int>(hosts[static_cast<size_t>(host)].size()); }
  const std::vector<int>& neighbours() const { return hosts[static_cast<size_t>(host)]; }  // this host's members
  bool is_leader() const { return index == 0; }
  int leader_of(int which) const { return hosts[static_cast<size_t>(which)][0]; }
  bool is_here(int rank) const { return host_of[static_cast<size_t>(rank)] == host; }
};

}  // namespace chorale::comm
